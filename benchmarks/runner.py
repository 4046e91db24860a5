# SPDX-License-Identifier: Apache-2.0
"""Check, then time, each contender on one layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from benchmarks import accounting
from benchmarks.ceilings import Ceiling
from benchmarks.contenders import Contender, Runner
from benchmarks.layers import Layer
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
        Expected results of this layer.
    read, compute : Ceiling
        For the floor.
    progress : callable, optional
        Called with a label, and with how many sizes are done when a contender is.

    Returns
    -------
    list of Row
        One row for each contender and size; one for a contender that cannot run.
    """
    rows: list[Row] = []
    for contender in contenders:
        progress(f"{layer.name}: {contender.name} {contender.recipe}", 0)
        rows += _run_one(layer, contender, timer, reference, read, compute)
        if layer.device.type == "cuda":
            torch.cuda.empty_cache()  # a graph's memory comes back only so
        progress(f"{layer.name}: {contender.name} {contender.recipe}", len(layer.sweep))
    return rows


def _run_one(
    layer: Layer,
    contender: Contender,
    timer: Timer,
    reference: Reference,
    read: Ceiling,
    compute: Ceiling,
) -> list[Row]:
    def row(**fields: object) -> Row:
        return Row(
            layer=layer.name,
            contender=contender.name,
            recipe=contender.recipe,
            **fields,  # type: ignore[arg-type]
        )

    # A contender is somebody else's code: whatever it raises is a result of this benchmark.
    try:
        if reason := contender.refusal(layer):
            return [row(status="unavailable", reason=reason)]
        run = contender.prepare(layer)
    except Exception as error:
        return [row(status="FAILED", reason=_describe(error))]
    rows = []
    for size in layer.sweep:
        measured: float | None = None
        try:
            measured, fault = _check(layer, run, size, contender, reference)
            if fault:
                rows.append(
                    row(
                        status="FAILED",
                        size=size,
                        reason=fault,
                        error=measured,
                        limit=contender.limit,
                    )
                )
                continue
            samples = timer.measure(lambda i, size=size: _call(layer, run, size, i))  # type: ignore[misc]
        except Exception as error:
            rows.append(row(status="FAILED", size=size, reason=_describe(error), error=measured))
            continue
        rows.append(
            row(
                status="ok",
                size=size,
                error=measured,
                limit=contender.limit,
                **_figures(layer, contender, size, samples, read, compute),
            )
        )
    return rows


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _check(
    layer: Layer, run: Runner, size: int, contender: Contender, reference: Reference
) -> tuple[float | None, str | None]:
    """Return the norm-wise relative error (None if not finite) and what is wrong, if anything."""
    result = run(layer.check_batch(size))
    expected_shape = reference.shape(size)
    if tuple(result.shape) != expected_shape:
        return None, f"result of shape {tuple(result.shape)}, need {expected_shape}"
    if not bool(torch.isfinite(result).all()):
        return None, "the result has NaN or infinity"
    error = reference.error(result, size, contender.recipe)
    if not math.isfinite(error):
        return None, "the error against the reference is not finite"
    if error > contender.limit:
        return error, (
            f"relative error {error:.2e} against the float64 {contender.recipe} reference, "
            f"limit {contender.limit:.2e}"
        )
    return error, None


def _call(layer: Layer, run: Runner, size: int, i: int) -> Call:
    batch = layer.batch(size, i)
    return lambda: run(batch)


def _figures(
    layer: Layer,
    contender: Contender,
    size: int,
    samples: Samples,
    read: Ceiling,
    compute: Ceiling,
) -> dict[str, object]:
    work = accounting.mean([layer.batch(size, i).work for i in samples.calls])
    floor = accounting.floor(work, read_bytes_per_s=read.value, flops_per_s=compute.value)
    moved = work.bytes(contender.weight_format)
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
        "weight_format": contender.weight_format,
        "megabytes": moved / 1e6,
        "gb_per_s": moved / median / 1e3,
        "tflop_per_s": work.flops / median / 1e6,
        "floor_us": floor.us,
        "floor_bound": floor.bound,
        "floor_percent": 100 * floor.us / median,
    }
