# SPDX-License-Identifier: Apache-2.0
"""The stages of a MoE block on backend ``fused``, for checking them."""

from __future__ import annotations

import torch

from fp4lt import _C
from fp4lt.backends.fused import activate, run_block
from fp4lt.codec import quantize_parts
from fp4lt.problem import MoECall, MoEProblem, MoETrace, Operand
from fp4lt.tensor import NVFP4Tensor


def host_trace(problem: MoEProblem, call: MoECall) -> MoETrace:
    """Run the block and give its stages as host tensors.

    The operands never exist as NVFP4 tensors in this backend; they are quantized once more here, by
    the same arithmetic.
    """
    stages = run_block(problem, call, keep_h=True)
    routes = stages.routes
    rows = int(routes.rows)
    token = routes.token[:rows].to("cpu", torch.int64)
    expert = routes.expert[:rows].to("cpu", torch.int64)
    h = stages.h[:rows]

    def operand(x: torch.Tensor, scale: torch.Tensor | None) -> Operand:
        if not problem.quantizes:
            return x.to("cpu", problem.dtype)
        on_device = expert.to(x.device)
        if scale is not None:
            scale = (scale[on_device] if scale.ndim else scale.expand(rows)).contiguous()
        codes, scales, g = quantize_parts(x, "row" if scale is None else scale)
        return NVFP4Tensor._make(codes.cpu(), scales.cpu(), g.cpu())

    a1 = operand(stages.x[token.to(stages.x.device)], call.a1_scale)
    u = activate(problem, call, stages.h, routes, _C.ActivationForm.FLOAT).values[:rows]
    a2 = operand(u, call.a2_scale)
    return MoETrace(
        token,
        expert,
        routes.slot_row.to("cpu", torch.int64),
        a1,
        h.cpu(),
        a2,
        stages.z[:rows].cpu(),
        call.out.cpu(),
    )
