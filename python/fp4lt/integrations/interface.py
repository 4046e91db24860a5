# SPDX-License-Identifier: Apache-2.0
"""Whether an engine still looks the way an adapter was written for.

An engine's internals move between releases without notice.  Each adapter lists what it touches, and
asks here before it touches anything.
"""

from __future__ import annotations

import inspect
import pkgutil
from dataclasses import dataclass
from importlib import metadata
from typing import Any

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True)
class Target:
    """Something of an engine's that an adapter calls, replaces or reads.

    Attributes
    ----------
    path : str
        Dotted: module, then attributes.
    parameters : tuple of str or None
        Names that a call gives it, in order, without ``self``.  None if it is not called.
    """

    path: str
    parameters: tuple[str, ...] | None = None

    def fault(self) -> str | None:
        """What is wrong with it, or None."""
        try:
            found = pkgutil.resolve_name(self.path)
        except (ImportError, AttributeError) as error:
            return f"{self.path} is not there ({error})"
        if self.parameters is None:
            return None
        return _signature_fault(self.path, found, self.parameters)


def _signature_fault(path: str, found: Any, wanted: tuple[str, ...]) -> str | None:
    try:
        parameters = list(inspect.signature(found).parameters.values())
    except (TypeError, ValueError) as error:
        return f"{path} has no signature ({error})"
    if parameters and parameters[0].name == "self":
        parameters = parameters[1:]
    have = tuple(p.name for p in parameters if p.kind in _POSITIONAL)
    spare = [
        p.name
        for p in parameters
        if p.name not in wanted
        and p.default is p.empty
        and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if have[: len(wanted)] != wanted or spare:
        return f"{path} takes ({', '.join(p.name for p in parameters)}), not ({', '.join(wanted)})"
    return None


def faults(targets: tuple[Target, ...]) -> list[str]:
    """What is wrong with any of `targets`; empty if nothing is."""
    return [fault for fault in (target.fault() for target in targets) if fault is not None]


def version_of(package: str) -> str:
    """The installed version, "" if there is no such package."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def release(version: str) -> tuple[int, ...]:
    """The numbers at the start of a version: (0, 5, 23) of "0.5.23.post1"."""
    numbers: list[int] = []
    for part in version.split("+")[0].split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


def version_fault(package: str, low: str, high: str) -> str | None:
    """Why the installed version is outside ``low <= version < high``, or None."""
    version = version_of(package)
    if release(low) <= release(version) < release(high):
        return None
    return f"{package} {version or '(unknown version)'} is outside >={low},<{high}"
