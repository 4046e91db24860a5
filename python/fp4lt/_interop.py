# SPDX-License-Identifier: Apache-2.0
"""Torch tensors as the pointers, extents and strides that the compiled core takes.

The only file that calls ``data_ptr()``.  Callers check dtype, shape and device first; what is
checked here is what a pointer cannot show: strides and overlap.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from fp4lt import _C
from fp4lt.errors import ArgumentError, DeviceError, DTypeError, LayoutError

DTYPES = {
    torch.float32: _C.DType.F32,
    torch.float16: _C.DType.F16,
    torch.bfloat16: _C.DType.BF16,
}


_NO_DISPATCH = torch.Tensor.__torch_dispatch__


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.bfloat16`` as ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


def address(t: torch.Tensor | None) -> int:
    """Address of the first element; 0 for None."""
    if t is None:
        return 0
    if t.is_neg():
        raise LayoutError(
            f"a tensor of shape {tuple(t.shape)} is a lazily negated view, whose memory holds the "
            "values with the other sign: call .resolve_neg()"
        )
    return t.data_ptr()


def is_aligned(t: torch.Tensor, size: int) -> bool:
    """Whether the first element lies at a multiple of `size` bytes."""
    return t.data_ptr() % size == 0


def threads() -> int:
    """Threads a CPU call may use: torch's own setting."""
    return torch.get_num_threads()


def tracing(*tensors: torch.Tensor | None) -> bool:
    """Whether torch is recording operators, or one of `tensors` stands for something else.

    Values and addresses are then out of reach, or would be baked into the recording: functions of
    the API go through ``torch.ops.fp4lt`` instead of computing.
    """
    return (
        torch.compiler.is_dynamo_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or any(
            isinstance(t, torch.Tensor) and type(t).__torch_dispatch__ is not _NO_DISPATCH
            for t in tensors
        )
    )


def as_tensor(value: torch.Tensor | float | None, device: torch.device) -> torch.Tensor | None:
    """A number as a () float32 tensor, as operators take it; by an operation torch can record."""
    if value is None or isinstance(value, torch.Tensor):
        return value
    return torch.full((), value, dtype=torch.float32, device=device)


def cuda_launch(device: torch.device) -> dict[str, int]:
    """Device index and current stream of torch, as the arguments of a CUDA kernel."""
    index = torch.cuda.current_device() if device.index is None else device.index
    return {"device": index, "stream": torch.cuda.current_stream(index).cuda_stream}


def kernel(name: str, device: torch.device) -> Callable[..., None]:
    """The compiled function `name` for `device`, with its threads, or its device and stream."""
    if device.type == "cuda":
        return partial(getattr(_C, f"cuda_{name}"), **cuda_launch(device))
    return partial(getattr(_C, name), threads=threads())


def device_of(what: str, device: torch.device | str | int) -> torch.device:
    """The device that a ``.to()`` names; a dtype or a tensor is refused."""
    if isinstance(device, (torch.device, str, int)) and not isinstance(device, bool):
        return torch.device(device)
    raise ArgumentError(
        f"{what}.to({device!r}): it takes a device; codes and scales have their dtypes for good, "
        "and values in another dtype come from .dequantize(dtype)"
    )


def require_device_of_ours(what: str, t: torch.Tensor) -> None:
    """Refuse a tensor that is neither in host memory nor on a CUDA device of this build."""
    if t.device.type == "cpu" or (t.device.type == "cuda" and _C.cuda_built_with()):
        return
    hint = "; this build has no CUDA code" if t.device.type == "cuda" else ""
    raise DeviceError(
        f"{what}: the tensor is on {t.device}, and this runs on the CPU and on CUDA devices{hint}: "
        "move it with .to('cpu')"
    )


def require_dtype(what: str, t: torch.Tensor, allowed: tuple[torch.dtype, ...]) -> None:
    """Refuse dtypes that are not among `allowed`."""
    if t.dtype not in allowed:
        names = ", ".join(dtype_name(d) for d in allowed)
        raise DTypeError(f"{what} is {dtype_name(t.dtype)}; it must be one of: {names}")


def require_no_grad(what: str, *tensors: torch.Tensor | None) -> None:
    """Refuse tensors whose gradient would silently be lost."""
    if not torch.is_grad_enabled():
        return
    for t in tensors:
        if t is not None and t.requires_grad:
            raise ArgumentError(
                f"{what}: an input requires grad, but fp4lt is for inference and computes no "
                "gradients; pass t.detach(), or call under torch.no_grad()"
            )


def row_strides(what: str, t: torch.Tensor) -> tuple[int, int]:
    """Expert and row stride (elements) of a 2-D or 3-D tensor whose last dimension is contiguous.

    Raises
    ------
    LayoutError
        If the last dimension is strided.
    """
    if t.stride(-1) != 1 and t.shape[-1] > 1 and t.numel():
        raise LayoutError(
            f"{what} has shape {tuple(t.shape)} and strides {t.stride()}; its last dimension must "
            "be contiguous (stride 1): call .contiguous()"
        )
    return (t.stride(0) if t.ndim == 3 else 0), t.stride(-2)


def dense_view(what: str, t: torch.Tensor) -> _C.DenseView:
    """View of (rows, K) or (E, rows, K) in fp32, fp16 or bf16."""
    expert, row = row_strides(what, t)
    return _C.DenseView(data=address(t), type=DTYPES[t.dtype], expert_stride=expert, row_stride=row)


def nvfp4_view(
    codes: torch.Tensor, scales: torch.Tensor, global_scale: torch.Tensor
) -> _C.Nvfp4View:
    """View of an NVFP4 matrix or stack; the global scale is () or one per expert or row."""
    stacked = codes.ndim == 3
    return _C.Nvfp4View(
        codes=address(codes),
        codes_expert_stride=codes.stride(0) if stacked else 0,
        scales=address(scales),
        scales_expert_stride=scales.stride(0) if stacked else 0,
        global_scale=address(global_scale),
        global_stride=global_scale.stride(0) if global_scale.ndim else 0,
    )


def expert_parameter(value: torch.Tensor | float) -> _C.ExpertParameter:
    """A number, or a () or (E,) float32 tensor."""
    if not isinstance(value, torch.Tensor):
        return _C.ExpertParameter(values=0, stride=0, shared=value)
    stride = value.stride(0) if value.ndim else 0
    return _C.ExpertParameter(values=address(value), stride=stride, shared=0.0)


def require_tensor(what: str, value: object) -> None:
    """Refuse what is no tensor."""
    if not isinstance(value, torch.Tensor):
        raise ArgumentError(f"{what} is a {type(value).__name__}; a torch.Tensor is needed")


def _extent(t: torch.Tensor) -> tuple[int, int]:
    last = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    return t.data_ptr(), t.data_ptr() + (last + 1) * t.element_size()


def _side_by_side(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two matrices with rows of one length in memory keep to columns of their own."""
    if a.ndim != 2 or b.ndim != 2 or a.element_size() != b.element_size():
        return False
    stride, width = a.stride(0), a.element_size()
    if stride != b.stride(0) or a.stride(1) != 1 or b.stride(1) != 1:
        return False
    apart = (b.data_ptr() - a.data_ptr()) % (stride * width)
    return a.shape[1] * width <= apart <= (stride - b.shape[1]) * width


def require_no_overlap(out: torch.Tensor, *inputs: torch.Tensor | None) -> None:
    """Refuse an ``out`` that shares bytes with an input, or with itself."""
    if out.ndim == 2 and out.shape[0] > 1 and out.stride(0) < out.shape[1]:
        raise LayoutError(
            f"out= has shape {tuple(out.shape)} and strides {out.stride()}: its rows overlap"
        )
    if tracing(out) or out.is_meta or out.numel() == 0:
        return
    start, end = _extent(out)
    for t in inputs:
        if t is None or t.numel() == 0 or t.device != out.device:
            continue
        first, last = _extent(t)
        if first < end and start < last and not _side_by_side(out, t):
            raise LayoutError(
                "out= overlaps an input in memory; results would depend on the order of writes: "
                "pass a buffer of its own"
            )
