# SPDX-License-Identifier: Apache-2.0
"""Rounding to NVFP4 and back, on the parts of a tensor: codes, tiled scales, global scale.

The arithmetic is docs/numerics.md, sections 2 and 3.  :mod:`fp4lt.tensor` wraps the parts up.
"""

from __future__ import annotations

import math
from typing import Literal

import torch

from fp4lt import _C
from fp4lt._interop import (
    DTYPES,
    address,
    dense_view,
    kernel,
    nvfp4_view,
    require_device_of_ours,
    require_dtype,
    require_no_grad,
    require_tensor,
    row_strides,
    tracing,
)
from fp4lt.errors import ArgumentError, DeviceError, ShapeError
from fp4lt.formats import BLOCK
from fp4lt.layout import padded_scale_shape

GlobalScaleArg = torch.Tensor | float | Literal["row"] | None

FLOATS = tuple(DTYPES)


def check_global_scale(what: str, g: torch.Tensor, *shapes: tuple[tuple[int, ...], str]) -> None:
    """Refuse a global scale that is not float32, of one of `shapes`, finite and positive.

    A shape comes with its meaning.  The values are looked at only in host memory, and not while
    torch is tracing.
    """
    require_dtype(what, g, (torch.float32,))
    if not any(tuple(g.shape) == shape for shape, _ in shapes):
        wanted = " or ".join(f"{shape} ({meaning})" for shape, meaning in shapes)
        raise ShapeError(f"{what} has shape {tuple(g.shape)}; it must be {wanted}")
    if g.device.type != "cpu" or tracing(g) or g.numel() == 0:
        return
    bad = ~(torch.isfinite(g) & (g > 0))
    if bool(bad.any()):
        where = tuple(int(i) for i in torch.nonzero(bad.reshape(g.shape))[0]) if g.ndim else ()
        value = float(g[where])
        raise ArgumentError(
            f"{what}{list(where) if where else ''} is {value}; a global scale is a multiplier and "
            "must be finite and greater than 0"
        )


def is_per_row(global_scale: GlobalScaleArg) -> bool:
    """Whether `global_scale` is "row"; other strings are refused."""
    if isinstance(global_scale, str) and global_scale != "row":
        raise ArgumentError(
            f"quantize: global_scale={global_scale!r}; it must be None, 'row', or a tensor"
        )
    return isinstance(global_scale, str)


def check_source(x: torch.Tensor, global_scale: torch.Tensor | float | None, per_row: bool) -> None:
    """Refuse what :func:`fp4lt.quantize` does not take, as far as values do not matter."""
    require_tensor("quantize: x", x)
    require_dtype("quantize: x", x, FLOATS)
    require_no_grad("quantize", x)
    if x.ndim not in (2, 3):
        raise ShapeError(f"quantize: x has shape {tuple(x.shape)}; it must be (M, K) or (E, N, K)")
    k = x.shape[-1]
    if k == 0 or k % BLOCK:
        raise ShapeError(
            f"quantize: x has shape {tuple(x.shape)}; K={k} must be a positive multiple of "
            f"{BLOCK}, since neighbours along K share a scale: pad K with zeros"
        )
    row_strides("quantize: x", x)
    if per_row and x.ndim != 2:
        raise ShapeError(
            f"quantize: global_scale='row' needs a 2-D x, but x has shape {tuple(x.shape)}; "
            "weights have one global scale per expert (global_scale=None)"
        )
    if isinstance(global_scale, torch.Tensor):
        meaning = "one per expert" if x.ndim == 3 else "one per row"
        shapes = ((), "shared"), ((x.shape[0],), meaning)
        check_global_scale("quantize: global_scale", global_scale, *shapes)


def quantize_parts(
    x: torch.Tensor, global_scale: GlobalScaleArg
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, tiled scales and global scale of :func:`fp4lt.quantize`; see there."""
    per_row = is_per_row(global_scale)
    given = None if isinstance(global_scale, str) else global_scale
    check_source(x, given, per_row)
    require_device_of_ours("quantize", x)
    *lead, rows, k = x.shape
    experts = lead[0] if lead else 1
    view = dense_view("quantize: x", x)

    if per_row:
        mode = _C.GlobalScale.PER_ROW
        g = x.new_empty((rows,), dtype=torch.float32)
        strides = (0, 1)
    elif given is None:
        mode = _C.GlobalScale.PER_EXPERT
        g = x.new_empty(lead, dtype=torch.float32)
        strides = (1, 0)
    else:
        mode = _C.GlobalScale.GIVEN
        g = _given(given, x)
        strides = (int(bool(g.ndim and lead)), int(bool(g.ndim and not lead)))

    codes = x.new_empty((*x.shape[:-1], k // 2), dtype=torch.uint8)
    scales = x.new_empty((*lead, *padded_scale_shape(rows, k)), dtype=torch.float8_e4m3fn)
    if experts and rows:
        kernel("quantize", x.device)(
            x=view,
            experts=experts,
            rows=rows,
            k=k,
            mode=mode,
            global_scale=address(g),
            global_expert_stride=strides[0],
            global_row_stride=strides[1],
            codes=address(codes),
            scales=address(scales),
        )
    elif mode == _C.GlobalScale.PER_EXPERT:
        g.fill_(1.0)
    return codes, scales, g


def _given(global_scale: torch.Tensor | float, x: torch.Tensor) -> torch.Tensor:
    if not isinstance(global_scale, torch.Tensor):
        if not (math.isfinite(global_scale) and global_scale > 0):
            raise ArgumentError(
                f"quantize: global_scale is {global_scale}; it must be finite and greater than 0"
            )
        global_scale = torch.tensor(global_scale, dtype=torch.float32, device=x.device)
        check_global_scale("quantize: global_scale", global_scale, ((), "shared"))
    if global_scale.device != x.device:
        raise DeviceError(
            f"quantize: global_scale is on {global_scale.device}, but x is on {x.device}"
        )
    # A copy: the result must not change when the caller's tensor does.
    return global_scale.detach().clone(memory_format=torch.contiguous_format)


def check_target(dtype: torch.dtype) -> None:
    """Refuse a dtype that :func:`fp4lt.dequantize` cannot give."""
    if dtype not in FLOATS:
        names = ", ".join(str(d) for d in FLOATS)
        raise ArgumentError(f"dequantize: dtype is {dtype}; it must be one of: {names}")


def dequantize_parts(
    codes: torch.Tensor, scales: torch.Tensor, global_scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Values of the parts in `dtype`; see :func:`fp4lt.dequantize`."""
    check_target(dtype)
    require_device_of_ours("dequantize", codes)
    rows, k = codes.shape[-2], codes.shape[-1] * 2
    stacked = codes.ndim == 3
    out = codes.new_empty((*codes.shape[:-1], k), dtype=dtype)
    if out.numel():
        stride = global_scale.stride(0) if global_scale.ndim else 0
        kernel("dequantize", codes.device)(
            x=nvfp4_view(codes, scales, global_scale),
            experts=codes.shape[0] if stacked else 1,
            rows=rows,
            k=k,
            global_expert_stride=stride if stacked else 0,
            global_row_stride=0 if stacked else stride,
            out=address(out),
            out_type=DTYPES[dtype],
        )
    return out
