# SPDX-License-Identifier: Apache-2.0
"""Where the CPU backend changes its way: groups of rows, chunks and tails of K, odd scales."""

from __future__ import annotations

import pytest
import torch
from test_grouped_mm import KINDS, Case, check_exact, make

import fp4lt
from fp4lt import _C
from fp4lt.backends.cpu import depth
from fp4lt.testing import bounds, cases

DENSE = [kind for kind, (_, dtype, _) in KINDS.items() if dtype is not None]
BOUNDARIES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 15, 16, 17, 63, 64, 65, 72, 127, 128, 129)
"""Rows on both sides of a kernel's rows (8) and of those that share an unpacked tile (64)."""


def run(case: Case, a: torch.Tensor) -> torch.Tensor:
    return case._replace(a=a).run((len(a),), out_dtype=torch.float32)


def with_tables(case: Case, a: torch.Tensor) -> list[torch.Tensor]:
    """The result of each kernel table."""
    results = []
    for table in _C.cpu_kernels():
        _C.select_cpu_kernels(table)
        try:
            results.append(run(case, a))
        finally:
            _C.select_cpu_kernels("")
    return results


@pytest.mark.parametrize("kind", DENSE)
def test_rows_on_both_sides_of_each_boundary(kind: str, kernel_table: str) -> None:
    """A row has the bits that it has alone, however many rows are taken with it."""
    case = make(kind, 50, BOUNDARIES[-1], 1, 21, 336, exact=False)
    a = case.a
    assert isinstance(a, torch.Tensor)
    alone = torch.cat([run(case, a[i : i + 1]) for i in range(len(a))])
    for rows in BOUNDARIES:
        bounds.assert_bitwise(run(case, a[:rows]), alone[:rows], name=f"{rows} rows")


@pytest.mark.parametrize("kind", DENSE)
def test_every_tail_of_k(kind: str, kernel_table: str) -> None:
    """Ends inside a group of 4 scales, of 8 blocks, of a chain's 16, and behind one or two."""
    for blocks in (*range(1, 20), 31, 32, 33):
        check_exact(make(kind, blocks, 9, 1, 5, 16 * blocks), (9,))


@pytest.mark.parametrize("kind", ["nvfp4", "w4a16-bf16", "w4a16-fp16"])
@pytest.mark.parametrize(("n", "k"), [(1, 16), (700, 16), (700, 48), (261, 272), (130, 1296)])
def test_tiles_that_are_asked_for_ahead(
    n: int, k: int, kind: str, kernel_table: str, two_threads: None
) -> None:
    """Fewer chunks than are asked for ahead, and tiles past the last row."""
    check_exact(make(kind, 51, 5, 2, n, k), (2, 3))


@pytest.mark.parametrize("kind", DENSE)
@pytest.mark.parametrize("broken", [0, 3, 7, 8, 9, 63, 64])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_broken_row_stays_alone(value: float, broken: int, kind: str, kernel_table: str) -> None:
    case = make(kind, 52, 66, 1, 17, 288, exact=False)
    a = case.a
    assert isinstance(a, torch.Tensor)
    want = run(case, a)
    damaged = a.clone()
    damaged[broken, 5] = value
    y = run(case, damaged)
    others = torch.arange(66) != broken
    bounds.assert_bitwise(y[others], want[others])
    if value != value:  # NaN
        assert bool(y[broken].isnan().all())


SPECIAL = (0x00, 0x01, 0x07, 0x08, 0x77, 0x7E, 0x7F)


@pytest.mark.parametrize("kind", ["nvfp4", "w4a16-bf16", "w4a16-fp16"])
@pytest.mark.parametrize("byte", SPECIAL, ids=hex)
def test_one_odd_scale_among_ordinary_ones(byte: int, kind: str, kernel_table: str) -> None:
    """Zero, denormals, the limits and NaN, first, in the middle and last of a line of scales."""
    for row, block in ((0, 0), (37, 2), (99, 4), (130, 7), (2, 8)):
        linear = cases.random_operand(cases.generator(53), (1, 131, 144))
        scales = linear.scales.view(torch.uint8).clamp(0x10, 0x70)
        scales[0, row, block] = byte
        b = fp4lt.NVFP4Tensor.from_linear_scales(
            linear.codes, scales.view(torch.float8_e4m3fn), linear.global_scale
        )
        case = make(kind, 54, 3, 1, 131, 144, exact=False)._replace(b=b.mT)
        y = case.run((3,), out_dtype=torch.float32)
        case.want((3,)).check(y, depth(144, case.sums))
        assert bool(y[:, row].isnan().all()) == (byte == 0x7F)
        _C.select_cpu_kernels("scalar")
        bounds.assert_bitwise(case.run((3,), out_dtype=torch.float32), y)
        _C.select_cpu_kernels(kernel_table)


# ---- magnitudes at which a bf16 unit that flushes denormals, or an unscaled sum, would differ

K = 528
EXPONENTS = (-133, -126, -120, -112, -111, -110)


def faint(exponent: int, chunk: int | None) -> torch.Tensor:
    """Rows of which some hold values near 2^exponent, everywhere or in one chunk of 256."""
    generator = torch.Generator().manual_seed(55)
    a = torch.randn(11, K, generator=generator, dtype=torch.float32)
    if chunk is None:
        a = a.double() * 2.0**exponent
        return a.bfloat16()
    part = slice(256 * chunk, 256 * chunk + 256)
    small = a.double() * 2.0**exponent
    a[[0, 4, 8, 10], part] = 0.0
    a = a.bfloat16()
    a[4, part] = small[4, part].bfloat16()
    a[10, part.start + 3] = 2.0**exponent
    return a


@pytest.mark.parametrize("chunk", [None, 0, 1, 2])
@pytest.mark.parametrize("exponent", EXPONENTS)
def test_faint_activations_count(exponent: int, chunk: int | None) -> None:
    """The same bits from every table, and the right ones, down to bf16's smallest number."""
    case = make("w4a16-bf16", 56, 11, 1, 19, K, exact=False)
    a = faint(exponent, chunk)
    results = with_tables(case, a)
    for y in results[1:]:
        bounds.assert_bitwise(y, results[0])
    case = case._replace(a=a)
    # A factor that brings the result back among the normal numbers.
    alpha = torch.tensor([2.0 ** min(-exponent, 100)])
    y = case.run((11,), out_dtype=torch.float32, alpha=alpha)
    case.want((11,), alpha=alpha).check(y, depth(K, "w4a16"))
    assert bool(y.count_nonzero())


@pytest.mark.parametrize("exponent", EXPONENTS)
def test_a_single_faint_activation_is_exact(exponent: int, kernel_table: str) -> None:
    case = make("w4a16-bf16", 57, 9, 1, 33, K)
    a = torch.zeros(9, K, dtype=torch.bfloat16)
    for row in range(9):
        a[row, 61 * row % K] = 2.0**exponent
    case = case._replace(a=a)
    for alpha in (1.0, 2.0**30, 2.0**100):
        check_exact(case, (9,), alpha=torch.tensor([alpha]))


def test_sums_of_the_largest_numbers_do_not_overflow(kernel_table: str) -> None:
    """A block's sum passes the largest fp32 number by far, its product with the scale does not."""
    largest = torch.finfo(torch.bfloat16).max
    a = torch.full((9, 64), largest, dtype=torch.bfloat16)
    codes = torch.full((1, 17, 32), 0x77, dtype=torch.uint8)  # 6 everywhere
    scales = torch.full((1, 17, 4), 2.0**-9).to(torch.float8_e4m3fn)
    b = fp4lt.NVFP4Tensor.from_linear_scales(codes, scales, torch.tensor([1.0]))
    case = Case(a, b.mT, "w4a16", "w4a16")
    y = case.run((9,), out_dtype=torch.float32)
    assert bool(y.isfinite().all())
    case.want((9,)).check(y, depth(64, "w4a16"))
