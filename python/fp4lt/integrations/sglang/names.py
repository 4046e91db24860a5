# SPDX-License-Identifier: Apache-2.0
"""The names that ``--moe-runner-backend`` takes, and whether one of them is in force."""

from __future__ import annotations

import os
from typing import Final

from sglang.srt.layers.moe.utils import get_moe_runner_backend

from fp4lt.errors import ArgumentError
from fp4lt.integrations.options import Options
from fp4lt.problem import Recipe

NAME: Final = "fp4lt"
RECIPES: Final[dict[str, Recipe | None]] = {
    NAME: None,
    f"{NAME}_w4a4": "w4a4",
    f"{NAME}_w4a16": "w4a16",
}
"""Each name with the recipe that it asks for."""

TAKE_OVER: Final = "FP4LT_SGLANG_TAKE_OVER"
REPLACEABLE: Final = ("auto", "flashinfer_cutlass", "marlin")
"""SGLang's own names that the variable may hand to us: those whose layers load as ours do."""


def taken_over() -> tuple[str, ...]:
    """SGLang's backends that TAKE_OVER names.

    Raises
    ------
    ArgumentError
        If it names another one.
    """
    names = tuple(n.strip() for n in os.environ.get(TAKE_OVER, "").split(",") if n.strip())
    wrong = [name for name in names if name not in REPLACEABLE]
    if wrong:
        raise ArgumentError(
            f"{TAKE_OVER} names {', '.join(wrong)}; it can name {', '.join(REPLACEABLE)}"
        )
    return names


def in_force() -> str | None:
    """Our name if layers made now are ours, else None.

    The draft model of speculative decoding has a backend of its own, which SGLang puts in place
    while it makes that model.
    """
    value: str = get_moe_runner_backend().value
    if value in RECIPES:
        return value
    return NAME if value in taken_over() else None


def wanted_recipe(name: str) -> Recipe | None:
    """The recipe that the name asks for, else the environment; None leaves it to the device."""
    return RECIPES[name] or Options.read().recipe
