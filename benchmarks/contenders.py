# SPDX-License-Identifier: Apache-2.0
"""What is raced: fp4lt's backends, plain torch, and the names that cannot run here, with why."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

import fp4lt
from benchmarks.accounting import WeightFormat, weight_bytes
from benchmarks.layers import Batch, GemmBatch, GemmLayer, Layer, MoEBatch, MoELayer
from fp4lt.backends import BACKENDS

Recipe = Literal["w4a4", "w4a16"]
RECIPES: tuple[Recipe, ...] = ("w4a4", "w4a16")
Runner = Callable[[Batch], torch.Tensor]

# Norm-wise relative error against the float64 reference of the same recipe, bf16 output.
FP4LT_LIMITS: dict[Recipe, float] = {"w4a4": 2.5e-3, "w4a16": 3e-3}
TORCH_LIMITS: dict[torch.dtype, float] = {torch.bfloat16: 1e-2, torch.float32: 3e-3}
FP4LT_BACKENDS = ("cpu", "fused", "dequant", "cublaslt", "cublaslt_grouped")


class Contender(Protocol):
    """One implementation of a layer.

    ``refusal`` says why it cannot run a layer here, or None.  ``prepare`` may take its time and
    memory; only calls of what it returns are timed.
    """

    @property
    def name(self) -> str:
        """Name in the table and for ``--contenders``."""
        ...

    @property
    def recipe(self) -> Recipe:
        """Semantics that its result is checked against."""
        ...

    @property
    def limit(self) -> float:
        """Largest norm-wise relative error that passes."""
        ...

    @property
    def weight_format(self) -> WeightFormat:
        """Format whose bytes a call reads."""
        ...

    def refusal(self, layer: Layer) -> str | None:
        """Return why this layer cannot be run here, or None."""
        ...

    def prepare(self, layer: Layer) -> Runner:
        """Return a function from a batch to (T, H) or (M, N) bf16."""
        ...


@dataclass(frozen=True)
class Fp4lt:
    """One backend of fp4lt through its public call, planning and dispatch included."""

    backend: str
    recipe: Recipe
    weight_format: WeightFormat = "nvfp4"

    @property
    def name(self) -> str:
        return f"fp4lt-{self.backend}"

    @property
    def limit(self) -> float:
        return FP4LT_LIMITS[self.recipe]

    def refusal(self, layer: Layer) -> str | None:
        # Asking by name gives the backend or its own reason; one token is cheap where it runs.
        try:
            self.prepare(layer)(layer.check_batch(1))
        except (fp4lt.errors.UnsupportedError, fp4lt.errors.DeviceError) as error:
            return str(error)
        except fp4lt.errors.ArgumentError as error:
            if any(backend.name == self.backend for backend in BACKENDS):
                raise
            return str(error)  # not in this build's table at all
        return None

    def prepare(self, layer: Layer) -> Runner:
        if isinstance(layer, GemmLayer):
            matrix = layer.weights.mT

            def gemm(batch: Batch) -> torch.Tensor:
                assert isinstance(batch, GemmBatch)
                return fp4lt.grouped_mm(
                    batch.x, matrix, offs=batch.offs, recipe=self.recipe, backend=self.backend
                )

            return gemm
        weights = layer.weights

        def block(batch: Batch) -> torch.Tensor:
            assert isinstance(batch, MoEBatch)
            return fp4lt.moe(
                batch.x,
                weights,
                topk_weights=batch.routing.weights,
                topk_ids=batch.routing.ids,
                recipe=self.recipe,
                backend=self.backend,
            )

        return block


@dataclass(frozen=True)
class Torch:
    """A Python loop of ``torch.mm`` over the active experts.

    With ``ahead`` the weights are expanded once, before timing; without, each call expands those
    of its active experts, which is what an engine without NVFP4 kernels has to do.
    """

    dtype: torch.dtype
    ahead: bool
    memory_budget: int
    recipe: Recipe = "w4a16"

    @property
    def name(self) -> str:
        if not self.ahead:
            return "torch-dequant"
        return "torch-bf16" if self.dtype == torch.bfloat16 else "torch-fp32"

    @property
    def limit(self) -> float:
        return TORCH_LIMITS[self.dtype]

    @property
    def weight_format(self) -> WeightFormat:
        if not self.ahead:
            return "nvfp4"
        return "bf16" if self.dtype == torch.bfloat16 else "fp32"

    def refusal(self, layer: Layer) -> str | None:
        if isinstance(layer, MoELayer) and (reason := _unsupported(layer.weights)):
            return reason
        if self.ahead:
            elements = layer.experts * sum(n * k for n, k in layer.gemms)
            need = weight_bytes(elements, self.weight_format)
            if need > self.memory_budget:
                return (
                    f"its weights need {need / 2**30:.1f} GiB, the budget is "
                    f"{self.memory_budget / 2**30:.1f} GiB; use --experts or --memory-budget"
                )
        return None

    def prepare(self, layer: Layer) -> Runner:
        def expand(expert: int) -> tuple[torch.Tensor, ...]:
            return dense(layer, expert, self.dtype)

        matrices: Callable[[int], tuple[torch.Tensor, ...]] = expand
        if self.ahead:
            matrices = [expand(e) for e in range(layer.experts)].__getitem__
        if isinstance(layer, GemmLayer):
            return lambda batch: _loop_gemm(batch, matrices, self.dtype)
        order = layer.weights.order
        return lambda batch: _loop_moe(batch, matrices, self.dtype, order)


def _unsupported(weights: fp4lt.MoEWeights) -> str | None:
    if not weights.gated or weights.activation != "silu":
        return f"the torch loop has gated silu only, not {weights.activation}"
    extras = ("w13_bias", "w2_bias", "swiglu_alpha", "swiglu_beta", "swiglu_limit")
    given = [name for name in extras if getattr(weights, name) is not None]
    return f"the torch loop has no {', '.join(given)}" if given else None


def dense(layer: Layer, expert: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Expand one expert's matrices, (N, K) each, global scales included."""
    if isinstance(layer, GemmLayer):
        return (layer.weights[expert].dequantize(dtype),)
    weights = layer.weights
    stored13, stored2 = layer.matrices
    w2 = stored2[expert].dequantize(dtype)
    if weights.gate_up_scales is None:
        return stored13[expert].dequantize(dtype), w2
    w13 = stored13[expert].dequantize(torch.float32)
    factor = torch.empty(w13.shape[0])
    for rows, scale in zip(
        split(torch.arange(w13.shape[0]), weights.order, dim=0),
        weights.gate_up_scales[expert],
        strict=True,
    ):
        factor[rows] = scale
    return (w13 * factor[:, None]).to(dtype), w2


def split(x: torch.Tensor, order: str | None, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gate's and the up projection's part of ``x`` along ``dim``."""
    if order == "interleaved":
        index = torch.arange(0, x.shape[dim], 2)
        return x.index_select(dim, index), x.index_select(dim, index + 1)
    first, second = x.chunk(2, dim=dim)
    return (second, first) if order == "up_gate" else (first, second)


def _loop_moe(
    batch: Batch,
    matrices: Callable[[int], tuple[torch.Tensor, ...]],
    dtype: torch.dtype,
    order: str | None,
) -> torch.Tensor:
    assert isinstance(batch, MoEBatch)
    ids, router = batch.routing.ids, batch.routing.weights
    top_k = ids.shape[1]
    x = batch.x.to(dtype)
    y = torch.zeros(x.shape, dtype=torch.float32)
    slots = ids.reshape(-1).argsort(stable=True)
    start = 0
    for expert, rows in enumerate(torch.bincount(ids.reshape(-1)).tolist()):
        if not rows:
            continue
        mine = slots[start : start + rows]
        start += rows
        tokens = mine // top_k
        w13, w2 = matrices(expert)
        gate, up = split(torch.mm(x[tokens], w13.t()), order, dim=1)
        z = torch.mm(torch.nn.functional.silu(gate) * up, w2.t())
        y.index_add_(0, tokens, z.float() * router.reshape(-1)[mine, None])
    return y.to(torch.bfloat16)


def _loop_gemm(
    batch: Batch, matrices: Callable[[int], tuple[torch.Tensor, ...]], dtype: torch.dtype
) -> torch.Tensor:
    assert isinstance(batch, GemmBatch)
    x = batch.x.to(dtype)
    parts = []
    start = 0
    for expert, end in enumerate(batch.offs.tolist()):
        if end > start:
            (w,) = matrices(expert)
            parts.append(torch.mm(x[start:end], w.t()))
        start = end
    return torch.cat(parts).to(torch.bfloat16)


@dataclass(frozen=True)
class Absent:
    """A peer that is named so that its absence is seen; it never runs here."""

    name: str
    needs: str
    recipe: Recipe = "w4a16"
    limit: float = 1e-2
    weight_format: WeightFormat = "nvfp4"

    def refusal(self, layer: Layer) -> str | None:
        del layer
        if not torch.cuda.is_available():
            return f"needs {self.needs}; torch sees no CUDA device"
        return f"needs {self.needs}, and this benchmark times CPU calls only so far"

    def prepare(self, layer: Layer) -> Runner:
        raise NotImplementedError(self.refusal(layer))


PEERS = (
    Absent("flashinfer-cutlass", "a GPU with FP4 tensor cores (CC 10.0 or later)", "w4a4"),
    Absent("marlin", "vLLM's marlin MoE kernel on an NVIDIA GPU"),
    Absent("humming", "humming-kernels on an NVIDIA GPU"),
)


def contenders(recipes: Sequence[Recipe], memory_budget: int) -> tuple[Contender, ...]:
    """All contenders, in the order of the table.

    ``recipes`` selects among fp4lt's; the others have one each.
    """

    def generate() -> Iterator[Contender]:
        # The CPU backend first: it is the one that runs everywhere.
        for backend in FP4LT_BACKENDS:
            for recipe in recipes:
                yield Fp4lt(backend, recipe)
        yield Torch(torch.bfloat16, ahead=True, memory_budget=memory_budget)
        yield Torch(torch.float32, ahead=True, memory_budget=memory_budget)
        yield Torch(torch.bfloat16, ahead=False, memory_budget=memory_budget)
        yield from PEERS

    return tuple(generate())
