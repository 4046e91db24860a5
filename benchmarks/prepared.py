# SPDX-License-Identifier: Apache-2.0
"""A contender that is ready for a layer: the call that is checked, and the calls that are timed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from benchmarks.layers import Batch
from benchmarks.timing import Call

Recipe = Literal["w4a4", "w4a16"]
RECIPES: tuple[Recipe, ...] = ("w4a4", "w4a16")

Runner = Callable[[Batch], torch.Tensor]
"""From a batch to (T, H) or (M, N)."""
Stage = Callable[[Batch], Call]
"""Does what is not timed for a batch, and returns the call that is."""

Boundary = Literal["block", "gemms", "all"]
BOUNDARIES: dict[Boundary, str] = {
    "block": "the whole call: sorting the routing, both GEMMs, activation, router weights, the sum",
    "gemms": "each grouped GEMM's launch alone: what a contender does to the activations before it "
    "(rounding, gathering, padding) is left out, what its kernel does inside is in",
    "all": "both",
}


class Judge(Protocol):
    """Says how far a result is from the exact one."""

    def error(self, result: torch.Tensor, size: int, recipe: str) -> float:
        """Norm-wise relative error of :meth:`check_batch`'s result at ``size``."""
        ...


@dataclass(frozen=True)
class Prepared:
    """What a contender's ``prepare`` may return instead of a plain function.

    Attributes
    ----------
    run : Runner
        The whole call.
    block : Stage, optional
        The same for timing, where a batch must first be brought into the contender's own form.
    gemm1, gemm2 : Stage, optional
        The block's two GEMMs apart, on the batch's own routing and values.
    reference : Judge, optional
        What the result is checked against instead of the exact oracle.
    """

    run: Runner
    block: Stage | None = None
    gemm1: Stage | None = None
    gemm2: Stage | None = None
    reference: Judge | None = None

    def __call__(self, batch: Batch) -> torch.Tensor:
        return self.run(batch)

    @classmethod
    def of(cls, runner: Runner) -> Prepared:
        """``runner`` itself if it is one, else with nothing but the call."""
        return runner if isinstance(runner, Prepared) else cls(runner)

    def call(self, batch: Batch) -> Call:
        """The block's call to be timed."""
        return self.block(batch) if self.block is not None else lambda: self.run(batch)
