# SPDX-License-Identifier: Apache-2.0
"""safetensors files taken apart and put together by hand, for the checkpoint tests.

Neither the expected values nor the damage may depend on the package that load_moe reads with.
"""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import fp4lt
from fp4lt.errors import CheckpointError

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
    path: Path, *fragments: str, layer: Any = None, error: type[Exception] = CheckpointError
) -> None:
    """Load, and look for the fragments in the message of exactly this error."""
    with pytest.raises(error) as caught:
        fp4lt.load_moe(path, layer=layer)
    message = str(caught.value)
    assert type(caught.value) is error
    for fragment in fragments:
        assert fragment in message
