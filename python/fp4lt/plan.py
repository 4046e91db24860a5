# SPDX-License-Identifier: Apache-2.0
"""Plans: a problem with the backend chosen for it.  The API's functions are sugar over them."""

from __future__ import annotations

from typing import Generic, TypeVar

import torch

from fp4lt.backends import Backend, choose
from fp4lt.problem import GroupedProblem, MoEProblem

P = TypeVar("P", GroupedProblem, MoEProblem)


class Plan(Generic[P]):
    """What does not change from call to call.

    Attributes
    ----------
    problem : GroupedProblem or MoEProblem
    device : torch.device
    backend : Backend
        Chosen when the plan was made.
    """

    def __init__(self, problem: P, device: torch.device, backend: str) -> None:
        self.problem: P = problem
        self.device = device
        self.backend: Backend = choose(problem, device, backend)

    def __repr__(self) -> str:
        name = type(self).__name__
        return f"{name}({self.problem}, backend={self.backend.name!r}, {self.device})"
