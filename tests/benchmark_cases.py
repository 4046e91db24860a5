# SPDX-License-Identifier: Apache-2.0
"""Tiny layers, a counting timer and a contender that can be made wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks import accounting, ceilings, layers, presets, report, timing
from benchmarks.contenders import Fp4lt, Recipe, Runner
from benchmarks.reference import Reference
from benchmarks.runner import run_layer

READ = ceilings.Ceiling(1e9, "given", {"given": 1e9})
COMPUTE = ceilings.Ceiling(1e12, "given", {"given": 1e12})

TINY = presets.MoEPreset(
    name="tiny",
    model="none",
    hidden=64,
    intermediate=48,
    experts=6,
    top_k=2,
    activation="silu",
    order="gate_up",
    sweep=(1, 5),
    source="made up",
    note="",
)
TINY_GEMM = presets.GemmPreset(
    name="tiny-gemm",
    model="none",
    out_features=40,
    in_features=96,
    experts=3,
    sweep=(1, 2, 7),
    source="made up",
    note="",
)


@dataclass
class CountingTimer:
    """Makes ``calls`` calls and reports that each took the time it was told to report."""

    us: float = 100.0
    calls: int = 3
    measured: int = 0

    @property
    def description(self) -> str:
        return "a counter"

    def measure(self, prepare: timing.Prepare) -> timing.Samples:
        self.measured += 1
        for i in range(self.calls):
            prepare(i)()
        return timing.Samples((self.us,) * self.calls)


@dataclass(frozen=True)
class Altered:
    """The CPU backend with its result passed through ``alter``."""

    alter: Callable[[torch.Tensor], torch.Tensor]
    name: str = "altered"
    recipe: Recipe = "w4a16"
    limit: float = 3e-3
    weight_format: accounting.WeightFormat = "nvfp4"

    def refusal(self, layer: layers.Layer) -> str | None:
        return None

    def prepare(self, layer: layers.Layer) -> Runner:
        run = Fp4lt("cpu", self.recipe).prepare(layer)
        return lambda batch: self.alter(run(batch))


def race(layer: layers.Layer, contender: Any, timer: timing.Timer) -> list[report.Row]:
    return run_layer(
        layer, [contender], timer, reference=Reference(layer), read=READ, compute=COMPUTE
    )
