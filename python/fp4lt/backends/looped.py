# SPDX-License-Identifier: Apache-2.0
"""What the looped cuBLASLt backends share: one matmul per expert on a fan of streams.

Sizes have to be on the host: offsets that are on the device are copied, which waits for it, and
cannot be known inside a graph capture.  docs/cublaslt.md has the data flow.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple

import torch

from fp4lt import _C, _hazards, _library
from fp4lt._build import has_code_for
from fp4lt._interop import (
    DTYPES,
    address,
    cuda_launch,
    dense_view,
    is_aligned,
    nvfp4_view,
    threads,
)
from fp4lt.backends.cpu import GATE_ORDERS
from fp4lt.errors import ArgumentError, Error, LayoutError, UnsupportedError
from fp4lt.problem import GroupedProblem, MoEProblem, Operand
from fp4lt.tensor import NVFP4Tensor

TEST_CAPABILITY: Final = "FP4LT_TEST_COMPUTE_CAPABILITY"
"""For tests only: the compute capability, such as "10.0", to take every device for.  With a
stand-in for libcublasLt, it lets the FP4 path run where there are no FP4 tensor cores."""

STREAMS: Final = {_C.LoopedWeights.DENSE: 16, _C.LoopedWeights.CODES: 16}
"""Streams of a call; with expanded weights fewer, since each has a slice of them in L2."""
EXPANDED_STREAMS: Final = 8
MAX_THREADS: Final = 8
"""Host threads that enqueue outside a capture: beyond these, the driver is the limit."""

_SIXTEEN_BIT_WORKSPACE = 4 << 20
_FP4_WORKSPACE = 32 << 20  # what NVIDIA's own callers give FP4 products


def depth(k: int, recipe: str) -> int:
    """Most fp32 roundings or cuts a product can meet on its way into a sum over `k`.

    Tensor cores may cut every addend of an instruction, so each of the k counts once.  Split sums
    are added in fp32: as many additions as there are parts, each of which is shorter in turn.
    """
    del recipe
    return k


def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of a CUDA device, or what a test says it is."""
    forced = os.environ.get(TEST_CAPABILITY)
    if forced:
        major, _, minor = forced.partition(".")
        return int(major), int(minor or 0)
    return torch.cuda.get_device_capability(device)


def device_refusal(problem: GroupedProblem | MoEProblem, device: torch.device) -> str | None:
    """Why no looped backend can run on the device."""
    if device.type != "cuda":
        return f"it needs a CUDA device, and the tensors are on {device}"
    if not _C.cuda_built_with():
        return "this build of fp4lt has no CUDA code; reinstall it where nvcc is found"
    real = torch.cuda.get_device_capability(device)
    if real < (8, 0):
        return f"it needs compute capability 8.0 or later, and {device} has {real[0]}.{real[1]}"
    if not has_code_for(real):
        return (
            f"this build has code for {_C.cuda_architectures()}, and {device} has compute "
            f"capability {real[0]}.{real[1]}; reinstall with "
            f"-Ccmake.define.CMAKE_CUDA_ARCHITECTURES={real[0]}{real[1]}"
        )
    if isinstance(problem, MoEProblem) and problem.experts > _C.MAX_EXPERTS:
        return f"it routes to at most {_C.MAX_EXPERTS} experts, and there are {problem.experts}"
    try:
        _library.opened()
    except Error as error:
        return str(error)
    return None


class HostEnds(NamedTuple):
    """End offsets in host memory, on their way there until :meth:`wait`."""

    ends: torch.Tensor
    source: torch.Tensor
    rows: int

    def wait(self) -> torch.Tensor:
        """(E,) int64, checked."""
        if self.source.device.type == "cpu":
            return self.ends
        torch.cuda.current_stream(self.source.device).synchronize()
        ends = self.ends.to(torch.int64)
        if bool((torch.diff(ends, prepend=ends.new_zeros(1)) < 0).any()) or ends[-1] > self.rows:
            raise ArgumentError(
                f"grouped_mm: offs is {ends.tolist()}; end offsets must not decrease, and there "
                f"are {self.rows} rows"
            )
        return ends


def host_ends(ends: torch.Tensor, rows: int, name: str) -> HostEnds:
    """Start the copy of offsets to the host, where they are not there already."""
    if ends.device.type == "cpu":
        return HostEnds(ends, ends, rows)
    refuse_capture(name)
    host = torch.empty(ends.shape, dtype=ends.dtype, pin_memory=True)
    host.copy_(ends, non_blocking=True)
    return HostEnds(host, ends, rows)


def refuse_capture(name: str) -> None:
    """Raise if the current stream is capturing, when sizes would have to come from the device."""
    if torch.cuda.is_current_stream_capturing():
        raise UnsupportedError(
            f"backend {name!r} needs the number of rows of each expert on the host, and inside a "
            "graph capture they cannot be copied there: use backend='fused' for NVFP4 weights, or "
            "grouped_mm with offs in host memory, whose sizes the graph then keeps"
        )


def device_ends(ends: HostEnds, checked: torch.Tensor, device: torch.device) -> torch.Tensor:
    """(E,) int32 on the device; from the host as parameters of a kernel, without a copy."""
    if ends.source.device.type != "cpu":
        return ends.source.to(torch.int32)
    out = torch.empty(ends.ends.shape, dtype=torch.int32, device=device)
    _C.cuda_put_integers(
        values=address(checked), count=checked.numel(), out=address(out), **cuda_launch(device)
    )
    return out


@dataclass(frozen=True)
class Product:
    """What one grouped product is made of; its fields choose the compiled object."""

    n: int
    k: int
    weights: _C.LoopedWeights
    type: _C.DType
    """Of the 16-bit operands."""
    out: _C.DType

    def streams(self) -> int:
        """Streams of a call."""
        return STREAMS.get(self.weights, EXPANDED_STREAMS)


@lru_cache(maxsize=4096)
def compiled(product: Product, device: int, forced: str | None) -> _C.LoopedGemm:
    """The compiled loop for a product on a device; `forced` is the test's capability."""
    del forced
    library = _library.opened()
    major, minor = capability(torch.device("cuda", device))
    slice_rows = 0
    if product.weights == _C.LoopedWeights.EXPANDED:
        slice_rows = _slice_rows(product, _C.cuda_device_info(device).l2_bytes)
    codes = product.weights == _C.LoopedWeights.CODES
    return _C.LoopedGemm(
        library=library,
        device=device,
        n=product.n,
        k=product.k,
        weights=product.weights,
        type=product.type,
        out=product.out,
        slice=slice_rows,
        library_workspace=_FP4_WORKSPACE if codes else _SIXTEEN_BIT_WORKSPACE,
        filters=_hazards.filters(library.version, f"{major}.{minor}"),
    )


def _slice_rows(product: Product, l2_bytes: int) -> int:
    """Weight rows expanded at once: all streams' slices fill half of L2, in equal parts of N."""
    most = max(1, l2_bytes // 2 // EXPANDED_STREAMS // (2 * product.k * 128)) * 128
    parts = -(-product.n // most)
    return -(-product.n // (parts * 128)) * 128


def multiply(
    product: Product,
    ends: torch.Tensor,
    weights: Operand,
    rows: torch.Tensor,
    out: torch.Tensor,
    *,
    row_scales: torch.Tensor | None = None,
    alpha: torch.Tensor | None = None,
) -> None:
    """Enqueue the products of all experts.

    Parameters
    ----------
    ends : (E,) int64 in host memory
    rows : (M, K) 16-bit with contiguous K, or codes (M, K / 2)
    out : (M, N or more)
        Rows may be strided.
    row_scales : (tiles, bytes) uint8, with codes
    alpha : (E,) float32, optional
    """
    launch = cuda_launch(out.device)
    gemm = compiled(product, launch["device"], os.environ.get(TEST_CAPABILITY))
    if isinstance(weights, NVFP4Tensor):
        view: _C.Nvfp4View | _C.DenseView = nvfp4_view(
            weights.codes, weights.scales, weights.global_scale
        )
    else:
        view = dense_view("weights", weights)
        if weights.stride(1) < product.k and weights.shape[1] > 1:
            raise LayoutError(
                f"weights have shape {tuple(weights.shape)} and strides {weights.stride()}: their "
                "rows overlap; call .contiguous()"
            )
    streams = min(product.streams(), len(ends), rows.shape[0])
    memory = torch.empty(streams * gemm.stream_bytes, dtype=torch.uint8, device=out.device)
    stride = rows.stride(0) * (2 if rows.dtype == torch.uint8 else 1)
    gemm.run(
        ends=address(ends),
        experts=len(ends),
        weights=view,
        rows=address(rows),
        row_stride=max(stride, product.k),
        row_scales=address(row_scales),
        alpha=address(alpha),
        alpha_stride=1 if alpha is not None else 0,
        out=address(out),
        out_row_stride=max(out.stride(0), out.shape[1]),
        workspace=address(memory),
        streams=streams,
        threads=max(1, min(threads(), MAX_THREADS)),
        stream=launch["stream"],
    )


def sums_like(rows: int, n: int, device: torch.device) -> torch.Tensor:
    """Memory for fp32 sums: (rows, n) with rows at multiples of 32 bytes."""
    return torch.empty(rows, -(-n // 8) * 8, dtype=torch.float32, device=device)[:, :n]


def usable_rows(x: torch.Tensor) -> torch.Tensor:
    """Rows that tensor cores can be fed with: at multiples of 16 bytes, not overlapping."""
    overlaps = x.shape[0] > 1 and x.stride(0) < x.shape[1]
    if overlaps or x.stride(0) * x.element_size() % 16 or not is_aligned(x, 16):
        return x.clone(memory_format=torch.contiguous_format)
    return x


def finish_of(
    weights: Operand,
    *,
    a_global: torch.Tensor | None = None,
    alpha: torch.Tensor | None = None,
    order: str | None = None,
    bias: torch.Tensor | None = None,
) -> _C.Finish:
    """What turns the sums of a product into its results.  The tensors must outlive its use."""
    g = weights.global_scale if isinstance(weights, NVFP4Tensor) else None
    return _C.Finish(
        a_global=address(a_global),
        b_global=address(g),
        b_stride=g.stride(0) if g is not None and g.ndim else 0,
        alpha=address(alpha),
        alpha_expert_stride=alpha.stride(0) if alpha is not None else 0,
        order=GATE_ORDERS[order],
        bias=address(bias),
        bias_expert_stride=bias.stride(0) if bias is not None else 0,
    )


def finish_rows(
    sums: torch.Tensor,
    finish: _C.Finish,
    row_expert: torch.Tensor,
    out: torch.Tensor,
    row_count: torch.Tensor | None = None,
) -> None:
    """Write `out` (or `sums` itself) from sums."""
    _C.cuda_finish_rows(
        c=address(sums),
        c_row_stride=sums.stride(0),
        row_expert=address(row_expert),
        row_count=address(row_count),
        rows=sums.shape[0],
        n=sums.shape[1],
        finish=finish,
        out=address(out),
        out_type=DTYPES[out.dtype],
        out_row_stride=out.stride(0),
        **cuda_launch(out.device),
    )
