# SPDX-License-Identifier: Apache-2.0
"""ExpertParallelMoE with nccl, as many devices as there are: the bits of one process, captured."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from process_group import ProcessGroup
from test_distributed import block, routed, share, slices
from test_moe import Case, same
from test_moe_relations import tokens

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not dist.is_available(), reason="torch without distributed"),
]


@pytest.fixture(scope="module", params=[1, 2, 4, 8], ids=lambda n: f"{n}ranks")
def devices(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ProcessGroup]:
    """Processes in an nccl group."""
    if not dist.is_nccl_available():
        pytest.skip("this torch is built without nccl")
    if torch.cuda.device_count() < request.param:
        pytest.skip(f"{request.param} devices are needed")
    processes = ProcessGroup(request.param, tmp_path_factory.mktemp("nccl"), backend="nccl")
    yield processes
    processes.close()


def on_device(case: Case) -> Case:
    routing = case.routing._replace(
        topk_weights=case.routing.topk_weights.cuda(), topk_ids=case.routing.topk_ids.cuda()
    )
    weights = case.weights.to(torch.device("cuda", torch.cuda.current_device()))
    return case._replace(hidden=case.hidden.cuda(), weights=weights, routing=routing)


def local(rank: int, world: int, sentence: str, ids: str, shares: str) -> Case:
    case = slices(routed(sentence, ids), rank, world)
    return on_device(tokens(case, share(len(case.hidden), rank, world, shares)))


def run_case(
    rank: int, world: int, sentence: str, ids: str, shares: str, combine: str
) -> torch.Tensor:
    part = local(rank, world, sentence, ids, shares)
    return block(part, combine)(part.hidden, **part.routing._asdict()).cpu()


@pytest.mark.parametrize("combine", ["exact", "partial"])
@pytest.mark.parametrize(
    ("sentence", "ids", "shares"),
    [
        ("E13 T29 k2", "", "even"),
        ("E16 T16 k2 w4a16 biases split up_gate", "", "even"),
        ("E11 T9 k2 fp32 static_each limit swigluoai interleaved", "", "last"),
        ("E12 T10 k2 missing", "", "first"),
        ("E9 T8 k3", "one rank", "even"),
        ("E9 T5", "none", "even"),
        ("E10 T13 k1 on_input w4a16", "", "even"),
    ],
)
def test_bits_of_one_process(
    devices: ProcessGroup, sentence: str, ids: str, shares: str, combine: str
) -> None:
    want = on_device(routed(sentence, ids)).run().cpu()
    parts = devices.run(run_case, sentence=sentence, ids=ids, shares=shares, combine=combine)
    same(torch.cat(parts), want)


def run_captured(rank: int, world: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A planned routing in a CUDA graph, replayed on other hidden states."""
    part = local(rank, world, "E16 T24 k4", "", "even")
    ep = block(part)
    exchange = ep.plan(part.hidden, **part.routing._asdict())
    x = part.hidden.clone()
    out = torch.empty_like(x)
    ep.run(exchange, x, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        ep.run(exchange, x, out=out)
    x.mul_(2).add_(0.25)
    out.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    return out.cpu(), ep(x, **part.routing._asdict()).cpu()


def test_captured_in_a_graph(devices: ProcessGroup) -> None:
    for replayed, called in devices.run(run_captured):
        same(replayed, called)
