# SPDX-License-Identifier: Apache-2.0
"""Marlin's layout of NVFP4 weights: order of the codes, and scales in a format of its own.

Codes are stored as the fragments of a 16-bit mma of 16 x 8: a tile of 16 k by 64 columns is 128
words, 4 for each of 32 lanes.  Scales have no sign bit and 5 exponent bits, so that the kernel
needs one shift to make a half of one; what is left of the exponents' biases is in the global scale.
"""

from __future__ import annotations

import math

import torch

from benchmarks.peers.weights import Nvfp4, nibbles

TILE_K, TILE_N = 16, 64
BIAS = 2.0 ** (126 - 7)  # bf16's exponent bias over e2m1's, and the scales' factor of 128
SCALE_STEP = 128.0
_LARGEST = 448.0
_PAIRS_APART = (0, 2, 4, 6, 1, 3, 5, 7)  # the even codes of a word first


def code_order() -> torch.Tensor:
    """Index, within a (16, 64) tile seen as four of (16, 16), of each of the 1024 codes."""
    order: list[int] = []
    for lane in range(32):
        column, first = lane // 4, 2 * (lane % 4)
        rows = (first, first + 1, first + 8, first + 9)
        word = [16 * row + column + 8 * half for half in (0, 1) for row in rows]
        for part in range(4):
            order += [256 * part + word[i] for i in _PAIRS_APART]
    return torch.tensor(order)


def pack_codes(codes: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """One expert's codes (N, K/2) uint8 as (K/16, 2N) int32 words."""
    rows, half = codes.shape
    tiles = nibbles(codes).T.reshape(half // 8, TILE_K, rows // 16, 16).permute(0, 2, 1, 3)
    pairs = tiles.reshape(-1, TILE_K * TILE_N)[:, order].reshape(-1, 4, 2)
    words = (pairs[..., 0] | (pairs[..., 1] << 4)).contiguous()
    return words.view(torch.int32).view(half // 8, 2 * rows)


def scale_order(device: torch.device) -> torch.Tensor:
    """Column, of each 64, whose scale is stored at each place."""
    columns = torch.arange(64, device=device).view(8, 8).T.reshape(-1, 4)
    return columns[:, [0, 2, 1, 3]].reshape(-1)


def scale_factor(scales: torch.Tensor) -> float:
    """The power of two that brings the largest scale of all experts just under 448."""
    largest = float(scales.view(torch.uint8).max().view(torch.float8_e4m3fn).float())
    return 2.0 ** math.floor(math.log2(_LARGEST / largest)) if 0 < largest < _LARGEST else 1.0


def pack_scales(scales: torch.Tensor, factor: float) -> torch.Tensor:
    """One expert's scales (N, K/16) e4m3 as (K/16, N) in Marlin's format.

    A scale below 2^-6 / factor becomes zero: the format always has its first exponent bit set.
    """
    order = scale_order(scales.device)
    s = scales.float().T.reshape(-1, TILE_N)[:, order].reshape(scales.shape[1], -1)
    s = (s * factor).half() * SCALE_STEP
    s[s < 2] = 0
    return (s.view(torch.int16) << 1).view(torch.float8_e4m3fn)[:, 1::2].contiguous()


def pack(weight: Nvfp4) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes (E, K/16, 2N) int32, scales (E, K/16, N), global scales (E,) float32."""
    experts, rows, k = weight.shape
    device = weight.codes.device
    order, factor = code_order().to(device), scale_factor(weight.scales)
    codes = torch.empty(experts, k // 16, 2 * rows, dtype=torch.int32, device=device)
    scales = torch.empty(experts, k // 16, rows, dtype=torch.float8_e4m3fn, device=device)
    for expert in range(experts):
        codes[expert] = pack_codes(weight.codes[expert], order)
        scales[expert] = pack_scales(weight.scales[expert], factor)
    return codes, scales, weight.global_scale * (BIAS / factor)
