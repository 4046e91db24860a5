# SPDX-License-Identifier: Apache-2.0
"""ExpertParallelMoE: what is wrong on one rank is an error on all of them, and no hang."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from process_group import ProcessGroup
from test_distributed import block, slices
from test_moe import make, same
from test_moe_relations import select

from fp4lt import errors
from fp4lt.distributed import ExpertParallelMoE, expert_range

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")


def call_with(rank: int, world: int, who: int, what: str) -> Any:
    """A call in which rank `who` does something wrong; then a right one, which must work."""
    case = make("E6 T8 k3")
    part = slices(case, rank, world)
    ep, second = block(part), block(part)
    hidden, routing = part.hidden, part.routing._asdict()
    want = ep(hidden, **routing)
    wrong, wrong_routing = hidden, dict(routing)
    if rank == who:
        if what == "hidden size":
            wrong = torch.zeros(8, 96, dtype=torch.bfloat16)
        elif what == "no tensor":
            wrong = None  # type: ignore[assignment]
        elif what == "tokens":
            wrong = hidden[:5]
        elif what == "dtype":
            wrong = hidden.float()
        elif what == "k":
            wrong_routing = {name: t[:, :2].contiguous() for name, t in routing.items()}
        elif what == "ids":
            wrong_routing["topk_ids"] = routing["topk_ids"].float()
        elif what == "grad":
            wrong = hidden.clone().requires_grad_()
        elif what == "object":
            ep = second
    try:
        ep(wrong, **wrong_routing)
    except errors.Error as error:
        ep = block(part)
        same(ep(hidden, **routing), want)
        return type(error).__name__, str(error)
    return None


@pytest.mark.parametrize(
    ("what", "kind", "own", "others"),
    [
        ("hidden size", "ShapeError", "with H=80", "refused its input: moe: hidden has shape"),
        ("no tensor", "ArgumentError", "a tensor is needed", "a tensor is needed"),
        ("tokens", "ShapeError", "hidden has 5 tokens", "hidden has 5 tokens"),
        ("ids", "DTypeError", "topk_ids is float32", "topk_ids is float32"),
        ("grad", "ArgumentError", "requires grad", "requires grad"),
        ("dtype", "DistributedError", "hidden's dtype: ", "float32 on rank 1"),
        ("k", "DistributedError", "k, the columns", "2 on rank 1"),
        ("object", "DistributedError", "which ExpertParallelMoE", "on rank 1"),
    ],
)
def test_wrong_on_one_rank_is_an_error_on_all(
    group: ProcessGroup, what: str, kind: str, own: str, others: str
) -> None:
    answers = group.run(call_with, who=1, what=what)
    assert answers[1][0] == kind
    assert own in answers[1][1]
    for rank, (name, text) in enumerate(answers):
        if rank != 1:
            assert name == "DistributedError"
            assert others in text
            assert "rank 1" in text


def create_with(rank: int, world: int, what: str) -> tuple[str, str] | None:
    case = make("E6 T8 k3")
    part = slices(case, rank, world)
    last = rank == world - 1
    weights: Any = part.weights
    options: dict[str, Any] = {}
    if what == "overlap":
        weights = dataclasses.replace(weights, expert_start=0)
    elif what == "num_experts" and last:
        weights = dataclasses.replace(weights, num_experts=9)
    elif what == "gap" and last:
        weights = select(case.weights, [5], expert_start=6, num_experts=7)
    elif what == "gap":
        weights = dataclasses.replace(weights, num_experts=7)
    elif what == "no weights" and last:
        weights = None
    elif what == "recipe" and last:
        options = {"recipe": "w4a16"}
    elif what == "unknown" and last:
        options = {"combine": "sum"}
    elif what == "hidden size" and last:
        weights = slices(make("E6 T8 k3 H96"), rank, world).weights
    try:
        ExpertParallelMoE(weights, **options)
    except errors.Error as error:
        return type(error).__name__, str(error)
    return None


@pytest.mark.parametrize(
    ("what", "kind", "text"),
    [
        ("overlap", "DistributedError", "expert 0 is on rank 0 and on rank 1"),
        ("num_experts", "DistributedError", "differ in num_experts: 6 on rank 0"),
        ("gap", "DistributedError", "is on no rank; the ranks have experts 0:"),
        ("no weights", "ArgumentError", "MoEWeights is needed"),
        ("recipe", "DistributedError", "differ in recipe: w4a4 on rank 0"),
        ("unknown", "ArgumentError", "combine='sum'; it must be one of ('exact', 'partial')"),
        ("hidden size", "DistributedError", "differ in H: 80 on rank 0"),
    ],
)
def test_wrong_weights_are_an_error_on_all(
    group: ProcessGroup, what: str, kind: str, text: str
) -> None:
    answers = group.run(create_with, what=what)
    assert answers[-1][0] == kind
    for name, said in answers[:-1]:
        assert name == "DistributedError"
        assert text in said


def miss_a_call(rank: int, world: int, how: str) -> None:
    """A call in which the last rank never takes part."""
    case = make("E6 T8 k3")
    part = slices(case, rank, world)
    ep = block(part)
    routing = part.routing._asdict()
    ep(part.hidden, **routing)
    if rank == world - 1 and how == "dies":
        os._exit(1)
    if rank == world - 1:
        return
    with pytest.raises(errors.DistributedError, match=r"failed on rank \d of \d.*timeout"):
        ep(part.hidden, **routing)


@pytest.mark.parametrize("how", ["dies", "stays away"])
@pytest.mark.parametrize("world", [2, 4])
def test_a_rank_that_is_gone_is_an_error_and_no_hang(tmp_path: Path, world: int, how: str) -> None:
    processes = ProcessGroup(world, tmp_path, timeout=3.0)
    try:
        for rank in range(world):
            processes.start(rank, miss_a_call, rank=rank, world=world, how=how)
        for rank in range(world - 1):
            ok, value = processes.finish(rank)
            assert ok, value[2]
    finally:
        processes.close()


# ---- without a group


def test_expert_range_covers_all_once() -> None:
    for size in range(1, 12):
        ranges = [expert_range(11, rank, size) for rank in range(size)]
        assert [e for r in ranges for e in r] == list(range(11))
        assert {len(r) for r in ranges} <= {11 // size, 11 // size + 1}
    with pytest.raises(errors.ArgumentError, match="3 experts for 4 ranks"):
        expert_range(3, 0, 4)
    with pytest.raises(errors.ArgumentError, match="rank=4, size=4"):
        expert_range(8, 4, 4)


def test_needs_a_process_group() -> None:
    with pytest.raises(errors.ArgumentError, match="init_process_group"):
        ExpertParallelMoE(make("E4").weights)


def run_other_mistakes(rank: int, world: int) -> None:
    case = make("E6 T8 k3")
    part = slices(case, rank, world)
    ep = block(part)
    exchange = ep.plan(part.hidden, **part.routing._asdict())
    with pytest.raises(errors.ShapeError, match=r"\(5, 80\), but the exchange is for \(8, 80\)"):
        ep.run(exchange, part.hidden[:5])
    with pytest.raises(errors.DTypeError, match="hidden is float32"):
        ep.run(exchange, part.hidden.float())
    with pytest.raises(errors.LayoutError, match="overlaps"):
        ep.run(exchange, part.hidden, out=part.hidden)
    with pytest.raises(errors.UnsupportedError, match="no backend can run"):
        block(part, backend="fused")(part.hidden, **part.routing._asdict())
    alone = dist.new_group([rank], use_local_synchronization=True)
    alone_block = ExpertParallelMoE(case.weights, group=alone)
    same(alone_block(case.hidden, **case.routing._asdict()), case.run())


def test_other_mistakes(group: ProcessGroup) -> None:
    group.run(run_other_mistakes)
