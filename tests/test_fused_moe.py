# SPDX-License-Identifier: Apache-2.0
"""moe on CUDA: the CPU's cases stage by stage, graphs, streams, and rows' independence."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from test_moe import SHAPES, Case, covering, make

import fp4lt
from fp4lt.backends import fused
from fp4lt.problem import MoETrace
from fp4lt.testing import bounds, cases, oracle

pytestmark = pytest.mark.gpu

# Shapes that other kernels refuse or got wrong: (E, H, I, k).
FIELD_SHAPES = [
    (1, 256, 96, 1),
    (3, 2688, 1856, 2),
    (40, 2880, 352, 4),
    (60, 512, 464, 8),
    (8, 2880, 720, 4),
    (8, 2688, 928, 6),
    (16, 1024, 160, 22),
    (512, 256, 64, 10),
    (896, 128, 48, 16),
]


def quantized(sentence: str) -> bool:
    return "dense" not in sentence.split()


def on_gpu(case: Case) -> Case:
    routing = cases.Routing(*(t.cuda() for t in case.routing))
    return case._replace(
        hidden=case.hidden.cuda(), weights=case.weights.to("cuda"), routing=routing
    )


def check(case: Case, trace: MoETrace) -> None:
    """Judge a trace of the GPU by the oracle, on the host's copies of its inputs."""
    w = case.weights
    oracle.check_moe_trace(
        trace,
        w,
        case.hidden,
        *case.routing,
        case.recipe,
        fused.depth(w.hidden_size, case.recipe),
        fused.depth(w.intermediate_size, case.recipe),
        router_weight_on_input=case.on_input,
    )


@pytest.mark.parametrize("sentence", [s for s in (*covering(), *SHAPES) if quantized(s)])
def test_every_stage(sentence: str) -> None:
    case = make(sentence)
    gpu = on_gpu(case)
    trace = gpu.trace()
    check(case, trace)
    bounds.assert_bitwise(gpu.run().cpu(), trace.y)


@pytest.mark.parametrize("shape", FIELD_SHAPES, ids=str)
@pytest.mark.parametrize("recipe", ["w4a4", "w4a16"])
@pytest.mark.parametrize("tokens", [1, 7, 40])
def test_field_shapes(shape: tuple[int, int, int, int], recipe: str, tokens: int) -> None:
    experts, hidden, inner, k = shape
    case = make(f"E{experts} H{hidden} I{inner} k{k} T{tokens} {recipe} split")
    check(case, on_gpu(case).trace())


@pytest.mark.parametrize("sentence", ["", "w4a16", "fp16 w4a16 up_gate", "fp32 static_each"])
@pytest.mark.parametrize("tokens", [3, 70, 300])
def test_a_row_has_the_same_bits_in_every_batch(sentence: str, tokens: int) -> None:
    """Row blocks of 8, 16, 32 and 64 rows, and a token alone."""
    case = on_gpu(make(f"{sentence} T{tokens} E4 k2 H2064 I1040"))
    whole = case.run()
    for t in (0, tokens // 2, tokens - 1):
        part = slice(t, t + 1)
        routing = cases.Routing(*(r[part] for r in case.routing))
        alone = case._replace(hidden=case.hidden[part], routing=routing).run()
        bounds.assert_bitwise(alone.cpu(), whole[part].cpu())


@pytest.mark.parametrize("sentence", ["", "w4a16 biases interleaved", "fp32 static_each split"])
def test_capture_with_one_routing_and_replay_with_another(sentence: str) -> None:
    case = on_gpu(make(f"{sentence} T33 E8 k2 H528 I272"))
    other = make(f"{sentence} T33 E8 k2 H528 I272", seed=5)
    hidden, out = case.hidden.clone(), torch.empty_like(case.hidden)
    routing = cases.Routing(*(t.clone() for t in case.routing))
    static = case._replace(hidden=hidden, routing=routing)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # The first call of this shape in this process may well be this one.
    with torch.cuda.graph(graph):
        static.run(out=out)
    for source in (case, case._replace(hidden=other.hidden.cuda(), routing=other.routing)):
        hidden.copy_(source.hidden)
        for to, new in zip(routing, source.routing, strict=True):
            to.copy_(new)
        out.fill_(float("nan"))
        graph.replay()
        bounds.assert_bitwise(out.cpu(), static.run().cpu())


def test_a_thousand_repeats() -> None:
    case = on_gpu(make("w4a16 T64 E8 k4 H2048 I768 split"))
    want = case.run()
    out = torch.empty_like(want)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        out.fill_(float("nan"))
        case.run(out=out)
        wrong += (out.view(torch.int16) != want.view(torch.int16)).sum()
    assert int(wrong) == 0


def test_streams_and_threads_at_once() -> None:
    jobs = [on_gpu(make(f"{s} T20 E6 k3 H1040 I272", seed=i)) for i, s in enumerate(["", "w4a16"])]
    want = [job.run() for job in jobs]
    torch.cuda.synchronize()
    wrong: list[int] = []

    def work(i: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            results = [jobs[i].run() for _ in range(100)]
            torch.cuda.current_stream().synchronize()
        wrong.extend(i for y in results if not torch.equal(y, want[i]))

    workers = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


@pytest.mark.parametrize("sentence", ["", "w4a16 biases", "fp32 static"])
def test_out_is_strided_and_poisoned(sentence: str) -> None:
    case = on_gpu(make(f"{sentence} T11 H80"))
    want = case.run()
    buffer = torch.full((24, 100), float("nan"), dtype=want.dtype, device="cuda")
    view = buffer[1:23:2, 8:88]
    assert case.run(out=view) is view
    bounds.assert_bitwise(view.cpu(), want.cpu())
    view.fill_(float("nan"))
    assert bool(buffer.isnan().all())


def test_poisoned_scale_padding() -> None:
    case = make("T9 E3 H80 I48 w4a16")
    broken: dict[str, Any] = {}
    for name in ("w13", "w2"):
        w = getattr(case.weights, name)
        linear = oracle.from_packed(w).scales
        filled = torch.full_like(w.scales.view(torch.uint8), 0x7F)
        keep = torch.from_numpy(oracle.tile(linear + 1)) != 0
        filled[keep] = w.scales.view(torch.uint8)[keep]
        scales = filled.view(torch.float8_e4m3fn)
        broken[name] = fp4lt.NVFP4Tensor(w.codes, scales, w.global_scale)
    poisoned = case.with_weights(**broken)
    bounds.assert_bitwise(on_gpu(poisoned).run().cpu(), on_gpu(case).run().cpu())


@pytest.mark.parametrize("sentence", ["T40 k4 E8", "T40 k4 E8 w4a16"])
def test_agrees_with_the_cpu_within_both_bounds(sentence: str) -> None:
    """Same h up to both backends' rounding: the CPU's trace is checked against the GPU's bound."""
    case = make(sentence)
    check(case, case.trace())


def test_refuses_what_it_cannot_do() -> None:
    case = on_gpu(make("dense bf16"))
    with pytest.raises(fp4lt.errors.UnsupportedError, match=r"NVFP4 weights.*bfloat16"):
        case.run(backend="fused")
