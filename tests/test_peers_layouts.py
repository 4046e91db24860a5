# SPDX-License-Identifier: Apache-2.0
"""Peers' repacked weights mean what the layer's weights mean, element by element."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from benchmark_cases import TINY
from peer_cases import PEER, marlin_dense

import fp4lt
from benchmarks import layers
from benchmarks.peers import marlin_layout, mxfp4_format
from benchmarks.peers.humming import tile_intervals
from benchmarks.peers.marlin import block_size
from benchmarks.peers.mxfp4_format import requantize
from benchmarks.peers.weights import E2M1, Nvfp4, decode, linear
from fp4lt.problem import Order


def _layer(order: Order = "gate_up") -> layers.MoELayer:
    layer = layers.from_preset(replace(TINY, order=order))
    assert isinstance(layer, layers.MoELayer)
    return layer


def _matrix(experts: int, rows: int, k: int, low: int = 0x20, high: int = 0x7F) -> Nvfp4:
    generator = torch.Generator().manual_seed(5)
    codes = torch.randint(256, (experts, rows, k // 2), dtype=torch.uint8, generator=generator)
    shape = (experts, rows, k // 16)
    scales = torch.randint(low, high, shape, dtype=torch.uint8, generator=generator)
    global_scale = torch.rand(experts, generator=generator) + 0.5
    return Nvfp4(codes, scales.view(torch.float8_e4m3fn), global_scale)


def test_codes_are_the_sixteen_values() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    packed = codes[0::2] | (codes[1::2] << 4)
    assert decode(packed).tolist() == [*E2M1, *(-v for v in E2M1)]


@pytest.mark.parametrize("order", ["gate_up", "up_gate", "interleaved"])
def test_linear_weights_have_the_gate_first(order: Order) -> None:
    layer = _layer(order)
    w13, w2 = (matrix.dequantize(torch.float32) for matrix in layer.matrices)
    if order == "up_gate":
        w13 = w13.roll(48, 1)
    elif order == "interleaved":
        w13 = torch.cat((w13[:, 0::2], w13[:, 1::2]), 1)
    weights = linear(layer)
    assert (weights.experts, weights.hidden, weights.intermediate) == (6, 64, 48)
    for expert in range(6):
        dense = weights.dense(expert)
        assert torch.equal(dense[0], w13[expert])
        assert torch.equal(dense[1], w2[expert])


def test_linear_weights_share_their_codes_with_the_layer() -> None:
    layer = _layer()
    assert linear(layer).w2.codes.data_ptr() == layer.matrices[1].codes.data_ptr()


def test_a_shared_global_scale_is_every_experts() -> None:
    layer = _layer()
    _, w2 = layer.matrices
    shared = fp4lt.NVFP4Tensor(w2.codes, w2.scales, torch.tensor(0.25))
    weights = replace(layer.weights, w2=shared)
    assert linear(replace(layer, copies=(weights,))).w2.global_scale.tolist() == [0.25] * 6


# --- Marlin ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "k"), [(64, 16), (128, 64), (192, 48)])
def test_marlin_words_hold_the_same_weights(rows: int, k: int) -> None:
    weight = _matrix(2, rows, k)
    codes, scales, global_scale = marlin_layout.pack(weight)
    assert codes.shape == (2, k // 16, 2 * rows)
    assert codes.dtype == torch.int32
    for expert in range(2):
        got = marlin_dense(codes[expert], scales[expert], float(global_scale[expert]))
        # The global scale is divided by a power of two, so that nothing is rounded anew.
        assert torch.equal(got, weight.dense(expert))


def test_marlin_flushes_scales_that_its_format_cannot_hold() -> None:
    every = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)
    scales = torch.zeros(1, 64, 2, dtype=torch.uint8).view(torch.float8_e4m3fn)
    scales.view(torch.uint8)[0].view(-1)[:127] = every.view(torch.uint8)
    codes = torch.full((1, 64, 16), 0x22, dtype=torch.uint8)  # 1.0
    weight = Nvfp4(codes, scales, torch.ones(1))
    packed = marlin_layout.pack(weight)
    got = marlin_dense(packed[0][0], packed[1][0], float(packed[2][0]))[:, ::16]
    want = scales[0].float()
    assert torch.equal(got, torch.where(want < 2**-6, 0.0, want))


@pytest.mark.parametrize(("largest", "factor"), [(0x7E, 1.0), (0x76, 2.0), (0x38, 256.0), (0, 1.0)])
def test_marlin_lifts_all_scales_by_a_power_of_two(largest: int, factor: float) -> None:
    scales = torch.tensor([0, largest], dtype=torch.uint8).view(torch.float8_e4m3fn)
    assert marlin_layout.scale_factor(scales) == factor


def test_marlins_blocks_follow_the_mean_count() -> None:
    sizes = [block_size(slots, 256) for slots in (8, 1843, 1844, 16384, 32768)]
    assert sizes == [8, 8, 16, 64, 64]


# --- MXFP4 -----------------------------------------------------------------------------------


def test_weights_that_mxfp4_can_hold_are_kept() -> None:
    # Equal power-of-two scales in pairs, and a 6 in each block so that the range is the same.
    weight = _matrix(2, 8, 64)
    scales = weight.scales.view(torch.uint8)
    scales[...] = 0x38 + 8 * (torch.arange(4) // 2).to(torch.uint8)
    weight.codes.view(2, 8, 2, 16)[..., 0] = 0x77
    weight = weight._replace(global_scale=torch.tensor([0.25, 8.0]))
    stored = requantize(weight)
    assert torch.equal(stored.codes & 0x77, weight.codes & 0x77)
    for expert in range(2):
        assert torch.equal(stored.dense(expert), weight.dense(expert))


def test_mxfp4_rounds_to_the_nearest_or_saturates() -> None:
    weight = _matrix(3, 16, 96)
    stored = requantize(weight)
    grid = torch.tensor(E2M1)
    for expert in range(3):
        want, got = weight.dense(expert), stored.dense(expert)
        scale = mxfp4_format.power_of_two(stored.scales[expert].int() - 127)
        scale = scale.repeat_interleave(32, 1)
        largest = want.view(16, 3, 32).abs().amax(-1).repeat_interleave(32, 1)
        assert bool(((4 * scale <= largest) & (largest < 8 * scale)).all())
        distance = ((want / scale).abs()[..., None].clamp(max=6.0) - grid).abs().amin(-1)
        assert torch.equal((want - got).abs() / scale, distance + ((want / scale).abs() - 6).relu())


def test_a_block_of_zeros_stays_zero() -> None:
    weight = _matrix(1, 4, 32)
    weight.codes[:] = 0
    stored = requantize(weight)
    assert not stored.dense(0).any()


def test_powers_of_two_are_exact() -> None:
    exponents = torch.arange(-126, 128, dtype=torch.int32)
    assert mxfp4_format.power_of_two(exponents).tolist() == [2.0**e for e in range(-126, 128)]


# --- Humming ---------------------------------------------------------------------------------


def test_only_the_intervals_of_wanted_sizes_are_compiled() -> None:
    table = [[0, 8, "a"], [8, 64, "b"], [64, 512, "c"], [512, 4096, "d"]]
    kept = tile_intervals(table, [8, 65, 100])
    assert kept == [[0, 8, "a"], [8, 1 << 30, "c"]]
    assert tile_intervals(table, [600]) == [[0, 1 << 30, "d"]]
    every = tile_intervals(table, [1, 9, 65, 4096])
    assert all(first[1] == second[0] for first, second in pairwise(every))
    assert table[2] == [64, 512, "c"]
    with pytest.raises(ValueError, match="holds any of"):
        tile_intervals(table, [5000])


def test_the_tiny_case_is_one_that_every_peer_takes() -> None:
    for n, k in PEER.gemms:
        assert n % 256 == 0
        assert k % 128 == 0
