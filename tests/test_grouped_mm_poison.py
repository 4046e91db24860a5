# SPDX-License-Identifier: Apache-2.0
"""What grouped_mm may not read, may not write, and may not let spread."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_grouped_mm import KINDS, OUT_TYPES, Case, check_exact, extras, make, nvfp4
from test_grouped_mm_relations import assert_same, bits, take_rows

import fp4lt
from fp4lt.backends.cpu import depth
from fp4lt.problem import Operand
from fp4lt.testing import cases, oracle

COUNTS = (4, 0, 129)
ROWS, N, K = 133, 35, 80
DENSE = [kind for kind in KINDS if not kind.startswith("nvfp4")]


def poison_padding(t: fp4lt.NVFP4Tensor, byte: int) -> fp4lt.NVFP4Tensor:
    """Put a byte wherever no scale of the matrix lies."""
    rows, blocks = t.codes.shape[-2], t.codes.shape[-1] // 8
    tiled = t.scales.view(torch.uint8).clone()
    used = np.unique(oracle.tile_offset(np.arange(rows)[:, None], np.arange(blocks), blocks))
    free = torch.ones(tiled.shape[-2] * tiled.shape[-1], dtype=torch.bool)
    free[torch.from_numpy(used)] = False
    assert bool(free.any())
    tiled.flatten(-2)[..., free] = byte
    assert not torch.equal(tiled, t.scales.view(torch.uint8))
    poisoned = fp4lt.NVFP4Tensor.from_tiled_scales(t.codes, tiled, t.global_scale)
    return poisoned.mT if t.transposed else poisoned


@pytest.mark.parametrize("byte", [0x7F, 0xFF, 0x7E])
@pytest.mark.parametrize("kind", ["nvfp4", "nvfp4-rows", "w4a4-bf16", "w4a16-bf16"])
def test_scale_padding_is_ignored(kind: str, byte: int, kernel_table: str) -> None:
    case = make(kind, 50, ROWS, 3, N, K)
    b: Operand = case.b
    assert isinstance(b, fp4lt.NVFP4Tensor)
    poisoned = case._replace(b=poison_padding(b, byte))
    if isinstance(case.a, fp4lt.NVFP4Tensor):
        poisoned = poisoned._replace(a=poison_padding(case.a, byte))
    assert_same(poisoned.run(COUNTS), case.run(COUNTS))
    check_exact(poisoned, COUNTS)


def with_poisoned_tail(a: Operand, rows: int) -> Operand:
    """NaN in every row from `rows` on, as values, scales and global scales."""
    if isinstance(a, torch.Tensor):
        broken = a.clone()
        broken[rows:] = float("nan")
        return broken
    q = oracle.from_packed(a)
    scales = q.scales.copy()
    scales[rows:] = 0x7F
    linear = torch.from_numpy(scales)
    return fp4lt.NVFP4Tensor.from_linear_scales(a.codes, linear, a.global_scale)


@pytest.mark.parametrize("dtype", OUT_TYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_past_the_end_are_neither_read_nor_written(
    kind: str, dtype: torch.dtype, kernel_table: str
) -> None:
    used = 77
    case = make(kind, 51, ROWS, 3, N, K)
    inside = case._replace(a=take_rows(case.a, torch.arange(used)))
    want = inside.run((70, 0, 7), out_dtype=dtype)
    poisoned = case._replace(a=with_poisoned_tail(case.a, used))
    # A NaN whose bits give an overwrite with another NaN away.
    out = torch.empty(ROWS, N, dtype=dtype)
    bits(out).fill_(0x7FABCDEF if dtype == torch.float32 else 0x7FED)
    assert bool(out.isnan().all())
    before = out.clone()
    poisoned.run((70, 0, 7), out=out)
    assert_same(out[:used], want)
    assert_same(out[used:], before[used:])
    assert not bool(out[:used].isnan().any())


def test_a_global_scale_past_the_end_is_not_read(kernel_table: str) -> None:
    case = make("nvfp4-rows", 52, 12, 2, N, K)
    assert isinstance(case.a, fp4lt.NVFP4Tensor)
    want = case.run((3, 4))[:7]
    case.a.global_scale[7:] = float("nan")
    assert_same(case.run((3, 4))[:7], want)


@pytest.mark.parametrize("kind", KINDS)
def test_inputs_are_left_alone(kind: str) -> None:
    case, options = make(kind, 53, 7, 3, N, K), extras(53, 3, N)
    options["offs"] = torch.tensor([3, 3, 7])
    if kind.startswith("w4a4"):
        options["a_scale"] = torch.tensor([1.0, 2.0, 0.5])
    tensors = list(options.values())
    for operand in (case.a, case.b):
        if isinstance(operand, torch.Tensor):
            tensors.append(operand)
        else:
            tensors += [operand.codes, operand.scales.view(torch.uint8), operand.global_scale]
    before = [t.clone() for t in tensors]
    case.run((), **options)
    for t, copy in zip(tensors, before, strict=True):
        assert torch.equal(t, copy)


# ---- NaN and infinity


SPECIALS = {
    "nan": [float("nan")],
    "inf": [float("inf")],
    "-inf": [float("-inf")],
    "both": [float("inf"), float("-inf")],
    "nan and inf": [float("nan"), float("inf")],
    "an inf in each block": [float("inf")] * (K // 16),
    "a nan in each block": [float("nan")] * (K // 16),
    "all inf": [float("inf")],
    "all nan": [float("nan")],
}
"""Put into a row at intervals of a block, or everywhere."""


@pytest.mark.parametrize("name", SPECIALS)
@pytest.mark.parametrize("kind", DENSE)
@pytest.mark.parametrize("exact", [True, False])
def test_nan_and_infinity_stay_in_their_row(
    kind: str, name: str, exact: bool, kernel_table: str
) -> None:
    """The row is what IEEE arithmetic and the codec make of it, the others keep their bits."""
    case = make(kind, 54, 9, 3, N, K, exact)
    assert isinstance(case.a, torch.Tensor)
    counts, row, values = (3, 0, 6), 4, SPECIALS[name]
    clean = case.run(counts, out_dtype=torch.float32)
    broken = case.a.clone()
    places = slice(None) if name.startswith("all") else slice(7, 7 + 16 * len(values), 16)
    broken[row, places] = torch.tensor(values, dtype=broken.dtype)
    case = case._replace(a=broken)
    y = case.run(counts, out_dtype=torch.float32)
    others = torch.arange(9) != row
    assert_same(y[others], clean[others])
    assert not torch.equal(y[row], clean[row])
    if exact:
        case.want(counts).check_exact(y)
    case.want(counts).check(y, depth(K, case.sums))
    quantized = case.sums == "w4a4"
    if "nan" in name:
        assert bool(y[row].isnan().all())
    elif quantized:
        assert bool(y[row].isfinite().all()), "an infinity saturates"
    else:
        assert not bool(y[row].isfinite().any())


@pytest.mark.parametrize("kind", ["w4a4-bf16", "w4a4-fp32"])
def test_nan_row_under_a_static_scale(kind: str, kernel_table: str) -> None:
    case = make(kind, 55, 9, 3, N, K)
    assert isinstance(case.a, torch.Tensor)
    case.a[4, 7] = float("nan")
    case.a[5, 8] = float("inf")
    scale = torch.tensor([1.0, 1.0, 0.25])
    y = case.run((3, 0, 6), a_scale=scale, out_dtype=torch.float32)
    case.want((3, 0, 6), a_scale=scale).check_exact(y)
    assert y.isnan().any(1).nonzero()[:, 0].tolist() == [4]


@pytest.mark.parametrize("kind", ["nvfp4", "nvfp4-rows"])
def test_nan_scale_of_an_activation_row(kind: str, kernel_table: str) -> None:
    case = make(kind, 56, 9, 3, N, K)
    assert isinstance(case.a, fp4lt.NVFP4Tensor)
    clean = case.run((3, 0, 6))
    q = oracle.from_packed(case.a)
    scales = q.scales.copy()
    scales[4, 3] = 0x7F
    case = case._replace(
        a=fp4lt.NVFP4Tensor.from_linear_scales(
            case.a.codes, torch.from_numpy(scales), case.a.global_scale
        )
    )
    y = case.run((3, 0, 6))
    assert bool(y[4].isnan().all())
    assert_same(y[torch.arange(9) != 4], clean[torch.arange(9) != 4])


@pytest.mark.parametrize("kind", ["plain-bf16", "plain-fp16"])
def test_infinite_dense_weight_stays_in_its_column(kind: str, kernel_table: str) -> None:
    case = make(kind, 57, 9, 3, N, K)
    assert isinstance(case.b, torch.Tensor)
    clean = case.run((3, 0, 6))
    broken = case.b.mT.contiguous()
    broken[2, 17, 5] = float("inf")
    y = Case(case.a, broken.mT, case.recipe, case.sums).run((3, 0, 6))
    case._replace(b=broken.mT).want((3, 0, 6)).check_exact(y)
    touched = (bits(y) != bits(clean)).nonzero()
    assert touched.tolist() == [[row, 17] for row in range(3, 9)]


def test_nan_scales_have_the_same_bits_in_every_table(kernel_table: str) -> None:
    w = nvfp4(cases.exact_operand(cases.generator(5), (1, 20, 48)))
    w.scales.view(torch.uint8)[...] = 0x7F
    x = torch.ones(2, 48, dtype=torch.bfloat16)
    y = fp4lt.grouped_mm(x, w.mT, offs=torch.tensor([2]), recipe="w4a16", out_dtype=torch.float32)
    assert y.view(torch.int32).unique().tolist() == [0x7FC00000]
