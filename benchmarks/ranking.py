# SPDX-License-Identifier: Apache-2.0
"""Each row's time against the best peer's in the same run, for the block and for each GEMM.

A ratio is taken among contenders of one recipe and one number format.  The only one across formats
says the peer's format and bits: MXFP4 moves fewer bytes than NVFP4, and bf16 more.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from benchmarks import report
from benchmarks.accounting import BITS
from benchmarks.report import Row


class Best(NamedTuple):
    """A row's time over that of the best peer, and who that is; below 1 the row is faster."""

    peer: str | None
    ratio: float | None


NOBODY = Best(None, None)


def best(row: Row, others: Iterable[Row], field: str, *, with_format: bool = False) -> Best:
    """Compare ``row`` with the fastest of ``others`` by the time in ``field``."""
    own = getattr(row, field)
    timed = [other for other in others if getattr(other, field) is not None]
    if own is None or not timed:
        return NOBODY
    first = min(timed, key=lambda other: float(getattr(other, field)))
    name = f"{first.contender} ({_format(first)})" if with_format else first.contender
    return Best(name, own / getattr(first, field))


def _format(row: Row) -> str:
    bits = next((value for name, value in BITS.items() if name == row.weight_format), None)
    return f"{row.weight_format} {bits:g} bit"


def with_best_peers(rows: Sequence[Row], peers: Collection[str]) -> list[Row]:
    """Return one layer's rows with their ratios to the best of ``peers`` at the same size."""
    result = []
    for row in rows:
        at_size = [
            other
            for other in rows
            if other.status == "ok"
            and other.contender in peers
            and (other.size, other.recipe) == (row.size, row.recipe)
        ]
        alike = [other for other in at_size if other.weight_format == row.weight_format]
        block, gemm1, gemm2 = (best(row, alike, f) for f in ("us_median", "gemm1_us", "gemm2_us"))
        every = best(row, at_size, "us_median", with_format=True)
        result.append(
            replace(
                row,
                best_peer=block.peer,
                best_peer_ratio=block.ratio,
                gemm1_best_peer=gemm1.peer,
                gemm1_ratio=gemm1.ratio,
                gemm2_best_peer=gemm2.peer,
                gemm2_ratio=gemm2.ratio,
                any_format_best_peer=every.peer,
                any_format_ratio=every.ratio,
            )
        )
    return result


_TIMES = (
    ("block", "us_median", "best_peer_ratio", "best_peer"),
    ("gemm1", "gemm1_us", "gemm1_ratio", "gemm1_best_peer"),
    ("gemm2", "gemm2_us", "gemm2_ratio", "gemm2_best_peer"),
)


def table(rows: Sequence[Row], size_name: str) -> Table | None:
    """Lay out each time beside its ratio; None where no GEMM was timed apart and no peer ran."""
    shown = [
        row
        for row in rows
        if any(t is not None for t in (row.any_format_ratio, row.gemm1_us, row.gemm2_us))
    ]
    if not shown:
        return None
    title = (
        "the block and its GEMMs, and time over the best peer's: below 1, faster than every peer"
    )
    result = report.grid(title, size_name)
    for heading in ("contender", "recipe", "weights"):
        result.add_column(heading, no_wrap=True)
    for what, *_ in _TIMES:
        result.add_column(f"{what} us", justify="right", no_wrap=True)
        result.add_column("/ best", no_wrap=True)
    result.add_column("block / best of any format", no_wrap=True)
    shown.sort(key=lambda row: row.size or 0)
    for i, row in enumerate(shown):
        cells = []
        for _, time, ratio, peer in _TIMES:
            cells.append(report.significant(getattr(row, time), 4))
            cells.append(_cell(row, getattr(row, ratio), getattr(row, peer)))
        result.add_row(
            str(row.size),
            row.contender,
            row.recipe,
            row.weight_format or "",
            *cells,
            _cell(row, row.any_format_ratio, row.any_format_best_peer),
            end_section=i + 1 == len(shown) or shown[i + 1].size != row.size,
        )
    return result


def _cell(row: Row, ratio: float | None, peer: str | None) -> str:
    if ratio is None or peer is None:
        return ""
    own = peer.partition(" ")[0] == row.contender
    return "best" if own else f"{ratio:.2f} {peer}"


def print_table(console: Console, rows: Sequence[Row], size_name: str) -> None:
    """Print what :func:`table` lays out, if anything."""
    ratios = table(rows, size_name)
    if ratios is not None:
        console.print(ratios)
