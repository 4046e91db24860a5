# SPDX-License-Identifier: Apache-2.0
"""A MoE layer's NVFP4 weights in checkpoint order, as peers' repacking takes them."""

from __future__ import annotations

from typing import NamedTuple

import torch

from benchmarks.layers import Layer, MoELayer
from benchmarks.torch_loops import split
from fp4lt import NVFP4Tensor
from fp4lt.layout import untile_scales

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class Nvfp4(NamedTuple):
    """One matrix of every expert; a weight is code * scale * global scale.

    ``codes`` (E, N, K/2) uint8 with the even column in the low nibble, ``scales`` (E, N, K/16)
    float8_e4m3fn row by row, ``global_scale`` (E,) float32.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    global_scale: torch.Tensor

    @property
    def shape(self) -> tuple[int, int, int]:
        """(E, N, K)."""
        experts, rows, half = self.codes.shape
        return experts, rows, 2 * half

    def dense(self, expert: int) -> torch.Tensor:
        """(N, K) float32, rounded as fp4lt rounds them: ``code * (scale * global_scale)``."""
        scale = self.scales[expert].float() * self.global_scale[expert]
        return decode(self.codes[expert]) * scale.repeat_interleave(16, 1)


class Weights(NamedTuple):
    """``w13`` (E, 2I, H) with the gate's rows before the up projection's, ``w2`` (E, H, I)."""

    w13: Nvfp4
    w2: Nvfp4

    @property
    def experts(self) -> int:
        """E."""
        return self.w13.shape[0]

    @property
    def hidden(self) -> int:
        """H."""
        return self.w13.shape[2]

    @property
    def intermediate(self) -> int:
        """I."""
        return self.w2.shape[2]

    def dense(self, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        """One expert's matrices in float32."""
        return self.w13.dense(expert), self.w2.dense(expert)


def decode(codes: torch.Tensor) -> torch.Tensor:
    """Values of packed E2M1 codes (..., K/2): (..., K) float32."""
    table = torch.tensor([*E2M1, *(-value for value in E2M1)], device=codes.device)
    return table[nibbles(codes).long()]


def nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Codes one by one: (..., K/2) to (..., K) uint8."""
    return torch.stack((codes & 15, codes >> 4), -1).flatten(-2)


def unsupported(layer: Layer) -> str | None:
    """Why no peer takes this layer, or None: they are raced on the plain SwiGLU block."""
    if not isinstance(layer, MoELayer):
        return "it is raced on whole MoE blocks, and this is a plain GEMM"
    weights = layer.weights
    if weights.activation != "silu" or not weights.gated:
        gate = "gated" if weights.gated else "ungated"
        return f"it is raced on gated silu, and this block has {gate} {weights.activation}"
    extras = {
        "biases": (weights.w13_bias, weights.w2_bias),
        "a clamped or scaled SwiGLU": (
            weights.swiglu_alpha,
            weights.swiglu_beta,
            weights.swiglu_limit,
        ),
        "separate gate and up scales": (weights.gate_up_scales,),
    }
    for name, values in extras.items():
        if any(value is not None for value in values):
            return f"it is raced without {name}, which this block has"
    if layer.router_weight_on_input:
        return "it applies router weights to the output, and this block to the input"
    if weights.num_experts != weights.num_local_experts:
        return (
            f"it is raced with all experts on one device, and this is a part of "
            f"{weights.num_experts}"
        )
    return None


def linear(layer: MoELayer) -> Weights:
    """The layer's first copy with row-major scales, and the gate first; codes are not copied."""
    w13, w2 = (_linear(matrix) for matrix in layer.matrices)
    order = layer.weights.order
    if order != "gate_up":
        index = torch.arange(w13.shape[1], device=layer.device)
        rows = torch.cat(split(index, order, dim=0))
        w13 = Nvfp4(w13.codes[:, rows], w13.scales[:, rows], w13.global_scale)
    return Weights(w13, w2)


def _linear(matrix: NVFP4Tensor) -> Nvfp4:
    experts, rows, k = matrix.shape
    scales = untile_scales(matrix.scales, rows, k // 16)
    return Nvfp4(matrix.codes, scales, matrix.global_scale.expand(experts).contiguous())
