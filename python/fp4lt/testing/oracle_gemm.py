# SPDX-License-Identifier: Apache-2.0
"""The matrix product, exactly: sums in integers or provably exact float64, scales apart.

``y = round_out(f c + bias)`` with ``c = sum a b`` on products that leave the global scales out,
and ``f = (g_a g_b) alpha`` in fp32.  This module gives f, c, sum|a b| and the bias, from which
:mod:`fp4lt.testing.bounds` judges a result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from fp4lt.testing import bounds
from fp4lt.testing.oracle_codec import (
    E4M3_TABLE,
    F32,
    F64,
    I64,
    Quantized,
    decode_e2m1,
    derive_global,
    from_packed,
    quantize,
)

PRODUCT_UNIT: Final = 2.0**-10
"""Every product of a code and a block scale is a multiple of it, at most 2688 in magnitude."""

EXACT_BLOCK: Final = 1024
"""k that float64 sums without rounding in any order: 1024 * (2688 * 2^10)^2 < 2^53."""


def is_nvfp4(t: Any) -> bool:
    """Whether it has an ``NVFP4Tensor``'s fields (a plain tensor has no ``codes``)."""
    return hasattr(t, "codes")


@dataclass(frozen=True)
class Operand:
    """Exact values of one operand, its global scale kept apart.

    Attributes
    ----------
    products : (..., N, K) float64
        ``code * scale`` as stored, whatever ``transposed`` says; or the plain values.
    global_scale : float32
        ``()``, (E,) or (M,); 1 for a plain tensor.
    nvfp4 : bool
        Whether the products are multiples of 2^-10 up to 2688 (or NaN).
    """

    products: F64
    global_scale: F32
    nvfp4: bool

    @staticmethod
    def of(t: Any, *, expert: int | None = None) -> Operand:
        """Read an ``NVFP4Tensor``-like object, or a bf16, fp16 or fp32 tensor, as it is stored.

        With ``expert``, only that matrix of a stack (E, N, K) is decoded.
        """
        if is_nvfp4(t):
            return Operand.from_quantized(from_packed(t, expert=expert))
        values = bounds.to_float64(t if expert is None else t[expert])
        return Operand(values, np.asarray(1, np.float32), nvfp4=False)

    @staticmethod
    def from_quantized(q: Quantized) -> Operand:
        """Products of codes and scales; scale bytes from 0x80 on are refused."""
        if q.scales.size and q.scales.max() >= 0x80:
            raise ValueError("block scales are unsigned: found a byte from 0x80 on")
        scales = np.repeat(E4M3_TABLE[q.scales], 16, axis=-1)
        return Operand(decode_e2m1(q.codes) * scales, q.global_scale, nvfp4=True)

    def rows(self, start: int, stop: int) -> Operand:
        """Rows of a 2-D operand, with their global scales."""
        g = self.global_scale
        return Operand(self.products[start:stop], g[start:stop] if g.ndim else g, self.nvfp4)


@dataclass(frozen=True)
class Sums:
    """``c = sum a b`` and ``sum |a b|``, (M, N) float64 each, and how far ``c`` can be off."""

    c: F64
    sum_abs: F64
    residual: F64


def exact_sum_int64(a: F64, b: F64) -> I64:
    """``sum_k a[m, k] b[n, k]`` of NVFP4 products in units of 2^-20, exactly.

    Each term is below 2^43 units; 1024 of them stay below 2^53, where float64 rounds nothing, so
    such blocks are plain matrix products and only their sums are added in int64.

    Parameters
    ----------
    a : (M, K) float64
    b : (N, K) float64
        Finite multiples of 2^-10, at most 2688 in magnitude; K at most 2^20.

    Returns
    -------
    (M, N) int64
    """
    if a.shape[1] > 1 << 20:
        raise ValueError(f"K = {a.shape[1]}: int64 holds the sum only up to K = 2^20")
    left, right = a / PRODUCT_UNIT, b / PRODUCT_UNIT
    for units in (left, right):
        if not ((np.abs(units) <= 2688 * 1024) & (units == np.rint(units))).all():
            raise ValueError("not NVFP4 products: need finite multiples of 2^-10 up to 2688")
    total = np.zeros((a.shape[0], b.shape[0]), np.int64)
    for k in range(0, a.shape[1], EXACT_BLOCK):
        block = left[:, k : k + EXACT_BLOCK] @ right[:, k : k + EXACT_BLOCK].T
        total += block.astype(np.int64)
    return total


def _lowest_bit(x: F64) -> float:
    """Largest power of two that divides every value (1 if all are zero)."""
    nonzero = x[x != 0]
    if nonzero.size == 0:
        return 1.0
    fraction, exponent = np.frexp(nonzero)
    mantissa = np.abs(np.ldexp(fraction, 53)).astype(np.int64)
    trailing = np.frexp((mantissa & -mantissa).astype(np.float64))[1] - 1
    return float(np.ldexp(1.0, int((exponent - 53 + trailing).min())))


def exact_sum(a: F64, b: F64, *, nvfp4: bool) -> Sums:
    """Sum products over k, exactly or with a stated error far below the bound's.

    Parameters
    ----------
    a : (M, K) float64
    b : (N, K) float64
        NaN or infinity in a row of ``a`` or ``b`` gives what IEEE arithmetic gives, in the
        outputs of that row only.
    nvfp4 : bool
        Both sides are NVFP4 products, so the sum is an int64 in units of 2^-20.

    Returns
    -------
    Sums
        ``residual`` is 0 where c is exact.  With bf16 or fp16 activations each term is exact in
        float64 and the sum errs by at most K 2^-53 sum|a b|: 2^-30 K of one fp32 rounding.
    """
    bad_a = np.asarray(~np.isfinite(a).all(axis=1))
    bad_b = np.asarray(~np.isfinite(b).all(axis=1))
    left, right = np.where(bad_a[:, None], 0.0, a), np.where(bad_b[:, None], 0.0, b)
    k = a.shape[1]
    sum_abs = np.abs(left) @ np.abs(right).T
    if nvfp4:
        units = exact_sum_int64(left, right)
        c = np.ldexp(units.astype(np.float64), -20)
        # Above 2^53 units the conversion rounds once.
        residual = np.where(np.abs(units) < 1 << 53, 0.0, np.abs(c) * 2.0**-53)
    else:
        c = left @ right.T
        unit = _lowest_bit(left) * _lowest_bit(right)
        residual = np.where(sum_abs * (1 + k * 2.0**-53) < unit * 2.0**53, 0.0, k * 2.0**-53)
        residual = residual * sum_abs
    for m in np.flatnonzero(bad_a):
        c[m] = _ieee_sum(a[m], b)
    for n in np.flatnonzero(bad_b):
        c[:, n] = _ieee_sum(b[n], a)
    sum_abs = np.where(bad_a[:, None] | bad_b, np.inf, sum_abs)
    return Sums(c, sum_abs, residual)


def _ieee_sum(row: F64, matrix: F64) -> F64:
    """Add up a row that holds NaN or infinity: which of the two comes out has no order."""
    with np.errstate(invalid="ignore"):
        return np.asarray((row * matrix).sum(axis=1))


@dataclass(frozen=True)
class Expected:
    """An exact result ``f c + bias`` with what its bound needs; (M, N) float64 each."""

    f: F64
    c: F64
    sum_abs: F64
    bias: F64
    residual: F64

    @property
    def value(self) -> F64:
        """``f c + bias``, to float64's own rounding."""
        with np.errstate(invalid="ignore"):
            return np.asarray(self.f * self.c + self.bias)

    def rounded(self, dtype: torch.dtype) -> F64:
        """Give what exact inputs must: ``f c + bias`` in fp32, each rounded, then the type."""
        with np.errstate(invalid="ignore"):
            product = bounds.round_to(self.f * self.c, torch.float32)
            total = bounds.round_to(product + self.bias, torch.float32)
        return bounds.round_to(total, dtype)

    def bound(self, depth: int, out_dtype: torch.dtype) -> F64:
        """Bound of numerics' section 4, without the oracle's own error."""
        return bounds.bound(self.f, self.c, self.sum_abs, self.bias, depth, out_dtype)

    def check(self, y: torch.Tensor, depth: int, *, name: str = "y") -> None:
        """Raise AssertionError at the worst element of ``y`` out of its bound."""
        # value is two float64 roundings away from f c + bias; infinities are compared as such.
        with np.errstate(invalid="ignore"):
            own = np.abs(self.f) * self.residual + 2.0**-52 * (
                np.abs(self.f * self.c) + np.abs(self.bias)
            )
        bounds.assert_within(
            y, self.f, self.c, self.sum_abs, self.bias, depth, residual=own, name=name
        )

    def check_exact(self, y: torch.Tensor, *, name: str = "y") -> None:
        """Raise AssertionError at the first element that is not :meth:`rounded`'s."""
        bounds.assert_bitwise(y, self.rounded(y.dtype), signed_zeros=False, name=name)


def factor(g_a: npt.ArrayLike, g_b: npt.ArrayLike, alpha: npt.ArrayLike = 1.0) -> F64:
    """``f = (g_a g_b) alpha`` in fp32, rounded per multiplication."""
    with np.errstate(over="ignore", under="ignore"):
        pair = np.asarray(g_a, np.float32) * np.asarray(g_b, np.float32)
        return np.asarray(pair * np.asarray(alpha, np.float32), np.float64)


def product(a: Operand, b: Operand, *, alpha: npt.ArrayLike = 1.0, bias: Any = None) -> Expected:
    """Multiply one group: (M, K) by (N, K), scales, factor and bias included.

    Parameters
    ----------
    a, b : Operand
        ``a.global_scale`` () or (M,), ``b.global_scale`` ().
    alpha : float32, optional
        (), or (N,) where columns differ.
    bias : (N,) float32, optional

    Returns
    -------
    Expected
    """
    sums = exact_sum(a.products, b.products, nvfp4=a.nvfp4 and b.nvfp4)
    shape = sums.c.shape
    g_a = a.global_scale.reshape(-1, 1) if a.global_scale.ndim else a.global_scale
    added = 0.0 if bias is None else bounds.to_float64(bias)
    return Expected(
        np.broadcast_to(factor(g_a, b.global_scale, alpha), shape),
        sums.c,
        sums.sum_abs,
        np.broadcast_to(np.asarray(added), shape),
        sums.residual,
    )


def concatenate(parts: Sequence[Expected]) -> Expected:
    """Stack the groups' rows."""
    return Expected(
        *(
            np.concatenate([np.asarray(getattr(part, field)) for part in parts])
            for field in ("f", "c", "sum_abs", "bias", "residual")
        )
    )


def per_expert(value: Any, experts: int, default: float = 1.0) -> F32:
    """Spread None, a number, () or (E,) to (E,) float32."""
    array = np.asarray(default if value is None else bounds.to_float64(value), np.float32)
    return np.asarray(np.broadcast_to(array, (experts,)))


def quantize_rows(x: npt.ArrayLike, given: F32 | None) -> Quantized:
    """Quantize activations with one scale per row: the given ones (M,), or derived."""
    values = np.asarray(x, np.float32)
    return quantize(values, derive_global(values, per="row") if given is None else given)


def grouped_mm(
    a: Any,
    b: Any,
    *,
    offs: Any,
    bias: Any = None,
    alpha: Any = None,
    recipe: str = "w4a4",
    a_scale: Any = None,
) -> Expected:
    """Say what ``fp4lt.grouped_mm`` of the same arguments must give.

    Parameters
    ----------
    a : (M, K) bfloat16, float16 or float32, or NVFP4Tensor
    b : NVFP4Tensor ``w.mT`` or tensor (E, K, N)
    offs : (E,) int
        End rows of the groups.
    bias : (E, N) or (N,), optional
    alpha : () or (E,), optional
    recipe : {"w4a4", "w4a16"}, optional
        Does not matter when ``a`` is quantized or ``b`` is a plain tensor.
    a_scale : () or (E,) float32, optional
        Static activation scale for "w4a4"; None derives one per row.

    Returns
    -------
    Expected
        ``offs[-1]`` rows; rows of ``a`` past them have no result.

    Raises
    ------
    ValueError
        When an NVFP4 ``b`` is not transposed.
    """
    ends = [int(end) for end in bounds.to_float64(offs)]
    experts, rows = len(ends), ends[-1] if ends else 0
    if not is_nvfp4(b):
        b = b.mT
    elif not b.transposed:
        raise ValueError("b must be transposed: pass w.mT")
    starts = [0, *ends[:-1]]
    counts = [end - start for start, end in zip(starts, ends, strict=True)]
    if is_nvfp4(a):
        left = Operand.of(a)
    elif is_nvfp4(b) and recipe == "w4a4":
        given = None if a_scale is None else np.repeat(per_expert(a_scale, experts), counts)
        left = Operand.from_quantized(quantize_rows(bounds.to_float64(a)[:rows], given))
    else:
        left = Operand.of(a)
    alphas = per_expert(alpha, experts)
    parts: list[Expected] = []
    for expert, (start, end) in enumerate(zip(starts, ends, strict=True)):
        if start == end and (parts or expert + 1 < experts):
            continue  # but one part is needed, for its number of columns
        own = bias[expert] if bias is not None and bias.ndim == 2 else bias
        right = Operand.of(b, expert=expert)
        parts.append(product(left.rows(start, end), right, alpha=alphas[expert], bias=own))
    return concatenate(parts)
