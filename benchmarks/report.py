# SPDX-License-Identifier: Apache-2.0
"""Rows, the table on the terminal and the JSON file."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.accounting import BITS
from benchmarks.ceilings import Ceiling

SCHEMA_VERSION = 2
BUSY = 0.5  # load average of the minute before a run above which the header warns
Status = Literal["ok", "FAILED", "unavailable"]


@dataclass(frozen=True)
class Row:
    """One contender at one size, or one that did not run and why.

    Times are in microseconds, ``megabytes`` in 1e6 bytes, rates in 1e9 bytes and 1e12 operations
    per second; averages are over the timed calls.  ``size`` is tokens, for a GEMM rows per expert.
    A ratio is this row's time over the best peer's: below 1 this row is faster.
    """

    layer: str
    contender: str
    recipe: str
    status: Status
    size: int | None = None
    reason: str | None = None
    error: float | None = None
    limit: float | None = None
    active_experts: float | None = None
    rows_per_active_expert: float | None = None
    us_median: float | None = None
    us_p10: float | None = None
    us_p90: float | None = None
    calls: int | None = None
    preemptions_per_call: float | None = None
    weight_format: str | None = None
    megabytes: float | None = None
    gb_per_s: float | None = None
    tflop_per_s: float | None = None
    floor_us: float | None = None
    floor_bound: str | None = None
    floor_percent: float | None = None
    gemm1_us: float | None = None
    gemm2_us: float | None = None
    best_peer: str | None = None
    best_peer_ratio: float | None = None
    gemm1_best_peer: str | None = None
    gemm1_ratio: float | None = None
    gemm2_best_peer: str | None = None
    gemm2_ratio: float | None = None
    any_format_best_peer: str | None = None
    any_format_ratio: float | None = None


def _seen(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


def significant(value: float | None, digits: int = 3) -> str:
    """Format with so many significant digits, 5 decimals at most, without exponent."""
    if value is None:
        return ""
    if value == 0:
        return "0"
    return f"{float(f'{value:.{digits}g}'):,.{_decimals(value, digits)}f}"


def _decimals(value: float, digits: int) -> int:
    exponent = int(f"{abs(value):.{digits - 1}e}".partition("e")[2])
    return min(5, max(0, digits - 1 - exponent))


def _text(value: object) -> str:
    return "" if value is None else str(value)


def _error(row: Row) -> str:
    error = "" if row.error is None else f"{row.error:.1e}"
    return f"[bold red]FAILED[/] {error}" if row.status == "FAILED" else error


def _weights(row: Row) -> str:
    bits = {str(name): value for name, value in BITS.items()}
    return "" if row.weight_format is None else f"{row.weight_format} {bits[row.weight_format]:g}b"


COLUMNS: dict[str, Callable[[Row], str]] = {
    "contender": lambda row: escape(row.contender),
    "recipe": lambda row: row.recipe,
    "weights": _weights,
    "error": _error,
    "active": lambda row: _seen(row.active_experts, 1),
    "rows/act": lambda row: _seen(row.rows_per_active_expert, 2),
    "us median": lambda row: significant(row.us_median, 4),
    "p10": lambda row: significant(row.us_p10),
    "p90": lambda row: significant(row.us_p90),
    "n": lambda row: _text(row.calls),
    "preempt": lambda row: _seen(row.preemptions_per_call, 1),
    "MB": lambda row: significant(row.megabytes),
    "GB/s": lambda row: significant(row.gb_per_s),
    "TFLOP/s": lambda row: significant(row.tflop_per_s),
    "floor us": lambda row: significant(row.floor_us),
    "% floor": lambda row: significant(row.floor_percent),
}


def grid(title: str, size_name: str) -> Table:
    """An empty table in the reports' style, with a column for sizes."""
    result = Table(title=escape(title), title_justify="left", title_style="bold", box=box.SIMPLE)
    result.add_column(size_name, justify="right", no_wrap=True)
    return result


def table(title: str, rows: Sequence[Row], size_name: str) -> Table:
    """Lay out one layer's rows, by size and in the contenders' order within a size.

    A column that no row has a value for is left out.
    """
    shown = sorted(
        (row for row in rows if row.status != "unavailable" and row.size is not None),
        key=lambda row: row.size or 0,
    )
    cells = {heading: [cell(row) for row in shown] for heading, cell in COLUMNS.items()}
    used = [heading for heading, column in cells.items() if any(column)]
    result = grid(title, size_name)
    for heading in used:
        left = heading in ("contender", "recipe", "weights")
        result.add_column(heading, justify="left" if left else "right", no_wrap=True)
    for i, row in enumerate(shown):
        last = i + 1 == len(shown) or shown[i + 1].size != row.size
        values = (cells[heading][i] for heading in used)
        result.add_row(str(row.size), *values, end_section=last)
    return result


def print_layer(console: Console, title: str, rows: Sequence[Row], size_name: str) -> None:
    """Print a layer's table, then what failed and why."""
    console.print()
    if any(row.status != "unavailable" for row in rows):
        console.print(table(title, rows, size_name))
    else:
        console.print(f"[bold]{escape(title)}[/]")
    for row in rows:
        if row.status == "FAILED":
            where = "" if row.size is None else f" at {size_name} = {row.size}"
            console.print(
                f"[bold red]FAILED[/] {row.contender} {row.recipe}{where}: "
                f"{escape(row.reason or '')}",
                soft_wrap=True,
            )


def print_absent(console: Console, rows: Sequence[Row]) -> None:
    """Print who did not run, with the reason, and on which layers if not on all of them."""
    layers = dict.fromkeys(row.layer for row in rows)
    # One backend refuses all recipes and layers for one reason as a rule: say it once.
    absent: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row.status == "unavailable":
            absent.setdefault((row.contender, row.reason or ""), []).append(row)
    console.print()
    for (contender, reason), group in absent.items():
        recipes = ", ".join(dict.fromkeys(row.recipe for row in group))
        where = dict.fromkeys(row.layer for row in group)
        on = "" if len(where) == len(layers) else f" on {', '.join(where)}"
        console.print(
            f"not run: {contender} ({recipes}){on}: {escape(reason)}",
            soft_wrap=True,
            highlight=False,
        )


def print_header(
    console: Console,
    environment: dict[str, Any],
    read: Ceiling,
    compute: Ceiling,
    timing: str,
) -> None:
    """Print what the tables below were measured on, and against."""
    sizes = ", ".join(
        f"{name} {size / 2**10:,.0f} KiB" for name, size in environment["caches"].items()
    )
    lines = {
        "CPU": f"{environment['cpu']} ({environment['cpu_capability']} in torch), "
        f"{environment['threads']} threads",
        "caches": f"{sizes or 'unknown'}; last level {environment['llc_bytes'] / 2**20:.0f} MiB, "
        f"{environment['llc_source']}",
        "versions": f"fp4lt {environment['fp4lt']} (git {environment['git']}), torch "
        f"{environment['torch']}, Python {environment['python']}",
        "timing": timing,
        "read ceiling": f"{read.value / 1e9:.1f} GB/s, best of {_candidates(read, 1e9)}",
        "compute ceiling": f"{compute.value / 1e12:.3f} TFLOP/s, best of "
        f"{_candidates(compute, 1e12)}",
        "floor": "max(NVFP4 weights of the active experts + activations / read ceiling, "
        "operations / compute ceiling), the same for every contender of a size; "
        "% floor = floor / median",
    }
    gpu = environment["gpu"]
    if gpu is not None:
        lines = {
            "GPU": f"{gpu['name']}, CC {gpu['compute_capability']}, {gpu['multiprocessors']} SMs, "
            f"L2 {gpu['l2_bytes'] / 2**20:.0f} MiB, {gpu['memory_bytes'] / 2**30:.0f} GiB; driver "
            f"{gpu['driver']}, torch's CUDA {gpu['torch_cuda']}; fp4lt built for "
            f"{gpu['fp4lt_architectures']}"
        } | lines
    load = environment["load_average"]
    if gpu is None and load is not None and load >= BUSY:
        lines["BUSY MACHINE"] = (
            f"load average {load} in the minute before: if that was other work and it goes on, "
            "calls whose threads wait for each other can take many times longer than alone"
        )
    for key, value in lines.items():
        console.print(f"[bold]{key:<15}[/] {escape(value)}", soft_wrap=True, highlight=False)


def _candidates(ceiling: Ceiling, unit: float) -> str:
    return ", ".join(f"{name} {value / unit:.3g}" for name, value in ceiling.candidates.items())


def document(
    environment: dict[str, Any],
    read: Ceiling,
    compute: Ceiling,
    settings: dict[str, Any],
    rows: Sequence[Row],
) -> dict[str, Any]:
    """Assemble the JSON report."""
    return {
        "schema_version": SCHEMA_VERSION,
        "environment": environment,
        "settings": settings,
        "ceilings": {
            "read_bytes_per_s": asdict(read),
            "compute_flop_per_s": asdict(compute),
        },
        "rows": [asdict(row) for row in rows],
    }


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Write a report so that ``path`` holds either the old file or the whole new one."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(data, file, indent=1, allow_nan=False)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        # mkstemp's files are for the owner only; a report is an ordinary file.
        mask = os.umask(0)
        os.umask(mask)
        temporary.chmod(0o666 & ~mask)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
