# SPDX-License-Identifier: Apache-2.0
"""What the looped cuBLASLt backends share: one matmul per expert on a fan of streams.

Offsets that are on the device are copied to the host, which waits for it; inside a graph capture
they are refused, or become conditional nodes where these are switched on.  docs/cublaslt.md has the
data flow.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import torch

from fp4lt import _C, _algorithms, _hazards, _library
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

CONDITIONAL_GRAPHS: Final = "FP4LT_CONDITIONAL_GRAPHS"
"""Set to 1 to capture sizes on the device as conditional nodes; refused otherwise."""

STREAMS: Final = {_C.LoopedWeights.DENSE: 16, _C.LoopedWeights.CODES: 16}
"""Streams of a call; with expanded weights fewer, since each has a slice of them in L2."""
EXPANDED_STREAMS: Final = 8
MAX_THREADS: Final = 8
"""Host threads that enqueue outside a capture: beyond these, the driver is the limit."""

# Slots of a graph's chains together, where two of them are less.
_GRAPH_BYTES = 1 << 30

BUCKETS: Final = tuple(1 << i for i in range(21))
"""Rows of an expert up to which one algorithm is used."""

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


def refuse_capture() -> None:
    """Raise where sizes on the device would need conditional nodes, unless these are switched on.

    Raises
    ------
    UnsupportedError
    """
    if os.environ.get(CONDITIONAL_GRAPHS) != "1":
        raise UnsupportedError(
            "the number of rows of each expert is on the device, and inside a graph capture it "
            "cannot be copied to the host: use backend='fused' for NVFP4 weights, pass grouped_mm "
            f"its offs in host memory, or set {CONDITIONAL_GRAPHS}=1 for conditional graph nodes, "
            "which are experimental"
        )


class Sizes:
    """How many rows each expert has: known to the host, or inside a capture to the device only.

    Attributes
    ----------
    rows : int
        Rows used, or the most there can be.
    host : (E,) int64 in host memory, or None
    device : (E,) int32 on the device
        End offsets; made when first asked for.
    """

    def __init__(self, ends: torch.Tensor, rows: int, device: torch.device) -> None:
        self.rows = rows
        self._place = device
        self._source = ends
        self._device: torch.Tensor | None = None
        self.host: torch.Tensor | None = None
        self._coming: torch.Tensor | None = None
        if ends.device.type == "cpu":
            self.host, self.rows = ends, int(ends[-1])
        elif torch.cuda.is_current_stream_capturing():
            refuse_capture()
        else:
            self._coming = torch.empty(ends.shape, dtype=ends.dtype, pin_memory=True)
            self._coming.copy_(ends, non_blocking=True)

    def wait(self) -> Sizes:
        """Wait for a copy to the host that is under way, and check what came.

        Raises
        ------
        ArgumentError
            If offsets decrease or pass the rows.
        """
        if self._coming is None:
            return self
        torch.cuda.current_stream(self._place).synchronize()
        ends, self._coming = self._coming.to(torch.int64), None
        if bool((torch.diff(ends, prepend=ends.new_zeros(1)) < 0).any()) or ends[-1] > self.rows:
            raise ArgumentError(
                f"grouped_mm: offs is {ends.tolist()}; end offsets must not decrease, and there "
                f"are {self.rows} rows"
            )
        self.host, self.rows = ends, int(ends[-1])
        return self

    @property
    def device(self) -> torch.Tensor:
        """See the class."""
        if self._device is not None:
            return self._device
        if self._source.device.type != "cpu":
            self._device = self._source.to(torch.int32)
        else:
            # As parameters of a kernel: no copy, and a capture has the values.
            self._device = torch.empty(self._source.shape, dtype=torch.int32, device=self._place)
            _C.cuda_put_integers(
                values=address(self._source),
                count=self._source.numel(),
                out=address(self._device),
                **cuda_launch(self._place),
            )
        return self._device

    @property
    def count(self) -> torch.Tensor | None:
        """(1,) int32: rows used, where only the device knows; else None."""
        return None if self.host is not None else self.device[-1:]


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

    def __str__(self) -> str:
        kind = "e2m1" if self.weights == _C.LoopedWeights.CODES else self.type.name.lower()
        how = self.weights.name.lower()
        return f"{how} {kind} -> {self.out.name.lower()} N={self.n} K={self.k}"


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
    gemm = _C.LoopedGemm(
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
    for bucket in BUCKETS:
        found = tuned().get(algorithm_key(product, device, bucket))
        if found is not None:
            gemm.pin(bucket, found.data)
    return gemm


@lru_cache(maxsize=1)
def tuned() -> dict[str, _algorithms.Tuned]:
    """The tuned algorithms, read once."""
    return _algorithms.load(_algorithms.path())


def algorithm_key(product: Product, device: int, bucket: int) -> str:
    """Where the algorithm of a product is kept."""
    major, minor = capability(torch.device("cuda", device))
    name = f"{torch.cuda.get_device_name(device)} {major}.{minor}"
    return _algorithms.key(name, _library.opened().version, str(product), bucket)


def _slice_rows(product: Product, l2_bytes: int) -> int:
    """Weight rows expanded at once: all streams' slices fill half of L2, in equal parts of N."""
    most = max(1, l2_bytes // 2 // EXPANDED_STREAMS // (2 * product.k * 128)) * 128
    parts = -(-product.n // most)
    return -(-product.n // (parts * 128)) * 128


def multiply(
    product: Product,
    sizes: Sizes,
    weights: Operand,
    rows: torch.Tensor,
    out: torch.Tensor,
    *,
    row_scales: torch.Tensor | None = None,
    alpha: torch.Tensor | None = None,
    gemm: _C.LoopedGemm | None = None,
) -> None:
    """Enqueue the products of all experts, or add them to the graph that is being captured.

    Parameters
    ----------
    rows : (M, K) 16-bit with contiguous K, or codes (M, K / 2)
    out : (M, N or more)
        Rows may be strided.
    row_scales : (tiles, bytes) uint8, with codes
    alpha : (E,) float32, optional
    gemm : LoopedGemm, optional
        Instead of the cached one.
    """
    launch = cuda_launch(out.device)
    if gemm is None:
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
    experts = weights.shape[0]
    stride = rows.stride(0) * (2 if rows.dtype == torch.uint8 else 1)
    operands: dict[str, Any] = {
        "experts": experts,
        "weights": view,
        "rows": address(rows),
        "row_stride": max(stride, product.k),
        "row_scales": address(row_scales),
        "alpha": address(alpha),
        "alpha_stride": 1 if alpha is not None else 0,
        "out": address(out),
        "out_row_stride": max(out.stride(0), out.shape[1]),
        "stream": launch["stream"],
    }
    streams = min(product.streams(), experts, _most_streams(out.device))
    if sizes.host is not None:
        streams = min(streams, rows.shape[0])
        memory = _workspace(streams * gemm.stream_bytes, out.device)
        gemm.run(
            ends=address(sizes.host),
            workspace=address(memory),
            streams=streams,
            threads=max(1, min(threads(), MAX_THREADS)),
            **operands,
        )
        return
    each = gemm.graph_bytes(sizes.rows)
    streams = max(min(streams, _GRAPH_BYTES // each), min(streams, 2))
    memory = _workspace(streams * each, out.device)
    gemm.add_to_graph(
        ends=address(sizes.device),
        row_count=sizes.rows,
        workspace=address(memory),
        streams=streams,
        **operands,
    )


def _most_streams(device: torch.device) -> int:
    major, minor = capability(device)
    return _hazards.most_streams(_library.opened().version, f"{major}.{minor}")


def _workspace(size: int, device: torch.device) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device=device)


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
        c_row_stride=max(sums.stride(0), sums.shape[1]),
        row_expert=address(row_expert),
        row_count=address(row_count),
        rows=sums.shape[0],
        n=sums.shape[1],
        finish=finish,
        out=address(out),
        out_type=DTYPES[out.dtype],
        out_row_stride=max(out.stride(0), out.shape[1]),
        **cuda_launch(out.device),
    )
