# SPDX-License-Identifier: Apache-2.0
"""The fused backend's two GEMM launches apart, with everything before them done beforehand.

They are made of the backend's own pieces, in the order of its ``run_block``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from benchmarks.layers import Batch, MoEBatch, MoELayer
from benchmarks.prepared import Recipe, Stage
from benchmarks.timing import Call
from fp4lt import _C
from fp4lt.backends import fused, stages
from fp4lt.block import moe_call, moe_problem
from fp4lt.problem import MoECall, MoEProblem


class _Pass(NamedTuple):
    """One pass over the tokens, sorted and with its activations ready for w13."""

    problem: MoEProblem
    call: MoECall
    work: fused._WorkList
    routes: stages.Routes
    a1: stages.Rows
    row_index: torch.Tensor | None

    def gemm1(self) -> torch.Tensor:
        """(T * k, 2I) float32, as the block has it."""
        call = self.call
        h = self._empty(call.w13.shape[1])
        fused._gemm(
            self.work,
            self.a1,
            self.row_index,
            call.w13,
            h,
            alpha=call.gate_up_scales,
            order=self.problem.order,
            bias=call.w13_bias,
        )
        return h

    def activated(self) -> stages.Rows:
        """w2's operand."""
        image = fused._image(self.work, self.routes) if self.images else None
        return stages.activate(self.problem, self.call, self.gemm1(), self.routes, image=image)

    @property
    def images(self) -> bool:
        """Whether w2's GEMM takes an image."""
        return fused._form(self.call.w2, self.call.hidden.device) == _C.RowForm.IMAGE

    def gemm2(self, a2: stages.Rows) -> torch.Tensor:
        """(T * k, H) float32."""
        z = self._empty(self.problem.hidden)
        fused._gemm(self.work, a2, None, self.call.w2, z, bias=self.call.w2_bias, second=True)
        return z

    def _empty(self, width: int) -> torch.Tensor:
        slots, device = self.call.topk_ids.numel(), self.call.hidden.device
        return torch.empty(slots, width, dtype=torch.float32, device=device)


def _pass(problem: MoEProblem, call: MoECall) -> _Pass:
    slots, device = call.topk_ids.numel(), call.hidden.device
    work = fused._WorkList.empty(slots, problem.experts, device, (call.w13, call.w2))
    routes = stages.route(problem, call, work.blocks, work.length, work.block_rows, work.flags)
    x = call.hidden
    if call.router_weight_on_input:
        x = stages.scale_rows(x, call.topk_weights)
    a1, index = fused.first_operand(problem, call, work, routes, x)
    return _Pass(problem, call, work, routes, a1, index)


def passes(layer: MoELayer, recipe: Recipe, batch: Batch) -> list[_Pass]:
    """What the backend would do for a batch, up to the first GEMM."""
    assert isinstance(batch, MoEBatch)
    weights, router = layer.copies[batch.copy], batch.routing
    given = (batch.x, weights, router.weights, router.ids)
    problem = moe_problem(*given, recipe)
    call = moe_call(problem, *given, layer.router_weight_on_input, None)
    return [_pass(problem, part) for part in stages.passes(problem, call)]


def gemms(layer: MoELayer, recipe: Recipe) -> tuple[Stage, Stage]:
    """Stages for w13 and w2."""

    def first(batch: Batch) -> Call:
        parts = passes(layer, recipe, batch)
        return lambda: [part.gemm1() for part in parts]

    def second(batch: Batch) -> Call:
        parts = [(part, part.activated()) for part in passes(layer, recipe, batch)]
        return lambda: [part.gemm2(a2) for part, a2 in parts]

    return first, second
