# SPDX-License-Identifier: Apache-2.0
"""What may not change a bit of a row: its batch, its place, threads, instruction sets, strides."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from test_grouped_mm import KINDS, OUT_TYPES, Case, extras, make

import fp4lt
from fp4lt import _C
from fp4lt.problem import Operand
from fp4lt.testing import cases, oracle

COUNTS = (3, 0, 70, 4)
ROWS, EXPERTS, N, K = 77, 4, 19, 1040
"""Enough rows for a second tile of them, and a K whose chains and tree are ragged."""


def bits(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().view({4: torch.int32, 2: torch.int16}[t.element_size()])


def assert_same(y: torch.Tensor, want: torch.Tensor) -> None:
    assert y.dtype == want.dtype
    assert torch.equal(bits(y), bits(want))


def random_case(kind: str, seed: int = 30, rows: int = ROWS) -> Case:
    """Sums that round, so that another order would give other bits."""
    return make(kind, seed, rows, EXPERTS, N, K, exact=False)


def take_rows(a: Operand, index: torch.Tensor) -> Operand:
    if isinstance(a, torch.Tensor):
        return a[index]
    q = oracle.from_packed(a)
    g = torch.from_numpy(q.global_scale)
    return fp4lt.NVFP4Tensor.from_linear_scales(
        a.codes[index], torch.from_numpy(q.scales[index.numpy()]), g[index] if g.ndim else g
    )


def take_experts(b: Operand, index: torch.Tensor) -> Operand:
    if isinstance(b, torch.Tensor):
        return b.mT[index].mT
    return fp4lt.NVFP4Tensor.from_tiled_scales(
        b.codes[index], b.scales.view(torch.uint8)[index], b.global_scale[index]
    ).mT


def experts_of(counts: Sequence[int]) -> torch.Tensor:
    return torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))


def subset(case: Case, rows: torch.Tensor, **options: Any) -> torch.Tensor:
    """Only these rows, ascending, of a batch grouped by COUNTS."""
    counts = torch.bincount(experts_of(COUNTS)[rows], minlength=EXPERTS).tolist()
    return case._replace(a=take_rows(case.a, rows)).run(counts, **options)


# ---- the batch around a row


@pytest.mark.parametrize("kind", KINDS)
def test_rows_do_not_depend_on_their_batch(kind: str, kernel_table: str) -> None:
    case, options = random_case(kind), extras(31, EXPERTS, N)
    whole = case.run(COUNTS, **options)
    picked = torch.from_numpy(np.flatnonzero(cases.generator(32).random(ROWS) < 0.4))
    alone = [torch.tensor([row]) for row in (0, 2, 3, 66, 67, 72, 73, 76)]
    halves = [torch.arange(40), torch.arange(40, ROWS)]
    for rows in (picked, *alone, *halves):
        assert_same(subset(case, rows, **options), whole[rows])


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "nvfp4-rows"])
def test_permuted_experts_permute_the_rows(kind: str) -> None:
    case, options = random_case(kind), extras(33, EXPERTS, N)
    whole = case.run(COUNTS, **options)
    order = torch.tensor([2, 3, 0, 1])
    rows = torch.cat([(experts_of(COUNTS) == e).nonzero()[:, 0] for e in order])
    moved = Case(take_rows(case.a, rows), take_experts(case.b, order), case.recipe, case.sums)
    y = moved.run([COUNTS[e] for e in order], **{k: v[order] for k, v in options.items()})
    assert_same(y, whole[rows])


@pytest.mark.parametrize("kind", KINDS)
def test_doubling_alpha_doubles_exactly(kind: str) -> None:
    case = random_case(kind)
    alpha = extras(34, EXPERTS, N)["alpha"]
    for dtype in (torch.float32, torch.bfloat16):
        once = case.run(COUNTS, alpha=alpha, out_dtype=dtype)
        assert_same(case.run(COUNTS, alpha=2 * alpha, out_dtype=dtype), 2 * once)


# ---- the machine


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("two_threads")
def test_bits_do_not_depend_on_threads_or_time(kind: str, kernel_table: str) -> None:
    case, options = random_case(kind), extras(35, EXPERTS, N)
    first = case.run(COUNTS, **options)
    for threads in (1, 2, 5, 2):
        torch.set_num_threads(threads)
        assert_same(case.run(COUNTS, **options), first)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [16, 272, 1808])
def test_every_kernel_table_gives_the_same_bits(kind: str, k: int) -> None:
    case, options = make(kind, k, 9, 3, 35, k, exact=False), extras(36, 3, 35)
    for dtype in OUT_TYPES:
        results = []
        for table in _C.cpu_kernels():
            _C.select_cpu_kernels(table)
            try:
                results.append(case.run((5, 0, 4), out_dtype=dtype, **options))
            finally:
                _C.select_cpu_kernels("")
        for y in results[1:]:
            assert_same(y, results[0])


@pytest.mark.usefixtures("two_threads")
def test_calls_from_several_python_threads() -> None:
    jobs = [random_case(kind, seed) for kind in KINDS for seed in (37, 38)]
    want = [case.run(COUNTS) for case in jobs]
    with ThreadPoolExecutor(4) as pool:
        for y, expected in zip(pool.map(lambda case: case.run(COUNTS), jobs), want, strict=True):
            assert_same(y, expected)


@pytest.mark.usefixtures("two_threads")
def test_denormals_count_although_the_thread_flushes_them(kernel_table: str) -> None:
    for kind, exponent in (("w4a4-bf16", -118), ("w4a16-bf16", -125), ("plain-bf16", -140)):
        case = random_case(kind)
        alpha = torch.tensor(2.0**exponent)
        want = case.run(COUNTS, alpha=alpha, out_dtype=torch.float32)
        assert bool((bits(want) & 0x7FFFFFFF != 0).any())
        if not torch.set_flush_denormal(True):
            pytest.skip("torch cannot flush denormals on this processor")
        try:
            y = case.run(COUNTS, alpha=alpha, out_dtype=torch.float32)
        finally:
            torch.set_flush_denormal(False)
        assert_same(y, want)


# ---- strides and offsets


def dense_views(x: torch.Tensor) -> list[torch.Tensor]:
    """The values of a matrix in rows with gaps, rows of odd length, and at odd addresses."""
    rows, k = x.shape
    result = []
    for left, right in ((0, 24), (1, 0), (3, 2)):
        wide = x.new_full((rows + 2, left + k + right), float("nan"))
        wide[1:-1, left : left + k] = x
        result.append(wide[1:-1, left : left + k])
    odd = x.new_full((rows * k + 1,), float("nan"))[1:].view(rows, k)
    odd.copy_(x)
    assert odd.storage_offset() == 1
    every_other = torch.stack([x, torch.full_like(x, float("nan"))], 1).flatten(0, 1)[::2]
    return [*result, odd, every_other]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.startswith("nvfp4")])
def test_strided_activations_are_honoured(kind: str, kernel_table: str) -> None:
    case = random_case(kind)
    assert isinstance(case.a, torch.Tensor)
    want = case.run(COUNTS)
    for view in dense_views(case.a):
        assert_same(case._replace(a=view).run(COUNTS), want)
    repeated = case._replace(a=case.a[:1].expand(ROWS, K))
    contiguous = case._replace(a=case.a[:1].repeat(ROWS, 1))
    assert_same(repeated.run(COUNTS), contiguous.run(COUNTS))


@pytest.mark.parametrize("dtype", OUT_TYPES)
@pytest.mark.parametrize("kind", ["w4a4-bf16", "w4a16-fp16", "plain-bf16"])
def test_strided_output_is_honoured(kind: str, dtype: torch.dtype, kernel_table: str) -> None:
    case = random_case(kind, rows=ROWS + 2)
    want = case.run(COUNTS, out_dtype=dtype)[:ROWS]
    for left, right in ((0, 5), (1, 0), (3, 8)):
        buffer = torch.full((ROWS + 4, left + N + right), float("nan"), dtype=dtype)
        before = buffer.clone()
        out = buffer[1:-1, left : left + N]
        assert case.run(COUNTS, out=out, out_dtype=dtype) is out
        assert_same(out[:ROWS], want)
        before[1 : 1 + ROWS, left : left + N] = want
        assert_same(buffer, before)


@pytest.mark.parametrize("kind", ["plain-bf16", "plain-fp16"])
def test_strided_dense_weights_are_honoured(kind: str, kernel_table: str) -> None:
    case = random_case(kind)
    assert isinstance(case.b, torch.Tensor)
    want, w = case.run(COUNTS), case.b.mT
    wide = w.new_full((EXPERTS, N + 3, K + 9), float("nan"))
    wide[:, 1 : 1 + N, 3 : 3 + K] = w
    odd = w.new_empty(w.numel() + 1)[1:].view(w.shape)
    odd.copy_(w)
    rows_first = w.transpose(0, 1).contiguous().transpose(0, 1)
    every_other = torch.stack([w, torch.full_like(w, float("nan"))], 1).flatten(0, 1)[::2]
    for view in (wide[:, 1 : 1 + N, 3 : 3 + K], odd, rows_first, every_other):
        assert_same(case._replace(b=view.mT).run(COUNTS), want)
    shared = case._replace(b=w[:1].expand(w.shape).mT)
    assert_same(shared.run(COUNTS), case._replace(b=w[:1].repeat(EXPERTS, 1, 1).mT).run(COUNTS))


def moved(t: fp4lt.NVFP4Tensor) -> fp4lt.NVFP4Tensor:
    """The same tensor, its parts at odd addresses."""
    codes = torch.empty(t.codes.numel() + 1, dtype=torch.uint8)[1:].view(t.codes.shape)
    scales = torch.empty(t.scales.numel() + 3, dtype=torch.uint8)[3:].view(t.scales.shape)
    codes.copy_(t.codes)
    scales.copy_(t.scales.view(torch.uint8))
    return fp4lt.NVFP4Tensor.from_tiled_scales(codes, scales, t.global_scale)


@pytest.mark.parametrize("kind", ["nvfp4", "nvfp4-rows", "w4a4-fp32", "w4a16-bf16"])
def test_sliced_and_moved_nvfp4_weights(kind: str, kernel_table: str) -> None:
    counts = (30, 47)
    stack = make(kind, 39, ROWS, 6, N, K, exact=False)
    assert isinstance(stack.b, fp4lt.NVFP4Tensor)
    for index in (slice(1, 3), slice(0, 6, 5), slice(5, 6)):
        sliced = stack.b[index]
        part = counts[: len(sliced)]
        used = take_rows(stack.a, torch.arange(sum(part)))
        want = Case(
            used, take_experts(stack.b, torch.arange(6)[index]), stack.recipe, stack.sums
        ).run(part)
        for b in (sliced, stack.b.mT[index].mT, moved(sliced.mT).mT):
            assert_same(Case(used, b, stack.recipe, stack.sums).run(part), want)


@pytest.mark.parametrize("kind", ["nvfp4", "nvfp4-rows"])
def test_moved_nvfp4_activations(kind: str, kernel_table: str) -> None:
    case = random_case(kind)
    assert isinstance(case.a, fp4lt.NVFP4Tensor)
    want, a = case.run(COUNTS), case.a
    assert_same(case._replace(a=moved(a)).run(COUNTS), want)
    g = torch.stack([a.global_scale.expand(ROWS), torch.full((ROWS,), 9.0)], 1)[:, 0]
    strided = fp4lt.NVFP4Tensor(a.codes, a.scales, g)
    assert_same(case._replace(a=strided).run(COUNTS), want)


def test_shared_global_scale_of_a_stack(kernel_table: str) -> None:
    case = random_case("w4a4-bf16")
    assert isinstance(case.b, fp4lt.NVFP4Tensor)
    shared, each = (
        fp4lt.NVFP4Tensor(case.b.codes, case.b.scales, g).mT
        for g in (torch.tensor(0.3), torch.full((EXPERTS,), 0.3))
    )
    assert_same(case._replace(b=shared).run(COUNTS), case._replace(b=each).run(COUNTS))


def test_strided_small_arguments() -> None:
    case, options = random_case("w4a4-bf16"), extras(40, EXPERTS, N)
    options["a_scale"] = torch.tensor([0.01, 0.5, 0.02, 0.3])
    want = case.run(COUNTS, **options)
    apart = {k: torch.stack([v, v * 3], -1)[..., 0] for k, v in options.items()}
    ends = cases.offsets(COUNTS, torch.int64)
    for offs in (ends, torch.stack([ends, ends * 3], -1)[:, 0], ends.int()):
        assert_same(case.run(COUNTS, offs=offs, **apart), want)
