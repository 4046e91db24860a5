# SPDX-License-Identifier: Apache-2.0
"""Well-formed matmuls for :mod:`lt_driver`, with what they must give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import lt_driver as lt
import numpy as np
import numpy.typing as npt
import torch
from lt_driver import Layout, Lt, Matmul, buffer, i32, i64, placed

from fp4lt.testing import bounds, cases, oracle

DTYPES = {lt.BF16: torch.bfloat16, lt.F16: torch.float16, lt.F32: torch.float32}
WORKSPACE = 1 << 20


def scalar(value: float) -> lt.U8:
    return placed(np.array([value], np.float32))


def tiles(operand: cases.Linear) -> npt.NDArray[np.uint8]:
    return oracle.tile(operand.quantized().scales)


def products(operand: cases.Linear) -> npt.NDArray[np.float64]:
    return oracle.Operand.from_quantized(operand.quantized()).products


def aligned_to(bytes_: int) -> dict[int, bytes]:
    """Preferences: workspace, and the alignment of all four matrices."""
    names = (lt.ALIGN_A, lt.ALIGN_B, lt.ALIGN_C, lt.ALIGN_D)
    return {lt.MAX_WORKSPACE: i64(WORKSPACE)} | {name: i32(bytes_) for name in names}


def nvfp4(
    library: Lt,
    weight: cases.Linear,
    rows: cases.Linear,
    *,
    d_type: int = lt.BF16,
    alpha: float = 1.0,
    beta: float = 0.0,
    c: npt.NDArray[np.float64] | None = None,
    pad: int = 0,
) -> Matmul:
    """``Y[n, m] = alpha X W^T (+ beta C)``: W (m, k) is A, X (n, k) is B, Y is D.

    ``pad`` is what ld has on top, in multiples of 32 elements.
    """
    (m, half), n = weight.codes.shape, rows.codes.shape[0]
    k = 2 * half
    ldk, ldm = k + 32 * pad, m + 32 * pad
    size = (bounds.format_of(DTYPES[d_type]).digits > 11 and 4) or 2
    codes = [np.pad(x.codes.numpy(), ((0, 0), (0, 16 * pad)), constant_values=0xAA)
             for x in (weight, rows)]  # fmt: skip
    out = buffer(n * ldm * size, fill=0xFF)
    if c is not None:
        values = torch.from_numpy(np.pad(c, ((0, 0), (0, 32 * pad)))).to(DTYPES[d_type])
        out[:] = values.contiguous().view(torch.uint8).numpy().reshape(-1)
    made = Matmul(
        library,
        Layout(lt.FP4, k, m, ldk),
        Layout(lt.FP4, k, n, ldk),
        Layout(d_type, m, n, ldm),
        Layout(d_type, m, n, ldm),
        {
            "a": placed(codes[0]),
            "b": placed(codes[1]),
            "c": out,
            "d": out,
            "alpha": scalar(alpha),
            "beta": scalar(beta),
            "workspace": buffer(WORKSPACE),
        },
        {
            lt.TRANSA: i32(1),
            lt.TRANSB: i32(0),
            lt.POINTER_MODE: i32(1),
            lt.A_MODE: i32(1),
            lt.B_MODE: i32(1),
        },
        aligned_to(16),
    )
    made.point(lt.A_SCALE, placed(tiles(weight)))
    made.point(lt.B_SCALE, placed(tiles(rows)))
    return made


def plain(
    library: Lt, weight: torch.Tensor, rows: torch.Tensor, *, d_type: int = lt.BF16
) -> Matmul:
    """The same with bf16 or fp16 operands."""
    (m, k), n = weight.shape, rows.shape[0]
    kind = lt.BF16 if weight.dtype == torch.bfloat16 else lt.F16
    out = buffer(n * m * (4 if d_type == lt.F32 else 2), fill=0xFF)
    return Matmul(
        library,
        Layout(kind, k, m, k),
        Layout(kind, k, n, k),
        Layout(d_type, m, n, m),
        Layout(d_type, m, n, m),
        {
            "a": placed(weight.view(torch.uint8).numpy()),
            "b": placed(rows.view(torch.uint8).numpy()),
            "c": out,
            "d": out,
            "alpha": scalar(1.0),
            "beta": scalar(0.0),
            "workspace": buffer(WORKSPACE),
        },
        {lt.TRANSA: i32(1), lt.TRANSB: i32(0), lt.POINTER_MODE: i32(1)},
        aligned_to(16),
    )


def result(matmul: Matmul) -> npt.NDArray[np.float64]:
    """Read D as (n, m) float64."""
    data = matmul.data["d"]
    assert data is not None
    dtype = DTYPES[matmul.d.type]
    values = torch.from_numpy(data.copy()).view(dtype).reshape(matmul.d.cols, matmul.d.ld)
    return bounds.to_float64(values[:, : matmul.d.rows])


def small(library: Lt, *, m: int = 136, n: int = 3, k: int = 96, **options: Any) -> Matmul:
    """A matmul that passes every rule, of exact values."""
    rng = cases.generator(m + n + k)
    weight, rows = cases.exact_operand(rng, (m, k)), cases.exact_operand(rng, (n, k))
    return nvfp4(library, weight, rows, **options)


@dataclass
class Group:
    """Operands of one expert."""

    weight: cases.Linear
    rows: cases.Linear
    alpha: float
    out: lt.U8


def _integers(values: Sequence[int], wide: bool) -> lt.U8:
    return placed(np.array(values, np.int64 if wide else np.int32))


def _pointers(arrays: Sequence[lt.U8]) -> lt.U8:
    return placed(np.array([array.ctypes.data for array in arrays], np.uint64))


def grouped(
    library: Lt,
    counts: Sequence[int],
    *,
    m: int = 64,
    k: int = 96,
    d_type: int = lt.BF16,
    wide: bool = False,
    seed: int = 0,
) -> tuple[Matmul, list[Group]]:
    """One grouped matmul over experts with ``counts`` rows, alphas of their own."""
    rng = cases.generator(seed)
    size = 4 if d_type == lt.F32 else 2
    experts = [
        Group(
            cases.exact_operand(rng, (m, k)),
            cases.exact_operand(rng, (n, k)),
            2.0 ** -(i % 5),
            buffer(n * m * size, fill=0xFF),
        )
        for i, n in enumerate(counts)
    ]
    a = [placed(g.weight.codes.numpy()) for g in experts]
    b = [placed(g.rows.codes.numpy()) for g in experts]
    a_scales = [placed(tiles(g.weight)) for g in experts]
    b_scales = [placed(tiles(g.rows)) for g in experts]
    alphas, zero = [scalar(g.alpha) for g in experts], scalar(0.0)
    same = len(counts)
    ks, ms, ns = (_integers(v, wide) for v in ([k] * same, [m] * same, list(counts)))
    widths = {12: i32(int(wide)), 13: i32(int(wide))}
    out = _pointers([g.out for g in experts])

    def layout(kind: int, rows: lt.U8, cols: lt.U8) -> Layout:
        return Layout(kind, 0, 0, 0, dict(widths), (rows, cols, rows), same)

    made = Matmul(
        library,
        layout(lt.FP4, ks, ms),
        layout(lt.FP4, ks, ns),
        layout(d_type, ms, ns),
        layout(d_type, ms, ns),
        {
            "a": _pointers(a),
            "b": _pointers(b),
            "c": out,
            "d": out,
            "alpha": _pointers(alphas),
            "beta": zero,
            "workspace": buffer(WORKSPACE),
        },
        {
            lt.TRANSA: i32(1),
            lt.POINTER_MODE: i32(1),
            lt.A_MODE: i32(1),
            lt.B_MODE: i32(1),
            lt.ALPHA_STRIDE: i64(1),
        },
        {lt.MAX_WORKSPACE: i64(WORKSPACE), lt.AVERAGE_COLS: i64(2)},
    )
    made.point(lt.A_SCALE, _pointers(a_scales))
    made.point(lt.B_SCALE, _pointers(b_scales))
    made.keep += [*a, *b, *a_scales, *b_scales, *alphas]
    return made, experts


def group_result(group: Group, m: int, d_type: int = lt.BF16) -> npt.NDArray[np.float64]:
    if group.out.size == 0:
        return np.zeros((0, m))
    values = torch.from_numpy(group.out.copy()).view(DTYPES[d_type])
    return bounds.to_float64(values.reshape(-1, m))
