# SPDX-License-Identifier: Apache-2.0
"""SGLang's and vLLM's NVFP4 MoE cases: small ones on the CPU, all of theirs on a GPU."""

from __future__ import annotations

from typing import Any

import kernel_cases as peers
import pytest
import torch

import fp4lt
from fp4lt.integrations.weights import Stack, build_weights, plan_block
from fp4lt.problem import MoETrace, Recipe
from fp4lt.testing import bounds

# All combinations of one shape, and a third of the others'.
SMALL = peers.every(peers.SMALL_SHAPES[:1]) + peers.every(peers.SMALL_SHAPES[1:])[::3]
SMALL_UNGATED = peers.every(peers.SMALL_SHAPES[:2], gated=False)[::3]
UNGATED = [c for c in peers.every(peers.SHAPES, gated=False) if c.dtype == torch.bfloat16]


def run(case: peers.Case, recipe: Recipe, device: str) -> tuple[peers.Call, MoETrace, Any]:
    call = peers.make(case, device)
    plan = fp4lt.plan_moe(call.hidden, call.weights, top_k=case.top_k, recipe=recipe)
    trace = plan.trace(call.hidden, call.weights, **call.routing())
    y = plan.run(call.hidden, call.weights, **call.routing())
    bounds.assert_bitwise(y.cpu(), trace.y)
    return call, trace, plan.backend


@pytest.mark.parametrize("recipe", peers.RECIPES)
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_small(case: peers.Case, recipe: Recipe) -> None:
    call, trace, backend = run(case, recipe, "cpu")
    peers.check(call, trace, recipe, backend)


@pytest.mark.parametrize("recipe", peers.RECIPES)
@pytest.mark.parametrize("case", SMALL_UNGATED, ids=str)
def test_small_without_a_gate(case: peers.Case, recipe: Recipe) -> None:
    call, trace, backend = run(case, recipe, "cpu")
    peers.check(call, trace, recipe, backend)


@pytest.mark.gpu
@pytest.mark.parametrize("case", peers.every(peers.SHAPES), ids=str)
def test_theirs(case: peers.Case) -> None:
    for recipe in peers.RECIPES:
        call, trace, backend = run(case, recipe, "cuda")
        peers.check(call, trace, recipe, backend)


@pytest.mark.gpu
@pytest.mark.parametrize("case", UNGATED, ids=str)
def test_theirs_without_a_gate(case: peers.Case) -> None:
    for recipe in peers.RECIPES:
        call, trace, backend = run(case, recipe, "cuda")
        peers.check(call, trace, recipe, backend)


BROKEN: dict[str, Any] = {
    "one expert's scale doubled": lambda t: t._replace(
        h=torch.where((t.rows_expert == t.rows_expert[0])[:, None], 2 * t.h, t.h)
    ),
    "gate and up swapped": lambda t: t._replace(h=t.h.roll(t.h.shape[1] // 2, dims=1)),
    "a column of h zero": lambda t: t._replace(h=t.h * (torch.arange(t.h.shape[1]) != 5)),
    "a column of z zero": lambda t: t._replace(z=t.z * (torch.arange(t.z.shape[1]) != 5)),
    "a row of z of another": lambda t: t._replace(z=t.z.roll(1, dims=0)),
    "all of z zero": lambda t: t._replace(z=torch.zeros_like(t.z)),
    "y off by a bit": lambda t: t._replace(
        y=(t.y.view(torch.int16) ^ (torch.arange(t.y.shape[1]) == 7).short()).view(t.y.dtype)
    ),
    "two rows swapped": lambda t: t._replace(rows_token=t.rows_token.flip(0)),
    "NaN": lambda t: t._replace(h=torch.where(torch.arange(t.h.shape[1]) == 3, torch.nan, t.h)),
}


@pytest.mark.parametrize("recipe", peers.RECIPES)
@pytest.mark.parametrize("name", BROKEN)
def test_the_check_sees_what_theirs_would_let_pass(name: str, recipe: Recipe) -> None:
    case = peers.Case((17, 96, 80), 40, 6, torch.bfloat16, "up_gate")
    call, trace, backend = run(case, recipe, "cpu")
    with pytest.raises(AssertionError):
        peers.check(call, BROKEN[name](trace), recipe, backend)


# ---- in a graph


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", peers.RECIPES)
@pytest.mark.parametrize("tokens", [1, 32, 4096])
def test_a_replay_equals_eager_and_allocates_nothing(tokens: int, recipe: Recipe) -> None:
    """vLLM's demand of a runner: equal bits, and no memory after the capture."""
    case = peers.Case((tokens, 512, 4096), 4, 2, torch.bfloat16, "up_gate")
    call = peers.make(case, "cuda")
    out = torch.empty_like(call.hidden)

    def step() -> None:
        fp4lt.moe(call.hidden, call.weights, recipe=recipe, out=out, **call.routing())

    for _ in range(2):  # as the engines warm up
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    generator = torch.Generator("cuda").manual_seed(3)
    for _ in range(3):
        fresh = torch.randn(call.hidden.shape, generator=generator, device="cuda") / 10
        call.hidden.copy_(fresh)
        call.topk_ids.copy_(call.topk_ids.flip(0))
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
        replayed = out.clone()
        step()
        bounds.assert_bitwise(replayed.cpu(), out.cpu())


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", peers.RECIPES)
def test_an_engine_s_tensors_in_a_graph_with_padding_rows(recipe: Recipe) -> None:
    """What the SGLang adapter does: parameters as they are, local ids, -1, stale rows."""
    case = peers.Case((32, 96, 1040), 40, 6, torch.bfloat16, "gate_up")
    call = peers.make(case, "cuda")
    own = call.weights
    assert isinstance(own.w13, fp4lt.NVFP4Tensor)
    assert isinstance(own.w2, fp4lt.NVFP4Tensor)
    assert own.gate_up_scales is not None

    def parameter(t: torch.Tensor) -> torch.nn.Parameter:
        return torch.nn.Parameter(t.clone(), requires_grad=False)

    two = own.gate_up_scales * own.w13.global_scale[:, None]
    w13 = Stack(parameter(own.w13.codes), parameter(own.w13.scales), parameter(two))
    w2 = Stack(*(parameter(t) for t in (own.w2.codes, own.w2.scales, own.w2.global_scale)))
    weights = build_weights(w13, w2, order="gate_up", a1_scale=own.a1_scale, a2_scale=own.a2_scale)
    assert weights.w13.codes.data_ptr() == w13.codes.data_ptr()  # type: ignore[union-attr]
    block = plan_block(weights, recipe, "auto", case.top_k, case.dtype)
    hidden, ids = call.hidden.clone(), call.topk_ids.clone()
    out = torch.empty_like(hidden)

    def step() -> None:
        routing: dict[str, Any] = {"topk_weights": call.topk_weights, "topk_ids": ids}
        block.plan.run(hidden, weights, out=out, **routing)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    graph.replay()
    whole = out.clone()
    for used in (32, 20, 1, 0):
        hidden.copy_(call.hidden)
        ids.copy_(call.topk_ids)
        hidden[used:] = float("nan")
        ids[used:] = -1
        out.fill_(float("nan"))
        graph.replay()
        bounds.assert_bitwise(out[:used].cpu(), whole[:used].cpu())
        assert not bool(out[used:].any())
    # Weights that the engine writes in place reach a captured graph.
    hidden.copy_(call.hidden)
    ids.copy_(call.topk_ids)
    w2.codes.zero_()
    graph.replay()
    assert not bool(out.any())
