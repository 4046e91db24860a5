# SPDX-License-Identifier: Apache-2.0
"""How far a result may lie from the exact one, element by element, and the checks that say so.

With ``d`` the backend's own depth (the fp32 roundings a term can meet) and ``h``, ``tiny`` the
output type's unit roundoff and half its smallest subnormal::

    |y - (f c + bias)| <= |f| d 2^-23 sum|a b| + h |f c + bias| + 2^-22 (|f c| + |bias|) + tiny

No percentile, no norm, no constant that was fitted to a result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

F64 = npt.NDArray[np.float64]
Bool = npt.NDArray[np.bool_]

FLT_MAX: Final = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class FloatFormat:
    """What rounding to a type needs: significant bits, smallest normal exponent, largest value."""

    digits: int
    min_exponent: int
    largest: float

    @property
    def unit_roundoff(self) -> float:
        """``h``: half an ulp of 1."""
        return 2.0**-self.digits

    @property
    def tiny(self) -> float:
        """Half the smallest subnormal."""
        return 2.0 ** (self.min_exponent - self.digits)


FORMATS: Final = {
    torch.float32: FloatFormat(24, -126, FLT_MAX),
    torch.bfloat16: FloatFormat(8, -126, float(torch.finfo(torch.bfloat16).max)),
    torch.float16: FloatFormat(11, -14, 65504.0),
}


def format_of(dtype: torch.dtype) -> FloatFormat:
    """Look up float32, bfloat16 or float16.

    Raises
    ------
    TypeError
        For another dtype.
    """
    if dtype not in FORMATS:
        raise TypeError(f"results are float32, bfloat16 or float16, got {dtype}")
    return FORMATS[dtype]


def round_to(value: npt.ArrayLike, dtype: torch.dtype) -> F64:
    """Round float64 values to a narrower type once (nearest even), kept in float64.

    Torch's own float64 casts to 16 bits pass through fp32 and round twice.

    Parameters
    ----------
    value : (...) float64
    dtype : torch.dtype
        float32, bfloat16 or float16.

    Returns
    -------
    (...) float64
        Overflow is infinity, as IEEE says; signs of zeros are kept.
    """
    fmt = format_of(dtype)
    x = np.asarray(value, np.float64)
    finite = np.isfinite(x)
    safe = np.where(finite, x, 0.0)
    exponent = np.maximum(np.frexp(safe)[1].astype(np.int64) - 1, fmt.min_exponent)
    step = exponent - (fmt.digits - 1)
    rounded = np.ldexp(np.rint(np.ldexp(safe, -step)), step)
    rounded = np.where(np.abs(rounded) > fmt.largest, np.copysign(np.inf, rounded), rounded)
    return np.asarray(np.where(finite, np.copysign(rounded, x), x))


def to_float64(value: torch.Tensor | npt.ArrayLike) -> F64:
    """Widen a tensor or array exactly."""
    if isinstance(value, torch.Tensor):
        return np.asarray(value.detach().cpu().to(torch.float64).numpy())
    return np.asarray(value, np.float64)


def bound(
    f: npt.ArrayLike,
    c: npt.ArrayLike,
    sum_abs: npt.ArrayLike,
    bias: npt.ArrayLike,
    depth: int,
    out_dtype: torch.dtype,
) -> F64:
    """Largest allowed distance of ``y`` from ``f c + bias``.

    Parameters
    ----------
    f : (M, N) float32
        Product of the global scales and alpha, or what broadcasts to it.
    c, sum_abs : (M, N) float64
        Exact ``sum a b`` and ``sum |a b|`` over k.
    bias : (M, N) float32
        0 where there is none.
    depth : int
        fp32 roundings or truncations a term can meet, derived from the backend's code.
    out_dtype : torch.dtype
        float32, bfloat16 or float16.

    Returns
    -------
    (M, N) float64
        NaN where an argument is NaN.
    """
    fmt = format_of(out_dtype)
    f, c, sum_abs, bias = (np.asarray(v, np.float64) for v in (f, c, sum_abs, bias))
    with np.errstate(invalid="ignore"):
        scaled = f * c
        return np.asarray(
            np.abs(f) * (depth * 2.0**-23) * sum_abs
            + fmt.unit_roundoff * np.abs(scaled + bias)
            + 2.0**-22 * (np.abs(scaled) + np.abs(bias))
            + fmt.tiny
        )


def infinity_allowed(
    f: npt.ArrayLike,
    c: npt.ArrayLike,
    sum_abs: npt.ArrayLike,
    bias: npt.ArrayLike,
    depth: int,
    out_dtype: torch.dtype,
) -> tuple[Bool, Bool]:
    """Where infinity is right too, and where the fp32 sum itself may have overflowed.

    The first: the result with its bound passes the largest finite number of ``out_dtype``, or
    ``f c`` that of fp32.  The second: ``sum |a b|`` passes fp32's, so partial sums may have become
    infinite with either sign, or NaN by their difference.  Arguments as for :func:`bound`.
    """
    limit = bound(f, c, sum_abs, bias, depth, out_dtype)
    f, c, sum_abs, bias = (np.asarray(v, np.float64) for v in (f, c, sum_abs, bias))
    with np.errstate(invalid="ignore"):
        scaled = f * c
        passes = np.abs(scaled + bias) + limit > format_of(out_dtype).largest
        passes |= np.abs(scaled) + limit > FLT_MAX
        return passes, np.asarray(sum_abs * (1 + depth * 2.0**-23) > FLT_MAX)


def _shown(index: tuple[int, ...]) -> str:
    return "[" + ", ".join(str(i) for i in index) + "]"


def assert_within(
    y: torch.Tensor,
    f: npt.ArrayLike,
    c: npt.ArrayLike,
    sum_abs: npt.ArrayLike,
    bias: npt.ArrayLike,
    depth: int,
    *,
    residual: npt.ArrayLike = 0.0,
    name: str = "y",
) -> None:
    """Require every element of ``y`` to lie within its bound.

    A finite exact result needs a finite ``y`` (infinity of the same sign where
    :func:`infinity_allowed` says so); NaN needs NaN; an infinite one, from an infinite input, needs
    that infinity.

    Parameters
    ----------
    y : (M, N) float32, bfloat16 or float16
    f, c, sum_abs, bias, depth
        As for :func:`bound`.
    residual : (M, N) float64, optional
        The oracle's own error, added to the bound.
    name : str, optional
        What to call ``y`` in the message.

    Raises
    ------
    AssertionError
        Naming the worst element: index, got, want, error, bound, and how many are wrong.
    """
    got = to_float64(y)
    f, c, sum_abs, bias, own = (np.asarray(v, np.float64) for v in (f, c, sum_abs, bias, residual))
    with np.errstate(invalid="ignore"):
        want = np.asarray(f * c + bias)
        if got.shape != want.shape:
            raise AssertionError(f"{name}: shape {got.shape}, want {want.shape}")
        limit = np.broadcast_to(bound(f, c, sum_abs, bias, depth, y.dtype) + own, want.shape)
        error = np.abs(got - want)
        good = error <= limit
        passes, overflow = infinity_allowed(f, c, sum_abs, bias, depth, y.dtype)
        same_sign = (np.sign(got) == np.sign(want)) | (np.abs(want) <= limit)
        good |= passes & np.isinf(got) & same_sign
        good |= overflow & ~np.isfinite(got)
        good = np.where(np.isfinite(want), good, (got == want) | (np.isnan(got) & np.isnan(want)))
    if good.all():
        return
    # A wrong NaN or infinity is worse than any finite excess.
    with np.errstate(invalid="ignore"):
        excess = np.where(np.isfinite(error) & np.isfinite(limit), error / limit, np.inf)
    worst = np.unravel_index(int(np.argmax(np.where(good, -1.0, excess))), got.shape)
    index = tuple(int(i) for i in worst)
    raise AssertionError(
        f"{name}{_shown(index)}: got {float(got[index])!r}, want {float(want[index])!r}, "
        f"error {float(error[index]):.6g} > bound {float(limit[index]):.6g} "
        f"(depth {depth}, {y.dtype}); {int((~good).sum())} of {good.size} elements out of bounds"
    )


def assert_bitwise(y: Any, want: Any, *, signed_zeros: bool = True, name: str = "y") -> None:
    """Require equality of every element; any NaN equals any NaN.

    Parameters
    ----------
    y : Tensor or array
    want : Tensor or array
        Of the same shape.  Values are compared, so a float64 ``want`` must be rounded to ``y``'s
        type already (:func:`round_to`).
    signed_zeros : bool, optional
        Whether -0 differs from +0.
    name : str, optional
        What to call ``y`` in the message.

    Raises
    ------
    AssertionError
        Naming the first differing coordinate and both values, and how many differ.
    """
    if isinstance(y, torch.Tensor) and isinstance(want, torch.Tensor) and y.dtype != want.dtype:
        raise AssertionError(f"{name}: dtype {y.dtype}, want {want.dtype}")
    got, need = to_float64(y), to_float64(want)
    if got.shape != need.shape:
        raise AssertionError(f"{name}: shape {got.shape}, want {need.shape}")
    same = (got == need) | (np.isnan(got) & np.isnan(need))
    if signed_zeros:
        same &= (np.signbit(got) == np.signbit(need)) | np.isnan(got)
    if same.all():
        return
    index = tuple(int(i) for i in np.argwhere(~same)[0])
    raise AssertionError(
        f"{name}{_shown(index)}: got {float(got[index])!r} ({float(got[index]).hex()}), "
        f"want {float(need[index])!r} ({float(need[index]).hex()}); "
        f"{int((~same).sum())} of {same.size} elements differ"
    )
