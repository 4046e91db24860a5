# SPDX-License-Identifier: Apache-2.0
"""Shapes to time, read from ``benchmarks/presets/*.json``, whole or as one device's share.

Two kinds: ``moe`` is a whole MoE block, ``gemm`` a grouped GEMM without router or activation.  A
file holds a model's own extents; a name with a suffix is what one device has of it: ``glm5-tp8``
(an eighth of the intermediate size), ``kimi-k2-ep16`` (a sixteenth of the experts).
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from fp4lt.problem import ACTIVATIONS, ORDERS, Activation, Order

SCHEMA_VERSION = 2
FOLDER = Path(__file__).parent / "presets"
BLOCK = 16
SUGGESTED = (
    "glm5-tp8",
    "glm5-ep8",
    "seed-probe",
    "deepseek-v3-tp8",
    "deepseek-v3-ep8",
    "kimi-k2-ep16",
    "qwen3-235b-tp8",
    "qwen3-30b-tp1",
    "qwen3-next-tp4",
    "gpt-oss-120b-tp1",
    "llama4-maverick-tp8",
    "minimax-m2-tp4",
    "nemotron3-nano-tp2",
    "nemotron3-super-ep8",
    "kimi-k3-ep32",
)
"""Shares that fit one GPU and differ in what they stress."""

_SUFFIX = re.compile(r"-(tp|ep)([0-9]+)$")
_COMMON: dict[str, tuple[type, ...]] = {
    "schema_version": (int,),
    "name": (str,),
    "kind": (str,),
    "model": (str,),
    "experts": (int,),
    "sweep": (list,),
    "source": (str,),
    "note": (str,),
}
_BY_KIND: dict[str, dict[str, tuple[type, ...]]] = {
    "moe": {
        "hidden": (int,),
        "intermediate": (int,),
        "top_k": (int,),
        "activation": (str,),
        "order": (str, type(None)),
        "swiglu_limit": (float, type(None)),
        "bias": (bool,),
        "router_weight_on_input": (bool,),
    },
    "gemm": {"out_features": (int,), "in_features": (int,)},
}


class PresetError(ValueError):
    """A preset file or name that cannot be; the message names file and key, or the numbers."""


@dataclass(frozen=True)
class MoEPreset:
    """A MoE block: ``w13`` (experts, 2I or I, H), ``w2`` (experts, H, I); sweep over tokens.

    ``intermediate`` is one device's.  ``experts`` is the model's number: with ``ep`` devices
    sharing them, this one holds the first ``local_experts``.
    """

    name: str
    model: str
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    activation: Activation
    order: Order | None
    sweep: tuple[int, ...]
    source: str
    note: str
    swiglu_limit: float | None = None
    bias: bool = False
    router_weight_on_input: bool = False
    tp: int = 1
    ep: int = 1
    kind: Literal["moe"] = "moe"

    @property
    def local_experts(self) -> int:
        """Experts that this device holds."""
        return self.experts // self.ep

    @property
    def gemms(self) -> tuple[tuple[int, int], ...]:
        """(out-features, in-features) of each expert's matrices."""
        rows = self.intermediate if self.order is None else 2 * self.intermediate
        return ((rows, self.hidden), (self.hidden, self.intermediate))

    def share(self, name: str, tp: int, ep: int) -> MoEPreset:
        """One of ``tp`` slices of every expert, of one of ``ep`` parts of the experts."""
        part, exact = self.intermediate // tp, self.intermediate / tp
        if self.intermediate % tp or part % BLOCK:
            fits = [2**i for i in range(7) if self.intermediate % (2**i * BLOCK) == 0]
            raise PresetError(
                f"{name}: TP{tp} cuts {self.model}'s intermediate size {self.intermediate} into "
                f"slices of {exact:g}, which is {exact / BLOCK:g} blocks of {BLOCK}, and NVFP4 has "
                f"whole ones; TP can be {', '.join(map(str, fits))}"
            )
        if self.experts % ep:
            raise PresetError(f"{name}: {self.experts} experts cannot be shared out to EP{ep}")
        return replace(self, name=name, intermediate=part, tp=tp, ep=ep)


@dataclass(frozen=True)
class GemmPreset:
    """A grouped GEMM of (experts, N, K) weights; sweep over rows per expert."""

    name: str
    model: str
    out_features: int
    in_features: int
    experts: int
    sweep: tuple[int, ...]
    source: str
    note: str
    kind: Literal["gemm"] = "gemm"

    @property
    def local_experts(self) -> int:
        """All of them."""
        return self.experts

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
    for key, types in wanted.items():
        # bool is an int to isinstance, and `true` is never an extent.
        if type(data[key]) not in types:
            names = " or ".join("null" if t is type(None) else t.__name__ for t in types)
            raise PresetError(f"{where}: {key} must be {names}, got {data[key]!r}")
    if data["schema_version"] != SCHEMA_VERSION:
        raise PresetError(
            f"{where}: schema_version {data['schema_version']}, this code reads {SCHEMA_VERSION}"
        )
    for key, types in wanted.items():
        if types == (int,) and data[key] < 1:
            raise PresetError(f"{where}: {key} must be at least 1, got {data[key]}")
    sweep = data["sweep"]
    if not sweep or any(type(t) is not int or t < 1 for t in sweep) or sweep != sorted(set(sweep)):
        raise PresetError(f"{where}: sweep must be increasing positive integers, got {sweep}")
    for key in ("hidden", "intermediate", "in_features"):
        if data.get(key, 0) % BLOCK:
            raise PresetError(f"{where}: {key} must be a multiple of {BLOCK}, got {data[key]}")
    if kind == "moe":
        _validate_moe(data, where)
    return data


def _validate_moe(data: dict[str, Any], where: str) -> None:
    if data["activation"] not in ACTIVATIONS:
        raise PresetError(f"{where}: activation must be one of {ACTIVATIONS}")
    if data["order"] not in (*ORDERS, None):
        raise PresetError(f"{where}: order must be one of {ORDERS}, or null without a gate")
    if data["top_k"] > data["experts"]:
        raise PresetError(f"{where}: top_k {data['top_k']} of only {data['experts']} experts")
    if data["router_weight_on_input"] and data["top_k"] != 1:
        raise PresetError(f"{where}: router_weight_on_input is for top_k 1, got {data['top_k']}")


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
    """Return every model in the folder, whole, by name."""
    return {path.stem: read(path) for path in sorted(FOLDER.glob("*.json"))}


def resolve(name: str, *, tp: int | None = None, ep: int | None = None) -> Preset:
    """Return a preset by its name, ``-tpN`` and ``-epN`` suffixes included.

    Parameters
    ----------
    name : str
        A file's name, possibly with suffixes.
    tp, ep : int, optional
        As if the name had these suffixes.

    Raises
    ------
    PresetError
        If there is no such model, or it cannot be cut so.
    """
    known = available()
    parts = {"tp": tp, "ep": ep}
    base = name
    while base not in known and (suffix := _SUFFIX.search(base)):
        which, count = suffix[1], int(suffix[2])
        if parts[which] is not None:
            raise PresetError(f"{name} with another {which.upper()} of {parts[which]}: give one")
        parts[which] = count
        base = base[: suffix.start()]
    if base not in known:
        raise PresetError(
            f"no preset {name!r}; there are {', '.join(known)}, each MoE model also as NAME-tpN "
            "and NAME-epN"
        )
    preset = known[base]
    given = {which: count for which, count in parts.items() if count is not None}
    if not given:
        return preset
    if min(given.values()) < 1:
        raise PresetError(f"{name}: TP and EP are at least 1")
    if not isinstance(preset, MoEPreset):
        raise PresetError(f"{base} is a plain GEMM; TP and EP are for MoE blocks")
    full = base + "".join(f"-{which}{count}" for which, count in given.items())
    return preset.share(full, given.get("tp", 1), given.get("ep", 1))
