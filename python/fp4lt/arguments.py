# SPDX-License-Identifier: Apache-2.0
"""Checks of arguments that grouped_mm, MoEWeights and moe share."""

from __future__ import annotations

import numbers

import torch

from fp4lt._interop import (
    dtype_name,
    require_dtype,
    require_no_grad,
    require_no_overlap,
    require_tensor,
    row_strides,
)
from fp4lt.codec import FLOATS
from fp4lt.errors import ArgumentError, DeviceError, DTypeError, ShapeError
from fp4lt.problem import Operand
from fp4lt.tensor import NVFP4Tensor

_FLOAT_MAX = float(torch.finfo(torch.float32).max)


def tensors_of(operand: Operand) -> tuple[torch.Tensor, ...]:
    """The tensors an operand is made of."""
    if isinstance(operand, NVFP4Tensor):
        return operand.codes, operand.scales, operand.global_scale
    return (operand,)


def parts_of(operand: Operand) -> tuple[torch.Tensor | None, ...]:
    """An operand as operators take it: codes, scales and global scale, or values and two Nones."""
    parts = tensors_of(operand)
    return parts if len(parts) == 3 else (*parts, None, None)


def per_expert(
    what: str, value: torch.Tensor | float, experts: int, device: torch.device
) -> torch.Tensor:
    """A number, () or (E,) float32 tensor as a tensor on `device`."""
    given: object = value
    if isinstance(given, bool) or not isinstance(given, (torch.Tensor, numbers.Real)):
        raise ArgumentError(
            f"{what} is a {type(value).__name__}; a number or a float32 tensor is needed"
        )
    if not isinstance(value, torch.Tensor):
        if not abs(float(value)) <= _FLOAT_MAX:
            raise ArgumentError(f"{what} is {value}; it must be a finite float32")
        # By a kernel: a copy from the host would wait, and could not be captured.
        return torch.full((), float(value), dtype=torch.float32, device=device)
    require_dtype(what, value, (torch.float32,))
    if tuple(value.shape) not in ((), (experts,)):
        raise ShapeError(
            f"{what} has shape {tuple(value.shape)}; it must be () or ({experts},), one per expert"
        )
    require_device(what, value, device)
    return value.contiguous()


def require_device(what: str, t: torch.Tensor, device: torch.device) -> None:
    """Refuse a tensor that is not on `device`."""
    if t.device != device:
        raise DeviceError(f"{what} is on {t.device}, but the activations are on {device}")


def check_bias(
    what: str, bias: torch.Tensor, experts: int, n: int, device: torch.device
) -> torch.Tensor:
    """A bias (E, n) in any of the float dtypes as float32 with contiguous rows."""
    require_tensor(what, bias)
    require_dtype(what, bias, FLOATS)
    if tuple(bias.shape) != (experts, n):
        raise ShapeError(
            f"{what} has shape {tuple(bias.shape)}; it must be ({experts}, {n}), a row per expert"
        )
    require_device(what, bias, device)
    require_no_grad(what, bias)
    return bias.detach().to(torch.float32).contiguous()


def check_out(
    what: str,
    out: torch.Tensor,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    inputs: tuple[torch.Tensor | None, ...],
) -> None:
    """Refuse an ``out=`` of another shape, dtype, device or column stride, or one that overlaps."""
    require_tensor(f"{what}: out=", out)
    if tuple(out.shape) != shape:
        raise ShapeError(f"{what}: out= has shape {tuple(out.shape)}; it must be {shape}")
    if out.dtype != dtype:
        raise DTypeError(
            f"{what}: out= is {dtype_name(out.dtype)}, but the result is {dtype_name(dtype)}"
        )
    require_device(f"{what}: out=", out, device)
    row_strides(f"{what}: out=", out)
    require_no_overlap(out, *inputs)
