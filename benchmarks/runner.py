# SPDX-License-Identifier: Apache-2.0
"""Check, then time, each contender on one layer."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from benchmarks import accounting
from benchmarks.ceilings import Ceiling
from benchmarks.contenders import Contender
from benchmarks.layers import Layer
from benchmarks.prepared import Boundary, Prepared, Stage
from benchmarks.reference import Reference
from benchmarks.report import Row
from benchmarks.timing import Call, Samples, Timer

Progress = Callable[[str, int], None]


def run_layer(
    layer: Layer,
    contenders: Sequence[Contender],
    timer: Timer,
    *,
    reference: Reference,
    read: Ceiling,
    compute: Ceiling,
    boundary: Boundary = "all",
    progress: Progress = lambda _label, _steps: None,
) -> list[Row]:
    """Race the contenders on one layer.

    Each is prepared once, checked at every size of the sweep, and timed only where the check
    passed.  One at a time holds its weights.

    Parameters
    ----------
    layer : Layer
    contenders : sequence of Contender
    timer : Timer
    reference : Reference
        Expected results of this layer, for contenders that bring none of their own.
    read, compute : Ceiling
        For the floor.
    boundary : "block", "gemms" or "all"
        What is timed.
    progress : callable, optional
        Called with a label, and with how many sizes are done when a contender is.

    Returns
    -------
    list of Row
        One row for each contender and size; one for a contender that cannot run.
    """
    rows: list[Row] = []
    for i, contender in enumerate(contenders):
        progress(f"{layer.name}: {contender.name} {contender.recipe}", 0)
        entry = _Entry(layer, contender, timer, reference, read, compute, boundary)
        rows += entry.run()
        if fault := device_fault(layer.device):
            reason = f"{contender.name} left the GPU unusable: {fault}"
            return rows + not_run(layer.name, contenders[i + 1 :], reason)
        if layer.device.type == "cuda":
            gc.collect()  # weights in a cycle would stay beside the next contender's
            torch.cuda.empty_cache()  # a graph's memory comes back only so
        progress(f"{layer.name}: {contender.name} {contender.recipe}", len(layer.sweep))
    return rows


def device_fault(device: torch.device) -> str | None:
    """The CUDA error that ends all work of this process on the device, if there was one."""
    if device.type == "cuda":
        try:
            torch.cuda.synchronize(device)
        except RuntimeError as error:
            return str(error).partition("\n")[0]
    return None


def not_run(layer: str, contenders: Sequence[Contender], reason: str) -> list[Row]:
    """Rows of contenders that one reason keeps from a layer."""
    return [
        Row(layer, c.name, c.recipe, "unavailable", reason=reason, weight_format=c.weight_format)
        for c in contenders
    ]


@dataclass(frozen=True)
class _Entry:
    """One contender on one layer."""

    layer: Layer
    contender: Contender
    timer: Timer
    reference: Reference
    read: Ceiling
    compute: Ceiling
    boundary: Boundary

    def run(self) -> list[Row]:
        # A contender is somebody else's code: whatever it raises is a result of this benchmark.
        try:
            if reason := self.contender.refusal(self.layer):
                return [self._row(status="unavailable", reason=reason)]
            prepared = Prepared.of(self.contender.prepare(self.layer))
        except Exception as error:
            return [self._row(status="FAILED", reason=_describe(error))]
        return [self._at(prepared, size) for size in self.layer.sweep]

    def _at(self, prepared: Prepared, size: int) -> Row:
        measured: float | None = None
        try:
            measured, fault = self._check(prepared, size)
            if fault:
                given = {"error": measured, "limit": self.contender.limit}
                return self._row(status="FAILED", size=size, reason=fault, **given)
            figures = self._time(prepared, size)
        except Exception as error:
            return self._row(status="FAILED", size=size, reason=_describe(error), error=measured)
        given = {"error": measured, "limit": self.contender.limit}
        return self._row(status="ok", size=size, **given, **figures)

    def _row(self, **fields: object) -> Row:
        return Row(
            layer=self.layer.name,
            contender=self.contender.name,
            recipe=self.contender.recipe,
            weight_format=self.contender.weight_format,
            **fields,  # type: ignore[arg-type]
        )

    def _check(self, prepared: Prepared, size: int) -> tuple[float | None, str | None]:
        """Return the norm-wise relative error (None if not finite), and what is wrong."""
        result = prepared(self.layer.check_batch(size))
        expected_shape = self.reference.shape(size)
        if tuple(result.shape) != expected_shape:
            return None, f"result of shape {tuple(result.shape)}, need {expected_shape}"
        if not bool(torch.isfinite(result).all()):
            return None, "the result has NaN or infinity"
        recipe, limit = self.contender.recipe, self.contender.limit
        error = (prepared.reference or self.reference).error(result, size, recipe)
        if not math.isfinite(error):
            return None, "the error against the reference is not finite"
        if error > limit:
            held_to = "fp32" if prepared.reference else "float64"
            return error, (
                f"relative error {error:.2e} against the {held_to} {recipe} reference, "
                f"limit {limit:.2e}"
            )
        return error, None

    def _time(self, prepared: Prepared, size: int) -> dict[str, object]:
        figures: dict[str, object] = {}
        if self.boundary in ("block", "all"):
            samples = self._measure(prepared.call, size)
            figures |= self._block_figures(size, samples)
        if self.boundary in ("gemms", "all"):
            for name, stage in (("gemm1_us", prepared.gemm1), ("gemm2_us", prepared.gemm2)):
                if stage is not None:
                    figures[name] = self._measure(stage, size).median
        return figures

    def _measure(self, stage: Stage, size: int) -> Samples:
        def prepare(i: int) -> Call:
            return stage(self.layer.batch(size, i))

        return self.timer.measure(prepare)

    def _block_figures(self, size: int, samples: Samples) -> dict[str, object]:
        layer = self.layer
        work = accounting.mean([layer.batch(size, i).work for i in samples.calls])
        floor = accounting.floor(
            work, read_bytes_per_s=self.read.value, flops_per_s=self.compute.value
        )
        moved = work.bytes(self.contender.weight_format)
        median = samples.median
        return {
            "active_experts": work.active,
            "rows_per_active_expert": work.rows_per_active,
            "us_median": median,
            "us_p10": samples.percentile(10),
            "us_p90": samples.percentile(90),
            "calls": samples.n,
            "preemptions_per_call": None
            if samples.preemptions is None
            else samples.preemptions / samples.n,
            "megabytes": moved / 1e6,
            "gb_per_s": moved / median / 1e3,
            "tflop_per_s": work.flops / median / 1e6,
            "floor_us": floor.us,
            "floor_bound": floor.bound,
            "floor_percent": 100 * floor.us / median,
        }


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
