# SPDX-License-Identifier: Apache-2.0
"""torch._grouped_mm on bf16 weights: what an unquantized MoE costs, at 16 bits a weight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch

from benchmarks.accounting import WeightFormat
from benchmarks.peers import glue
from benchmarks.peers.base import Block, Inputs, Peer, clones
from benchmarks.peers.weights import Nvfp4, Weights


class Sorted(NamedTuple):
    """Rows by expert: where each expert's end, the rows themselves, and the row of each slot."""

    ends: torch.Tensor
    rows: torch.Tensor
    slot_row: torch.Tensor


def _dense(weight: Nvfp4) -> torch.Tensor:
    stack = weight.codes.new_empty(weight.shape, dtype=torch.bfloat16)
    for expert in range(weight.shape[0]):
        stack[expert] = weight.dense(expert)
    return stack


class TorchGroupedBlock(Block):
    """See the module."""

    def __init__(self, weights: Weights, copies: int) -> None:
        super().__init__(weights, copies)
        self._copies = clones((_dense(weights.w13), _dense(weights.w2)), copies)
        device = weights.w13.codes.device
        self._bounds = torch.arange(1, self.experts + 1, dtype=torch.int32, device=device)

    def plan(self, call: Inputs) -> Sorted:
        ordered, order = torch.sort(call.ids.flatten(), stable=True)
        ends = torch.searchsorted(ordered, self._bounds, out_int32=True)
        slot_row = torch.empty_like(order)
        slot_row[order] = torch.arange(order.numel(), device=order.device)
        return Sorted(ends, call.x[order // call.ids.shape[1]], slot_row)

    def gemm1(self, call: Inputs, plan: Any, copy: int = 0) -> torch.Tensor:
        return self._gemm(plan.rows, plan, copy, 0)

    def gemm2(self, call: Inputs, plan: Any, u: torch.Tensor, copy: int = 0) -> torch.Tensor:
        return self._gemm(u, plan, copy, 1)

    def combine(self, call: Inputs, plan: Any, z: torch.Tensor) -> torch.Tensor:
        return glue.weighted_sum(z, call.weights, plan.slot_row)

    def _gemm(self, a: torch.Tensor, plan: Sorted, copy: int, which: int) -> torch.Tensor:
        weight = self._copies[copy][which]
        assert weight is not None
        return torch._grouped_mm(a, weight.mT, offs=plan.ends)


class TorchGrouped(Peer):
    """See the module."""

    name = "torch-grouped"
    weight_format: ClassVar[WeightFormat] = "bf16"
    limit: ClassVar[float] = 1e-2  # the weights are rounded as well

    def load(self) -> None:
        if not hasattr(torch, "_grouped_mm"):
            raise RuntimeError(f"torch {torch.__version__} has no _grouped_mm")
        glue.kernels()

    def prepare(
        self, weights: Weights, *, tokens: Sequence[int], top_k: int, copies: int = 1
    ) -> TorchGroupedBlock:
        del tokens, top_k
        return TorchGroupedBlock(weights, copies)
