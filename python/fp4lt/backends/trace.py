# SPDX-License-Identifier: Apache-2.0
"""The stages of a MoE block on a CUDA backend, for checking them."""

from __future__ import annotations

import torch

from fp4lt import _C
from fp4lt.backends.stages import Routes, activate
from fp4lt.codec import quantize_parts
from fp4lt.problem import MoECall, MoEProblem, MoETrace, Operand
from fp4lt.tensor import NVFP4Tensor


def host_trace(
    problem: MoEProblem,
    call: MoECall,
    x: torch.Tensor,
    routes: Routes,
    h: torch.Tensor,
    z: torch.Tensor,
) -> MoETrace:
    """A block that has run, as host tensors.

    The operands need not exist as NVFP4 tensors in a backend; they are quantized once more here, by
    the same arithmetic.

    Parameters
    ----------
    x : (T, H)
        What the rows were taken from.
    routes : Routes
    h, z : (T * k, ...) float32
        With all scales and biases.
    """
    rows = int(routes.rows)
    token = routes.token[:rows].to("cpu", torch.int64)
    expert = routes.expert[:rows].to("cpu", torch.int64)

    def operand(values: torch.Tensor, scale: torch.Tensor | None) -> Operand:
        if not problem.quantizes:
            return values.to("cpu", problem.dtype)
        on_device = expert.to(values.device)
        if scale is not None:
            scale = (scale[on_device] if scale.ndim else scale.expand(rows)).contiguous()
        codes, scales, g = quantize_parts(values, "row" if scale is None else scale)
        return NVFP4Tensor._make(codes.cpu(), scales.cpu(), g.cpu())

    a1 = operand(x[token.to(x.device)], call.a1_scale)
    u = activate(problem, call, h, routes, kind=_C.ActivationForm.FLOAT).values[:rows]
    a2 = operand(u, call.a2_scale)
    return MoETrace(
        token,
        expert,
        routes.slot_row.to("cpu", torch.int64),
        a1,
        h[:rows].cpu(),
        a2,
        z[:rows].cpu(),
        call.out.cpu(),
    )
