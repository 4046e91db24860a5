# SPDX-License-Identifier: Apache-2.0
"""ExpertParallelMoE on real processes: the bits of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from process_group import ProcessGroup
from test_moe import Case, make, same
from test_moe_relations import select, tokens

from fp4lt import errors
from fp4lt.distributed import ExpertParallelMoE, expert_range
from fp4lt.testing import bounds

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")


# ---- what the ranks run


def slices(case: Case, rank: int, world: int) -> Case:
    """A rank's experts, in ranges of unlike sizes; its tokens are chosen later."""
    experts = case.weights.num_local_experts
    own = expert_range(experts, rank, world)
    local = select(case.weights, list(own), expert_start=own.start, num_experts=experts)
    return case._replace(weights=local)


def share(total: int, rank: int, world: int, shares: str) -> slice:
    """Which tokens a rank owns."""
    if shares == "even":
        own = [total * r // world for r in range(world + 1)]
    elif shares == "first":  # all on rank 0
        own = [0] + [total] * world
    else:  # all on the last, so that every other has none
        own = [0] * world + [total]
    return slice(own[rank], own[rank + 1])


def block(case: Case, combine: str = "exact", **options: Any) -> ExpertParallelMoE:
    return ExpertParallelMoE(
        case.weights,
        recipe=case.recipe,
        router_weight_on_input=case.on_input,
        combine=combine,  # type: ignore[arg-type]
        **options,
    )


def routed(sentence: str, ids: str = "") -> Case:
    case = make(sentence)
    t = case.routing.topk_ids
    if ids == "one rank":
        t = t.clamp(max=0)  # expert 0 in every slot
    elif ids == "none":
        t = torch.full_like(t, -1)
    return case._replace(routing=case.routing._replace(topk_ids=t))


def run_case(
    rank: int, world: int, sentence: str, ids: str, shares: str, combine: str
) -> torch.Tensor:
    case = routed(sentence, ids)
    part = tokens(slices(case, rank, world), share(len(case.hidden), rank, world, shares))
    y = block(part, combine)(part.hidden, **part.routing._asdict())
    assert y.dtype == part.hidden.dtype
    return y


# ---- equal to one process

CASES = [
    ("E7 T13 k3", "", "even"),
    ("E8 T16 k4 w4a16", "", "even"),
    ("E5 T9 k5 w4a16 fp16 biases split up_gate", "", "even"),
    ("E6 T11 k2 fp32 static_each limit swigluoai interleaved alpha_each", "", "even"),
    ("E6 T10 static biases ungated relu2", "", "first"),
    ("E5 T7 missing", "", "last"),
    ("E5 T12 duplicates k4", "", "even"),
    ("E6 T12 out_of_range", "", "even"),
    ("E6 T9 one_hot k2", "", "even"),
    ("E9 T8 k3", "one rank", "even"),
    ("E6 T5", "none", "even"),
    ("E7 T13 k1 on_input w4a16", "", "even"),
    ("E7 T13 k1 on_input biases", "", "last"),
    ("E4 T8 dense", "", "even"),
    ("E6 T3 poison", "", "even"),
    ("E64 T40 k8", "", "even"),
]


@pytest.mark.parametrize(("sentence", "ids", "shares"), CASES)
def test_bits_of_one_process(group: ProcessGroup, sentence: str, ids: str, shares: str) -> None:
    case = routed(sentence, ids)
    want = case.run()
    parts = group.run(run_case, sentence=sentence, ids=ids, shares=shares, combine="exact")
    same(torch.cat(parts), want)


@pytest.mark.parametrize(
    ("sentence", "ids"),
    [
        ("E8 T16 k2", ""),  # two terms: the order of an addition makes no difference
        ("E7 T13 k1 on_input", ""),
        ("E6 T9 missing k2 w4a16 biases", ""),
        ("E9 T8 k5", "one rank"),  # one sum, of one rank
        ("E6 T5", "none"),
    ],
)
def test_partial_sums_that_keep_the_order(group: ProcessGroup, sentence: str, ids: str) -> None:
    want = routed(sentence, ids).run()
    parts = group.run(run_case, sentence=sentence, ids=ids, shares="even", combine="partial")
    same(torch.cat(parts), want)


@pytest.mark.parametrize("sentence", ["E16 T32 k8 fp32", "E16 T32 k8 w4a16", "E5 T12 duplicates"])
def test_partial_sums_within_their_bound(group: ProcessGroup, sentence: str) -> None:
    """Both sums add the same k terms, each with k - 1 roundings; then y is rounded once."""
    case = routed(sentence)
    want = case.run().double()
    z = case.trace()
    terms = case.routing.topk_weights.double().unsqueeze(-1) * z.z[z.slot_row].double()
    k, one = terms.shape[1], bounds.format_of(case.hidden.dtype)
    size = terms.abs().sum(1)
    limit = 2 * (k + 1) * 2.0**-24 * size  # products, sums, of two results
    limit += 2 * one.unit_roundoff * (want.abs() + limit) + 2 * one.tiny
    parts = group.run(run_case, sentence=sentence, ids="", shares="even", combine="partial")
    y = torch.cat(parts).double()
    assert bool(((y - want).abs() <= limit).all())
    if "fp32" in sentence:
        # The order does differ: this is not the exact form by another name.
        assert bool((y != want).any())


def order_of_partial_sums(rank: int, world: int) -> torch.Tensor:
    """Single slots on every rank but the first, whose slots lead: the order of one process."""
    case, ids = leading_case(world)
    part = slices(case._replace(routing=case.routing._replace(topk_ids=ids)), rank, world)
    return block(part, "partial")(part.hidden, **part.routing._asdict())


def leading_case(world: int) -> tuple[Case, torch.Tensor]:
    case = make(f"E{2 * world} T9 k{world + 1} fp32")
    last = 2 * (world - 1)
    # Two experts of the last rank, then one of each other, from the back.
    row = [last, last + 1, *range(last - 2, -1, -2)]
    return case, torch.tensor(row).expand(9, -1).contiguous()


def test_partial_sums_are_added_by_first_slot(group: ProcessGroup) -> None:
    case, ids = leading_case(group.world)
    want = case._replace(routing=case.routing._replace(topk_ids=ids)).run()
    for y in group.run(order_of_partial_sums):
        same(y, want)


# ---- the stages, reuse, out=


def run_stages(rank: int, world: int) -> tuple[bool, bool, bool, tuple[int, int], str]:
    case = make("E6 T8 k3")
    part = tokens(slices(case, rank, world), share(8, rank, world, "even"))
    ep = block(part)
    routing = part.routing._asdict()
    exchange = ep.plan(part.hidden, **routing)
    y = ep(part.hidden, **routing)
    z = ep.compute(exchange, ep.dispatch(exchange, part.hidden))
    assert z.dtype == torch.float32
    assert len(z) == sum(exchange.results_sent)
    staged = ep.combine(exchange, z)
    wide = torch.full((len(part.hidden), 96), 7.0, dtype=torch.bfloat16)
    out = wide[:, 8:88]
    result = ep.run(exchange, part.hidden, out=out)
    assert result.data_ptr() == out.data_ptr()
    untouched = bool((wide[:, :8] == 7).all() and (wide[:, 88:] == 7).all())
    other = ep.run(exchange, 2 * part.hidden)  # the same routing, another x
    want = ep(2 * part.hidden, **routing)
    equal = torch.equal(y, staged) and torch.equal(y, out) and torch.equal(other, want)
    strided = torch.randn(2 * len(part.hidden), 80).to(torch.bfloat16)[::2]
    equal &= torch.equal(ep(strided, **routing), ep(strided.contiguous(), **routing))
    return equal, untouched, other.dtype == y.dtype, exchange.bytes_sent(rank, 80), repr(ep)


def test_stages_make_the_call(group: ProcessGroup) -> None:
    case = make("E6 T8 k3")
    for rank, (equal, untouched, dtype, (x, z), text) in enumerate(group.run(run_stages)):
        assert equal
        assert untouched
        assert dtype
        assert f"rank {rank} of {group.world}" in text
        assert z == 4 * 80 * slots_received(case, rank, group.world)
        mine = case.routing.topk_ids[share(8, rank, group.world, "even")].tolist()
        others = [expert_range(6, r, group.world) for r in range(group.world) if r != rank]
        assert x == 2 * 80 * sum(any(i in own for i in row) for own in others for row in mine)


def slots_received(case: Case, rank: int, world: int) -> int:
    own = expert_range(case.weights.num_local_experts, rank, world)
    ids = case.routing.topk_ids.tolist()
    mine = range(len(ids))[share(len(ids), rank, world, "even")]
    return sum(i in own for t, row in enumerate(ids) if t not in mine for i in row)


def run_subgroup(rank: int, world: int) -> torch.Tensor | None:
    half = dist.new_group(list(range(world // 2, world)))
    if rank < world // 2:
        with pytest.raises(errors.ArgumentError, match="not in this group"):
            ExpertParallelMoE(make("E6").weights, group=half)
        return None
    case = make("E6 T8 k3")
    part = slices(case, rank - world // 2, world - world // 2)
    return block(part, group=half)(part.hidden, **part.routing._asdict())


def test_subgroup(group: ProcessGroup) -> None:
    want = make("E6 T8 k3").run()
    for y in group.run(run_subgroup)[group.world // 2 :]:
        assert y is not None
        same(y, want)
