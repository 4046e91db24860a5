# SPDX-License-Identifier: Apache-2.0
"""Expert parallelism: ``torchrun --nproc-per-node N -m benchmarks.expert_parallel``.

Times a MoE block whose experts are spread over the ranks, stage by stage, for the same number of
tokens per rank on 1, 2, 4, ... of them.  gloo on CPUs, nccl on GPUs.  docs/distributed.md says what
the rows mean.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks import cli, environment, ep_block, layers, presets, report, routing
from benchmarks.contenders import RECIPES
from fp4lt.distributed.exchange import Combine

DEFAULT_TOKENS = (1, 16, 128)


def parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    result = argparse.ArgumentParser(
        prog="torchrun --nproc-per-node N -m benchmarks.expert_parallel",
        description="Time a MoE block over N ranks: planning, dispatch, GEMMs, combine.",
        epilog="Exit status 1 if a result was wrong, 2 for unusable options. Without torchrun: "
        "one rank.",
    )
    add = result.add_argument
    add("--preset", action="append", metavar="NAME", help="a MoE model's shape (repeatable)")
    add("--tokens", type=cli.integers, default=DEFAULT_TOKENS, metavar="T,...", help="per rank")
    add("--ranks", type=cli.integers, metavar="N,...", help="default 1, 2, 4, ... and all")
    add("--recipe", type=cli.recipes, default=RECIPES, metavar="R,...", help="w4a4, w4a16 or both")
    add("--combine", choices=("exact", "partial"), default="exact", help="default exact")
    add("--routing", default="uniform", metavar="R", help=f"{routing.KINDS}; default uniform")
    add("--experts", type=cli.positive, help="of the whole model: keep N, to save memory")
    add("--device", choices=("cpu", "cuda"), help="default cuda where torch sees one")
    add("--threads", type=cli.positive, help="of each rank; torchrun's default is 1")
    add("--seed", type=int, default=0, help="of weights, activations and routings")
    add("--repeats", type=cli.positive, default=20, help="timed calls; default 20")
    add("--memory-budget", type=float, metavar="GIB", help="for one rank's weights")
    add("--timeout", type=float, default=600.0, metavar="S", help="of the process group")
    add("--json", type=Path, metavar="FILE", help="also write everything as JSON")
    add("--quick", action="store_true", help="3 calls: a smoke test")
    return result


def _join(options: argparse.Namespace) -> torch.device:
    """Enter the process group that torchrun describes, or one of this process alone."""
    kind = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(kind)
    if kind == "cuda":
        if not torch.cuda.is_available():
            raise cli.UsageError(f"--device cuda: torch {torch.__version__} sees no CUDA device")
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    backend = "nccl" if kind == "cuda" else "gloo"
    timeout = timedelta(seconds=options.timeout)
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        store = torch._C._distributed_c10d.HashStore()
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
    return device


def _sizes(options: argparse.Namespace, world: int) -> list[int]:
    if options.ranks is None:
        return [*(2**i for i in range(world.bit_length()) if 2**i < world), world]
    if max(options.ranks) > world:
        raise cli.UsageError(f"--ranks {max(options.ranks)}: torchrun started {world}")
    return list(options.ranks)


def _preset(name: str, experts: int | None, ranks: int) -> presets.MoEPreset:
    preset = presets.resolve(name)
    if not isinstance(preset, presets.MoEPreset) or preset.ep > 1:
        raise cli.UsageError(f"--preset {name}: a whole MoE model is needed; --ranks shares it out")
    preset = ep_block.cut(preset, experts)
    if preset.experts < max(ranks, preset.top_k):
        raise cli.UsageError(
            f"{name} has {preset.experts} experts; at least one for each of {ranks} ranks, and "
            f"{preset.top_k} for a token, are needed"
        )
    return preset


def _row_of(name: str, recipe: str, tokens: int, m: ep_block.Measured) -> list[report.Row]:
    """A row for each stage; one that says so where the result was wrong."""
    given: dict[str, Any] = {"layer": name, "recipe": recipe, "size": tokens, "error": m.error}
    given |= {"limit": m.limit, "weight_format": "nvfp4"}
    if m.error > m.limit:
        reason = f"error {m.error:.1e} against one process, {m.limit:.1e} allowed"
        return [report.Row(contender="call", status="FAILED", reason=reason, **given)]
    rows = []
    for stage, samples in m.stages.items():
        extra: dict[str, Any] = {}
        if stage in m.sent:
            sent = m.sent[stage]
            extra = {"megabytes": sent / 1e6, "gb_per_s": sent / samples.median / 1e3}
        elif stage == "gemms":
            extra = {
                "active_experts": m.active,
                "rows_per_active_expert": m.rows / m.active if m.active else 0.0,
                "tflop_per_s": m.flops / samples.median / 1e6,
            }
        rows.append(
            report.Row(
                contender=stage,
                status="ok",
                us_median=samples.median,
                us_p10=samples.percentile(10),
                us_p90=samples.percentile(90),
                calls=samples.n,
                **given,
                **extra,
            )
        )
    if m.no_graph is not None:
        rows.append(report.Row(contender="graph", status="unavailable", reason=m.no_graph, **given))
    return rows


def scaling(rows: Sequence[report.Row], ranks: dict[str, int]) -> list[dict[str, Any]]:
    """Whole calls at one number of tokens per rank, by number of ranks.

    ``efficiency`` is tokens per second and rank over those of the smallest number of ranks.
    """
    result = []
    first: dict[tuple[str, str, int | None], float] = {}
    for row in rows:
        if row.contender != "call" or row.us_median is None or row.size is None:
            continue
        count = ranks[row.layer]
        key = (row.layer.rpartition("-ep")[0], row.recipe, row.size)
        first.setdefault(key, row.us_median)
        result.append(
            {
                "model": key[0],
                "recipe": row.recipe,
                "tokens_per_rank": row.size,
                "ranks": count,
                "us_median": row.us_median,
                "tokens_per_s": count * row.size / row.us_median * 1e6,
                "efficiency": first[key] / row.us_median,
            }
        )
    return result


def _print_scaling(console: Console, points: Sequence[dict[str, Any]]) -> None:
    table = Table(title="Scaling, tokens per rank held", title_justify="left", box=box.SIMPLE)
    for heading in ("model", "recipe", "T per rank", "ranks", "us", "tokens/s", "efficiency"):
        table.add_column(heading, justify="left" if heading in ("model", "recipe") else "right")
    ordered = sorted(points, key=lambda p: (p["model"], p["recipe"], p["tokens_per_rank"]))
    for p in ordered:
        table.add_row(
            p["model"],
            p["recipe"],
            str(p["tokens_per_rank"]),
            str(p["ranks"]),
            f"{p['us_median']:,.1f}",
            f"{p['tokens_per_s']:,.0f}",
            f"{p['efficiency']:.2f}",
        )
    console.print(table)


def _run(options: argparse.Namespace, console: Console) -> int:
    device = _join(options)
    rank, world = dist.get_rank(), dist.get_world_size()
    if rank != 0:
        console.quiet = True
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    router = routing.parse(options.routing)
    sizes = _sizes(options, world)
    models = [_preset(n, options.experts, sizes[-1]) for n in options.preset or ["qwen3-30b"]]
    for preset in models:
        router.validate(max(options.tokens), preset.experts, preset.top_k)
    if options.json is not None and not options.json.resolve().parent.is_dir():
        raise cli.UsageError(f"--json {options.json}: no such folder")
    budget = environment.memory_budget(device) // (1 if device.type == "cuda" else world)
    if options.memory_budget is not None:
        budget = int(options.memory_budget * 2**30)
    repeats = 3 if options.quick else options.repeats
    # Every rank makes every group, in the same order.
    groups = {n: None if n == world else dist.new_group(list(range(n))) for n in sizes}

    facts = environment.describe(device)
    _print_header(console, facts, world, options.combine)
    rows: list[report.Row] = []
    ranks: dict[str, int] = {}
    combine: Combine = options.combine
    for preset in models:
        for n in sizes:
            name = f"{preset.name}-ep{n}"
            ranks[name] = n
            own: list[report.Row] = []
            need = layers.stored_bytes(preset, -(-preset.experts // n))
            if need > budget:
                reason = f"{need / 2**30:.1f} GiB a rank, the budget is {budget / 2**30:.1f} GiB"
                own = [
                    report.Row(name, "call", recipe, "unavailable", reason=reason)
                    for recipe in options.recipe
                ]
            elif rank < n:
                on = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
                with on:
                    block = ep_block.Block(preset, groups[n], n, device, options.seed, router)
                    for recipe in options.recipe:
                        for tokens in options.tokens:
                            m = block.measure(recipe, combine, tokens, repeats)
                            own += _row_of(name, recipe, tokens, m)
            report.print_layer(console, f"{name}: {preset.model}, {n} ranks", own, "T per rank")
            rows += own
            dist.barrier()
    report.print_absent(console, rows)
    points = scaling(rows, ranks)
    _print_scaling(console, points)
    # Only the first rank is in every group.
    failed = torch.tensor([any(row.status == "FAILED" for row in rows)], device=device)
    dist.broadcast(failed, 0)
    if options.json is not None and rank == 0:
        settings = {
            "combine": combine,
            "routing": router.name,
            "seed": options.seed,
            "repeats": repeats,
            "world": world,
            "backend": dist.get_backend(),
            "timing": ep_block.TIMING,
        }
        document = {
            "schema_version": report.SCHEMA_VERSION,
            "environment": facts,
            "settings": settings,
            "rows": [asdict(row) for row in rows],
            "scaling": points,
        }
        report.write_json(options.json, document)
        console.print(f"\nwrote {options.json}", soft_wrap=True, highlight=False)
    return int(failed.item())


def _print_header(console: Console, facts: dict[str, Any], world: int, combine: str) -> None:
    lines = {
        "machine": f"{environment.machine(facts)} a rank; {facts['cpus']} CPUs in rank 0's machine",
        "group": f"{world} ranks, {dist.get_backend()}; combine {combine}",
        "versions": f"fp4lt {facts['fp4lt']} (git {facts['git']}), torch {facts['torch']}",
        "timing": ep_block.TIMING,
    }
    if world * facts["threads"] > (facts["cpus"] or 1) and facts["gpu"] is None:
        lines["TOO FEW CPUS"] = (
            f"{world} ranks of {facts['threads']} threads share {facts['cpus']}: the ranks take "
            "turns, and scaling says nothing about machines of their own"
        )
    for key, value in lines.items():
        console.print(f"[bold]{key:<13}[/] {value}", soft_wrap=True, highlight=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns 0, 1 if a result was wrong, 2 for unusable options."""
    options = parser().parse_args(arguments)
    try:
        status = cli.run(lambda console: _run(options, console))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return status


if __name__ == "__main__":
    sys.exit(main())
