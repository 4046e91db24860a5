# SPDX-License-Identifier: Apache-2.0
"""Shapes to time, read from ``benchmarks/presets/*.json``.

Two kinds share one schema: ``moe`` is a whole MoE block, ``gemm`` a grouped GEMM without router
or activation.  Extents are those of one device: ``intermediate`` is already divided by ``tp``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fp4lt.problem import ACTIVATIONS, Activation

SCHEMA_VERSION = 1
FOLDER = Path(__file__).parent / "presets"

_COMMON: dict[str, type] = {
    "schema_version": int,
    "name": str,
    "kind": str,
    "model": str,
    "experts": int,
    "tp": int,
    "sweep": list,
    "source": str,
}
_BY_KIND: dict[str, dict[str, type]] = {
    "moe": {
        "hidden": int,
        "intermediate": int,
        "top_k": int,
        "activation": str,
        "gated": bool,
    },
    "gemm": {"out_features": int, "in_features": int},
}


class PresetError(ValueError):
    """A preset file that does not follow the schema; the message names file and key."""


@dataclass(frozen=True)
class MoEPreset:
    """A MoE block: ``w13`` (experts, 2I or I, H), ``w2`` (experts, H, I); sweep over tokens."""

    name: str
    model: str
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    activation: Activation
    gated: bool
    tp: int
    sweep: tuple[int, ...]
    source: str
    kind: Literal["moe"] = "moe"

    @property
    def gemms(self) -> tuple[tuple[int, int], ...]:
        """(out-features, in-features) of each expert's matrices."""
        rows = 2 * self.intermediate if self.gated else self.intermediate
        return ((rows, self.hidden), (self.hidden, self.intermediate))


@dataclass(frozen=True)
class GemmPreset:
    """A grouped GEMM of (experts, N, K) weights; sweep over rows per expert."""

    name: str
    model: str
    out_features: int
    in_features: int
    experts: int
    tp: int
    sweep: tuple[int, ...]
    source: str
    kind: Literal["gemm"] = "gemm"

    @property
    def gemms(self) -> tuple[tuple[int, int], ...]:
        """(out-features, in-features) of each expert's matrix."""
        return ((self.out_features, self.in_features),)


Preset = MoEPreset | GemmPreset


def validate(data: Any, where: str) -> dict[str, Any]:
    """Check one parsed preset against the schema.

    Parameters
    ----------
    data : object
        What ``json.load`` gave.
    where : str
        Named in error messages, usually the file.

    Returns
    -------
    dict
        ``data`` itself.

    Raises
    ------
    PresetError
        For a missing, unknown or mistyped key, or an extent that NVFP4 cannot have.
    """
    if not isinstance(data, dict):
        raise PresetError(f"{where}: a preset is a JSON object, got {type(data).__name__}")
    kind = data.get("kind")
    if kind not in _BY_KIND:
        raise PresetError(f"{where}: kind must be one of {sorted(_BY_KIND)}, got {kind!r}")
    wanted = _COMMON | _BY_KIND[kind]
    if missing := sorted(wanted.keys() - data.keys()):
        raise PresetError(f"{where}: missing {', '.join(missing)}")
    if unknown := sorted(data.keys() - wanted.keys()):
        raise PresetError(f"{where}: unknown {', '.join(unknown)}; a {kind} has {sorted(wanted)}")
    for key, kind_of in wanted.items():
        # bool is an int to isinstance, and `true` is never an extent.
        if type(data[key]) is not kind_of:
            raise PresetError(f"{where}: {key} must be {kind_of.__name__}, got {data[key]!r}")
    if data["schema_version"] != SCHEMA_VERSION:
        raise PresetError(
            f"{where}: schema_version {data['schema_version']}, this code reads {SCHEMA_VERSION}"
        )
    extents = [key for key, kind_of in wanted.items() if kind_of is int]
    for key in extents:
        if data[key] < 1:
            raise PresetError(f"{where}: {key} must be at least 1, got {data[key]}")
    sweep = data["sweep"]
    if not sweep or any(type(t) is not int or t < 1 for t in sweep) or sweep != sorted(set(sweep)):
        raise PresetError(f"{where}: sweep must be increasing positive integers, got {sweep}")
    for key in ("hidden", "intermediate", "in_features"):
        if data.get(key, 0) % 16:
            raise PresetError(f"{where}: {key} must be a multiple of 16, got {data[key]}")
    if kind == "moe" and data["activation"] not in ACTIVATIONS:
        raise PresetError(f"{where}: activation must be one of {ACTIVATIONS}")
    if kind == "moe" and data["top_k"] > data["experts"]:
        raise PresetError(f"{where}: top_k {data['top_k']} of only {data['experts']} experts")
    return data


def read(path: Path) -> Preset:
    """Read and validate one preset file."""
    try:
        data = validate(json.loads(path.read_text(encoding="utf-8")), path.name)
    except json.JSONDecodeError as error:
        raise PresetError(f"{path.name}: not JSON: {error}") from error
    if data["name"] != path.stem:
        raise PresetError(f"{path.name}: name {data['name']!r} must be the file's own")
    fields = {key: value for key, value in data.items() if key not in ("schema_version", "kind")}
    fields["sweep"] = tuple(fields["sweep"])
    return MoEPreset(**fields) if data["kind"] == "moe" else GemmPreset(**fields)


def available() -> dict[str, Preset]:
    """Return every preset in the folder, by name."""
    return {path.stem: read(path) for path in sorted(FOLDER.glob("*.json"))}
