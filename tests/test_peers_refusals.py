# SPDX-License-Identifier: Apache-2.0
"""Which peers refuse which layers and machines, and that they say why."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from benchmark_cases import COMPUTE, READ, TINY, TINY_GEMM, CountingTimer
from peer_cases import PEER

from benchmarks import layers, presets, runner
from benchmarks.contenders import PEERS, Fp4lt
from benchmarks.peers import bundle, vllm_operators
from benchmarks.peers.base import Peer, Shape
from benchmarks.peers.contender import PeerContender
from benchmarks.peers.humming import Humming
from benchmarks.peers.marlin import Marlin
from benchmarks.peers.torch_grouped import TorchGrouped
from benchmarks.peers.triton_mxfp4 import TritonMxfp4
from benchmarks.peers.weights import unsupported
from benchmarks.reference import Reference

BUDGET = 2**30


def _layer(preset: presets.MoEPreset = PEER) -> layers.MoELayer:
    layer = layers.from_preset(preset)
    assert isinstance(layer, layers.MoELayer)
    return layer


@pytest.mark.parametrize("peer", [*PEERS, TorchGrouped()], ids=lambda peer: peer.name)
def test_no_peer_runs_without_a_gpu(peer: Peer) -> None:
    reason = PeerContender(peer, BUDGET).refusal(_layer())
    assert reason == "needs an NVIDIA GPU; this run is on cpu"


@pytest.mark.parametrize(
    ("preset", "reason"),
    [
        (TINY_GEMM, "a plain GEMM"),
        (replace(TINY, activation="relu2", order=None), "ungated relu2"),
        (replace(TINY, activation="swigluoai", order="interleaved"), "gated swigluoai"),
        (replace(TINY, bias=True), "without biases"),
        (replace(TINY, swiglu_limit=7.0), "a clamped or scaled SwiGLU"),
        (replace(TINY, top_k=1, router_weight_on_input=True), "this block to the input"),
        (TINY.share("tiny-ep3", 1, 3), "a part of 6"),
        (TINY, None),
    ],
)
def test_what_is_no_plain_block_is_refused(preset: presets.Preset, reason: str | None) -> None:
    found = unsupported(layers.from_preset(preset))
    assert (found is None) == (reason is None)
    assert reason is None or reason in str(found)


def test_separate_gate_and_up_scales_are_refused() -> None:
    layer = _layer(TINY)
    weights = replace(layer.weights, gate_up_scales=torch.ones(6, 2))
    assert "gate and up scales" in str(unsupported(replace(layer, copies=(weights,))))


@pytest.mark.parametrize(
    ("peer", "shape", "reason"),
    [
        (Marlin(), Shape(8, 2048, 96, 2), "of 64, and they are 2048 and 96"),
        (Marlin(), Shape(8, 2880, 128, 2), "H to be a multiple of 128"),
        (Marlin(), Shape(8, 2048, 192, 2), None),
        (Humming(), Shape(8, 2048, 192, 2), "it would pad w13 (384 x 2048)"),
        (Humming(), Shape(8, 2048, 128, 2), None),
        (TritonMxfp4(), Shape(8, 2048, 80, 2), "w2 has K = 80"),
        (TritonMxfp4(), Shape(8, 2048, 128, 1), "its softmax over a single logit"),
        (TritonMxfp4(), Shape(8, 2048, 96, 2), None),
    ],
)
def test_shapes_that_a_peer_does_not_take(peer: Peer, shape: Shape, reason: str | None) -> None:
    found = peer.refusal(shape)
    assert (found is None) == (reason is None)
    assert reason is None or reason in str(found)


def test_weights_over_the_budget_are_refused() -> None:
    need = 5 * 3 * 256 * 128 * 9 // 16
    assert "use --experts" in str(PeerContender(Marlin(), need - 1).refusal(_layer()))
    assert "needs an NVIDIA GPU" in str(PeerContender(Marlin(), need).refusal(_layer()))


class Broken(Marlin):
    """Cannot be loaded."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error
        self.tries = 0

    def load(self) -> None:
        self.tries += 1
        raise self.error


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError("libcudart.so.13: not found"), "could not be loaded: OSError: libcudart.so.13"),
        (bundle.BundleError("no files: fetch them"), "no files: fetch them"),
    ],
)
def test_a_peer_that_cannot_be_loaded_says_why(error: Exception, reason: str) -> None:
    peer = Broken(error)
    for _ in range(2):
        assert str(peer.available(torch.device("cuda"))).startswith(reason)
    assert peer.tries == 1


def test_a_missing_bundle_is_a_reason(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if hasattr(torch.ops._moe_C, "moe_wna16_marlin_gemm"):
        pytest.skip("the operators are loaded in this process already")
    monkeypatch.setenv("FP4LT_PEERS", str(tmp_path / "none"))
    monkeypatch.setenv("FP4LT_PEERS_CACHE", str(tmp_path / "cache"))
    for peer in (Marlin(), Humming()):
        reason = str(peer.available(torch.device("cuda")))
        assert f"{tmp_path / 'none'} has no" in reason
        assert bundle.PREPARE in reason


def test_operators_of_another_version_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    schema = SimpleNamespace(default=SimpleNamespace(_schema=SimpleNamespace(arguments=[1, 2])))
    names = {"moe_wna16_marlin_gemm": schema, "moe_align_block_size": schema}
    monkeypatch.setattr(vllm_operators, "operators", lambda: SimpleNamespace(**names))
    with pytest.raises(bundle.BundleError, match="moe_wna16_marlin_gemm has another signature"):
        vllm_operators.load()


def test_a_peer_that_breaks_the_gpu_ends_the_race_with_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def synchronize(device: torch.device) -> None:
        raise RuntimeError("CUDA error: an illegal memory access\nmore lines")

    # Only the device's type is looked at.
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    fault = runner.device_fault(torch.device("cuda"))
    assert fault == "CUDA error: an illegal memory access"
    assert runner.device_fault(torch.device("cpu")) is None
    monkeypatch.setattr(runner, "device_fault", lambda device: fault)
    layer = _layer()
    rows = runner.run_layer(
        layer,
        [Fp4lt("cpu", "w4a16"), *(PeerContender(peer, BUDGET) for peer in PEERS)],
        CountingTimer(),
        reference=Reference(layer),
        read=READ,
        compute=COMPUTE,
    )
    assert [row.status for row in rows] == ["ok", "ok", *["unavailable"] * 3]
    assert rows[-1].contender == "triton-mxfp4"
    assert rows[-1].reason == f"fp4lt-cpu left the GPU unusable: {fault}"
