# SPDX-License-Identifier: Apache-2.0
"""Backend ``cublaslt``: NVFP4 times NVFP4 on FP4 tensor cores, one cublasLtMatmul per expert."""

from __future__ import annotations

import torch

from fp4lt import _hazards, _library
from fp4lt.backends.looped import capability, depth, device_refusal
from fp4lt.backends.looped_calls import run_block, run_grouped, run_moe
from fp4lt.backends.trace import host_trace
from fp4lt.problem import GroupedCall, GroupedProblem, MoECall, MoEProblem, MoETrace

__all__ = ["CublasLtBackend", "depth"]


class CublasLtBackend:
    """See the module."""

    name = "cublaslt"

    def refusal(self, problem: GroupedProblem | MoEProblem, device: torch.device) -> str | None:
        """See :class:`fp4lt.backends.base.Backend`."""
        if device.type != "cuda":
            return f"it needs a CUDA device, and the tensors are on {device}"
        major, minor = capability(device)
        if major < 10:
            return (
                "it needs FP4 tensor cores, compute capability 10.0 or later, and "
                f"{device} has {major}.{minor}"
            )
        refused = _format_refusal(problem) or device_refusal(problem, device)
        if refused is not None:
            return refused
        version = _library.opened().version
        return _hazards.refusal(version, f"{major}.{minor}", "fp4", _columns(problem))

    def grouped_mm(self, problem: GroupedProblem, call: GroupedCall) -> None:
        """See :class:`fp4lt.backends.base.Backend`."""
        run_grouped(True, problem, call)

    def moe(self, problem: MoEProblem, call: MoECall) -> None:
        """See :class:`fp4lt.backends.base.Backend`."""
        run_moe(True, problem, call)

    def trace_moe(self, problem: MoEProblem, call: MoECall) -> MoETrace:
        """See :class:`fp4lt.backends.base.Backend`; everything is moved to host memory."""
        return host_trace(problem, call, *run_block(True, problem, call, trace=True))


def _columns(problem: GroupedProblem | MoEProblem) -> tuple[int, ...]:
    """Out-features of each product."""
    if isinstance(problem, GroupedProblem):
        return (problem.n,)
    gated = 2 if problem.order is not None else 1
    return (gated * problem.intermediate, problem.hidden)


def _format_refusal(problem: GroupedProblem | MoEProblem) -> str | None:
    inner: tuple[int, ...]
    if isinstance(problem, GroupedProblem):
        weights, inner = problem.b_format, (problem.k,)
        exact = problem.quantizes or problem.a_format == "nvfp4"
    else:
        weights, inner = problem.w_format, (problem.hidden, problem.intermediate)
        exact = problem.quantizes
    if weights != "nvfp4":
        return f"it multiplies NVFP4 weights, and these are {weights}"
    if not exact:
        return "it multiplies NVFP4 by NVFP4; use recipe='w4a4', or backend='fused'"
    for k in inner:
        # 32 would do for the codes.  But the last tile of scales would then hold blocks past K,
        # which cuBLASLt wants zero and reads, and which in weights are as their maker left them.
        if k % 64:
            return (
                "cuBLASLt's FP4 needs an inner dimension that fills its tiles of scales, a "
                f"multiple of 64, and this is {k}; pad codes and scales with zeros, or use "
                "backend='fused'"
            )
    for n in _columns(problem):
        if n % 8:
            return (
                f"cuBLASLt's FP4 needs out-features that are a multiple of 8, and these are {n}; "
                "pad them, or use backend='fused'"
            )
    return None
