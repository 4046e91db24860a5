# SPDX-License-Identifier: Apache-2.0
"""Backend ``dequant``: the looped shim on 16-bit tensor cores.

NVFP4 weights are expanded to bf16 or fp16 in the stream's workspace just before their product, in
slices that stay in L2.  The products code * scale are exact in both types, so the numbers are those
of FP4 tensor cores, up to the order of the sum.  bf16 and fp16 weights are taken as they are.
"""

from __future__ import annotations

import torch

from fp4lt import _hazards, _library
from fp4lt.backends.looped import capability, depth, device_refusal
from fp4lt.backends.looped_calls import run_block, run_grouped, run_moe
from fp4lt.backends.trace import host_trace
from fp4lt.problem import GroupedCall, GroupedProblem, MoECall, MoEProblem, MoETrace

__all__ = ["DequantBackend", "depth"]


class DequantBackend:
    """See the module."""

    name = "dequant"

    def refusal(self, problem: GroupedProblem | MoEProblem, device: torch.device) -> str | None:
        """See :class:`fp4lt.backends.base.Backend`."""
        refused = device_refusal(problem, device)
        if refused is not None:
            return refused
        major, minor = capability(device)
        return _hazards.refusal(_library.opened().version, f"{major}.{minor}", "16-bit")

    def grouped_mm(self, problem: GroupedProblem, call: GroupedCall) -> None:
        """See :class:`fp4lt.backends.base.Backend`."""
        run_grouped(False, problem, call)

    def moe(self, problem: MoEProblem, call: MoECall) -> None:
        """See :class:`fp4lt.backends.base.Backend`."""
        run_moe(False, problem, call)

    def trace_moe(self, problem: MoEProblem, call: MoECall) -> MoETrace:
        """See :class:`fp4lt.backends.base.Backend`; everything is moved to host memory."""
        return host_trace(problem, call, *run_block(False, problem, call, trace=True))
