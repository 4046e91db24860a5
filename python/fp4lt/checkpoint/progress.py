# SPDX-License-Identifier: Apache-2.0
"""A progress bar on stderr for large loads, where rich is installed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Final

from fp4lt.errors import ArgumentError, UnsupportedError

LARGE_EXPERTS: Final = 64
LARGE_BYTES: Final = 256 * 2**20


def check_progress(progress: bool | None) -> None:
    """Refuse what is no choice, and a bar that cannot be drawn."""
    if progress is not None and not isinstance(progress, bool):
        raise ArgumentError(f"load_moe: progress must be True, False or None, got {progress!r}")
    if progress and not _have_rich():
        raise UnsupportedError(
            "load_moe: progress=True draws its bar with rich, which is not installed; "
            "pip install rich, or leave progress out"
        )


@contextmanager
def progress_bar(
    progress: bool | None, title: str, experts: int, size: int
) -> Iterator[Callable[[int], object]]:
    """Yield a function that takes the number of bytes that have just been read.

    Parameters
    ----------
    progress : bool, optional
        None draws a bar if stderr is a terminal, rich is there and the load is large.
    title : str
        Stands before the bar.
    experts, size : int
        Experts and bytes to come.
    """
    if progress is None:
        large = experts >= LARGE_EXPERTS or size > LARGE_BYTES
        progress = large and sys.stderr.isatty() and _have_rich()
    if not progress:
        yield lambda count: None
        return
    bars = import_module("rich.progress")
    console = import_module("rich.console").Console(stderr=True)
    text, left = bars.TextColumn("{task.description}"), bars.TimeRemainingColumn()
    with bars.Progress(
        text, bars.BarColumn(), bars.DownloadColumn(binary_units=True), left, console=console
    ) as shown:
        task = shown.add_task(import_module("rich.markup").escape(title), total=size)
        yield lambda count: shown.advance(task, count)


def _have_rich() -> bool:
    return find_spec("rich") is not None
