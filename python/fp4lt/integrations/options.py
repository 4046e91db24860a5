# SPDX-License-Identifier: Apache-2.0
"""What a user sets by environment variables, and how loud a fallback is."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, cast

import torch

from fp4lt.errors import ArgumentError, UnsupportedError
from fp4lt.problem import RECIPES, Recipe

RECIPE: Final = "FP4LT_SERVING_RECIPE"
BACKEND: Final = "FP4LT_SERVING_BACKEND"
REQUIRE: Final = "FP4LT_REQUIRE"
ANY_VERSION: Final = "FP4LT_ANY_VERSION"

_TRUTH: Final = {"": False, "0": False, "false": False, "no": False} | dict.fromkeys(
    ("1", "true", "yes"), True
)


@dataclass(frozen=True)
class Options:
    """Environment variables, checked.

    Attributes
    ----------
    recipe : "w4a4", "w4a16" or None
        None lets the device decide; see :func:`choose_recipe`.
    backend : str
        As in :func:`fp4lt.moe`.
    require : bool
        Whether a fallback to another kernel is an error.
    any_version : bool
        Whether an engine outside the tested versions is taken all the same.
    """

    recipe: Recipe | None = None
    backend: str = "auto"
    require: bool = False
    any_version: bool = False

    @classmethod
    def read(cls, environ: Mapping[str, str] | None = None) -> Options:
        """From the environment.

        Raises
        ------
        ArgumentError
            Naming the variable and what it may be.
        """
        environ = os.environ if environ is None else environ
        recipe = environ.get(RECIPE, "auto").strip().lower() or "auto"
        if recipe not in ("auto", *RECIPES):
            raise ArgumentError(f"{RECIPE}={recipe!r}; it must be auto or one of {RECIPES}")
        return cls(
            recipe=None if recipe == "auto" else cast(Recipe, recipe),
            backend=environ.get(BACKEND, "auto").strip() or "auto",
            require=flag(environ, REQUIRE),
            any_version=flag(environ, ANY_VERSION),
        )


def flag(environ: Mapping[str, str], name: str) -> bool:
    """A variable that is on or off."""
    value = environ.get(name, "").strip().lower()
    if value not in _TRUTH:
        raise ArgumentError(f"{name}={environ[name]!r}; it must be 0 or 1")
    return _TRUTH[value]


def choose_recipe(wanted: Recipe | None, device: torch.device, *, weight_only: bool) -> Recipe:
    """The recipe of a layer: the wanted one, else by checkpoint and device.

    W4A4 is the default where the GPU has FP4 tensor cores (compute capability 10.0 and later), as
    in the engines themselves; everywhere else activations stay in 16 bits.  So they do for a
    checkpoint that quantizes weights only.
    """
    if wanted is not None:
        return wanted
    if weight_only or device.type != "cuda":
        return "w4a16"
    return "w4a4" if torch.cuda.get_device_capability(device) >= (10, 0) else "w4a16"


def fall_back(logger: logging.Logger, message: str) -> None:
    """Say that something else than fp4lt will compute, or refuse that.

    Raises
    ------
    UnsupportedError
        If FP4LT_REQUIRE is on.
    """
    if Options.read().require:
        raise UnsupportedError(f"{message} ({REQUIRE}=1 makes this an error)")
    logger.warning("%s", message)
