# SPDX-License-Identifier: Apache-2.0
"""What is raced: fp4lt's backends, plain torch, peers, and names that cannot run here, with why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

import fp4lt
from benchmarks import fused_stages, torch_loops
from benchmarks.accounting import WeightFormat, weight_bytes
from benchmarks.layers import Batch, GemmBatch, GemmLayer, Layer, MoEBatch
from benchmarks.peers.contender import PeerContender
from benchmarks.peers.humming import Humming
from benchmarks.peers.marlin import Marlin
from benchmarks.peers.torch_grouped import TorchGrouped
from benchmarks.peers.triton_mxfp4 import TritonMxfp4
from benchmarks.peers.weights import unsupported
from benchmarks.prepared import RECIPES, Prepared, Recipe, Runner
from fp4lt.backends import BACKENDS

__all__ = [
    "PEER_NAMES",
    "RECIPES",
    "Absent",
    "Contender",
    "Fp4lt",
    "Grouped",
    "Recipe",
    "Runner",
    "Torch",
    "contenders",
]

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
        """Return a function from a batch to (T, H) or (M, N) bf16, or a :class:`Prepared`."""
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
            matrices = [weights.mT for weights in layer.copies]

            def gemm(batch: Batch) -> torch.Tensor:
                assert isinstance(batch, GemmBatch)
                return fp4lt.grouped_mm(
                    batch.x,
                    matrices[batch.copy],
                    offs=batch.offs,
                    recipe=self.recipe,
                    backend=self.backend,
                )

            return gemm

        def block(batch: Batch) -> torch.Tensor:
            assert isinstance(batch, MoEBatch)
            return fp4lt.moe(
                batch.x,
                layer.copies[batch.copy],
                topk_weights=batch.routing.weights,
                topk_ids=batch.routing.ids,
                recipe=self.recipe,
                router_weight_on_input=layer.router_weight_on_input,
                backend=self.backend,
            )

        if self.backend == "fused" and layer.device.type == "cuda":
            gemm1, gemm2 = fused_stages.gemms(layer, self.recipe)
            return Prepared(block, gemm1=gemm1, gemm2=gemm2)
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
        if self.dtype == torch.float32 and layer.device.type != "cpu":
            return "fp32 weights are raced on a CPU only"
        return _over_budget(layer, self.weight_format, self.memory_budget) if self.ahead else None

    def prepare(self, layer: Layer) -> Runner:
        if not self.ahead:
            return torch_loops.loop(
                layer,
                lambda copy, expert: torch_loops.dense(layer, copy, expert, self.dtype),
                self.dtype,
            )
        copies = _expand(layer, self.dtype, self.memory_budget)
        return torch_loops.loop(
            layer,
            lambda copy, expert: tuple(stack[expert] for stack in copies[copy % len(copies)]),
            self.dtype,
        )


@dataclass(frozen=True)
class Grouped:
    """torch's own grouped GEMM on bf16 weights that are expanded once, before timing."""

    memory_budget: int
    name: str = "torch-grouped"
    recipe: Recipe = "w4a16"
    limit: float = TORCH_LIMITS[torch.bfloat16]
    weight_format: WeightFormat = "bf16"

    def refusal(self, layer: Layer) -> str | None:
        if not hasattr(torch, "_grouped_mm"):
            return f"torch {torch.__version__} has no _grouped_mm"
        if layer.device.type == "cpu":
            return "torch._grouped_mm is raced on CUDA only; on a CPU torch-bf16 is such a loop"
        return _over_budget(layer, self.weight_format, self.memory_budget)

    def prepare(self, layer: Layer) -> Runner:
        # Its plain form has a kernel between the GEMMs; what that does not know goes by torch.
        peer = PeerContender(TorchGrouped(), self.memory_budget)
        if unsupported(layer) is None and (layer.device.type == "cpu" or not peer.refusal(layer)):
            return peer.prepare(layer)
        copies = _expand(layer, torch.bfloat16, self.memory_budget)
        return torch_loops.grouped(layer, lambda copy: copies[copy % len(copies)])


def _expanded_bytes(layer: Layer, weight_format: WeightFormat) -> int:
    return weight_bytes(layer.experts * sum(n * k for n, k in layer.gemms), weight_format)


def _over_budget(layer: Layer, weight_format: WeightFormat, budget: int) -> str | None:
    need = _expanded_bytes(layer, weight_format)
    if need <= budget:
        return None
    return (
        f"its weights need {need / 2**30:.1f} GiB, the budget is {budget / 2**30:.1f} GiB; "
        "use --experts or --memory-budget"
    )


def _expand(layer: Layer, dtype: torch.dtype, budget: int) -> list[tuple[torch.Tensor, ...]]:
    """Dense stacks (E, N, K) of as many copies as the budget has room for."""
    need = _expanded_bytes(layer, "bf16" if dtype == torch.bfloat16 else "fp32")
    count = max(1, min(len(layer.copies), budget // need))
    return [torch_loops.dense_stacks(layer, copy, dtype) for copy in range(count)]


@dataclass(frozen=True)
class Absent:
    """A peer that is named so that its absence is seen; it never runs here."""

    name: str
    needs: str
    recipe: Recipe = "w4a16"
    limit: float = 1e-2
    weight_format: WeightFormat = "nvfp4"

    def refusal(self, layer: Layer) -> str | None:
        if layer.device.type != "cuda":
            return f"needs {self.needs}; this run is on {layer.device}"
        return f"needs {self.needs}; this benchmark cannot call it yet"

    def prepare(self, layer: Layer) -> Runner:
        raise NotImplementedError(self.refusal(layer))


ABSENT = (Absent("flashinfer-cutlass", "a GPU with FP4 tensor cores (CC 10.0 or later)", "w4a4"),)
PEERS = (Marlin(), Humming(), TritonMxfp4())  # the last spends longest in its compiler
PEER_NAMES = frozenset(peer.name for peer in (*ABSENT, *PEERS, TorchGrouped()))
"""Other projects' kernels: what the ratio to the best peer is taken of."""


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
        yield Grouped(memory_budget)
        yield from ABSENT
        for peer in PEERS:
            yield PeerContender(peer, memory_budget)

    return tuple(generate())
