# SPDX-License-Identifier: Apache-2.0
"""Time over size for each contender, with the floor below; needs matplotlib."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import Row

SUFFIXES = (".svg", ".png")
_SIZES = {"T": "tokens in a call", "rows": "rows per expert"}


class PlotError(Exception):
    """A plot that cannot be drawn; the message says what is needed."""


def require(path: Path) -> Any:
    """Return matplotlib, refusing before anything is measured what could not be drawn after."""
    if path.suffix.lower() not in SUFFIXES:
        raise PlotError(f"--plot {path}: the name must end in {' or '.join(SUFFIXES)}")
    try:
        return importlib.import_module("matplotlib")
    except ImportError as error:
        raise PlotError(
            f"--plot needs matplotlib ({error}); install it, or fp4lt's extra: pip install "
            "'.[bench]'"
        ) from error


def write(
    path: Path,
    rows: Sequence[Row],
    titles: Mapping[str, str],
    size_names: Mapping[str, str],
    machine: str,
) -> None:
    """Draw one panel per layer.

    Parameters
    ----------
    path : Path
        Its suffix is the format.
    rows : sequence of Row
        Those that were timed are drawn: medians as points, p10 to p90 as a band.
    titles, size_names : mapping
        By layer.
    machine : str
        For the title.
    """
    matplotlib = require(path)
    figures = importlib.import_module("matplotlib.figure")
    timed = [row for row in rows if row.us_median is not None]
    drawn = [name for name in titles if any(row.layer == name for row in timed)]
    if not drawn:
        raise PlotError(f"--plot {path}: nothing was timed")
    # One colour for a contender in all panels.
    every = list(dict.fromkeys((row.contender, row.recipe) for row in timed))
    with matplotlib.rc_context({"svg.hashsalt": "fp4lt", "svg.fonttype": "none"}):
        figure = figures.Figure(figsize=(11, 4.5 * len(drawn) + 0.6), layout="constrained")
        figure.suptitle(machine)
        for i, name in enumerate(drawn):
            axes = figure.add_subplot(len(drawn), 1, i + 1)
            mine = [row for row in timed if row.layer == name]
            _panel(axes, mine, every, titles[name], size_names[name])
        figure.savefig(path, dpi=150)


def _panel(
    axes: Any, rows: Sequence[Row], every: Sequence[tuple[str, str]], title: str, size_name: str
) -> None:
    sizes = sorted({row.size for row in rows if row.size is not None})
    for index, key in enumerate(every):
        mine = sorted(
            (row for row in rows if (row.contender, row.recipe) == key), key=lambda r: r.size or 0
        )
        if not mine:
            continue
        at, colour = [row.size for row in mine], f"C{index % 10}"
        style = "s--" if index >= 10 else "o-"
        axes.plot(at, [row.us_median for row in mine], style, color=colour, label=" ".join(key))
        low, high = ([getattr(row, p) for row in mine] for p in ("us_p10", "us_p90"))
        axes.fill_between(at, low, high, color=colour, alpha=0.15, linewidth=0)
    floors = {row.size: row.floor_us for row in rows}
    axes.plot(sizes, [floors[size] for size in sizes], "k:", label="floor")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set_xlabel(f"{_SIZES[size_name]} ({size_name})")
    axes.set_ylabel("time of a call (us), median; band p10 to p90")
    axes.set_title(title, fontsize="small", wrap=True)
    axes.grid(True, which="both", alpha=0.2)
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1.01, 0.5))
