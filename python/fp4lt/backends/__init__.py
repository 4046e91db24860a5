# SPDX-License-Identifier: Apache-2.0
"""The ordered table of backends, and the choice among them."""

from __future__ import annotations

import torch

from fp4lt.backends.base import Backend
from fp4lt.backends.cpu import CpuBackend
from fp4lt.backends.cublaslt import CublasLtBackend
from fp4lt.backends.dequant import DequantBackend
from fp4lt.backends.fused import FusedBackend
from fp4lt.errors import ArgumentError, UnsupportedError
from fp4lt.problem import GroupedProblem, MoEProblem

__all__ = ["BACKENDS", "Backend", "choose", "refusals"]

BACKENDS: tuple[Backend, ...] = (
    FusedBackend(),
    CublasLtBackend(),
    DequantBackend(),
    CpuBackend(),
)
"""In order of preference: ``backend="auto"`` takes the first that does not refuse."""


def refusals(problem: GroupedProblem | MoEProblem, device: torch.device) -> dict[str, str | None]:
    """Each backend's refusal of `problem` on `device`, None where it would take it."""
    return {b.name: b.refusal(problem, device) for b in BACKENDS}


def choose(problem: GroupedProblem | MoEProblem, device: torch.device, name: str) -> Backend:
    """The backend called `name`, or for "auto" the first that takes the problem.

    Raises
    ------
    ArgumentError
        If there is no backend of that name.
    UnsupportedError
        If it, or every backend, refuses; with the reasons.
    """
    known = [b.name for b in BACKENDS]
    if name != "auto" and name not in known:
        raise ArgumentError(
            f"backend={name!r}: this version has no such backend; use 'auto' or one of {known}"
        )
    reasons = []
    for backend in BACKENDS:
        if name not in ("auto", backend.name):
            continue
        reason = backend.refusal(problem, device)
        if reason is None:
            return backend
        reasons.append(f"{backend.name}: {reason}")
    raise UnsupportedError(f"no backend can run {problem} on {device}. " + "; ".join(reasons))
