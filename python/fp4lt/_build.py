# SPDX-License-Identifier: Apache-2.0
"""What the compiled module was built with, and has device code for."""

from __future__ import annotations

import re
from typing import Any

from fp4lt import _C


def covers(architecture: str, capability: tuple[int, int]) -> str | None:
    """How code for a CMake architecture such as "90a-real" or "80" runs on a device.

    Returns
    -------
    "as built", "PTX" (compiled by the driver at first use), None, or "unknown" for a name without
    a number, such as "native"
    """
    match = re.fullmatch(r"(\d+)(\d)([af]?)(?:-(real|virtual))?", architecture)
    if match is None:
        return "unknown"
    built, suffix, kind = (int(match[1]), int(match[2])), match[3], match[4]
    same_major = built[0] == capability[0] and built[1] <= capability[1]
    runs = {"a": built == capability, "f": same_major, "": same_major}[suffix]
    if runs and kind != "virtual":
        return "as built"
    runs_ptx = runs if suffix else built <= capability
    return "PTX" if runs_ptx and kind != "real" else None


def has_code_for(capability: tuple[int, int]) -> bool:
    """Whether the module's device code runs on a device of this compute capability."""
    return any(covers(name, capability) for name in _C.cuda_architectures().split())


def record() -> dict[str, Any]:
    """What the module was built by and for.

    Returns
    -------
    dict
        ``toolkit`` (``""`` without device code), ``architectures``, ``compiler``, and ``name``,
        which has toolkit and architectures: "cu13.0-sm80+ptx-sm90a", or "cpu".
    """
    toolkit, architectures = _C.cuda_built_with(), _C.cuda_architectures().split()
    return {
        "name": "-".join([f"cu{toolkit}", *map(_short, architectures)]) if toolkit else "cpu",
        "toolkit": toolkit,
        "architectures": architectures,
        "compiler": _C.compiler(),
    }


def _short(architecture: str) -> str:
    number, _, kind = architecture.partition("-")
    if not number[:1].isdigit():
        return architecture
    return {"real": f"sm{number}", "virtual": f"ptx{number}"}.get(kind, f"sm{number}+ptx")
