# SPDX-License-Identifier: Apache-2.0
"""Backend dequant in graphs, on several streams and from several threads."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from test_fused_gemm import KINDS, activations, weights
from test_fused_moe import on_gpu
from test_moe import make

import fp4lt
from fp4lt.backends import looped
from fp4lt.errors import UnsupportedError
from fp4lt.testing import bounds, cases

pytestmark = pytest.mark.gpu


@pytest.fixture
def conditional(monkeypatch: pytest.MonkeyPatch) -> None:
    """Conditional nodes switched on."""
    monkeypatch.setenv(looped.CONDITIONAL_GRAPHS, "1")


def test_device_offsets_in_a_capture_are_refused_and_the_capture_lives() -> None:
    x = torch.ones(4, 32, dtype=torch.bfloat16, device="cuda")
    w = torch.ones(2, 16, 32, dtype=torch.bfloat16, device="cuda")
    offs, host = torch.tensor([1, 4], device="cuda"), torch.tensor([1, 4])
    out = torch.zeros(4, 16, dtype=torch.bfloat16, device="cuda")
    case = on_gpu(make("dense"))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(UnsupportedError, match=r"on the device.*backend='fused'.*host memory"):
            fp4lt.grouped_mm(x, w.mT, offs=offs, backend="dequant")
        with pytest.raises(UnsupportedError, match="on the device"):
            case.run(backend="dequant")
        fp4lt.grouped_mm(x, w.mT, offs=host, out=out, backend="dequant")
    graph.replay()
    assert bool((out == 32).all())


@pytest.mark.parametrize("kind", ["w4a4-bf16", "w4a16-bf16"])
@pytest.mark.parametrize("biased", [False, True])
def test_host_offsets_can_be_captured(kind: str, biased: bool) -> None:
    rng = cases.generator(17)
    counts = [3, 0, 1, 8, 2, 5, 0, 1] * 3
    w = weights(rng, (24, 264, 528), exact=False).to("cuda")
    x = activations(rng, kind, sum(counts), 528, exact=False).to("cuda")
    bias = torch.randn(24, 264, device="cuda") if biased else None
    offs = cases.offsets(counts)
    out = torch.empty(sum(counts), 264, dtype=torch.bfloat16, device="cuda")
    given: dict[str, Any] = {"recipe": KINDS[kind][1], "bias": bias, "backend": "dequant"}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fp4lt.grouped_mm(x, w.mT, offs=offs.clone(), out=out, **given)
    for scale in (1.0, -2.0):
        assert isinstance(x, torch.Tensor)
        x.mul_(scale)
        out.fill_(float("nan"))
        graph.replay()
        want = fp4lt.grouped_mm(x, w.mT, offs=offs, **given)
        bounds.assert_bitwise(out.cpu(), want.cpu())


ROUTINGS = ("spread", "none", "one", "first", "last", "full", "ragged")


def ends_of(name: str, experts: int, rows: int) -> torch.Tensor:
    """End offsets of `rows` rows or fewer."""
    counts = torch.zeros(experts, dtype=torch.int64)
    if name == "spread":
        counts[:: max(1, experts // 5)] = 3
    elif name == "one":
        counts[experts // 2] = rows
    elif name == "first":
        counts[0] = 17
    elif name == "last":
        counts[-1] = 1
    elif name == "full":
        counts += rows // experts
    elif name == "ragged":
        counts = torch.from_numpy(cases.generator(3).integers(0, 2 * rows // experts, experts))
        while int(counts.sum()) > rows:
            counts[int(counts.argmax())] //= 2
    assert int(counts.sum()) <= rows
    return counts.cumsum(0)


@pytest.mark.parametrize("kind", ["w4a4-bf16", "w4a16-fp16", "dense"])
@pytest.mark.parametrize(("experts", "rows"), [(1, 5), (7, 40), (40, 300)])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.usefixtures("conditional")
def test_device_offsets_in_a_capture(
    kind: str, experts: int, rows: int, out_dtype: torch.dtype
) -> None:
    """One capture, replayed for other routings: the bits of eager calls, other rows untouched."""
    rng = cases.generator(rows)
    n, k = (264, 528) if kind != "dense" else (200, 272)
    given: dict[str, Any] = {"backend": "dequant", "out_dtype": out_dtype}
    if kind == "dense":
        w: Any = cases.random_matrix(rng, (experts, n, k), torch.bfloat16).cuda()
        x: Any = cases.random_matrix(rng, (rows, k), torch.bfloat16).cuda()
    else:
        w = weights(rng, (experts, n, k), exact=False).to("cuda")
        x = activations(rng, kind, rows, k, exact=False).to("cuda")
        given["recipe"] = KINDS[kind][1]
        given["bias"] = torch.randn(experts, n, device="cuda")
    offs = torch.zeros(experts, dtype=torch.int32, device="cuda")
    out = torch.empty(rows, n, dtype=out_dtype, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fp4lt.grouped_mm(x, w.mT, offs=offs, out=out, **given)
        after = out + 1.0
    for name in ROUTINGS:
        ends = (
            ends_of(name, experts, rows)
            if name != "first" or rows > 17
            else ends_of("last", experts, rows)
        )
        used = int(ends[-1])
        offs.copy_(ends)
        out.fill_(7.0)
        graph.replay()
        want = fp4lt.grouped_mm(x, w.mT, offs=ends, **given)
        bounds.assert_bitwise(out[:used].cpu(), want[:used].cpu(), name=name)
        assert bool((out[used:] == 7.0).all()), name
        assert torch.equal(after, out + 1.0), name


@pytest.mark.parametrize("sentence", ["", "w4a16 biases", "dense", "fp32 static_each split"])
@pytest.mark.usefixtures("conditional")
def test_the_block_in_a_capture(sentence: str) -> None:
    case = on_gpu(make(f"{sentence} T33 E24 k2 H528 I272"))
    other = make(f"{sentence} T33 E24 k2 H528 I272", seed=5)
    skewed = other.routing._replace(topk_ids=torch.full_like(other.routing.topk_ids, 3))
    hidden, out = case.hidden.clone(), torch.empty_like(case.hidden)
    routing = cases.Routing(*(t.clone() for t in case.routing))
    static = case._replace(hidden=hidden, routing=routing)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        static.run(out=out, backend="dequant")
    for source in (
        case,
        case._replace(hidden=other.hidden.cuda(), routing=other.routing),
        case._replace(hidden=other.hidden.cuda(), routing=skewed),
    ):
        hidden.copy_(source.hidden)
        for to, new in zip(routing, source.routing, strict=True):
            to.copy_(new)
        out.fill_(float("nan"))
        graph.replay()
        bounds.assert_bitwise(out.cpu(), static.run(backend="dequant").cpu())


@pytest.mark.usefixtures("conditional")
def test_wrong_device_offsets_in_a_capture_are_cut() -> None:
    rng = cases.generator(29)
    w = cases.exact_matrix(rng, (4, 64, 96)).cuda()
    x = cases.exact_matrix(rng, (10, 96)).cuda()
    offs = torch.zeros(4, dtype=torch.int64, device="cuda")
    out = torch.full((12, 64), 7.0, dtype=torch.bfloat16, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fp4lt.grouped_mm(x, w.mT, offs=offs, out=out[1:11], backend="dequant")
    for wrong in ([4, 2, 50, 60], [-5, 3, 10, 10], [99, 99, 99, 99]):
        offs.copy_(torch.tensor(wrong))
        graph.replay()
        torch.cuda.synchronize()
    assert bool((out[[0, 11]] == 7.0).all())
    offs.copy_(torch.tensor([2, 2, 5, 10]))
    graph.replay()
    want = fp4lt.grouped_mm(x, w.mT, offs=torch.tensor([2, 2, 5, 10]), backend="dequant")
    bounds.assert_bitwise(out[1:11].cpu(), want.cpu())


def test_a_capture_beside_eager_calls_of_other_threads() -> None:
    """Streams that a capture holds are lent to nobody else."""
    rng = cases.generator(23)
    counts = [1] * 32
    w = cases.exact_matrix(rng, (32, 128, 256)).cuda()
    x = cases.exact_matrix(rng, (32, 256)).cuda()
    offs = cases.offsets(counts)
    want = fp4lt.grouped_mm(x, w.mT, offs=offs, backend="dequant")
    torch.cuda.synchronize()
    wrong: list[str] = []
    stop = threading.Event()

    def eager() -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                while not stop.is_set():
                    y = fp4lt.grouped_mm(x, w.mT, offs=offs, backend="dequant")
                    torch.cuda.current_stream().synchronize()
                    if not torch.equal(y, want):
                        wrong.append("other bits")
        except Exception as error:
            wrong.append(str(error))

    thread = threading.Thread(target=eager)
    thread.start()
    out = torch.empty_like(want)
    for _ in range(5):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            fp4lt.grouped_mm(x, w.mT, offs=offs, out=out, backend="dequant")
            fp4lt.grouped_mm(x, w.mT, offs=offs, out=out, backend="dequant")
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.current_stream().synchronize()
        assert torch.equal(out, want)
    stop.set()
    thread.join()
    assert not wrong


def test_streams_and_threads_at_once() -> None:
    jobs = [on_gpu(make(f"{s} T20 E6 k3 H1040 I272", seed=i)) for i, s in enumerate(["", "dense"])]
    want = [job.run(backend="dequant") for job in jobs]
    torch.cuda.synchronize()
    wrong: list[int] = []

    def work(i: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            results = [jobs[i].run(backend="dequant") for _ in range(30)]
            torch.cuda.current_stream().synchronize()
        wrong.extend(i for y in results if not torch.equal(y, want[i]))

    workers = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong
