# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks' command lines share."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks import (
    ceilings,
    environment,
    layers,
    plot,
    presets,
    ranking,
    report,
    routing,
    runner,
)
from benchmarks.accounting import BITS
from benchmarks.contenders import PEER_NAMES, Contender
from benchmarks.peers import bundle
from benchmarks.prepared import BOUNDARIES, RECIPES, Recipe
from benchmarks.reference import Reference
from benchmarks.timing import CudaGraph, Timer, WallClock
from fp4lt import _C, errors

PATIENCE = 1.0  # seconds after which the default repeats of a slow contender end
CUDA_PATIENCE = 0.3  # the same of replays: they hardly vary, and a size is timed up to three times
REPORT_WIDTH = 170  # columns of a report that goes to a file or a pipe


class UsageError(Exception):
    """Options that name or ask for something impossible; the message says what is possible."""


def integers(text: str) -> tuple[int, ...]:
    """Parse increasing positive integers."""
    try:
        values = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"need integers like 1,4,16, got {text!r}") from None
    if min(values) < 1 or list(values) != sorted(set(values)):
        raise argparse.ArgumentTypeError(f"need increasing positive integers, got {text!r}")
    return values


def positive(text: str) -> int:
    """Parse one positive integer."""
    values = integers(text)
    if len(values) != 1:
        raise argparse.ArgumentTypeError(f"need one positive integer, got {text!r}")
    return values[0]


def recipes(text: str) -> tuple[Recipe, ...]:
    """Parse a list of recipes."""
    asked = text.split(",")
    if unknown := [name for name in asked if name not in RECIPES]:
        raise argparse.ArgumentTypeError(f"no recipe {unknown[0]!r}; there are {list(RECIPES)}")
    return tuple(recipe for recipe in RECIPES if recipe in asked)


def add_common(parser: argparse.ArgumentParser) -> None:
    """Add the options that all benchmarks have."""
    add = parser.add_argument
    add(
        "--recipe",
        type=recipes,
        default=RECIPES,
        metavar="R,...",
        help="w4a4, w4a16 or both, of fp4lt; the torch baselines are w4a16",
    )
    add("--contenders", metavar="NAME,...", help="only these")
    add(
        "--boundary",
        choices=tuple(BOUNDARIES),
        default="all",
        help="time whole calls, a MoE block's two GEMMs apart, or both (default all)",
    )
    add("--device", help="cpu or cuda; default cuda where torch sees one")
    add("--threads", type=positive, help="default: torch's own choice")
    add("--seed", type=int, default=0, help="of weights, activations and routings")
    add("--repeats", type=positive, help="timed calls (default 10, fewer of slow ones), or replays")
    add("--min-time", type=float, help="seconds of timed calls at least (default 0.3; CUDA 0.1)")
    add("--warm", action="store_true", help="leave caches as the previous call left them")
    add(
        "--memory-budget",
        type=float,
        metavar="GIB",
        help="for one contender's own copy of the weights; default half of the free memory",
    )
    add("--json", type=Path, metavar="FILE", help="also write everything as JSON")
    add("--plot", type=Path, metavar="FILE", help="also draw time over size, as .svg or .png")
    add("--quick", action="store_true", help="few calls and rough ceilings: a smoke test")


def select(every: Sequence[Contender], names: str | Sequence[str] | None) -> list[Contender]:
    """Return the contenders of these names, all by default."""
    if names is None:
        return list(every)
    asked = names.split(",") if isinstance(names, str) else names
    known = list(dict.fromkeys(contender.name for contender in every))
    if unknown := [name for name in asked if name not in known]:
        raise UsageError(f"no contender {unknown[0]!r}; there are {', '.join(known)}")
    return [contender for contender in every if contender.name in asked]


class Session:
    """One run: checked options, the device, its ceilings and the rows so far."""

    def __init__(self, options: argparse.Namespace, console: Console) -> None:
        self.options = options
        self.console = console
        for option in ("json", "plot"):
            path = getattr(options, option)
            if path is not None and not path.resolve().parent.is_dir():
                raise UsageError(f"--{option} {path}: no such folder")
        if options.plot is not None:
            plot.require(options.plot)
        if options.min_time is not None and not options.min_time >= 0:
            raise UsageError(f"--min-time must be 0 or more seconds, got {options.min_time}")
        bundle.set_cache_variables()  # before CUDA is initialized
        self.device = _device(options.device)
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        self.budget = (
            environment.memory_budget(self.device)
            if options.memory_budget is None
            else int(options.memory_budget * 2**30)
        )
        self.rows: list[report.Row] = []
        self.titles: dict[str, str] = {}
        self.size_names: dict[str, str] = {}

    def start(self) -> None:
        """Measure the ceilings and print the header; options must have been checked."""
        quick = self.options.quick
        self.facts = environment.describe(self.device)
        if self.device.type == "cuda":
            self.cache_bytes = int(self.facts["gpu"]["l2_bytes"])
            self.read = ceilings.cuda_read_bandwidth(self.device, quick=quick)
            self.compute = ceilings.cuda_compute(self.device, quick=quick)
            torch.cuda.empty_cache()
        else:
            self.cache_bytes = int(self.facts["llc_bytes"])
            self.read = ceilings.read_bandwidth(
                self.cache_bytes, self.facts["threads"], quick=quick
            )
            self.compute = ceilings.compute(quick=quick)
        self.timer = self._timer()
        report.print_header(
            self.console, self.facts, self.read, self.compute, self.timer.description
        )

    def _timer(self) -> Timer:
        repeats, min_time, quick = self.options.repeats, self.options.min_time, self.options.quick
        if self.device.type == "cuda":
            least = 0.1 if min_time is None else min_time
            return CudaGraph(
                calls=4 if quick else 16,
                repeats=repeats or (3 if quick else 20),
                min_time=0.0 if quick else least,
                max_time=float("inf") if repeats or min_time else CUDA_PATIENCE,
                warm=self.options.warm,
            )
        return WallClock(
            flush_bytes=0 if self.options.warm else 2 * self.cache_bytes,
            repeats=repeats or (3 if quick else 10),
            min_time=min_time if min_time is not None else (0.0 if quick else 0.3),
            max_time=float("inf") if repeats or min_time else PATIENCE,
        )

    def race(
        self,
        name: str,
        make: Callable[[], layers.Layer],
        raced: Sequence[Contender],
        advance: Callable[[str, int], None],
    ) -> list[report.Row]:
        """Make a layer, run the contenders on it and print its table."""
        if fault := runner.device_fault(self.device):
            own = runner.not_run(
                name, raced, f"the GPU is unusable since an earlier layer: {fault}"
            )
            self.rows += own
            return own
        advance(f"{name}: making the layer", 0)
        try:
            layer = make()
        except (errors.Error, ValueError, OSError) as error:
            raise UsageError(f"{name}: {error}") from error
        note = ""
        if self.device.type == "cuda" and not self.options.warm:
            # Three times the L2: twice would do for a cache that forgets the oldest first.
            count, enough = layers.copies_needed(layer, 3 * self.cache_bytes, self.budget)
            layer = layers.with_copies(layer, count)
            note = (
                f"; copies of the weights: {count}{'' if enough else ', too few to leave the L2'}"
            )
        own = runner.run_layer(
            layer,
            raced,
            self.timer,
            reference=Reference(layer),
            read=self.read,
            compute=self.compute,
            boundary=self.options.boundary,
            progress=advance,
        )
        own = ranking.with_best_peers(own, PEER_NAMES)
        title = layer.title + note
        size_name = "T" if layer.kind == "moe" else "rows"
        report.print_layer(self.console, title, own, size_name)
        ranking.print_table(self.console, own, size_name)
        self.rows += own
        self.titles[layer.name] = title
        self.size_names[layer.name] = size_name
        return own

    def finish(self, **settings: Any) -> int:
        """Write what was asked for; return the exit status."""
        report.print_absent(self.console, self.rows)
        if self.options.json is not None:
            timer = {"timer": type(self.timer).__name__} | vars(self.timer)
            if timer.get("max_time") == float("inf"):
                timer["max_time"] = None
            settings |= {
                "timing": self.timer.description,
                "timer": timer,
                "seed": self.options.seed,
                "quick": self.options.quick,
                "cold": not self.options.warm,
                "boundary": self.options.boundary,
                "boundaries": BOUNDARIES,
                "bits_per_weight": BITS,
                "layers": self.titles,
            }
            document = report.document(self.facts, self.read, self.compute, settings, self.rows)
            report.write_json(self.options.json, document)
            self._wrote(self.options.json)
        if self.options.plot is not None:
            plot.write(
                self.options.plot,
                self.rows,
                self.titles,
                self.size_names,
                environment.machine(self.facts),
            )
            self._wrote(self.options.plot)
        return 1 if any(row.status == "FAILED" for row in self.rows) else 0

    def _wrote(self, path: Path) -> None:
        self.console.print(f"\nwrote {path}", soft_wrap=True, highlight=False)


def _device(asked: str | None) -> torch.device:
    if asked is None:
        usable = torch.cuda.is_available() and bool(_C.cuda_built_with())
        return torch.device("cuda" if usable else "cpu")
    try:
        device = torch.device(asked)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"--device is cpu or cuda, got {asked!r}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"--device {asked}: torch {torch.__version__} sees no CUDA device")
    if device.type == "cuda" and not _C.cuda_built_with():
        raise UsageError(f"--device {asked}: this build of fp4lt has no CUDA code")
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
    return device


@contextmanager
def progress(total: int) -> Iterator[Callable[[str, int], None]]:
    """Show a bar on stderr if that is a terminal; yields ``advance(label, steps)``."""
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )
    with bar:
        task = bar.add_task("measuring", total=total)
        yield lambda label, steps: bar.update(task, description=label, advance=steps)


def run(body: Callable[[Console], int]) -> int:
    """Run a command; unusable options are a line on stderr and status 2."""
    # A pipe has no width of its own, and a table folded to 80 columns is unreadable.
    console = Console(width=None if sys.stdout.isatty() else REPORT_WIDTH)
    try:
        return body(console)
    except (UsageError, plot.PlotError, presets.PresetError, routing.RoutingError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
