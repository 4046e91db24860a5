# SPDX-License-Identifier: Apache-2.0
"""Damaged and contradictory checkpoints: load_moe says which tensor, where, and what it needs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from checkpoint_files import (
    CT,
    MO,
    ROOT,
    E,
    H,
    I,
    Raw,
    Tensors,
    mixtral,
    original,
    refuse,
    rename,
    save,
    scalar,
    write,
)

import fp4lt
from fp4lt.errors import ArgumentError, UnsupportedError


class Damage(NamedTuple):
    """A change to one tensor of a checkpoint (or its removal), and what the message must say."""

    checkpoint: str
    tensor: str
    change: Callable[[Raw], Raw | None]
    found: str
    needed: str


def gone(_: Raw) -> None:
    return None


def holds(value: float) -> Callable[[Raw], Raw]:
    return lambda raw: scalar(value, *raw.shape)


def retyped(dtype: str) -> Callable[[Raw], Raw]:
    """Same bytes under another name of the same width."""
    return lambda raw: raw._replace(dtype=dtype)


def reshaped(*shape: int) -> Callable[[Raw], Raw]:
    """Another shape, the bytes repeated or cut as it needs."""
    count = int(np.prod(shape))

    def change(raw: Raw) -> Raw:
        width = len(raw.data) // int(np.prod(raw.shape))
        data = raw.data * (count * width // len(raw.data) + 1)
        return Raw(raw.dtype, shape, data[: count * width])

    return change


def byte(row: int, block: int, value: int) -> Callable[[Raw], Raw]:
    def change(raw: Raw) -> Raw:
        data = bytearray(raw.data)
        data[row * raw.shape[1] + block] = value
        return raw._replace(data=bytes(data))

    return change


POSITIVE = "must be finite and positive"
DAMAGE = {
    "missing codes": Damage(MO, "3.up_proj.weight", gone, "missing", "need every"),
    "missing packed": Damage(CT, "7.down_proj.weight_packed", gone, "missing", "need every"),
    "missing scales": Damage(MO, "0.gate_proj.weight_scale", gone, "missing", "need every"),
    "missing global": Damage(MO, "5.down_proj.weight_scale_2", gone, "missing", "need every"),
    "missing divisor": Damage(CT, "5.up_proj.weight_global_scale", gone, "missing", "need every"),
    "some inputs": Damage(MO, "6.up_proj.input_scale", gone, "missing", "need every"),
    "some down inputs": Damage(CT, "2.down_proj.input_global_scale", gone, "missing", "need every"),
    "codes signed": Damage(MO, "1.gate_proj.weight", retyped("I8"), "is I8", "need U8"),
    "first codes": Damage(CT, "0.gate_proj.weight_packed", retyped("I8"), "is I8", "need U8"),
    "scales U8": Damage(CT, "1.down_proj.weight_scale", retyped("U8"), "is U8", "need F8_E4M3"),
    "scales E5M2": Damage(
        MO, "2.up_proj.weight_scale", retyped("F8_E5M2"), "is F8_E5M2", "need F8_E4M3"
    ),
    "global int": Damage(MO, "4.up_proj.weight_scale_2", retyped("I32"), "is I32 ()", "F32 scalar"),
    "global vector": Damage(
        CT, "4.up_proj.weight_global_scale", reshaped(2), "is F32 (2,)", "need one F32 scalar"
    ),
    "input vector": Damage(MO, "4.down_proj.input_scale", reshaped(1, 1), "(1, 1)", "F32 scalar"),
    "rows of one expert": Damage(
        MO, "2.gate_proj.weight", reshaped(I + 16, H // 2), f"{I + 16} x {H}", f"need {I} x {H}"
    ),
    "columns of up": Damage(
        CT, "0.up_proj.weight_packed", reshaped(I, H // 2 + 8), f"{I} x {H + 16}", f"{I} x {H}"
    ),
    "down not transposed": Damage(
        MO, "3.down_proj.weight", reshaped(I, H // 2), f"{I} x {H} weights", f"need {H} x {I}"
    ),
    "K not in blocks": Damage(
        MO, "0.gate_proj.weight", reshaped(I, 60), f"({I}, 60)", "K a multiple of 16"
    ),
    "I not in blocks": Damage(
        CT, "1.down_proj.weight_packed", reshaped(H, 4), f"({H}, 4)", "K a multiple of 16"
    ),
    "codes of rank 3": Damage(
        MO, "1.up_proj.weight", reshaped(1, I, H // 2), f"(1, {I}, {H // 2})", "need (N, K/2)"
    ),
    "no rows": Damage(MO, "0.gate_proj.weight", lambda raw: Raw("U8", (0, 128), b""), "(0,", "N"),
    "scales transposed": Damage(
        MO, "6.gate_proj.weight_scale", reshaped(H // 16, I), "(16, 128)", "need\n(128, 16)"
    ),
    "scales per 32": Damage(
        CT, "6.down_proj.weight_scale", reshaped(H, I // 32), "(256, 4)", "need\n(256, 8)"
    ),
    "scale NaN": Damage(
        MO, "7.down_proj.weight_scale", byte(3, 5, 0x7F), "0x7F (NaN) at row 3, block 5", "to 0x7E"
    ),
    "scale negative NaN": Damage(
        CT, "0.up_proj.weight_scale", byte(127, 15, 0xFF), "0xFF (NaN) at row 127, block 15", "0x7E"
    ),
    "scale negative": Damage(
        MO, "2.gate_proj.weight_scale", byte(64, 0, 0x9A), "0x9A (sign bit set) at row 64", "0x7E"
    ),
    "scale minus zero": Damage(
        CT, "2.gate_proj.weight_scale", byte(0, 1, 0x80), "0x80 (sign bit set) at row 0", "0x7E"
    ),
    "global 0": Damage(MO, "1.up_proj.weight_scale_2", holds(0), "holds 0.0", POSITIVE),
    "global -0": Damage(MO, "1.up_proj.weight_scale_2", holds(-0.0), "holds -0.0", POSITIVE),
    "global negative": Damage(MO, "1.down_proj.weight_scale_2", holds(-1), "-1.0", POSITIVE),
    "global inf": Damage(MO, "1.gate_proj.weight_scale_2", holds(np.inf), "inf", POSITIVE),
    "global NaN": Damage(MO, "7.gate_proj.weight_scale_2", holds(np.nan), "nan", POSITIVE),
    "divisor 0": Damage(CT, "3.up_proj.weight_global_scale", holds(0), "0.0 (a div", POSITIVE),
    "divisor inf": Damage(CT, "3.up_proj.weight_global_scale", holds(np.inf), "inf", POSITIVE),
    "divisor tiny": Damage(
        CT, "3.down_proj.weight_global_scale", holds(1e-39), "e-39 (a div", POSITIVE
    ),
    "input 0": Damage(MO, "5.gate_proj.input_scale", holds(0), "holds 0.0", POSITIVE),
    "input NaN": Damage(CT, "5.down_proj.input_global_scale", holds(np.nan), "nan", POSITIVE),
    "input inf": Damage(CT, "5.up_proj.input_global_scale", holds(np.inf), "inf", POSITIVE),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_damaged_tensor(tmp_path: Path, damage: Damage) -> None:
    tensors = original(damage.checkpoint)
    name = ROOT + damage.tensor
    changed = damage.change(tensors.pop(name))
    if changed is not None:
        tensors[name] = changed
    folder = save(tmp_path, damage.checkpoint, tensors)
    expert = damage.tensor.partition(".")[0]
    where = str(folder) if changed is None else str(folder / "model.safetensors")
    needed = damage.needed.replace("\n", " ")
    refuse(folder, f"{name} (expert {expert}", where, damage.found, needed)


@pytest.mark.parametrize("expert", [0, 4])
def test_gap_among_the_experts(tmp_path: Path, expert: int) -> None:
    tensors = {n: raw for n, raw in original(MO).items() if f"experts.{expert}." not in n}
    folder = save(tmp_path, MO, tensors)
    refuse(folder, f"{ROOT}{expert}.*", f"expert {expert} missing", "without a gap")


@pytest.mark.parametrize("key", ["num_experts", "n_routed_experts", "num_local_experts"])
def test_expert_count_of_the_config(tmp_path: Path, key: str) -> None:
    tensors = {n: raw for n, raw in original(MO).items() if "experts.7." not in n}
    folder = save(tmp_path, MO, tensors, **{"num_experts": None, key: E})
    refuse(folder, f"{key} 8", "config.json", "holds 7 experts", "expert 7")
    fp4lt.load_moe(save(tmp_path, MO, tensors, **{"num_experts": None, key: 7}))


# ---- names


def test_layer_that_is_not_there(tmp_path: Path) -> None:
    tensors: Tensors = {}
    for layer in (3, 4, 5, 9):
        for name, raw in original(CT).items():
            tensors[name.replace("layers.0.", f"layers.{layer}.")] = raw
    folder = save(tmp_path, CT, tensors)
    refuse(folder, "layer 0 has no experts", str(folder), "3-5, 9", layer=0)
    refuse(folder, "4 MoE layers", "3-5, 9", "pass layer=")
    for wrong in ("3", 3.0, True):
        refuse(folder, "layer must be an int", repr(wrong), layer=wrong, error=ArgumentError)


def test_same_layer_twice(tmp_path: Path) -> None:
    tensors = original(CT)
    folder = save(tmp_path, CT, tensors | rename(tensors, lambda n: n.replace("model.", "draft.")))
    roots = "draft.layers.0.mlp.experts, model.layers.0.mlp.experts"
    refuse(folder, "ambiguous", roots, layer=0)


def test_no_experts_at_all(tmp_path: Path) -> None:
    tensors = {n: raw for n, raw in original(MO).items() if ".experts." not in n}
    refuse(save(tmp_path, MO, tensors), "no expert tensors in", str(tmp_path), "gate_proj.weight")


@pytest.mark.parametrize(
    "name",
    [
        "2.up_proj.pre_quant_scale",
        "2.up_proj.weight_scale_inv",
        "2.gate_up_proj.weight",
        "gate_up_proj",
        "down_proj.bias",
        "2.w1.weight",
        "02.up_proj.weight",
        "per_expert_scale",
    ],
)
def test_unknown_tensor_of_an_expert(tmp_path: Path, name: str) -> None:
    folder = save(tmp_path, MO, {**original(MO), ROOT + name: scalar(1)})
    refuse(folder, ROOT + name, "weight_scale_2", error=UnsupportedError)


def test_two_formats_in_a_layer(tmp_path: Path) -> None:
    kept = {n: raw for n, raw in original(CT).items() if "experts.5." not in n}
    other = {n: raw for n, raw in original(MO).items() if "experts.5." in n}
    refuse(save(tmp_path, CT, kept | other), "layer 0", "weight_packed", "weight_scale_2", "mixes")


def test_other_dtypes_without_scales(tmp_path: Path) -> None:
    for dtype, width in (("F32", 4), ("U8", 1)):
        tensors = {
            f"{ROOT}0.{name}_proj.weight": Raw(dtype, (16, 16), bytes(256 * width))
            for name in ("gate", "up", "down")
        }
        write(tmp_path / "model.safetensors", tensors)
        refuse(tmp_path, f"is {dtype} without", f"{ROOT}0.gate_proj", error=UnsupportedError)


def test_plain_experts_of_two_dtypes(tmp_path: Path) -> None:
    tensors = {
        f"{ROOT}{expert}.{name}_proj.weight": Raw("BF16", (16, 16), bytes(512))
        for expert in range(2)
        for name in ("gate", "up", "down")
    }
    tensors[f"{ROOT}1.up_proj.weight"] = Raw("F16", (16, 16), bytes(512))
    write(tmp_path / "model.safetensors", tensors)
    refuse(tmp_path, f"{ROOT}1.up_proj.weight (expert 1", "is F16", "need BF16")


def test_mixtral_names_in_messages(tmp_path: Path) -> None:
    tensors = rename(original(MO), mixtral)
    name = "model.layers.0.block_sparse_moe.experts.2.w3.weight_scale"
    del tensors[name]
    refuse(save(tmp_path, MO, tensors), f"{name} (expert 2)")
