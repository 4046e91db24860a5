# SPDX-License-Identifier: Apache-2.0
"""MoE decode on NVFP4 weights: ``python -m benchmarks.moe_decode`` from the repository's root.

Times one MoE block (or one grouped GEMM) per call on real checkpoints and on models' shapes.
Every contender is checked against the exact oracle before it is timed.  docs/benchmarks.md says
what is measured and what the columns mean.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks import ceilings, environment, layers, presets, report, runner
from benchmarks.contenders import FP4LT_BACKENDS, RECIPES, Contender, Recipe, contenders
from benchmarks.reference import Reference
from benchmarks.timing import WallClock
from fp4lt import errors

CHECKPOINTS = environment.ROOT / "tests" / "data" / "checkpoints"
DEFAULT_CHECKPOINTS = ("modelopt", "modelopt_split", "compressed_tensors")
DEFAULT_PRESETS = ("glm5-tp8",)
FALLBACK_BUDGET = 8 * 2**30
PATIENCE = 2.0  # seconds of timed calls after which a slow contender's default repeats end
REPORT_WIDTH = 160  # columns of a report that goes to a file or a pipe


class UsageError(Exception):
    """Options that name or ask for something impossible; the message says what is possible."""


@dataclass(frozen=True)
class Source:
    """A layer that is made when its turn comes, so that only one is in memory."""

    name: str
    sizes: tuple[int, ...]
    make: Callable[[], layers.Layer]


def _integers(text: str) -> tuple[int, ...]:
    try:
        values = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"need integers like 1,4,16, got {text!r}") from None
    if min(values) < 1 or list(values) != sorted(set(values)):
        raise argparse.ArgumentTypeError(f"need increasing positive integers, got {text!r}")
    return values


def _positive(text: str) -> int:
    values = _integers(text)
    if len(values) != 1:
        raise argparse.ArgumentTypeError(f"need one positive integer, got {text!r}")
    return values[0]


def _recipes(text: str) -> tuple[Recipe, ...]:
    asked = text.split(",")
    if unknown := [name for name in asked if name not in RECIPES]:
        raise argparse.ArgumentTypeError(f"no recipe {unknown[0]!r}; there are {list(RECIPES)}")
    return tuple(recipe for recipe in RECIPES if recipe in asked)


def parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    result = argparse.ArgumentParser(
        prog="python -m benchmarks.moe_decode",
        description="Time NVFP4 MoE blocks at decode sizes, each contender checked first.",
        epilog="Without --preset and --checkpoint: the test suite's three checkpoints and "
        "glm5-tp8. Exit status 1 if a contender failed its check, 2 for unusable options.",
    )
    add = result.add_argument
    add("--preset", action="append", metavar="NAME", help="a shape (repeatable); see --list")
    add(
        "--checkpoint",
        action="append",
        type=Path,
        metavar="PATH",
        help="folder or safetensors file (repeatable)",
    )
    add("--layer", type=int, help="layer of each checkpoint; not needed if it has only one")
    add("--top-k", type=_positive, help="of the checkpoints; default from their config.json")
    add(
        "--tokens",
        type=_integers,
        metavar="T,...",
        help="tokens in a call (rows per expert for a GEMM); default from the preset",
    )
    add(
        "--recipe",
        type=_recipes,
        default=RECIPES,
        metavar="R,...",
        help="w4a4, w4a16 or both, of fp4lt; the torch baselines are w4a16",
    )
    add("--contenders", metavar="NAME,...", help="only these; see --list")
    add("--threads", type=_positive, help="default: torch's own choice")
    add("--seed", type=int, default=0, help="of weights, activations and routings")
    add("--experts", type=_positive, help="keep only N experts of each preset, to save memory")
    add("--repeats", type=_positive, help="timed calls (default 10, fewer of slow ones)")
    add("--min-time", type=float, help="seconds of timed calls at least (default 0.3)")
    add("--warm", action="store_true", help="leave the caches as the previous call left them")
    add(
        "--memory-budget",
        type=float,
        metavar="GIB",
        help="for one contender's own copy of the weights; default half of the free memory",
    )
    add("--json", type=Path, metavar="FILE", help="also write everything as JSON")
    add("--quick", action="store_true", help="few calls and rough ceilings: a smoke test")
    add("--list", action="store_true", help="list presets and contenders and stop")
    return result


def _budget(asked: float | None) -> int:
    if asked is not None:
        return int(asked * 2**30)
    free = environment.available_memory()
    return FALLBACK_BUDGET if free is None else free // 2


def _sources(options: argparse.Namespace, budget: int) -> list[Source]:
    """Resolve what to time, refusing what cannot be before anything is measured."""
    known = presets.available()
    names: Sequence[str] = options.preset or ()
    paths: Sequence[Path] = options.checkpoint or ()
    if not names and not paths:
        names = DEFAULT_PRESETS
        paths = [CHECKPOINTS / name for name in DEFAULT_CHECKPOINTS]
    result = [_checkpoint_source(path, options) for path in paths]
    for name in names:
        if name not in known:
            raise UsageError(f"no preset {name!r}; there are {', '.join(known)}")
        result.append(_preset_source(known[name], options, budget))
    return result


def _checkpoint_source(path: Path, options: argparse.Namespace) -> Source:
    sizes = options.tokens or (1, 4, 24)
    return Source(
        path.name,
        sizes,
        lambda: layers.from_checkpoint(
            path, options.layer, sweep=sizes, top_k=options.top_k, seed=options.seed
        ),
    )


def _preset_source(preset: presets.Preset, options: argparse.Namespace, budget: int) -> Source:
    need = layers.stored_bytes(preset, min(options.experts or preset.experts, preset.experts))
    if need > budget:
        raise UsageError(
            f"{preset.name} needs {need / 2**30:.1f} GiB for its NVFP4 weights, the budget is "
            f"{budget / 2**30:.1f} GiB; use --experts N or --memory-budget"
        )
    sizes = options.tokens or preset.sweep
    return Source(
        preset.name,
        sizes,
        lambda: layers.from_preset(preset, sweep=sizes, experts=options.experts, seed=options.seed),
    )


def _select(all_of_them: Sequence[Contender], names: str | None) -> list[Contender]:
    if names is None:
        return list(all_of_them)
    asked = names.split(",")
    known = list(dict.fromkeys(contender.name for contender in all_of_them))
    if unknown := [name for name in asked if name not in known]:
        raise UsageError(f"no contender {unknown[0]!r}; there are {', '.join(known)}")
    return [contender for contender in all_of_them if contender.name in asked]


def _print_list(console: Console) -> None:
    console.print("[bold]presets[/]")
    for preset in presets.available().values():
        shape = " + ".join(f"{n}x{k}" for n, k in preset.gemms)
        console.print(
            f"  {preset.name:<14} {preset.kind:<5} {preset.model}: {preset.experts} x ({shape}), "
            f"sweep {','.join(map(str, preset.sweep))}",
            soft_wrap=True,
            highlight=False,
        )
    console.print("[bold]contenders[/] (those that cannot run are reported with the reason)")
    names = dict.fromkeys(contender.name for contender in contenders(RECIPES, 0))
    console.print(f"  {', '.join(names)}", soft_wrap=True, highlight=False)
    console.print(f"[bold]fp4lt backends[/]\n  {', '.join(FP4LT_BACKENDS)}", highlight=False)


def _timer(options: argparse.Namespace, llc_bytes: int) -> WallClock:
    return WallClock(
        flush_bytes=0 if options.warm else 2 * llc_bytes,
        repeats=options.repeats or (3 if options.quick else 10),
        min_time=options.min_time
        if options.min_time is not None
        else (0.0 if options.quick else 0.3),
        max_time=float("inf") if options.repeats or options.min_time else PATIENCE,
    )


@contextmanager
def _progress(total: int) -> Iterator[Callable[[str, int], None]]:
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


def _run(options: argparse.Namespace, console: Console) -> int:
    if options.json is not None and not options.json.resolve().parent.is_dir():
        raise UsageError(f"--json {options.json}: no such folder")
    if options.min_time is not None and not options.min_time >= 0:
        raise UsageError(f"--min-time must be 0 or more seconds, got {options.min_time}")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    budget = _budget(options.memory_budget)
    sources = _sources(options, budget)
    raced = _select(contenders(options.recipe, budget), options.contenders)

    facts = environment.describe()
    timer = _timer(options, facts["llc_bytes"])
    read = ceilings.read_bandwidth(facts["llc_bytes"], facts["threads"], quick=options.quick)
    compute = ceilings.compute(quick=options.quick)
    report.print_header(console, facts, read, compute, timer.description)

    rows: list[report.Row] = []
    titles: dict[str, str] = {}
    with _progress(sum(len(source.sizes) * len(raced) for source in sources)) as advance:
        for source in sources:
            advance(f"{source.name}: making the layer", 0)
            try:
                layer = source.make()
            except (errors.Error, ValueError, OSError) as error:
                raise UsageError(f"{source.name}: {error}") from error
            own = runner.run_layer(
                layer,
                raced,
                timer,
                reference=Reference(layer),
                read=read,
                compute=compute,
                progress=advance,
            )
            size_name = "T" if layer.kind == "moe" else "rows"
            report.print_layer(console, layer.title, own, size_name)
            rows += own
            titles[layer.name] = layer.title
            del layer
    report.print_absent(console, rows)
    if options.json is not None:
        settings = {
            "timing": timer.description,
            "seed": options.seed,
            "quick": options.quick,
            "cold": not options.warm,
            "repeats": timer.repeats,
            "min_time_s": timer.min_time,
            "max_time_s": None if timer.max_time == float("inf") else timer.max_time,
            "warmup": timer.warmup,
            "layers": titles,
        }
        report.write_json(options.json, report.document(facts, read, compute, settings, rows))
        console.print(f"\nwrote {options.json}", soft_wrap=True, highlight=False)
    return 1 if any(row.status == "FAILED" for row in rows) else 0


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
    # A pipe has no width of its own, and a table folded to 80 columns is unreadable.
    console = Console(width=None if sys.stdout.isatty() else REPORT_WIDTH)
    try:
        if options.list:
            _print_list(console)
            return 0
        return _run(options, console)
    except (UsageError, presets.PresetError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
