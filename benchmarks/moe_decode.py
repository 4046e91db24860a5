# SPDX-License-Identifier: Apache-2.0
"""MoE decode on NVFP4 weights: ``python -m benchmarks.moe_decode`` from the repository's root.

Times one MoE block (or one grouped GEMM) per call on real checkpoints and on models' shapes.
Every contender is checked against the exact oracle before it is timed.  docs/benchmarks.md says
what is measured and what the columns mean.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from benchmarks import cli, environment, layers, presets, routing
from benchmarks.contenders import FP4LT_BACKENDS, RECIPES, contenders

CHECKPOINTS = environment.ROOT / "tests" / "data" / "checkpoints"
DEFAULT_CHECKPOINTS = ("modelopt", "modelopt_split", "compressed_tensors")
CHECKPOINT_TOKENS = (1, 24)
DEFAULT_PRESETS = ("glm5-tp8",)


@dataclass(frozen=True)
class Source:
    """A layer that is made when its turn comes, so that only one is in memory."""

    name: str
    sizes: tuple[int, ...]
    make: Callable[[], layers.Layer]


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
    add("--tp", type=cli.positive, help="slices of each preset's I: as NAME-tpN")
    add("--ep", type=cli.positive, help="parts of each preset's experts: as NAME-epN")
    add(
        "--checkpoint",
        action="append",
        type=Path,
        metavar="PATH",
        help="folder or safetensors file (repeatable)",
    )
    add("--layer", type=int, help="layer of each checkpoint; not needed if it has only one")
    add("--top-k", type=cli.positive, help="of the checkpoints; default from their config.json")
    add(
        "--tokens",
        type=cli.integers,
        metavar="T,...",
        help="tokens in a call (rows per expert for a GEMM); default from the preset",
    )
    add("--routing", default="uniform", metavar="R", help=f"{routing.KINDS}; default uniform")
    add("--experts", type=cli.positive, help="keep only N experts of each preset, to save memory")
    cli.add_common(result)
    add("--list", action="store_true", help="list presets and contenders and stop")
    return result


def _sources(session: cli.Session, router: routing.Router) -> list[Source]:
    """Resolve what to time, refusing what cannot be before anything is measured."""
    options = session.options
    names: Sequence[str] = options.preset or ()
    paths: Sequence[Path] = options.checkpoint or ()
    if not names and not paths:
        names = DEFAULT_PRESETS
        paths = [CHECKPOINTS / name for name in DEFAULT_CHECKPOINTS]
        if options.tp or options.ep:
            raise cli.UsageError("--tp and --ep are of presets: give --preset")
    given = {"seed": options.seed, "router": router, "device": session.device}
    result = []
    for path in paths:
        sizes = options.tokens or CHECKPOINT_TOKENS
        make = partial(layers.from_checkpoint, path, options.layer, sweep=sizes, **given)
        result.append(Source(path.name, sizes, partial(make, top_k=options.top_k)))
    for name in names:
        preset = presets.resolve(name, tp=options.tp, ep=options.ep)
        _check_memory(preset, options.experts, session.budget)
        sizes = options.tokens or preset.sweep
        make_layer = partial(layers.from_preset, preset, sweep=sizes, **given)
        result.append(Source(preset.name, sizes, partial(make_layer, experts=options.experts)))
    return result


def _check_memory(preset: presets.Preset, experts: int | None, budget: int) -> None:
    need = layers.stored_bytes(preset, min(experts or preset.local_experts, preset.local_experts))
    if need > budget:
        raise cli.UsageError(
            f"{preset.name} needs {need / 2**30:.1f} GiB for its NVFP4 weights, the budget is "
            f"{budget / 2**30:.1f} GiB; use --experts N, --tp, --ep or --memory-budget"
        )


def _print_list(console: Console) -> None:
    console.print("[bold]presets[/] (a MoE model also as NAME-tpN and NAME-epN)")
    for preset in presets.available().values():
        shape = " + ".join(f"{n}x{k}" for n, k in preset.gemms)
        extra = "" if preset.kind == "gemm" else f", top-{preset.top_k} {preset.activation}"
        console.print(
            f"  {preset.name:<17} {preset.kind:<5} {preset.model}: {preset.experts} x ({shape})"
            f"{extra}, sweep {','.join(map(str, preset.sweep))}",
            soft_wrap=True,
            highlight=False,
        )
    console.print(f"[bold]suggested[/]\n  {', '.join(presets.SUGGESTED)}", highlight=False)
    console.print(f"[bold]routings[/]\n  {escape(routing.KINDS)}", highlight=False)
    console.print("[bold]contenders[/] (those that cannot run are reported with the reason)")
    names = dict.fromkeys(contender.name for contender in contenders(RECIPES, 0))
    console.print(f"  {', '.join(names)}", soft_wrap=True, highlight=False)
    console.print(f"[bold]fp4lt backends[/]\n  {', '.join(FP4LT_BACKENDS)}", highlight=False)


def _run(options: argparse.Namespace, console: Console) -> int:
    if options.list:
        _print_list(console)
        return 0
    session = cli.Session(options, console)
    router = routing.parse(options.routing)
    sources = _sources(session, router)
    raced = cli.select(contenders(options.recipe, session.budget), options.contenders)
    session.start()
    with cli.progress(sum(len(source.sizes) * len(raced) for source in sources)) as advance:
        for source in sources:
            session.race(source.name, source.make, raced, advance)
    return session.finish(routing=router.name)


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
