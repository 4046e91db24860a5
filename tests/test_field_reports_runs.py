# SPDX-License-Identifier: Apache-2.0
"""Reports from the field about runs: repeats, batches, threads, streams, graphs, other machines.

See test_field_reports.py for what the row numbers are.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_field_reports import EVERYWHERE, GPU, PRODUCTS, Machine
from test_field_reports_moe import check_sum, expert_shards, linear_block
from test_grouped_mm import extras, make as make_product
from test_grouped_mm_relations import assert_same, take_rows
from test_moe import Case, make, same
from test_moe_relations import tokens

import fp4lt
from fp4lt import _C, errors
from fp4lt.backends.fused import FusedBackend
from fp4lt.testing import cases, targets

NAN = float("nan")


def placed(machine: Machine, case: Case) -> Case:
    """The case with its tensors where the machine has them."""
    weights = case.weights.to(machine.device)
    routing = cases.Routing(*machine.put(tuple(case.routing)))
    return case._replace(hidden=machine.put(case.hidden), weights=weights, routing=routing)


# ---- the same bits


@EVERYWHERE
@pytest.mark.parametrize(
    "sentence", ["T9 E8 k4 split", "T9 E8 k4 w4a16 biases", "fp32 static_each T33 H16 I32"]
)
@pytest.mark.usefixtures("two_threads")
def test_a_thousand_repeats(machine: Machine, sentence: str) -> None:
    """Row 57 is another kernel's race.  A thousand runs of ours over poison have the same bits."""
    case = placed(machine, make(sentence))
    want = case.run(backend=machine.backend)
    integer = torch.int16 if want.element_size() == 2 else torch.int32
    wrong = torch.zeros((), dtype=torch.int64, device=machine.device)
    out = torch.empty_like(want)
    for _ in range(1000):
        out.fill_(NAN)
        case.run(out=out, backend=machine.backend)
        wrong += (out.view(integer) != want.view(integer)).sum()
    assert int(wrong) == 0
    assert bool(want.isfinite().all())


@EVERYWHERE
@pytest.mark.parametrize("kind", PRODUCTS)
@pytest.mark.usefixtures("two_threads")
def test_a_thousand_repeats_of_a_product(machine: Machine, kind: str) -> None:
    """As above, with a group in each size of row block."""
    counts = (1, 0, 9, 17, 40)
    case = make_product(kind, 57, 67, 5, 40, 272, exact=False)
    case = case._replace(a=machine.put(case.a), b=machine.put(case.b))
    options: dict[str, Any] = machine.put({"offs": cases.offsets(counts)} | extras(57, 5, 40))
    options |= {"out_dtype": torch.float32, "backend": machine.backend}
    want, out = case.run(counts, **options), torch.empty(67, 40, device=machine.device)
    wrong = torch.zeros((), dtype=torch.int64, device=machine.device)
    for _ in range(1000):
        out.fill_(NAN)
        case.run(counts, out=out, **options)
        wrong += (out.view(torch.int32) != want.view(torch.int32)).sum()
    assert int(wrong) == 0


@EVERYWHERE
@pytest.mark.parametrize(
    "sentence",
    [
        "T33 E40 k4 H2880 I96 split",
        "T33 E60 k8 H128 I464 w4a16 biases",
        "T33 E3 k2 H2688 I160 fp32 static_each",
        "T33 E512 k10 H64 I64",
        "T33 E896 k16 H64 I64 w4a16",
        "T33 E1 k1 H720 I352 w4a16 fp16",
    ],
)
def test_rows_do_not_depend_on_their_batch(machine: Machine, sentence: str) -> None:
    """A token alone, in half a batch, and in another order."""
    case = make(sentence)
    whole = machine.run(case)
    for t in (0, 16, 32):
        same(machine.run(tokens(case, slice(t, t + 1))), whole[t : t + 1])
    parts = [machine.run(tokens(case, part)) for part in (slice(13), slice(13, None))]
    same(torch.cat(parts), whole)
    order = torch.from_numpy(np.random.default_rng(0).permutation(33))
    same(machine.run(tokens(case, order)), whole[order])


@EVERYWHERE
@pytest.mark.parametrize("kind", PRODUCTS)
def test_rows_do_not_depend_on_the_size_of_their_group(machine: Machine, kind: str) -> None:
    """One row alone and among 2 to 300: every size of row block, and its edges."""
    case = make_product(kind, 58, 300, 1, 72, 1504, exact=False)
    whole = machine.multiply(case, (300,), out_dtype=torch.float32)
    for rows in (1, 2, 7, 8, 9, 16, 17, 32, 33, 63, 64, 65, 128, 129, 256):
        part = case._replace(a=take_rows(case.a, torch.arange(300 - rows, 300)))
        y = machine.multiply(part, (rows,), out_dtype=torch.float32)
        assert_same(y, whole[300 - rows :])


@EVERYWHERE
@pytest.mark.parametrize(
    ("sizes", "ranks"),
    [
        ((5, 3, 2688, 64, 2), 3),
        ((7, 40, 2880, 96, 4), 4),
        ((9, 60, 128, 464, 8), 5),
        ((5, 512, 128, 64, 10), 8),
        ((5, 896, 64, 48, 16), 7),
    ],
    ids=str,
)
def test_expert_ranges_sum_to_the_whole(
    machine: Machine, sizes: tuple[int, int, int, int, int], ranks: int
) -> None:
    """Bit for bit, since nothing rounds (T, E, H, I, k)."""
    case = linear_block(sizes)
    check_sum(machine, case, expert_shards(case, ranks))


# ---- several at once


@EVERYWHERE
@pytest.mark.parametrize("threads", [2, 5])
@pytest.mark.usefixtures("two_threads")
def test_row_63_several_threads_at_once(machine: Machine, threads: int) -> None:
    """Row 63 (kekzl/imp #179; pytorch #193832): callers shared a workspace.

    Blocks and products of several shapes, on a stream for each thread where there are streams.
    """
    blocks = [
        placed(machine, make(s))
        for s in ("T20 E6 k3 H272 I144 split", "w4a16 T7 E40 k4", "T1 E8 k8 fp32", "T64 H16 I16")
    ]
    products = [make_product(kind, 63, 70, 2, 48, 320, exact=False) for kind in PRODUCTS]
    jobs: list[Callable[[], torch.Tensor]]
    jobs = [partial(block.run, backend=machine.backend) for block in blocks]
    jobs += [partial(machine.multiply, product, (3, 67)) for product in products]
    want = [job().cpu() for job in jobs]
    start = threading.Barrier(threads)

    def work(first: int) -> list[tuple[int, torch.Tensor]]:
        start.wait()
        order = [(first + i) % len(jobs) for i in range(10 * len(jobs))]
        if machine.device == "cpu":
            return [(i, jobs[i]()) for i in order]
        new_stream: Any = torch.cuda.Stream  # which torch leaves untyped
        with torch.cuda.stream(new_stream()):
            done = [(i, jobs[i]()) for i in order]
            torch.cuda.current_stream().synchronize()
        return done

    with ThreadPoolExecutor(threads) as pool:
        for done in pool.map(work, range(threads)):
            for i, y in done:
                same(y.cpu(), want[i])


# ---- graphs


def replays(case: Case, times: int) -> None:
    """Capture the block, then replay it with other values each time."""
    case = placed(GPU, case)
    T, E = len(case.hidden), case.weights.num_local_experts
    out = torch.empty_like(case.hidden)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case.run(out=out, backend=GPU.backend)
    for i in range(times):
        rng = cases.generator(i)
        new = cases.route_missing(rng, T, E, case.routing.topk_ids.shape[1])
        for to, source in zip(case.routing, new, strict=True):
            to.copy_(source)
        case.hidden.copy_(cases.random_matrix(rng, tuple(case.hidden.shape)))
        valid = T if i % 2 else 5
        case.routing.topk_ids[valid:] = -1
        case.hidden[valid::2], case.hidden[valid + 1 :: 2] = NAN, float("inf")
        out.fill_(NAN)
        graph.replay()
        same(out.cpu(), case.run(backend=GPU.backend).cpu())
        assert not bool(out[valid:].any())
        assert bool(out.isfinite().all())


@pytest.mark.gpu
@pytest.mark.parametrize("sentence", ["w4a4", "w4a16", "static_each split"])
def test_rows_11_and_61_captured_for_64_tokens(sentence: str) -> None:
    """Rows 11 (vllm #40047) and 61 (flashinfer #2776): NaN in the padding of a captured batch
    reached valid tokens, and captures crashed.  100 replays, with 5 of 64 tokens valid in half."""
    replays(make(f"{sentence} T64 E8 k2 H256 I144"), 100)


FIRST_CALL = """
import torch
from test_field_reports_runs import replays
from test_moe import make
replays(make("{sentence} T64 E8 k2 H256 I144"), 2)
"""


@pytest.mark.gpu
@pytest.mark.parametrize("sentence", ["w4a4", "w4a16"])
def test_row_62_first_call_inside_a_capture(sentence: str) -> None:
    """Row 62 (vllm.cpp #1732): a query made at the first call broke the capture it was made in.

    In a process of its own, whose first call is captured.
    """
    code = FIRST_CALL.format(sentence=sentence)
    folder = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


# ---- other machines


@EVERYWHERE
@pytest.mark.parametrize("kind", PRODUCTS)
@pytest.mark.parametrize("shape", [(128, 128), (256, 512), (520, 256), (24, 3072)], ids=str)
def test_rows_53_and_58_what_is_chosen_is_right(
    machine: Machine, shape: tuple[int, int], kind: str
) -> None:
    """Rows 53 (flashinfer #2723; cutlass #3096) and 58 (vllm #48898, #48965): the path chosen on a
    new GPU gave garbage.  What "auto" takes is exact, and is the backend that is named here."""
    n, k = shape
    counts = (128, 1, 0, 20)
    case = make_product(kind, n + k, sum(counts), 4, n, k)
    y = machine._replace(backend="auto").multiply(case, counts, out_dtype=torch.float32)
    case.want(counts).check_exact(y)
    assert_same(machine.multiply(case, counts, out_dtype=torch.float32), y)


@pytest.mark.parametrize("major", [7, 5])
def test_row_55_a_gpu_that_is_too_old(major: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row 55 (vllm #24377, #28110, #38208, #50925): a GPU without device code of its own died of an
    illegal instruction.  A backend says what it needs and what is there."""
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (major, 2))
    monkeypatch.setattr(_C, "cuda_built_with", lambda: "13.0")
    for problem in targets.problems().values():
        reason = FusedBackend().refusal(problem, device)
        assert reason is not None
        assert "needs compute capability 8.0 or later" in reason
        assert f"cuda:0 has {major}.2" in reason


def test_row_55_a_build_without_device_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row 55: the same for a build without any; asking for it by name gives this reason."""
    monkeypatch.setattr(_C, "cuda_built_with", lambda: "")
    problem = targets.problems()["moe w4a4"]
    reason = FusedBackend().refusal(problem, torch.device("cuda", 0))
    assert reason is not None
    assert "no CUDA code" in reason
    case = make("")
    with pytest.raises(errors.UnsupportedError, match="fused: it needs a CUDA device"):
        fp4lt.moe(case.hidden, case.weights, **case.routing._asdict(), backend="fused")
