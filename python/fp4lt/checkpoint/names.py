# SPDX-License-Identifier: Apache-2.0
"""How checkpoints name the tensors of MoE experts.

One tensor per expert and projection::

    <prefix>layers.L.<module>.experts.E.{gate,up,down}_proj.<parameter>
    <prefix>layers.L.<module>.experts.E.{w1,w3,w2}.<parameter>

The parameters present tell the two NVFP4 conventions apart; magnitudes never do, since a multiplier
and its reciprocal can both be plausible.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, NoReturn

from fp4lt.errors import ArgumentError, CheckpointError, UnsupportedError

_EXPERT: Final = re.compile(
    r"(?P<prefix>(?:.*?\.)?)layers\.(?P<layer>\d+)\.(?P<module>(?:[^.]+\.)*?experts)\..+"
)
_STYLES: Final = (
    {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"},
    {"gate": "w1", "up": "w3", "down": "w2"},
)


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


@dataclass
class ExpertLayer:
    """Tensor names of one MoE layer, as found; nothing is known yet about their contents."""

    number: int
    root: str
    """Everything before the expert's number, e.g. ``model.layers.3.mlp.experts``."""
    members: list[str] = field(default_factory=list)
    """All tensors below ``root``; what follows is known only once they are :meth:`parsed`."""
    style: dict[str, str] = field(default_factory=lambda: _STYLES[0])
    experts: set[int] = field(default_factory=set)
    projections: set[str] = field(default_factory=set)
    parameters: set[str] = field(default_factory=set)
    names: set[str] = field(default_factory=set)
    strangers: list[str] = field(default_factory=list)
    """Tensors below ``root`` that no expert's projection accounts for."""

    @property
    def in_main_stack(self) -> bool:
        """False for the experts of a multi-token-prediction head, which counts layers anew."""
        return "mtp" not in self.root.split(".")

    def name(self, expert: int, projection: str, parameter: str) -> str:
        """Full name of a tensor, whether or not it exists."""
        return f"{self.root}.{expert}.{self.style[projection]}.{parameter}"

    def parsed(self) -> ExpertLayer:
        """Take the members' names apart, once a layer has been chosen among the many there are."""
        for name in self.members:
            _sort_in(self, name, name[len(self.root) + 1 :])
        return self

    def convention(self) -> Convention | None:
        """Tell the format by its parameter names; None for plain, unquantized weights."""
        _refuse_strangers(self)
        inverted = self.parameters & {"weight_packed", "weight_global_scale", "input_global_scale"}
        direct = self.parameters & {"weight", "weight_scale_2", "input_scale"}
        if inverted and direct:
            raise CheckpointError(
                f"load_moe: layer {self.number} ({self.root}) mixes formats: it has both "
                f"{_listed(inverted)} (compressed-tensors) and {_listed(direct)} (ModelOpt); "
                "need every expert in one of them"
            )
        if inverted:
            return COMPRESSED_TENSORS
        return None if self.parameters == {"weight"} else MODELOPT

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


def _sort_in(layer: ExpertLayer, name: str, rest: str) -> None:
    expert, _, tail = rest.partition(".")
    projection, _, parameter = tail.partition(".")
    known = {*MODELOPT.parameters, *COMPRESSED_TENSORS.parameters}
    style = next((style for style in _STYLES if projection in style.values()), None)
    # "007" would be named "7" again by ExpertLayer.name, so it counts as unknown.
    if style is None or parameter not in known or expert != str(_number(expert)):
        layer.strangers.append(name)
        return
    if not layer.experts:
        layer.style = style
    if style is not layer.style:
        layer.strangers.append(name)
        return
    layer.experts.add(int(expert))
    layer.projections.add(next(role for role, used in style.items() if used == projection))
    layer.parameters.add(parameter)
    layer.names.add(name)


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
            "model.layers.3.mlp.experts.0.gate_proj.weight or "
            "model.layers.3.block_sparse_moe.experts.0.w1.weight"
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
    if not layer.strangers:
        return
    name = min(layer.strangers)
    rest = name[len(layer.root) + 1 :]
    if not layer.experts and not rest[0].isdigit():
        raise UnsupportedError(
            f"load_moe: layer {layer.number} keeps all experts in stacked tensors ({name}); only "
            "one tensor per expert (experts.E.gate_proj.*) is read so far. Build the two stacks "
            "with NVFP4Tensor.from_modelopt or .from_compressed_tensors and pass them to MoEWeights"
        )
    _unknown(layer, name)


def _unknown(layer: ExpertLayer, name: str) -> NoReturn:
    style = "/".join(layer.style.values())
    raise UnsupportedError(
        f"load_moe: tensor {name} belongs to the experts of layer {layer.number} but is none that "
        f"load_moe knows, and leaving it out could change the result; known per expert are {style} "
        f"with {_listed(MODELOPT.parameters)} (ModelOpt) or "
        f"{_listed(COMPRESSED_TENSORS.parameters)} (compressed-tensors)"
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
