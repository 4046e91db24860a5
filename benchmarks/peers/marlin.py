# SPDX-License-Identifier: Apache-2.0
"""Marlin: vLLM's W4A16 MoE GEMM on NVFP4 weights, prepared and launched as vLLM does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.peers import marlin_layout, vllm_operators
from benchmarks.peers.base import Block, Inputs, Peer, Shape, Tensors, clones
from benchmarks.peers.vllm_operators import Slots
from benchmarks.peers.weights import Weights

E2M1_TYPE = 562949953487106  # id of float4_e2m1f among vLLM's scalar types, pinned version
BLOCKS = (8, 16, 32, 48, 64)


def block_size(slots: int, experts: int) -> int:
    """Rows of a block by vLLM's rule: the first that an expert's mean count fills to 9 tenths."""
    for block in BLOCKS:
        if slots / experts / block < 0.9:
            break
    return block


class MarlinBlock(Block):
    """The router weights are applied in the second GEMM, so the combine is a plain sum."""

    def __init__(self, weights: Weights, copies: int) -> None:
        super().__init__(weights, copies)
        device = weights.w13.codes.device
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        self._locks = torch.zeros(4 * processors, dtype=torch.int32, device=device)
        self._w13 = clones(marlin_layout.pack(weights.w13), copies)
        self._w2 = clones(marlin_layout.pack(weights.w2), copies)

    def plan(self, call: Inputs) -> Slots:
        block = block_size(call.slots, self.experts)
        return vllm_operators.align(call.ids, self.experts, block)

    def gemm1(self, call: Inputs, plan: Any, copy: int = 0) -> torch.Tensor:
        shape = (call.x.shape[0], 2 * self.intermediate, self.hidden)
        return self._gemm(call.x, self._w13[copy], plan, call, call.ids.shape[1], False, shape)

    def gemm2(self, call: Inputs, plan: Any, u: torch.Tensor, copy: int = 0) -> torch.Tensor:
        shape = (call.slots, self.hidden, self.intermediate)
        return self._gemm(u, self._w2[copy], plan, call, 1, True, shape)

    def combine(self, call: Inputs, plan: Any, z: torch.Tensor) -> torch.Tensor:
        return z.view(*call.ids.shape, self.hidden).sum(1)

    def _gemm(
        self,
        a: torch.Tensor,
        weight: Tensors,
        plan: Slots,
        call: Inputs,
        top_k: int,
        weighted: bool,
        shape: tuple[int, int, int],
    ) -> torch.Tensor:
        codes, scales, global_scale = weight
        out = a.new_empty(shape[0] * top_k, shape[1])
        # fmt: off
        result: torch.Tensor = vllm_operators.operators().moe_wna16_marlin_gemm(
            a, out, codes, None, scales, None, global_scale, None, self._locks,
            plan.sorted, plan.owners, plan.padded, call.weights, plan.block, top_k, weighted,
            E2M1_TYPE, *shape, False, True, False, -1, -1, -1)
        # fmt: on
        return result


class Marlin(Peer):
    """See the module."""

    name = "marlin"

    def load(self) -> None:
        vllm_operators.load()

    def refusal(self, shape: Shape) -> str | None:
        # Its thread tiles.  vLLM pads I for it; a padded race would not be of the same bytes.
        if shape.hidden % 128 or shape.intermediate % 64:
            return (
                f"its tiles need H to be a multiple of 128 and I of 64, and they are "
                f"{shape.hidden} and {shape.intermediate}"
            )
        return None

    def prepare(
        self, weights: Weights, *, tokens: Sequence[int], top_k: int, copies: int = 1
    ) -> MarlinBlock:
        del tokens, top_k
        return MarlinBlock(weights, copies)
