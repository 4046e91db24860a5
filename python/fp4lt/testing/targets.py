# SPDX-License-Identifier: Apache-2.0
"""What can be checked on this machine: each backend on each device, through the public plans."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import torch
from torch.utils import _pytree as pytree

from fp4lt import backends
from fp4lt.backends import Backend
from fp4lt.block import MoEPlan, moe_problem
from fp4lt.experts import MoEWeights
from fp4lt.gemm import GroupedMMPlan, grouped_problem
from fp4lt.problem import GroupedProblem, MoEProblem, MoETrace, Operand, Recipe
from fp4lt.tensor import NVFP4Tensor
from fp4lt.testing import cases, oracle

OUT_TYPES: Final = (torch.float32, torch.bfloat16, torch.float16)


class Check(NamedTuple):
    """A named check; ``run`` returns how many values it compared, or raises AssertionError."""

    name: str
    run: Callable[[], int]


class RefusedError(Exception):
    """The backend refuses a problem, with its reason; no failure."""


def problems() -> dict[str, GroupedProblem | MoEProblem]:
    """One small problem of each kind, to ask a backend about."""
    bf16 = torch.bfloat16
    named: dict[str, GroupedProblem | MoEProblem] = {}
    for kind, weights in (("w4a4", "nvfp4"), ("w4a16", "nvfp4"), ("bf16", "bfloat16")):
        recipe = "w4a4" if kind == "w4a4" else "w4a16"
        named[f"grouped_mm {kind}"] = GroupedProblem(8, 512, 256, "bfloat16", weights, bf16, recipe)
        named[f"moe {kind}"] = MoEProblem(
            8, 256, 128, 2, bf16, weights, recipe, order="gate_up", activation="silu"
        )
    return named


def refusals(backend: Backend, device: torch.device) -> dict[str, str | None]:
    """The backend's refusal of each of :func:`problems`, None where it takes it."""
    return {name: backend.refusal(problem, device) for name, problem in problems().items()}


def devices() -> list[torch.device]:
    """The CPU and torch's CUDA devices."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [torch.device("cpu"), *(torch.device("cuda", index) for index in range(count))]


def find_depth(backend: Backend, k: int, sums: str) -> int:
    """The backend's own depth: its method ``depth``, else the function of its module, else k.

    k is that of any order of any instruction that cuts each addend at most once.
    """
    places = [backend, *(sys.modules.get(c.__module__) for c in type(backend).__mro__)]
    for place in places:
        depth = getattr(place, "depth", None)
        if callable(depth):
            return int(depth(k, sums))
    return k


@dataclass
class Target:
    """A backend on a device.

    Tensors are given in host memory, or on the device, and returned in host memory.  ``skipped``
    collects the backend's refusals of parts of a check.
    """

    backend: Backend
    device: torch.device
    skipped: list[str] = field(default_factory=list)

    def depth(self, k: int, sums: str) -> int:
        """fp32 roundings a term can meet; `sums` is "w4a4" where both operands are NVFP4."""
        return find_depth(self.backend, k, sums)

    def _accept(self, problem: GroupedProblem | MoEProblem) -> None:
        reason = self.backend.refusal(problem, self.device)
        if reason is not None:
            raise RefusedError(reason)

    def _move(self, value: Any) -> Any:
        return pytree.tree_map_only(torch.Tensor, lambda t: t.to(self.device), value)

    def multiply(
        self,
        a: Operand,
        b: Operand,
        counts: Sequence[int],
        *,
        recipe: Recipe = "w4a4",
        out_dtype: torch.dtype | None = None,
        out: torch.Tensor | None = None,
        **options: Any,
    ) -> torch.Tensor:
        """``grouped_mm``; an `out` has to be on the device already."""
        a, b, options = self._move(a), self._move(b), self._move(options)
        problem = grouped_problem(a, b, recipe, out_dtype, out)
        self._accept(problem)
        # A plan of its own: cached ones may have been made for another backend of this name.
        plan = GroupedMMPlan(problem, self.device, self.backend.name)
        offs = cases.offsets(counts).to(self.device)
        return plan.run(a, b, offs=offs, out=out, **options).cpu()

    def block(
        self, hidden: torch.Tensor, weights: MoEWeights, recipe: Recipe, **options: Any
    ) -> tuple[Callable[[], torch.Tensor], Callable[[], MoETrace]]:
        """``moe`` and its trace as calls without arguments."""
        hidden, weights, options = self._move(hidden), weights.to(self.device), self._move(options)
        problem = moe_problem(hidden, weights, options["topk_weights"], options["topk_ids"], recipe)
        self._accept(problem)
        plan = MoEPlan(problem, self.device, self.backend.name)

        def trace() -> MoETrace:
            found = plan.trace(hidden, weights, **options)
            host: MoETrace = pytree.tree_map_only(torch.Tensor, lambda t: t.cpu(), found)
            return host

        return lambda: plan.run(hidden, weights, **options).cpu(), trace


def find_targets(
    names: Sequence[str] | None = None,
) -> tuple[list[Target], list[tuple[str, str, str]]]:
    """Usable backends, each on each device, and why the others are not.

    Parameters
    ----------
    names : sequence of str, optional
        Backends to look at; all by default.

    Returns
    -------
    targets : list of Target
    refused : list of (str, str, str)
        Backend, device, reason.
    """
    usable, refused = [], []
    for backend in backends.BACKENDS:
        if names is not None and backend.name not in names:
            continue
        for device in devices():
            found = refusals(backend, device)
            if all(found.values()):
                reasons = "; ".join(dict.fromkeys(str(reason) for reason in found.values()))
                refused.append((backend.name, str(device), reasons))
            else:
                usable.append(Target(backend, device))
    return usable, refused


def store(operand: cases.Linear) -> NVFP4Tensor:
    """Store an operand in the oracle's own tiles, so that no code under test takes part."""
    packed = operand.packed()
    return NVFP4Tensor.from_tiled_scales(packed.codes, packed.scales, packed.global_scale)


class Product(NamedTuple):
    """Operands of a grouped product, `b` transposed already."""

    name: str
    a: Operand
    b: Operand
    recipe: Recipe
    options: dict[str, Any]

    @property
    def sums(self) -> str:
        """What the depth goes by."""
        both = isinstance(self.b, NVFP4Tensor) and self.recipe == "w4a4"
        return "w4a4" if both else "w4a16"

    def run(self, target: Target, counts: Sequence[int], **options: Any) -> torch.Tensor:
        """The backend's result."""
        return target.multiply(
            self.a, self.b, counts, recipe=self.recipe, **(self.options | options)
        )

    def want(self, counts: Sequence[int]) -> oracle.Expected:
        """The exact result."""
        offs = cases.offsets(counts)
        return oracle.grouped_mm(self.a, self.b, offs=offs, recipe=self.recipe, **self.options)

    def check(self, target: Target, counts: Sequence[int], *, exact: bool) -> int:
        """Compare every output type: bit by bit, or with the bound; returns the values compared."""
        want, k, rows = self.want(counts), self.b.shape[1], sum(counts)
        compared = 0
        for dtype in OUT_TYPES:
            try:
                y = self.run(target, counts, out_dtype=dtype)[:rows]
            except RefusedError as reason:
                target.skipped.append(str(reason))
                continue
            name = f"{self.name}, groups {tuple(counts)}, (E, K, N) {tuple(self.b.shape)}, y"
            if exact:
                want.check_exact(y, name=name)
            else:
                want.check(y, target.depth(k, self.sums), name=name)
            compared += max(y.numel(), 1)  # of an empty result, its shape
        return compared
