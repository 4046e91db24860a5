# SPDX-License-Identifier: Apache-2.0
"""Peers in the race: who refuses what, what their libraries are asked, what results must be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from benchmark_cases import TINY, CountingTimer, race
from peer_cases import PEER, HummingModules, TritonModules, VllmOperators

from benchmarks import layers, presets, torch_loops
from benchmarks.contenders import PEERS, Grouped
from benchmarks.dense_reference import DenseReference
from benchmarks.peers import bundle, humming, triton_mxfp4, vllm_operators
from benchmarks.peers.base import Peer
from benchmarks.peers.contender import PeerContender, prepared
from benchmarks.peers.humming import Humming
from benchmarks.peers.marlin import Marlin
from benchmarks.peers.torch_grouped import TorchGrouped
from benchmarks.peers.triton_mxfp4 import TritonMxfp4
from benchmarks.peers.weights import linear
from fp4lt.problem import Order

CPU = torch.device("cpu")
BUDGET = 2**30


def _layer(preset: presets.MoEPreset = PEER, copies: int = 1) -> layers.MoELayer:
    layer = layers.with_copies(layers.from_preset(preset), copies)
    assert isinstance(layer, layers.MoELayer)
    return layer


# --- what the libraries are asked ------------------------------------------------------------


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> VllmOperators:
    stand_in = VllmOperators()
    monkeypatch.setattr(vllm_operators, "operators", lambda: stand_in)
    card = SimpleNamespace(multi_processor_count=3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    return stand_in


class OnCpu(PeerContender):
    """A peer whose library is a stand-in."""

    def refusal(self, layer: layers.Layer) -> str | None:
        return None


def _passes(peer: Peer, preset: presets.MoEPreset = PEER) -> None:
    timer = CountingTimer()
    rows = race(_layer(preset, copies=2), OnCpu(peer, BUDGET), timer)
    assert [(row.status, row.reason) for row in rows] == [("ok", None)] * len(preset.sweep)
    for row in rows:
        assert (row.us_median, row.gemm1_us, row.gemm2_us) == (100.0, 100.0, 100.0)
    assert timer.measured == 3 * len(preset.sweep)


def test_marlin_is_called_as_its_layout_and_arguments_mean(vllm: VllmOperators) -> None:
    _passes(Marlin())
    first, second = vllm.calls[:2]
    assert first == (1, 256, 256, 2, False, 8)
    assert second == (2, 256, 128, 1, True, 8)


def test_marlin_takes_the_gate_where_it_is(vllm: VllmOperators) -> None:
    del vllm
    for order in ("up_gate", "interleaved"):
        _passes(Marlin(), replace(PEER, order=order))


def test_humming_is_called_with_its_own_tables(
    vllm: VllmOperators, monkeypatch: pytest.MonkeyPatch
) -> None:
    del vllm
    modules = HummingModules()
    monkeypatch.setattr(humming, "importlib", SimpleNamespace(import_module=modules))
    _passes(Humming())
    assert sorted(modules.compiled) == ["256x128", "256x256"]


def test_mxfp4_is_held_to_its_own_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_mxfp4, "_module", TritonModules())
    _passes(TritonMxfp4())
    layer = _layer()
    block = TritonMxfp4().prepare(linear(layer), tokens=(1,), top_k=2)
    run = prepared(block)
    # Against the NVFP4 weights it would fail: the rounding is larger than any kernel's error.
    original = DenseReference(layer, linear(layer).dense)
    assert original.error(run(layer.check_batch(9)), 9, "w4a16") > 10 * TritonMxfp4.limit


@pytest.mark.parametrize("order", ["gate_up", "up_gate", "interleaved"])
def test_torch_grouped_in_its_plain_form(order: Order) -> None:
    _passes(TorchGrouped(), replace(TINY, order=order))


def test_torch_grouped_is_taken_apart_where_the_block_is_plain() -> None:
    class Host(Grouped):
        def refusal(self, layer: layers.Layer) -> str | None:
            return None

    rows = race(_layer(TINY), Host(BUDGET), CountingTimer())
    assert all(row.status == "ok" and row.gemm1_us and row.gemm2_us for row in rows)
    rows = race(_layer(replace(TINY, bias=True)), Host(BUDGET), CountingTimer())
    assert all(row.status == "ok" and row.gemm1_us is None for row in rows)


# --- checking and timing ---------------------------------------------------------------------


def _doubled_last(z: torch.Tensor) -> torch.Tensor:
    z[-1] *= 2
    return z


@pytest.mark.parametrize(
    "alter",
    [lambda z: z * 1.02, _doubled_last, lambda z: z.roll(1, 0)],
    ids=["scaled", "last", "rows"],
)
def test_a_wrong_peer_fails(alter: Callable[[torch.Tensor], torch.Tensor]) -> None:
    class Wrong(TorchGrouped):
        def prepare(self, *given: Any, **more: Any) -> Any:
            block = super().prepare(*given, **more)
            combine = block.combine
            monkey = lambda call, plan, z: alter(combine(call, plan, z))  # noqa: E731
            object.__setattr__(block, "combine", monkey)
            return block

    timer = CountingTimer()
    (_, row) = race(_layer(TINY), OnCpu(Wrong(), BUDGET), timer)
    assert row.status == "FAILED"
    assert "against the fp32 w4a16 reference" in str(row.reason)


def test_the_references_agree() -> None:
    layer = _layer(TINY)
    dense = DenseReference(layer, linear(layer).dense)
    run = torch_loops.loop(
        layer,
        lambda copy, expert: torch_loops.dense(layer, copy, expert, torch.float32),
        torch.float32,
    )
    # fp32 without rounding u: what is left is u's rounding in the reference, and the result's.
    assert dense.error(run(layer.check_batch(5)), 5, "w4a16") < 4e-3
    assert dense.tokens(5).tolist() == [0, 1, 2, 3, 4]
    assert dense.tokens(1024).tolist()[::15] == [0, 1023]
    assert len(set(dense.tokens(1024).tolist())) == 16


def test_calls_walk_over_a_peers_copies() -> None:
    used: list[int] = []

    class Recording(TorchGrouped):
        def prepare(self, *given: Any, **more: Any) -> Any:
            block = super().prepare(*given, **more)
            gemm1 = block.gemm1

            def record(call: Any, plan: Any, copy: int = 0) -> torch.Tensor:
                used.append(copy)
                return gemm1(call, plan, copy)

            object.__setattr__(block, "gemm1", record)
            return block

    layer = _layer(TINY, copies=3)
    run = OnCpu(Recording(), BUDGET).prepare(layer)
    for i in range(5):
        run.call(layer.batch(5, i))()
    assert used == [0, 1, 2, 0, 1]
    # A budget for two sets of bf16 weights: copy 2 of the layer is copy 0 of the peer.
    used.clear()
    need = 2 * 6 * (96 * 64 + 64 * 48)
    run = OnCpu(Recording(), 2 * need).prepare(layer)
    for i in range(5):
        run.call(layer.batch(5, i))()
    assert used == [0, 1, 0, 0, 1]


# --- on a GPU --------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("peer", [*PEERS, TorchGrouped()], ids=lambda peer: peer.name)
def test_peers_on_cuda(peer: Peer) -> None:
    if not isinstance(peer, TorchGrouped) and not bundle.folder().is_dir():
        pytest.skip(f"no {bundle.folder()}; `{bundle.PREPARE}` fetches it")
    device = torch.device("cuda")
    layer = layers.with_copies(layers.from_preset(PEER, sweep=(1, 9, 200), device=device), 2)
    rows = race(layer, PeerContender(peer, BUDGET), CountingTimer())
    if rows[0].status == "unavailable":
        pytest.skip(f"{peer.name} {rows[0].reason}")
    assert [(row.status, row.reason) for row in rows] == [("ok", None)] * 3
    assert all(row.gemm1_us and row.gemm2_us for row in rows)
