# SPDX-License-Identifier: Apache-2.0
"""The interface of a backend."""

from __future__ import annotations

from typing import Protocol

import torch

from fp4lt.problem import GroupedCall, GroupedProblem, MoECall, MoEProblem, MoETrace


class Backend(Protocol):
    """One way to compute.  Stateless: what a call needs comes with it."""

    @property
    def name(self) -> str:
        """Name for ``backend=``, messages and reports."""

    def refusal(self, problem: GroupedProblem | MoEProblem, device: torch.device) -> str | None:
        """Why this backend cannot solve `problem` on `device`, or None if it can.

        Pure and cheap.  The same text serves dispatch, error messages, reports and test skips.
        """

    def grouped_mm(self, problem: GroupedProblem, call: GroupedCall) -> None:
        """Write ``call.out``."""

    def moe(self, problem: MoEProblem, call: MoECall) -> None:
        """Write ``call.out``."""

    def trace_moe(self, problem: MoEProblem, call: MoECall) -> MoETrace:
        """As :meth:`moe`, keeping the intermediate values."""
