# SPDX-License-Identifier: Apache-2.0
"""What the JSON files beside a checkpoint say, and whether the tensors agree.

Absence says nothing: a lone safetensors file is loaded by its tensor names.  What is stated must
hold, for another algorithm can hide behind the same names.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from fp4lt.checkpoint.files import read_json
from fp4lt.checkpoint.names import COMPRESSED_TENSORS, MODELOPT, Convention, ExpertLayer
from fp4lt.errors import CheckpointError, UnsupportedError
from fp4lt.formats import BLOCK
from fp4lt.problem import Activation, Order

_ACTIVATIONS: Final[dict[str, Activation]] = {
    "silu": "silu",
    "swish": "silu",
    "swigluoai": "swigluoai",
    "gelu": "gelu",
    "gelu_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu2": "relu2",
    "relu_squared": "relu2",
}
_ACTIVATION_KEYS: Final = ("hidden_act", "hidden_activation", "mlp_hidden_act")
_EXPERT_COUNT_KEYS: Final = ("num_experts", "n_routed_experts", "num_local_experts")
_TEXT_SECTIONS: Final = ("text_config", "language_config", "llm_config")
_ALGORITHMS: Final = ("NVFP4", "W4A16_NVFP4")
_FORMAT: Final = "nvfp4-pack-quantized"
_GPT_OSS: Final = "gpt_oss"


@dataclass(frozen=True)
class ModelConfig:
    """config.json and hf_quant_config.json of a folder, empty where a file is absent."""

    folder: Path
    model: dict[str, Any] = field(default_factory=dict)
    hf_quant: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> ModelConfig:
        """Read whichever of the two files exist."""
        found = [
            read_json(folder / name) if (folder / name).is_file() else {}
            for name in ("config.json", "hf_quant_config.json")
        ]
        return cls(folder, *found)

    @property
    def _file(self) -> Path:
        return self.folder / "config.json"

    def _get(self, key: str) -> Any:
        """Look a key up in the text model's section first, where the model has several."""
        sections = [self.model.get(name) for name in _TEXT_SECTIONS]
        for section in (*sections, self.model):
            if isinstance(section, dict) and section.get(key) is not None:
                return section[key]
        return None

    def activation(self) -> Activation | None:
        """fp4lt's name for the experts' activation, or None where no file says."""
        if self._get("model_type") == _GPT_OSS:
            # Its config says silu; the code that belongs to it computes another function.
            return "swigluoai"
        for key in _ACTIVATION_KEYS:
            stated = self._get(key)
            if stated is None:
                continue
            if isinstance(stated, str) and stated in _ACTIVATIONS:
                return _ACTIVATIONS[stated]
            raise UnsupportedError(
                f"load_moe: {self._file} has {key} {stated!r}, which fp4lt does not compute; known "
                f"are {', '.join(_ACTIVATIONS)}"
            )
        return None

    def swiglu(self) -> tuple[float | None, float | None]:
        """Slope (alpha) and clamp (limit) of the gate, None where unstated."""
        if self._get("swiglu_limits") is not None:
            raise UnsupportedError(
                f"load_moe: {self._file} has swiglu_limits, one for each layer; only a single "
                "swiglu_limit is read"
            )
        return self._positive("swiglu_alpha"), self._positive("swiglu_limit")

    def _positive(self, key: str) -> float | None:
        stated = self._get(key)
        if stated is None:
            return None
        numeric = isinstance(stated, (int, float)) and not isinstance(stated, bool)
        if not (numeric and 0.0 < stated < math.inf):
            raise CheckpointError(
                f"load_moe: {self._file} has {key} {stated!r}; need a positive, finite number"
            )
        return float(stated)

    def stack_order(self) -> Order:
        """Where a stacked gate_up_proj has its gate."""
        return "interleaved" if self._get("model_type") == _GPT_OSS else "gate_up"

    def check_expert_count(self, layer: ExpertLayer, found: int) -> None:
        """Compare the experts found with the number that the model claims to have."""
        for key in _EXPERT_COUNT_KEYS:
            stated = self._get(key)
            if isinstance(stated, int) and stated != found:
                missing = sorted(set(range(stated)) - set(range(found)))
                hint = f" (first missing: expert {missing[0]})" if missing else ""
                raise CheckpointError(
                    f"load_moe: {self._file} has {key} {stated}, but layer {layer.number} "
                    f"({layer.root}) holds {found} experts{hint}; the two must agree"
                )

    def check_quantization(self, convention: Convention, layer: ExpertLayer) -> None:
        """Hold what the files say about quantization against what the names say.

        Raises
        ------
        CheckpointError
            They speak of the other format.
        UnsupportedError
            They speak of another algorithm, packing or block size.
        """
        quantization = self.hf_quant.get("quantization")
        if isinstance(quantization, dict):
            file = self.folder / "hf_quant_config.json"
            _require_format(file, "hf_quant_config.json itself", MODELOPT, convention, layer)
            _check_modelopt(file, quantization, layer)
        stated = self._get("quantization_config")
        if not isinstance(stated, dict):
            return
        method = stated.get("quant_method")
        if method == "compressed-tensors":
            _require_format(self._file, method, COMPRESSED_TENSORS, convention, layer)
            _check_compressed(self._file, stated)
        elif isinstance(method, str) and not method.startswith("modelopt"):
            raise UnsupportedError(
                f"load_moe: {self._file} has quant_method {method!r}; NVFP4 experts are read from "
                "modelopt and compressed-tensors checkpoints"
            )
        elif method is not None or "quant_algo" in stated:
            _require_format(self._file, method, MODELOPT, convention, layer)
            nested = stated.get("quantization")
            _check_modelopt(self._file, nested if isinstance(nested, dict) else stated, layer)


def _require_format(
    file: Path, said: object, claimed: Convention, found: Convention, layer: ExpertLayer
) -> None:
    if claimed is not found:
        raise CheckpointError(
            f"load_moe: {file} says {claimed.title} ({said!r}), but the tensors of layer "
            f"{layer.number} are named as in {found.title} "
            f"({layer.name(0, 'down', found.codes)}); the two store global scales the other way "
            "round, so the config must fit the tensors"
        )


def _check_modelopt(file: Path, stated: dict[str, Any], layer: ExpertLayer) -> None:
    algorithm = stated.get("quant_algo")
    if algorithm == "MIXED_PRECISION":
        # One entry for each module, or for a module above it.
        modules = stated.get("quantized_layers")
        for name, entry in modules.items() if isinstance(modules, dict) else ():
            if isinstance(entry, dict) and f"{name}.".startswith(f"{layer.root}."):
                _require_algorithm(file, entry.get("quant_algo"), f" for {name}")
                _require_block(file, entry.get("group_size"))
        return
    _require_algorithm(file, algorithm, "")
    _require_block(file, stated.get("group_size"))
    for _, weights in _groups(stated):
        _require_block(file, weights.get("group_size"))


def _require_algorithm(file: Path, algorithm: object, what: str) -> None:
    if algorithm is not None and algorithm not in _ALGORITHMS:
        raise UnsupportedError(
            f"load_moe: {file} has quant_algo {algorithm!r}{what}; only "
            f"{' and '.join(_ALGORITHMS)} checkpoints are read"
        )


def _check_compressed(file: Path, stated: dict[str, Any]) -> None:
    packing = stated.get("format")
    groups = list(_groups(stated))
    if packing == "mixed-precision" and any(own == _FORMAT for own, _ in groups):
        groups = [(own, weights) for own, weights in groups if own == _FORMAT]
    elif packing is not None and packing != _FORMAT:
        raise UnsupportedError(
            f"load_moe: {file} has compressed-tensors format {packing!r}; only {_FORMAT} is read"
        )
    for own, weights in groups:
        if own is not None and own != _FORMAT:
            raise UnsupportedError(
                f"load_moe: {file} has a config group of format {own!r}; only {_FORMAT} is read"
            )
        _require_block(file, weights.get("group_size"))


def _groups(stated: dict[str, Any]) -> Iterator[tuple[str | None, dict[str, Any]]]:
    """Packing format and weight settings of each config group."""
    groups = stated.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        if isinstance(weights, dict):
            yield group.get("format"), weights


def _require_block(file: Path, size: object) -> None:
    if size is not None and size != BLOCK:
        raise UnsupportedError(
            f"load_moe: {file} has group_size {size!r}; NVFP4 shares a scale among {BLOCK} weights"
        )
