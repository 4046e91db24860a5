# SPDX-License-Identifier: Apache-2.0
"""MXFP4: blocks of 32 codes with a power-of-two scale and no global scale, 4.25 bits a weight."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch

from benchmarks.peers.weights import E2M1, Nvfp4, decode

BLOCK = 32
SCALE_BIAS = 127
_SMALLEST = 2.0**-120  # of a block's largest: keeps the exponent in a byte


class Mxfp4(NamedTuple):
    """One matrix of every expert: ``codes`` (E, N, K/2), ``scales`` (E, N, K/32) E8M0, as uint8."""

    codes: torch.Tensor
    scales: torch.Tensor

    def dense(self, expert: int) -> torch.Tensor:
        """(N, K) float32, exact."""
        scale = power_of_two(self.scales[expert].int() - SCALE_BIAS)
        return decode(self.codes[expert]) * scale.repeat_interleave(BLOCK, 1)


def power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """2 to the power of int32 exponents from -126 to 127, exact where exp2 need not be."""
    return ((exponent + 127) << 23).view(torch.float32)


def requantize(weight: Nvfp4) -> Mxfp4:
    """Round NVFP4 weights to MXFP4, which changes their values.

    A block's scale is ``2^(floor(log2(largest)) - 2)``; codes go to the nearest, ties towards zero,
    and saturate at 6.
    """
    experts, rows, k = weight.shape
    device = weight.codes.device
    edges = torch.tensor([(low + high) / 2 for low, high in pairwise(E2M1)], device=device)
    codes = torch.empty_like(weight.codes)
    scales = torch.empty(experts, rows, k // BLOCK, dtype=torch.uint8, device=device)
    for expert in range(experts):
        blocks = weight.dense(expert).view(rows, k // BLOCK, BLOCK)
        # frexp's exponent is exact, which a logarithm's floor is not.
        exponent = blocks.abs().amax(-1).clamp_min(_SMALLEST).frexp().exponent - 3
        scaled = blocks * power_of_two(-exponent)[..., None]
        code = torch.bucketize(scaled.abs(), edges, out_int32=True) | ((scaled < 0).int() << 3)
        code = code.view(rows, k // 2, 2).to(torch.uint8)
        codes[expert] = code[..., 0] | (code[..., 1] << 4)
        scales[expert] = (exponent + SCALE_BIAS).to(torch.uint8)
    return Mxfp4(codes, scales)
