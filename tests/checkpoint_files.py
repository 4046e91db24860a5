# SPDX-License-Identifier: Apache-2.0
"""safetensors files taken apart and put together by hand, for the checkpoint tests.

Neither the expected values nor the damage may depend on the package that load_moe reads with.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import torch

import fp4lt
from fp4lt.errors import CheckpointError
from fp4lt.layout import untile_scales

DATA = Path(__file__).parent / "data" / "checkpoints"
MO, CT = "modelopt", "compressed_tensors"
CHECKPOINTS = ("modelopt", "modelopt_split", "compressed_tensors")
ROOT = "model.layers.0.mlp.experts."
E, H, I = 8, 256, 128  # noqa: E741


class Raw(NamedTuple):
    """A tensor as it stands in a safetensors file."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


Tensors = dict[str, Raw]


def read(file: Path) -> Tensors:
    blob = file.read_bytes()
    (size,) = struct.unpack("<Q", blob[:8])
    header = json.loads(blob[8 : 8 + size])
    header.pop("__metadata__", None)
    body = blob[8 + size :]
    return {
        name: Raw(entry["dtype"], tuple(entry["shape"]), body[slice(*entry["data_offsets"])])
        for name, entry in header.items()
    }


def write(file: Path, tensors: Tensors) -> None:
    header: dict[str, Any] = {}
    end = 0
    for name, raw in tensors.items():
        start, end = end, end + len(raw.data)
        header[name] = {"dtype": raw.dtype, "shape": raw.shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    body = b"".join(raw.data for raw in tensors.values())
    file.write_bytes(struct.pack("<Q", len(text)) + text + body)


def original(checkpoint: str) -> Tensors:
    return read(DATA / checkpoint / "model.safetensors")


def save(folder: Path, checkpoint: str, tensors: Tensors, **config: Any) -> Path:
    """Write a checkpoint folder with the original's JSON files; ``config`` overrides their keys."""
    for file in (DATA / checkpoint).glob("*.json"):
        shutil.copy(file, folder)
    stated = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**stated, **config}))
    write(folder / "model.safetensors", tensors)
    return folder


def scalar(value: float, *shape: int) -> Raw:
    return Raw("F32", shape, np.full(shape, value, np.float32).tobytes())


def float32(raw: Raw) -> np.float32:
    value: np.float32 = np.frombuffer(raw.data, np.float32)[0]
    return value


def rename(tensors: Tensors, edit: Callable[[str], str]) -> Tensors:
    return {edit(name): raw for name, raw in tensors.items()}


def mixtral(name: str) -> str:
    for old, new in (("mlp.", "block_sparse_moe."), ("gate_proj", "w1"), ("up_proj", "w3")):
        name = name.replace(old, new)
    return name.replace("down_proj", "w2")


def shards(folder: Path, tensors: Tensors, *, index: bool) -> None:
    """Split so that one expert's tensors lie in both files."""
    names = sorted(tensors)
    weight_map = {name: f"model-{place % 2 + 1}.safetensors" for place, name in enumerate(names)}
    for file in sorted(set(weight_map.values())):
        write(folder / file, {n: raw for n, raw in tensors.items() if weight_map[n] == file})
    if index:
        text = json.dumps({"metadata": {}, "weight_map": weight_map})
        (folder / "model.safetensors.index.json").write_text(text)


def refuse(
    path: Path, *fragments: str, error: type[Exception] = CheckpointError, **arguments: Any
) -> None:
    """Load, and look for the fragments in the message of exactly this error."""
    with pytest.raises(error) as caught:
        fp4lt.load_moe(path, **arguments)
    message = str(caught.value)
    assert type(caught.value) is error
    for fragment in fragments:
        assert fragment in message


# ---- what load_moe returns


def layer_bytes(weights: fp4lt.MoEWeights) -> dict[str, tuple[Any, ...]]:
    """All that load_moe returns, down to dtype, shape and bytes."""
    parts = {field.name: getattr(weights, field.name) for field in dataclasses.fields(weights)}
    for name in ("w13", "w2"):
        stack = parts.pop(name)
        for part in ("codes", "scales", "global_scale"):
            parts[f"{name}.{part}"] = getattr(stack, part)
    return {
        name: (part.dtype, part.shape, part.contiguous().view(torch.uint8).numpy().tobytes())
        if isinstance(part, torch.Tensor)
        else (part,)
        for name, part in parts.items()
    }


def packed(operand: object) -> fp4lt.NVFP4Tensor:
    assert isinstance(operand, fp4lt.NVFP4Tensor)
    return operand


def dense(operand: object) -> torch.Tensor:
    assert isinstance(operand, torch.Tensor)
    return operand


def joined(parts: list[fp4lt.MoEWeights], halves: int) -> tuple[torch.Tensor, ...]:
    """Codes, row-major scales and w13's bias of slices of I, put together again.

    ``halves`` is 2 where w13 has gate rows above up rows, whose slices alternate, and else 1.
    """

    def rows(tensors: list[torch.Tensor]) -> torch.Tensor:
        split = [t.reshape(len(t), halves, -1, *t.shape[2:]) for t in tensors]
        return torch.cat(split, dim=2).flatten(1, 2)

    def linear(weights: fp4lt.NVFP4Tensor) -> torch.Tensor:
        _, n, k = weights.shape
        return untile_scales(weights.scales.view(torch.uint8), n, k // 16)

    w13, w2 = [packed(part.w13) for part in parts], [packed(part.w2) for part in parts]
    biases = [part.w13_bias for part in parts if part.w13_bias is not None]
    return (
        rows([w.codes for w in w13]),
        rows([linear(w) for w in w13]),
        torch.cat([w.codes for w in w2], dim=2),
        torch.cat([linear(w) for w in w2], dim=2),
        rows(biases) if biases else torch.empty(0),
    )


# ---- stacked experts


def array(raw: Raw) -> npt.NDArray[Any]:
    kinds = {"U8": np.uint8, "F8_E4M3": np.uint8, "F32": np.float32, "BF16": np.uint16}
    return np.frombuffer(raw.data, kinds[raw.dtype]).reshape(raw.shape)


def raw(dtype: str, values: npt.NDArray[Any]) -> Raw:
    return Raw(dtype, values.shape, np.ascontiguousarray(values).tobytes())


def stacked(
    tensors: Tensors, *, dot: str = "_", swapped: bool = False, interleaved: bool = False
) -> Tensors:
    """Put all experts' tensors into stacks, with one global scale where gate and up share it."""
    stacks: Tensors = {}
    parameters = {name.rpartition(".")[2] for name in tensors if name.startswith(ROOT)}
    for parameter in parameters:
        tail = "" if (dot, parameter) == ("_", "weight") else dot + parameter

        def of(projection: str, parameter: str = parameter) -> npt.NDArray[Any]:
            names = [f"{ROOT}{expert}.{projection}_proj.{parameter}" for expert in range(E)]
            return np.stack([array(tensors[name]) for name in names])

        dtype = tensors[f"{ROOT}0.down_proj.{parameter}"].dtype
        gate, up, down = of("gate"), of("up"), of("down")
        if gate.ndim < 3:
            gate, up = gate.reshape(E, -1), up.reshape(E, -1)
        vector = parameter == "bias" or gate.ndim == 3
        if vector and interleaved:
            gate_up = np.stack([gate, up], axis=2).reshape(E, 2 * gate.shape[1], *gate.shape[2:])
        elif not vector and np.array_equal(gate, up):
            gate_up = gate.reshape(E)
        else:
            gate_up = np.concatenate([gate, up], axis=1)
        if swapped and gate.ndim == 3:
            gate_up, down = gate_up.swapaxes(1, 2), down.swapaxes(1, 2)
        stacks[f"{ROOT}gate_up_proj{tail}"] = raw(dtype, gate_up)
        stacks[f"{ROOT}down_proj{tail}"] = raw(dtype, down)
    return stacks


def with_biases(tensors: Tensors, dtype: str = "BF16") -> Tensors:
    """Add biases that tell expert, projection and row apart, exactly in bf16."""
    added = dict(tensors)
    for expert in range(E):
        for place, (name, rows) in enumerate((("gate", I), ("up", I), ("down", H))):
            values = (np.arange(rows) + 1.0) * (1 - 2 * (place % 2)) * 2.0 ** (8 * place + expert)
            bits = values.astype(np.float32).view(np.uint32)
            kept = values.astype(np.float32) if dtype == "F32" else (bits >> 16).astype(np.uint16)
            added[f"{ROOT}{expert}.{name}_proj.bias"] = Raw(dtype, (rows,), kept.tobytes())
    return added
