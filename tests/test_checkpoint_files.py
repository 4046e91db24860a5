# SPDX-License-Identifier: Apache-2.0
"""Damaged files, indexes that do not fit, and configs that contradict the tensors."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from checkpoint_files import (
    CHECKPOINTS,
    CT,
    DATA,
    MO,
    ROOT,
    E,
    H,
    I,
    original,
    read,
    refuse,
    save,
    shards,
    write,
)

import fp4lt
from fp4lt.errors import CheckpointError, UnsupportedError

INDEX = "model.safetensors.index.json"


# ---- configuration files


def quantization(checkpoint: str, **changes: Any) -> dict[str, Any]:
    config = json.loads((DATA / checkpoint / "config.json").read_text())
    return {"quantization_config": {**config["quantization_config"], **changes}}


def group(checkpoint: str, size: int) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "float", "group_size": size}
    return quantization(checkpoint, config_groups={"group_0": {"weights": weights}})


@pytest.mark.parametrize(
    ("checkpoint", "config", "fragment", "error"),
    [
        (MO, quantization(MO, quant_algo="FP8"), "quant_algo 'FP8'", UnsupportedError),
        (MO, quantization(MO, quant_algo="NVFP4_AWQ"), "'NVFP4_AWQ'", UnsupportedError),
        (MO, quantization(MO, quant_method="gptq"), "quant_method 'gptq'", UnsupportedError),
        (MO, quantization(CT), "says compressed-tensors", CheckpointError),
        (CT, quantization(MO), "says ModelOpt", CheckpointError),
        (MO, group(MO, 32), "group_size 32", UnsupportedError),
        (CT, group(CT, 128), "group_size 128", UnsupportedError),
        (CT, quantization(CT, format="pack-quantized"), "'pack-quantized'", UnsupportedError),
        (CT, quantization(CT, format="mixed-precision"), "'mixed-precision'", UnsupportedError),
        (MO, {"hidden_act": "relu"}, "hidden_act 'relu'", UnsupportedError),
        (MO, {"swiglu_limits": [7.0]}, "swiglu_limits", UnsupportedError),
        (MO, {"swiglu_limit": 0}, "swiglu_limit 0", CheckpointError),
        (MO, {"swiglu_limit": "7"}, "swiglu_limit '7'", CheckpointError),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_contradictory_config(
    tmp_path: Path, checkpoint: str, config: dict[str, Any], fragment: str, error: type[Exception]
) -> None:
    folder = save(tmp_path, checkpoint, original(checkpoint), **config)
    refuse(folder, str(folder / "config.json"), fragment, error=error)


@pytest.mark.parametrize(
    ("stated", "fragment"),
    [
        ({"quant_algo": "W4A8_AWQ", "group_size": 16}, "quant_algo 'W4A8_AWQ'"),
        ({"quant_algo": "NVFP4", "group_size": 32}, "group_size 32"),
        (
            {
                "quant_algo": "MIXED_PRECISION",
                "quantized_layers": {f"{ROOT}4.up_proj": {"quant_algo": "FP8"}},
            },
            f"quant_algo 'FP8' for {ROOT}4.up_proj",
        ),
    ],
)
def test_contradictory_hf_quant_config(
    tmp_path: Path, stated: dict[str, Any], fragment: str
) -> None:
    folder = save(tmp_path, MO, original(MO), quantization_config=None)
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": stated}))
    refuse(folder, "hf_quant_config.json", fragment, error=UnsupportedError)


def test_hf_quant_config_beside_the_other_format(tmp_path: Path) -> None:
    folder = save(tmp_path, CT, original(CT), quantization_config=None)
    (folder / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NVFP4"}}')
    refuse(folder, "hf_quant_config.json", "says ModelOpt", "weight_packed")


@pytest.mark.parametrize(
    "stated",
    [
        {"quant_algo": "NVFP4", "group_size": 16},
        {"quant_algo": "W4A16_NVFP4", "group_size": 16},
        {
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {
                "model.layers.0.self_attn.q_proj": {"quant_algo": "FP8"},
                f"{ROOT}4.up_proj": {"quant_algo": "NVFP4", "group_size": 16},
            },
        },
    ],
)
def test_agreeing_hf_quant_config(tmp_path: Path, stated: dict[str, Any]) -> None:
    folder = save(tmp_path, MO, original(MO), quantization_config=None)
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": stated}))
    assert fp4lt.load_moe(folder).w13.shape == (E, 2 * I, H)


def test_mixed_precision_with_an_nvfp4_group(tmp_path: Path) -> None:
    eight = {"format": "float-quantized", "weights": {"num_bits": 8, "group_size": None}}
    four = {"format": "nvfp4-pack-quantized", "weights": {"num_bits": 4, "group_size": 16}}
    config = quantization(CT, format="mixed-precision", config_groups={"a": eight, "b": four})
    folder = save(tmp_path, CT, original(CT), **config)
    assert fp4lt.load_moe(folder).w13.shape == (E, 2 * I, H)
    config["quantization_config"]["config_groups"]["b"]["weights"]["group_size"] = 32
    folder = save(tmp_path, CT, original(CT), **config)
    refuse(folder, str(folder / "config.json"), "group_size 32", error=UnsupportedError)


@pytest.mark.parametrize(
    "text",
    [b"{", b"[]", b'{"a": 1, "a": 2}', b"\xff"],
    ids=["cut", "list", "key twice", "no UTF-8"],
)
def test_broken_json(tmp_path: Path, text: bytes) -> None:
    folder = save(tmp_path, MO, original(MO))
    (folder / "config.json").write_bytes(text)
    refuse(folder, str(folder / "config.json"))


# ---- files


@pytest.mark.parametrize("keep", [0, 4, 8, 200, -1, -100_000])
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_truncated_file(tmp_path: Path, checkpoint: str, keep: int) -> None:
    folder = save(tmp_path, checkpoint, original(checkpoint))
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    refuse(folder, str(file), f"({file.stat().st_size} bytes)", "cut short")
    refuse(file, str(file), "download it again")


@pytest.mark.parametrize(
    "blob",
    [b"\xff" * 64, b"\x08" + bytes(7) + b"nonsense", bytes(64)],
    ids=["huge header", "no JSON", "zeros"],
)
def test_file_that_is_no_safetensors(tmp_path: Path, blob: bytes) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(blob)
    refuse(tmp_path, str(file), "damaged")


def test_paths_without_tensors(tmp_path: Path) -> None:
    refuse(tmp_path, f"no .safetensors file in folder {tmp_path}", INDEX)
    refuse(tmp_path / "absent", "does not exist", "absent")
    (tmp_path / "model.bin").write_bytes(b"")
    refuse(tmp_path / "model.bin", "model.bin is no .safetensors file")


def test_missing_shard(tmp_path: Path) -> None:
    shards(tmp_path, original(MO), index=True)
    (tmp_path / "model-2.safetensors").unlink()
    refuse(tmp_path, INDEX, ROOT, str(tmp_path / "model-2.safetensors"), "does not exist")


def test_missing_shard_of_another_layer_is_no_matter(tmp_path: Path) -> None:
    shards(tmp_path, original(MO), index=True)
    index = json.loads((tmp_path / INDEX).read_text())
    index["weight_map"][ROOT.replace("0", "1") + "0.up_proj.weight"] = "model-3.safetensors"
    (tmp_path / INDEX).write_text(json.dumps(index))
    assert fp4lt.load_moe(tmp_path, layer=0).w2.shape == (E, H, I)
    refuse(tmp_path, str(tmp_path / "model-3.safetensors"), "does not exist", layer=1)


def test_index_that_does_not_fit_the_shards(tmp_path: Path) -> None:
    shards(tmp_path, original(MO), index=True)
    index = json.loads((tmp_path / INDEX).read_text())
    name = f"{ROOT}3.down_proj.weight"
    held = index["weight_map"][name]
    other = next(file for file in set(index["weight_map"].values()) if file != held)
    index["weight_map"][name] = other
    (tmp_path / INDEX).write_text(json.dumps(index))
    refuse(tmp_path, name, INDEX, other)
    (tmp_path / INDEX).write_text('{"metadata": {}}')
    refuse(tmp_path, INDEX, "weight_map")


@pytest.mark.parametrize("index", [True, False])
def test_tensor_in_two_shards(tmp_path: Path, index: bool) -> None:
    tensors = original(CT)
    name = f"{ROOT}3.down_proj.weight_packed"
    shards(tmp_path, tensors, index=index)
    for place in (1, 2):
        file = tmp_path / f"model-{place}.safetensors"
        write(file, {**read(file), name: tensors[name]})
    files = [str(tmp_path / f"model-{place}.safetensors") for place in (1, 2)]
    refuse(tmp_path, f"tensor {name}", *files, "remove one")


def test_tensor_twice_in_the_index(tmp_path: Path) -> None:
    shards(tmp_path, original(CT), index=True)
    name = f"{ROOT}3.down_proj.weight_packed"
    text = (tmp_path / INDEX).read_text()
    more = f'"weight_map": {{"{name}": "elsewhere.safetensors", '
    (tmp_path / INDEX).write_text(text.replace('"weight_map": {', more))
    refuse(tmp_path, INDEX, name, "elsewhere.safetensors")


def test_safetensors_is_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    refuse(DATA / MO, "pip install fp4lt[checkpoints]", error=UnsupportedError)
