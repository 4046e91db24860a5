# SPDX-License-Identifier: Apache-2.0
"""How checkpoints name the tensors of MoE experts.

One tensor per expert and projection, or one for all experts with gate and up in it::

    <prefix>layers.L.<module>.experts.E.{gate,up,down}_proj.<parameter>
    <prefix>layers.L.<module>.experts.E.{w1,w3,w2}.<parameter>
    <prefix>layers.L.<module>.experts.{gate_up,down}_proj.<parameter>
    <prefix>layers.L.<module>.experts.{gate_up,down}_proj[_<parameter>]

The parameters present tell the two NVFP4 conventions apart; magnitudes never do, since a multiplier
and its reciprocal can both be plausible.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

from fp4lt.errors import ArgumentError, CheckpointError, UnsupportedError

_EXPERT: Final = re.compile(
    r"(?P<prefix>(?:.*?\.)?)layers\.(?P<layer>\d+)\.(?P<module>(?:[^.]+\.)*?experts)\..+"
)
_STYLES: Final = (
    {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"},
    {"gate": "w1", "up": "w3", "down": "w2"},
)
_STACKS: Final = {"gate_up": "gate_up_proj", "down": "down_proj"}
BIAS: Final = "bias"


@dataclass(frozen=True)
class Convention:
    """Parameter names of one NVFP4 format, and whether its global scales are stored inverted."""

    title: str
    codes: str
    scales: str
    weight_global: str
    input_global: str
    reciprocal: bool

    @property
    def parameters(self) -> tuple[str, str, str, str]:
        """Every parameter of a projection: codes, block scales, weight and input global."""
        return (self.codes, self.scales, self.weight_global, self.input_global)


MODELOPT: Final = Convention(
    "ModelOpt", "weight", "weight_scale", "weight_scale_2", "input_scale", reciprocal=False
)
COMPRESSED_TENSORS: Final = Convention(
    "compressed-tensors",
    "weight_packed",
    "weight_scale",
    "weight_global_scale",
    "input_global_scale",
    reciprocal=True,
)


_KNOWN: Final = {*MODELOPT.parameters, *COMPRESSED_TENSORS.parameters, BIAS}
# ModelOpt hangs a stack's other parameters on its name; "weight" itself is the bare name.
_UNDERSCORED: Final = {"": "weight"} | {
    f"_{parameter}": parameter for parameter in (*MODELOPT.parameters[1:], BIAS)
}


@dataclass
class ExpertLayer:
    """Tensor names of one MoE layer, as found; nothing is known yet about their contents."""

    number: int
    root: str
    """Everything before the expert's number, e.g. ``model.layers.3.mlp.experts``."""
    members: list[str] = field(default_factory=list)
    """All tensors below ``root``; what follows is known only once they are :meth:`parsed`."""
    style: dict[str, str] = field(default_factory=lambda: _STYLES[0])
    names: dict[str, tuple[int, str, str]] = field(default_factory=dict)
    """Expert, projection and parameter of every tensor of one expert."""
    stacks: dict[tuple[str, str], str] = field(default_factory=dict)
    """Name of a stacked tensor by projection (``gate_up``, ``down``) and parameter."""
    strangers: list[str] = field(default_factory=list)
    """Tensors below ``root`` that no expert's projection accounts for."""

    @property
    def in_main_stack(self) -> bool:
        """False for the experts of a multi-token-prediction head, which counts layers anew."""
        return "mtp" not in self.root.split(".")

    @cached_property
    def experts(self) -> frozenset[int]:
        """Numbers of the experts with tensors of their own."""
        return frozenset(expert for expert, _, _ in self.names.values())

    @cached_property
    def held(self) -> frozenset[tuple[str, str]]:
        """Projection and parameter of which any expert has a tensor."""
        return frozenset(parts[1:] for parts in self.names.values()) | self.stacks.keys()

    @cached_property
    def projections(self) -> frozenset[str]:
        """Projections of which any expert has a tensor."""
        return frozenset(projection for projection, _ in self.held)

    def has(self, projections: Iterable[str], parameter: str) -> bool:
        """Whether any expert has this parameter for any of these projections."""
        return any((projection, parameter) in self.held for projection in projections)

    def name(self, expert: int, projection: str, parameter: str) -> str:
        """Full name of a tensor, whether or not it exists."""
        if not self.stacks:
            return f"{self.root}.{expert}.{self.style[projection]}.{parameter}"
        if (projection, parameter) in self.stacks:
            return self.stacks[projection, parameter]
        dotted = any("." in name[len(self.root) + 1 :] for name in self.stacks.values())
        tail = f".{parameter}" if dotted else "" if parameter == "weight" else f"_{parameter}"
        return f"{self.root}.{_STACKS[projection]}{tail}"

    def names_of(self, experts: Collection[int], shared: Collection[tuple[str, str]]) -> list[str]:
        """Tensors of these experts, and these projections' parameters of all experts."""
        return [
            name
            for name, (expert, *what) in self.names.items()
            if expert in experts or tuple(what) in shared
        ]

    def parsed(self) -> ExpertLayer:
        """Take the members' names apart, once a layer has been chosen among the many there are."""
        for name in self.members:
            rest = name[len(self.root) + 1 :]
            if not (_sort_in(self, name, rest) or _sort_stack(self, name, rest)):
                self.strangers.append(name)
        return self

    def convention(self) -> Convention | None:
        """Tell the format by its parameter names; None for plain, unquantized weights."""
        _refuse_strangers(self)
        parameters = {parameter for _, parameter in self.held} - {BIAS}
        inverted = parameters & {"weight_packed", "weight_global_scale", "input_global_scale"}
        direct = parameters & {"weight", "weight_scale_2", "input_scale"}
        if inverted and direct:
            raise CheckpointError(
                f"load_moe: layer {self.number} ({self.root}) mixes formats: it has both "
                f"{_listed(inverted)} (compressed-tensors) and {_listed(direct)} (ModelOpt); "
                "need every expert in one of them"
            )
        if inverted:
            return COMPRESSED_TENSORS
        return None if parameters == {"weight"} else MODELOPT

    def require_contiguous(self) -> None:
        """Refuse a gap among the experts' numbers."""
        missing = sorted(set(range(max(self.experts) + 1)) - self.experts)
        if missing:
            raise CheckpointError(
                f"load_moe: layer {self.number} has experts up to {max(self.experts)} but no "
                f"tensors {self.root}.{missing[0]}.* (expert {missing[0]}"
                f"{f' and {len(missing) - 1} more' if len(missing) > 1 else ''} missing); "
                "experts must be numbered 0 to E-1 without a gap"
            )


def find_layers(tensors: Iterable[str]) -> list[ExpertLayer]:
    """Sort expert tensors by layer; everything else (attention, routers, shared experts) drops."""
    layers: dict[str, ExpertLayer] = {}
    for name in tensors:
        match = _EXPERT.fullmatch(name)
        if match is None:
            continue
        root = f"{match['prefix']}layers.{match['layer']}.{match['module']}"
        if root not in layers:
            layers[root] = ExpertLayer(int(match["layer"]), root)
        layers[root].members.append(name)
    return sorted(layers.values(), key=lambda found: (found.number, found.root))


def _sort_in(layer: ExpertLayer, name: str, rest: str) -> bool:
    """Note a tensor of one expert; False if it is none."""
    expert, _, tail = rest.partition(".")
    projection, _, parameter = tail.partition(".")
    style = next((style for style in _STYLES if projection in style.values()), None)
    # "007" would be named "7" again by ExpertLayer.name, so it counts as unknown.
    if style is None or parameter not in _KNOWN or expert != str(_number(expert)):
        return False
    if not layer.names:
        layer.style = style
    if style is not layer.style:
        return False
    role = next(role for role, used in style.items() if used == projection)
    layer.names[name] = (int(expert), role, parameter)
    return True


def _sort_stack(layer: ExpertLayer, name: str, rest: str) -> bool:
    """Note a tensor of all experts; False if it is none, or a second one for the same thing."""
    for role, stem in _STACKS.items():
        tail = rest.removeprefix(stem)
        parameter = tail[1:] if tail.startswith(".") else _UNDERSCORED.get(tail)
        if tail != rest and parameter in _KNOWN and (role, parameter) not in layer.stacks:
            layer.stacks[role, parameter] = name
            return True
    return False


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() else None


def select_layer(layers: list[ExpertLayer], number: int | None, where: str) -> ExpertLayer:
    """Pick the layer a caller asked for, or the only one.

    Parameters
    ----------
    layers : list of ExpertLayer
        As :func:`find_layers` gives them.
    number : int, optional
        None stands for the only layer there is.
    where : str
        What was searched, for the message.

    Raises
    ------
    CheckpointError
        No layer with experts, not this one, or several candidates.
    ArgumentError
        ``number`` is not an integer.
    """
    if number is not None and (isinstance(number, bool) or not isinstance(number, int)):
        raise ArgumentError(
            f"load_moe: layer must be an int or None, got {type(number).__name__} {number!r}"
        )
    if not layers:
        raise CheckpointError(
            f"load_moe: no expert tensors in {where}; need names like "
            "model.layers.3.mlp.experts.0.gate_proj.weight, "
            "model.layers.3.block_sparse_moe.experts.0.w1.weight or "
            "model.layers.3.mlp.experts.gate_up_proj"
        )
    main = [layer for layer in layers if layer.in_main_stack] or layers
    chosen = main if number is None else [layer for layer in main if layer.number == number]
    if len(chosen) == 1:
        return chosen[0].parsed()
    present = _ranges(sorted({layer.number for layer in main}))
    if number is None:
        raise CheckpointError(
            f"load_moe: {where} holds {len(main)} MoE layers ({present}); pass layer= one of them"
        )
    if not chosen:
        raise CheckpointError(
            f"load_moe: layer {number} has no experts in {where}; MoE layers there: {present}"
        )
    raise CheckpointError(
        f"load_moe: layer {number} of {where} is ambiguous: "
        f"{_listed(layer.root for layer in chosen)}; keep one of them in the file"
    )


def _refuse_strangers(layer: ExpertLayer) -> None:
    own = [name for name in layer.strangers if name[len(layer.root) + 1].isdigit()]
    if not layer.names and not own:
        _refuse_stacks(layer)
    elif layer.strangers or layer.stacks:
        style = "/".join(layer.style.values())
        raise UnsupportedError(
            f"load_moe: tensor {min([*layer.strangers, *layer.stacks.values()])} belongs to the "
            f"experts of layer {layer.number} but is none that load_moe knows beside the others, "
            f"and leaving it out could change the result; known per expert are {style} with "
            f"{_listed(MODELOPT.parameters)} (ModelOpt) or "
            f"{_listed(COMPRESSED_TENSORS.parameters)} (compressed-tensors), and {BIAS}"
        )


def _refuse_stacks(layer: ExpertLayer) -> None:
    """Refuse stacked tensors that are not all known, with all the names there are."""
    lacking = [role for role in _STACKS if role not in layer.projections]
    if not layer.strangers and not lacking:
        return
    what = (
        f"an unknown one, {min(layer.strangers)}"
        if layer.strangers
        else f"none called {_STACKS[lacking[0]]}"
    )
    raise UnsupportedError(
        f"load_moe: layer {layer.number} keeps all experts in stacked tensors, with {what}; found "
        f"{_listed(layer.members)}. Read are gate_up_proj and down_proj with "
        f"{_listed(filter(None, _UNDERSCORED))} or, after a dot, {_listed(_KNOWN)}. Build other "
        "stacks with NVFP4Tensor.from_modelopt or .from_compressed_tensors and pass them to "
        "MoEWeights"
    )


def _listed(words: Iterable[str]) -> str:
    return ", ".join(sorted(words))


def _ranges(numbers: list[int]) -> str:
    """Write 0, 3, 4, 5 as ``0, 3-5``."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs)
