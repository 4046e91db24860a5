# SPDX-License-Identifier: Apache-2.0
"""One rank's part of an expert-parallel block: its weights, its check, its stages timed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

import fp4lt
from benchmarks import layers, presets, routing
from benchmarks.contenders import Recipe
from benchmarks.timing import Samples, event_seconds
from fp4lt.distributed import Exchange, ExpertParallelMoE, expert_range
from fp4lt.distributed.exchange import Combine

STAGES = ("plan", "dispatch", "gemms", "combine")
TIMING = (
    "each stage of a call, the ranks starting it together (a barrier before each); `call` is all "
    "of them with one barrier before; a sample is the slowest rank's"
)
CHECKED = 2  # tokens of each rank that are compared with one process
# Both round an fp32 sum to bf16; sums in another order can fall on either side of a midpoint.
PARTIAL_LIMIT = 2.0**-7
# Their rows have the same bits in every batch.
EXACT_BACKENDS = ("cpu", "fused")


@dataclass(frozen=True)
class Measured:
    """One recipe at one number of tokens per rank.

    Attributes
    ----------
    error, limit : float
        Largest relative norm of the difference from one process, over the ranks.
    stages : dict of str to Samples
        By the names of :data:`STAGES`, then "call", then "graph" where it was captured.
    sent : dict of str to float
        Bytes that the busiest rank sends to others in a dispatch and a combine, mean over calls.
    active, rows, flops : float
        Means over ranks and calls: experts with rows, their rows, operations of the GEMMs.
    no_graph : str, optional
        Why there is no graph on a CUDA device.
    """

    error: float
    limit: float
    stages: dict[str, Samples]
    sent: dict[str, float]
    active: float
    rows: float
    flops: float
    no_graph: str | None = None


def cut(preset: presets.MoEPreset, experts: int | None) -> presets.MoEPreset:
    """The model with at most so many experts; its name says so."""
    if experts is None or experts >= preset.experts:
        return preset
    return replace(preset, experts=experts, name=f"{preset.name}-cut{experts}")


def make_weights(
    preset: presets.MoEPreset, experts: list[int], seed: int, device: torch.device
) -> tuple[fp4lt.NVFP4Tensor, fp4lt.NVFP4Tensor]:
    """``w13`` and ``w2`` of these experts; an expert's bytes depend on its number alone."""
    stacks = []
    for salt, (n, k) in zip((0x13, 0x02), preset.gemms, strict=True):
        each = [layers.random_nvfp4(1, n, k, [seed, salt, e], device) for e in experts]
        codes, scales, g = (
            torch.cat([getattr(t, name) for t in each])
            for name in ("codes", "scales", "global_scale")
        )
        stacks.append(fp4lt.NVFP4Tensor(codes, scales, g))
    return stacks[0], stacks[1]


class Block:
    """A preset's block on this rank of `group`, which has the ranks 0 to `size` - 1."""

    def __init__(
        self,
        preset: presets.MoEPreset,
        group: dist.ProcessGroup | None,
        size: int,
        device: torch.device,
        seed: int,
        router: routing.Router,
    ) -> None:
        self.preset, self.group, self.size, self.device = preset, group, size, device
        self.seed, self.router, self.rank = seed, router, dist.get_rank(group)
        own = expert_range(preset.experts, self.rank, size)
        w13, w2 = make_weights(preset, list(own), seed, device)
        self.weights = fp4lt.MoEWeights(
            w13,
            w2,
            order=preset.order,
            activation=preset.activation,
            swiglu_limit=preset.swiglu_limit,
            expert_start=own.start,
            num_experts=preset.experts,
        )

    def measure(self, recipe: Recipe, combine: Combine, tokens: int, repeats: int) -> Measured:
        """Check, then time `repeats` calls, each with its own routing; collective."""
        ep = ExpertParallelMoE(
            self.weights,
            group=self.group,
            recipe=recipe,
            router_weight_on_input=self.preset.router_weight_on_input,
            combine=combine,
        )
        generator = torch.Generator().manual_seed(self.seed * 1000 + self.rank)
        x = torch.randn(tokens, self.preset.hidden, generator=generator).to(
            self.device, torch.bfloat16
        )
        routings = [self._draw(tokens, call) for call in range(-2, repeats)]
        error, limit = self._check(ep, x, routings[0], recipe, combine)
        if error > limit:
            return Measured(error, limit, {}, {}, 0.0, 0.0, 0.0)
        times, sent, work = [], [], []
        for call, drawn in enumerate(routings):
            exchange, seconds = self._time(ep, x, drawn)
            if call < 2:  # warm-up
                continue
            times.append(seconds)
            sent.append(exchange.bytes_sent(self.rank, self.preset.hidden))
            ids = exchange.local_ids[exchange.local_ids >= 0]
            work.append((float(len(ids.unique())), float(len(ids))))
        slowest = self._reduce(torch.tensor(times, dtype=torch.float64), dist.ReduceOp.MAX)
        busiest = self._reduce(torch.tensor(sent, dtype=torch.float64), dist.ReduceOp.MAX)
        every = self._reduce(torch.tensor(work, dtype=torch.float64), dist.ReduceOp.SUM)
        stages = {
            name: Samples(tuple((slowest[:, i] * 1e6).tolist()))
            for i, name in enumerate((*STAGES, "call"))
        }
        no_graph = None
        if self.device.type == "cuda":
            graph, no_graph = self._graph(ep, x, routings[-1], repeats)
            if graph is not None:
                stages["graph"] = graph
        active, rows = (every.mean(0) / self.size).tolist()
        dispatched, returned = busiest.mean(0).tolist()
        flops = 2 * rows * sum(n * k for n, k in self.preset.gemms)
        moved = {"dispatch": dispatched, "combine": returned}
        return Measured(error, limit, stages, moved, active, rows, flops, no_graph)

    def _draw(self, tokens: int, call: int) -> routing.Routing:
        p = self.preset
        drawn = self.router.draw(
            tokens, p.experts, p.top_k, seed=self.seed, call=call * self.size + self.rank
        )
        return drawn.to(self.device)

    def _check(
        self,
        ep: ExpertParallelMoE,
        x: torch.Tensor,
        drawn: routing.Routing,
        recipe: Recipe,
        combine: Combine,
    ) -> tuple[float, float]:
        """The first tokens against one process that has just their experts."""
        y = ep(x, topk_weights=drawn.weights, topk_ids=drawn.ids)[:CHECKED]
        head = drawn.head(CHECKED)
        experts, ids = head.ids.unique(return_inverse=True)
        w13, w2 = make_weights(self.preset, experts.tolist(), self.seed, self.device)
        few = replace(self.weights, w13=w13, w2=w2, expert_start=0, num_experts=len(experts))
        plan = fp4lt.plan_moe(x[:CHECKED], few, top_k=self.preset.top_k, recipe=recipe)
        want = plan.run(
            x[:CHECKED],
            few,
            topk_weights=head.weights,
            topk_ids=ids,
            router_weight_on_input=self.preset.router_weight_on_input,
        ).double()
        norm = want.norm()
        error = ((y.double() - want).norm() / norm).cpu() if norm else torch.tensor(0.0)
        worst = self._reduce(error.double().reshape(1, 1), dist.ReduceOp.MAX)
        exact = combine == "exact" and plan.backend.name in EXACT_BACKENDS
        return float(worst), 0.0 if exact else PARTIAL_LIMIT

    def _time(
        self, ep: ExpertParallelMoE, x: torch.Tensor, drawn: routing.Routing
    ) -> tuple[Exchange, list[float]]:
        """Seconds of each stage, then of the whole call."""
        given = {"topk_weights": drawn.weights, "topk_ids": drawn.ids}
        planned: list[Exchange] = []
        held: list[torch.Tensor] = []
        calls: list[Callable[[], None]] = [
            lambda: planned.append(ep.plan(x, **given)),
            lambda: held.append(ep.dispatch(planned[0], x)),
            lambda: held.append(ep.compute(planned[0], held[0])),
            lambda: held.append(ep.combine(planned[0], held[1])),
            lambda: held.append(ep(x, **given)),
        ]
        seconds = [self._seconds(call) for call in calls]
        return planned[0], seconds

    def _seconds(self, call: Callable[[], None]) -> float:
        dist.barrier(self.group)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            return event_seconds(call)
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    def _graph(
        self, ep: ExpertParallelMoE, x: torch.Tensor, drawn: routing.Routing, repeats: int
    ) -> tuple[Samples | None, str | None]:
        """Replays of dispatch, GEMMs and combine of one planned routing, captured."""
        exchange = ep.plan(x, topk_weights=drawn.weights, topk_ids=drawn.ids)
        ep.run(exchange, x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            # nccl's watchdog thread asks for events meanwhile, which "global" would not allow.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                ep.run(exchange, x)
        except RuntimeError as error:
            return None, f"capture failed: {error}"
        graph.replay()
        times = [[self._seconds(graph.replay)] for _ in range(repeats)]
        slowest = self._reduce(torch.tensor(times, dtype=torch.float64), dist.ReduceOp.MAX)
        return Samples(tuple((slowest[:, 0] * 1e6).tolist())), None

    def _reduce(self, values: torch.Tensor, how: dist.ReduceOp.RedOpType) -> torch.Tensor:
        values = values.to(self.device)
        dist.all_reduce(values, how, group=self.group)
        return values.cpu()
