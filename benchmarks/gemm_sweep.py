# SPDX-License-Identifier: Apache-2.0
"""Rows against one matrix: ``python -m benchmarks.gemm_sweep`` from the repository's root.

Times a grouped GEMM on NVFP4 weights from few rows per expert to many, and says how many times
faster than torch on dense weights each contender is.  docs/benchmarks.md has the details.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks import cli, layers, presets, report
from benchmarks.contenders import FP4LT_BACKENDS, contenders

BASELINES = ("torch-fp32", "torch-bf16", "torch-grouped")
ON_CPU = ("fp4lt-cpu", "torch-bf16", "torch-fp32")
ON_CUDA = (*(f"fp4lt-{name}" for name in FP4LT_BACKENDS if name != "cpu"), *BASELINES[1:])


def parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    result = argparse.ArgumentParser(
        prog="python -m benchmarks.gemm_sweep",
        description="Time a grouped GEMM on NVFP4 weights, each contender checked first.",
        epilog="Exit status 1 if a contender failed its check, 2 for unusable options.",
    )
    add = result.add_argument
    add("--n", type=cli.positive, default=7168, help="out-features N (default 7168)")
    add("--k", type=cli.positive, default=7168, help="in-features K (default 7168)")
    add("--experts", type=cli.positive, default=1, help="matrices, all of them used (default 1)")
    add(
        "--rows",
        type=cli.integers,
        default=(8, 16, 32, 64, 128, 256),
        metavar="R,...",
        help="rows per expert (default 8,16,32,64,128,256)",
    )
    cli.add_common(result)
    return result


def ratios(rows: Sequence[report.Row]) -> Table | None:
    """Lay out each contender's speed as a multiple of the baselines' in the same run."""
    median = {(row.contender, row.recipe, row.size): row.us_median for row in rows}
    found = [name for name in BASELINES if any((name, "w4a16", row.size) in median for row in rows)]
    ok = [row for row in rows if row.status == "ok"]
    found = [name for name in found if any(row.contender == name for row in ok)]
    if not found:
        return None
    table = Table(
        title="times faster than torch on dense weights",
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE,
    )
    table.add_column("rows", justify="right")
    table.add_column("contender", no_wrap=True)
    table.add_column("recipe", no_wrap=True)
    for name in found:
        table.add_column(f"x {name}", justify="right", no_wrap=True)
    sizes = sorted({row.size for row in ok if row.size is not None})
    for size in sizes:
        group = [row for row in ok if row.size == size and row.contender not in BASELINES]
        for row in group:
            cells = (speed_up(row, median.get((name, "w4a16", size))) for name in found)
            table.add_row(
                str(size), row.contender, row.recipe, *cells, end_section=row is group[-1]
            )
    return table


def speed_up(row: report.Row, baseline_us: float | None) -> str:
    """Baseline's time over the row's, or nothing where one is missing."""
    if row.us_median is None or baseline_us is None:
        return ""
    return f"{baseline_us / row.us_median:.2f}"


def _run(options: argparse.Namespace, console: Console) -> int:
    if options.k % presets.BLOCK:
        raise cli.UsageError(f"--k must be a multiple of {presets.BLOCK}, got {options.k}")
    session = cli.Session(options, console)
    preset = presets.GemmPreset(
        name=f"{options.n}x{options.k}",
        model="random weights",
        out_features=options.n,
        in_features=options.k,
        experts=options.experts,
        sweep=options.rows,
        source="the command line",
        note="",
    )
    need = layers.stored_bytes(preset, options.experts)
    if need > session.budget:
        raise cli.UsageError(
            f"{options.experts} experts of {preset.name} need {need / 2**30:.1f} GiB, the budget "
            f"is {session.budget / 2**30:.1f} GiB; use fewer --experts or --memory-budget"
        )
    usual = ON_CPU if session.device.type == "cpu" else ON_CUDA
    raced = cli.select(contenders(options.recipe, session.budget), options.contenders or usual)
    session.start()
    make = partial(layers.from_preset, preset, seed=options.seed, device=session.device)
    with cli.progress(len(options.rows) * len(raced)) as advance:
        own = session.race(preset.name, make, raced, advance)
    table = ratios(own)
    if table is not None:
        console.print(table)
    return session.finish()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Parameters
    ----------
    arguments : sequence of str, optional
        Instead of ``sys.argv[1:]``.

    Returns
    -------
    int
        0; 1 if any contender failed its check; 2 if the options cannot be followed.
    """
    options = parser().parse_args(arguments)
    return cli.run(lambda console: _run(options, console))


if __name__ == "__main__":
    sys.exit(main())
