# SPDX-License-Identifier: Apache-2.0
"""The torch baselines compute what they are compared with, for every kind of MoE block."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from benchmark_cases import TINY, TINY_GEMM, CountingTimer, race

import fp4lt
from benchmarks import layers, presets, routing, torch_loops
from benchmarks.contenders import Contender, Fp4lt, Grouped, Runner, Torch
from fp4lt.problem import Order

CASES = {
    "silu": TINY,
    "clamped": replace(TINY, swiglu_limit=0.5),
    "oai": replace(TINY, activation="swigluoai", order="interleaved", swiglu_limit=7.0, bias=True),
    "ungated": replace(TINY, activation="relu2", order=None),
    "gelu": replace(TINY, activation="gelu", order="up_gate"),
    "gelu_tanh": replace(TINY, activation="gelu_tanh", bias=True),
    "on input": replace(TINY, top_k=1, router_weight_on_input=True),
    "top-1": replace(TINY, top_k=1),
    "ep": TINY.share("tiny-ep3", 1, 3),
    "gemm": TINY_GEMM,
}


class HostGrouped(Grouped):
    """Grouped, but on the CPU too."""

    def refusal(self, layer: layers.Layer) -> str | None:
        return None


EVERYONE: tuple[Contender, ...] = (
    Fp4lt("cpu", "w4a4"),
    Fp4lt("cpu", "w4a16"),
    Torch(torch.bfloat16, ahead=True, memory_budget=2**30),
    Torch(torch.float32, ahead=True, memory_budget=2**30),
    Torch(torch.bfloat16, ahead=False, memory_budget=0),
    HostGrouped(2**30),
)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("contender", EVERYONE, ids=lambda c: f"{c.name}-{c.recipe}")
def test_contenders_pass(case: presets.Preset, contender: Contender) -> None:
    rows = race(layers.from_preset(case), contender, CountingTimer())
    assert [(row.status, row.reason) for row in rows] == [("ok", None)] * len(case.sweep)


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("silu", "gemm", "top-1")])
def test_the_check_sees_what_sets_a_block_apart(name: str) -> None:
    case = CASES[name]
    assert isinstance(case, presets.MoEPreset)
    layer = layers.from_preset(case)
    assert isinstance(layer, layers.MoELayer)
    plain = replace(layer, router_weight_on_input=False)
    if name == "ep":
        plain = replace(plain, copies=(replace(layer.weights, expert_start=2),))
    elif not case.router_weight_on_input:
        other: Order | None = {"gate_up": "up_gate", "up_gate": "gate_up"}.get(str(case.order))  # type: ignore[assignment]
        weights = layer.weights
        if case.order is None:
            weights = replace(weights, activation="gelu")
        elif case.swiglu_limit == 0.5:
            weights = replace(weights, swiglu_limit=None)
        else:
            weights = replace(weights, order=other or "gate_up")
        plain = replace(plain, copies=(weights,))

    class Wrong(Fp4lt):
        def prepare(self, layer: layers.Layer) -> Runner:
            return super().prepare(plain)

    rows = race(layer, Wrong("cpu", "w4a16"), CountingTimer())
    assert [row.status for row in rows] == ["FAILED", "FAILED"]


@pytest.mark.parametrize("order", ["gate_up", "up_gate", "interleaved"])
def test_torch_loop_knows_every_order(order: Order) -> None:
    layer = layers.from_preset(TINY)
    assert isinstance(layer, layers.MoELayer)
    weights = fp4lt.MoEWeights(
        layer.weights.w13,
        layer.weights.w2,
        order=order,
        gate_up_scales=torch.linspace(0.25, 4.0, 12).reshape(6, 2),
    )
    contender = Torch(torch.float32, ahead=True, memory_budget=2**30)
    rows = race(replace(layer, copies=(weights,)), contender, CountingTimer())
    assert [row.status for row in rows] == ["ok", "ok"]


def test_dense_stacks_are_the_experts_together() -> None:
    layer = layers.from_preset(TINY)
    stacks = torch_loops.dense_stacks(layer, 0, torch.bfloat16)
    for expert in range(6):
        alone = torch_loops.dense(layer, 0, expert, torch.bfloat16)
        assert all(torch.equal(s[expert], a) for s, a in zip(stacks, alone, strict=True))


@pytest.mark.parametrize("limit", [None, 0.25, torch.linspace(0.1, 0.6, 6)])
@pytest.mark.parametrize("alpha", [None, 1.5, torch.linspace(0.5, 2.0, 6)])
def test_swiglu_parameters_may_be_per_expert(
    limit: float | torch.Tensor | None, alpha: float | torch.Tensor | None
) -> None:
    layer = layers.from_preset(TINY)
    assert isinstance(layer, layers.MoELayer)
    weights = replace(layer.weights, swiglu_limit=limit, swiglu_alpha=alpha, swiglu_beta=0.5)
    for contender in (Torch(torch.float32, ahead=True, memory_budget=2**30), HostGrouped(2**30)):
        rows = race(replace(layer, copies=(weights,)), contender, CountingTimer())
        assert [row.status for row in rows] == ["ok", "ok"]


def test_an_ep_rank_counts_its_own_experts_only() -> None:
    layer = layers.from_preset(TINY.share("tiny-ep3", 1, 3))
    assert isinstance(layer, layers.MoELayer)
    assert (layer.experts, layer.weights.num_experts) == (2, 6)
    assert "E 2 of 6 (EP3)" in layer.title
    batch = layer.batch(5, 0)
    local = batch.routing.ids[batch.routing.ids < 2]
    assert batch.work.rows == local.numel() == sum(batch.rows)
    assert batch.work.active == len(set(local.tolist()))
    # The checked token must have something to check.
    assert bool((layer.check_batch(1).routing.ids < 2).any())


def test_a_rank_without_work_is_checked_for_zeros() -> None:
    nowhere = routing.Router("far", lambda t, e, k, *, seed, call: torch.full((t, k), 5).numpy())
    layer = layers.from_preset(replace(TINY, ep=3, top_k=1), router=nowhere)
    good = race(layer, Fp4lt("cpu", "w4a16"), CountingTimer())
    assert [(row.status, row.error, row.active_experts) for row in good] == [("ok", 0.0, 0)] * 2

    class Busy(Fp4lt):
        def prepare(self, layer: layers.Layer) -> Runner:
            return lambda batch: torch.ones_like(batch.x)

    bad = race(layer, Busy("cpu", "w4a16"), CountingTimer())
    assert [row.status for row in bad] == ["FAILED", "FAILED"]


def test_the_grouped_baseline_is_for_cuda() -> None:
    reason = Grouped(2**30).refusal(layers.from_preset(TINY))
    assert reason is not None
    assert "CUDA only" in reason
