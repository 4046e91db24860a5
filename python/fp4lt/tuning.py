# SPDX-License-Identifier: Apache-2.0
"""``python -m fp4lt tune``: time cuBLASLt's algorithms for given products, and keep the best.

The library's first proposal can be several times slower than its best, above all for small experts.
Each proposal runs as calls run it: a product per expert, on as many streams, from a graph, with
weights that come from memory and not from a cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from fp4lt import _C, _algorithms
from fp4lt._interop import address, dense_view, nvfp4_view
from fp4lt.backends import looped
from fp4lt.backends.looped import Product
from fp4lt.errors import Error, UnsupportedError
from fp4lt.layout import padded_scale_shape
from fp4lt.problem import Operand
from fp4lt.tensor import NVFP4Tensor

PROPOSALS = 12
"""Proposals asked for, at each of a bucket's ends."""

_DTYPES = {_C.DType.F32: torch.float32, _C.DType.F16: torch.float16, _C.DType.BF16: torch.bfloat16}
_COLD = 4  # times the L2 that the weights of a trial fill, at least
_REPEATS = 5


class Outcome(NamedTuple):
    """What came of one product and bucket.

    Attributes
    ----------
    key : str
    best : Tuned
    first : float
        Microseconds of a product with the library's first proposal.
    proposals : int
    """

    key: str
    best: _algorithms.Tuned
    first: float
    proposals: int


class _Trial:
    """Operands of a product for enough experts, and the times of algorithms on them."""

    def __init__(self, product: Product, bucket: int, device: torch.device) -> None:
        self.product, self.device, self.bucket = product, device, bucket
        l2 = torch.cuda.get_device_properties(device).L2_cache_size
        expert_bytes = (
            product.n * product.k * (1 if product.weights != _C.LoopedWeights.DENSE else 4)
        )
        self.experts = max(2 * product.streams(), -(-2 * _COLD * l2 // expert_bytes))
        rows = self.experts * bucket
        self.codes = product.weights == _C.LoopedWeights.CODES
        self.weights = self._weights()
        if self.codes:
            # Zeros: the time does not depend on them, and no tile has to be laid out.
            self.rows = torch.zeros(rows, product.k // 2, dtype=torch.uint8, device=device)
            lines, line = padded_scale_shape(_C.packed_tiles(rows, self.experts) * 128, product.k)
            self.scales: torch.Tensor | None = torch.zeros(
                lines // 128, line * 128, dtype=torch.uint8, device=device
            )
        else:
            self.rows = torch.randn(rows, product.k, dtype=_DTYPES[product.type], device=device)
            self.scales = None
        self.out = torch.empty(
            rows, -(-product.n // 8) * 8, dtype=_DTYPES[product.out], device=device
        )[:, : product.n]
        # Not the plans' own: nothing of a trial stays.
        self.gemm = looped.compiled.__wrapped__(product, device.index, None)

    def _weights(self) -> Operand:
        p, shape = self.product, (self.experts, self.product.n, self.product.k)
        if p.weights == _C.LoopedWeights.DENSE:
            return torch.randn(shape, dtype=_DTYPES[p.type], device=self.device)
        codes = torch.randint(0, 256, (*shape[:2], p.k // 2), dtype=torch.uint8, device=self.device)
        tiled = padded_scale_shape(p.n, p.k)
        scales = torch.full((shape[0], *tiled), 0x38, dtype=torch.uint8, device=self.device)
        one = torch.ones((), dtype=torch.float32, device=self.device)
        return NVFP4Tensor._make(codes, scales.view(torch.float8_e4m3fn), one)

    def proposals(self) -> list[_C.LoopedAlgorithm]:
        """The library's proposals at both ends of the bucket, each once, the usual one first."""
        w = self.weights
        if isinstance(w, NVFP4Tensor):
            view: _C.Nvfp4View | _C.DenseView = nvfp4_view(w.codes, w.scales, w.global_scale)
        else:
            view = dense_view("weights", w)
        found: dict[bytes, _C.LoopedAlgorithm] = {}
        for rows in (self.bucket, self._least()):
            for a in self.gemm.candidates(
                weights=view,
                rows=address(self.rows),
                row_stride=self.product.k,
                row_scales=address(self.scales),
                out=address(self.out),
                out_row_stride=self.out.stride(0),
                row_count=rows,
                count=PROPOSALS,
            ):
                found.setdefault(a.data, a)
        return list(found.values())

    def _least(self) -> int:
        below = [b for b in looped.BUCKETS if b < self.bucket]
        return below[-1] + 1 if below else 1

    def time_or_error(self, algorithm: _C.LoopedAlgorithm) -> float | Error:
        """Microseconds of a product, the mean of both ends of the bucket."""
        self.gemm.pin(self.bucket, algorithm.data)
        ends = (self._least(), self.bucket)
        try:
            return sum(self._time(rows) for rows in ends) / len(ends)
        except Error as error:
            return error

    def _time(self, rows: int) -> float:
        counts = torch.arange(1, self.experts + 1) * rows
        sizes = looped.Sizes(counts, self.rows.shape[0], self.device)

        def run() -> None:
            looped.multiply(
                self.product,
                sizes,
                self.weights,
                self.rows,
                self.out,
                row_scales=self.scales,
                gemm=self.gemm,
            )

        run()  # loads kernels, and fails here if it has to
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        best = float("inf")
        for _ in range(_REPEATS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            best = min(best, start.elapsed_time(end) * 1e3)
        return best / self.experts


def tune(
    products: Iterable[Product], rows: int, device: torch.device | str = "cuda"
) -> Iterator[Outcome]:
    """Time the algorithms of products, one outcome per product and bucket as they come.

    Parameters
    ----------
    products : iterable of Product
    rows : int
        The most rows of an expert.
    device : torch.device
        The device to tune for, and to use.

    Notes
    -----
    Nothing is written: :func:`keep` does that.  Proposals that fail are left out.

    Raises
    ------
    UnsupportedError
        Where there is no CUDA device, or this build has no CUDA code.
    """
    check_device()
    place = torch.device(device)
    index = torch.cuda.current_device() if place.index is None else place.index
    place = torch.device("cuda", index)
    last = _C.row_bucket(rows)
    with torch.cuda.device(place):
        for product in products:
            for bucket in (b for b in looped.BUCKETS if b <= last):
                yield _tune_one(product, bucket, place)


def _tune_one(product: Product, bucket: int, device: torch.device) -> Outcome:
    trial = _Trial(product, bucket, device)
    proposals = trial.proposals()
    times = [trial.time_or_error(algorithm) for algorithm in proposals]
    good = [(t, a) for t, a in zip(times, proposals, strict=True) if isinstance(t, float)]
    if not good:
        raise next(t for t in times if isinstance(t, Error))
    best, algorithm = min(good, key=lambda pair: pair[0])
    found = _algorithms.Tuned(algorithm.data, best, str(algorithm))
    key = looped.algorithm_key(product, device.index, bucket)
    return Outcome(key, found, good[0][0], len(proposals))


def keep(outcomes: Iterable[Outcome]) -> str:
    """Write outcomes to the file of algorithms, and let plans of this process use them.

    Returns
    -------
    str
        The file, or why there is none.
    """
    file = _algorithms.path()
    if file is None:
        return f"nothing, since there is no file: set {_algorithms.VARIABLE} to one"
    _algorithms.store(file, {outcome.key: outcome.best for outcome in outcomes})
    looped.tuned.cache_clear()
    looped.compiled.cache_clear()
    return str(file)


def check_device() -> None:
    """Raise where there is nothing to tune on.

    Raises
    ------
    UnsupportedError
    """
    if not _C.cuda_built_with():
        raise UnsupportedError(
            "tune: this build of fp4lt has no CUDA code; reinstall it where nvcc is found"
        )
    if not torch.cuda.is_available():
        raise UnsupportedError(
            f"tune: it times cuBLASLt on a GPU, and torch {torch.__version__} finds no CUDA "
            "device; run it where the model runs"
        )


def moe_products(
    hidden: int, intermediate: int, gated: bool, weights: str, activations: str
) -> list[Product]:
    """The two products of a MoE block, whose sums are fp32; as :func:`products`."""
    up = (2 if gated else 1) * intermediate
    return [
        product(n, k, weights, activations, "float32")
        for n, k in ((up, hidden), (hidden, intermediate))
    ]


def grouped_products(n: int, k: int, weights: str, activations: str, out: str) -> list[Product]:
    """The products that grouped_mm may ask for, for an output of dtype `out`; as :func:`product`.

    The output is written by the matmul where it has the operands' type and factors of the experts
    alone; otherwise it comes by way of fp32 sums, as it does for NVFP4 activations with a scale per
    row, which is what they have unless scales are given.
    """
    exact = weights == "nvfp4" and activations == "nvfp4"
    operands = "bfloat16" if exact else weights if weights != "nvfp4" else activations
    outs = [out] if out in ("float32", operands) else ["float32"]
    if exact and "float32" not in outs:
        outs.append("float32")
    return [product(n, k, weights, activations, name) for name in outs]


def product(n: int, k: int, weights: str, activations: str, out: str) -> Product:
    """A product by the names of its types.

    Parameters
    ----------
    weights : "nvfp4", "bfloat16" or "float16"
    activations : "nvfp4", "bfloat16" or "float16"
        As they are multiplied: "nvfp4" with NVFP4 weights means FP4 tensor cores where there are
        any and they take N and K, else bf16.
    out : "float32", "bfloat16" or "float16"
    """
    types = {str(dtype).removeprefix("torch."): kind for kind, dtype in _DTYPES.items()}
    if weights != "nvfp4":
        return Product(n, k, _C.LoopedWeights.DENSE, types[weights], types[out])
    if activations == "nvfp4":
        fp4 = looped.capability(torch.device("cuda")) >= (10, 0) and n % 8 == 0 and k % 64 == 0
        kind = _C.LoopedWeights.CODES if fp4 else _C.LoopedWeights.EXPANDED
        return Product(n, k, kind, _C.DType.BF16, types[out])
    return Product(n, k, _C.LoopedWeights.EXPANDED, types[activations], types[out])


def main(products: list[Product], rows: int) -> int:
    """The command: tune, print a line per outcome, write the file after each product."""
    file = _algorithms.path()
    if file is not None:
        _algorithms.check_not_newer(file)
    done, kept = 0, ""
    last = _C.row_bucket(rows)
    total = len(products) * sum(bucket <= last for bucket in looped.BUCKETS)
    for one in products:
        outcomes = []
        for outcome in tune([one], rows):
            outcomes.append(outcome)
            done += 1
            print(
                f"[{done}/{total}] {outcome.key}: {outcome.best.microseconds:.2f} us an expert, "
                f"first of {outcome.proposals} proposals {outcome.first:.2f}",
                flush=True,
            )
        kept = keep(outcomes)
    print(f"kept in {kept}")
    return 0
