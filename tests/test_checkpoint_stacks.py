# SPDX-License-Identifier: Apache-2.0
"""Experts in stacked tensors: the same bytes as from one tensor each, or a refusal by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_files import (
    CT,
    MO,
    ROOT,
    E,
    H,
    I,
    Raw,
    array,
    dense,
    layer_bytes,
    original,
    packed,
    raw,
    refuse,
    rename,
    save,
    stacked,
    with_biases,
    write,
)

import fp4lt
from fp4lt.errors import ArgumentError, UnsupportedError
from fp4lt.layout import untile_scales

SPLIT = "modelopt_split"
# compressed-tensors has no name for codes but its parameter's.
SPELLINGS = [(MO, "_"), (MO, "."), (SPLIT, "_"), (SPLIT, "."), (CT, ".")]


# ---- the same bytes


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize(("checkpoint", "dot"), SPELLINGS)
def test_stacks_give_the_bytes_of_single_experts(
    tmp_path: Path, checkpoint: str, dot: str, swapped: bool
) -> None:
    tensors = with_biases(original(checkpoint))
    expected = fp4lt.load_moe(save(tmp_path, checkpoint, tensors))
    folder = save(tmp_path, checkpoint, stacked(tensors, dot=dot, swapped=swapped))
    assert layer_bytes(fp4lt.load_moe(folder)) == layer_bytes(expected)
    assert (expected.gate_up_scales is not None) == (checkpoint == SPLIT)


@pytest.mark.parametrize("by", ["order", "config"])
@pytest.mark.parametrize("swapped", [False, True])
def test_interleaved_stack(tmp_path: Path, swapped: bool, by: str) -> None:
    tensors = with_biases(original(MO))
    expected = fp4lt.load_moe(save(tmp_path, MO, tensors))
    config = {"model_type": "gpt_oss", "swiglu_limit": 5.0} if by == "config" else {}
    stacks = stacked(tensors, swapped=swapped, interleaved=True)
    folder = save(tmp_path, MO, stacks, **config)
    found = fp4lt.load_moe(folder, order=None if config else "interleaved")
    assert found.order == "interleaved"
    codes, scales = packed(found.w13).codes, packed(found.w13).scales
    linear = untile_scales(scales.view(torch.uint8), 2 * I, H // 16)
    kept = untile_scales(packed(expected.w13).scales.view(torch.uint8), 2 * I, H // 16)
    for half in (0, 1):
        rows = slice(half * I, (half + 1) * I)
        assert torch.equal(codes[:, half::2], packed(expected.w13).codes[:, rows])
        assert torch.equal(linear[:, half::2], kept[:, rows])
        assert torch.equal(dense(found.w13_bias)[:, half::2], dense(expected.w13_bias)[:, rows])
    for name in ("w13", "w2"):
        mine, theirs = packed(getattr(found, name)), packed(getattr(expected, name))
        assert torch.equal(mine.global_scale, theirs.global_scale)
    assert torch.equal(packed(found.w2).codes, packed(expected.w2).codes)
    if by == "config":
        # Its config.json says silu, as gpt-oss' own does.
        assert (found.activation, float(dense(found.swiglu_limit))) == ("swigluoai", 5.0)
        # What is asked for goes before what the config implies.
        assert fp4lt.load_moe(folder, order="gate_up").order == "gate_up"


@pytest.mark.parametrize("interleaved", [False, True])
def test_stacks_give_the_same_outputs(tmp_path: Path, interleaved: bool) -> None:
    tensors = original(MO)
    single = fp4lt.load_moe(save(tmp_path, MO, tensors))
    folder = save(tmp_path, MO, stacked(tensors, swapped=True, interleaved=interleaved))
    order = "interleaved" if interleaved else "gate_up"
    stack = fp4lt.load_moe(folder, order=order)  # type: ignore[arg-type]
    hidden = torch.randn(9, H, generator=torch.Generator().manual_seed(1))
    ids = torch.arange(18).view(9, 2) % E

    def run(weights: fp4lt.MoEWeights) -> torch.Tensor:
        return fp4lt.moe(hidden, weights, topk_weights=torch.ones(9, 2), topk_ids=ids)

    assert torch.equal(run(stack), run(single))
    wrong = dataclasses.replace(stack, order="gate_up" if interleaved else "interleaved")
    assert not torch.equal(run(wrong), run(single))


@pytest.mark.parametrize("shape", [(), (1,), (E,), (E, 1)])
@pytest.mark.parametrize("checkpoint", [MO, CT])
def test_shapes_of_global_scales(tmp_path: Path, checkpoint: str, shape: tuple[int, ...]) -> None:
    tensors = stacked(original(checkpoint), dot=".")
    values = np.arange(1, E + 1, dtype=np.float32)[: int(np.prod(shape))].reshape(shape)
    parameter = "weight_scale_2" if checkpoint == MO else "weight_global_scale"
    for projection in ("gate_up", "down"):
        tensors[f"{ROOT}{projection}_proj.{parameter}"] = raw("F32", values)
    weights = fp4lt.load_moe(save(tmp_path, checkpoint, tensors))
    stored = torch.from_numpy(np.broadcast_to(values.reshape(-1), (E,)).copy())
    expected = stored if checkpoint == MO else torch.ones(()) / stored
    for operand in (weights.w13, weights.w2):
        assert torch.equal(packed(operand).global_scale, expected)
    assert weights.gate_up_scales is None


def test_weight_only_stacks_have_no_activation_scales(tmp_path: Path) -> None:
    tensors = {n: t for n, t in stacked(original(MO)).items() if "input" not in n}
    weights = fp4lt.load_moe(save(tmp_path, MO, tensors))
    assert weights.a1_scale is None
    assert weights.a2_scale is None


@pytest.mark.parametrize("prefix", ["language_model.model.layers.0.feed_forward.experts.", ROOT])
def test_other_tensors_of_the_layer_are_left_alone(tmp_path: Path, prefix: str) -> None:
    tensors = stacked(original(MO))
    expected = layer_bytes(fp4lt.load_moe(save(tmp_path, MO, tensors)))
    layer = prefix.removesuffix("experts.")
    junk = Raw("I64", (1,), b"\xff" * 8)
    others = ("router.weight", "shared_expert.gate_up_proj", "shared_experts.down_proj.weight")
    moved = rename(tensors, lambda name: name.replace(ROOT, prefix))
    moved |= {layer + other: junk for other in others}
    moved["model.layers.0.self_attn.k_proj.k_scale"] = junk
    moved["model.layers.0.self_attn.kv_scale"] = junk
    assert layer_bytes(fp4lt.load_moe(save(tmp_path, MO, moved))) == expected


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize(("hidden", "inner"), [(32, 16), (32, 32), (16, 32), (48, 16)])
def test_plain_stacks(tmp_path: Path, hidden: int, inner: int, swapped: bool) -> None:
    # 2I = H, I = H and H < I: the two orientations differ in every one of them.
    first = np.arange(2 * 2 * inner * hidden, dtype=np.uint16).reshape(2, 2 * inner, hidden)
    second = (40000 + np.arange(2 * inner * hidden, dtype=np.uint16)).reshape(2, hidden, inner)
    stored = [w.swapaxes(1, 2) if swapped else w for w in (first, second)]
    tensors = {
        f"{ROOT}{name}_proj": raw("BF16", values)
        for name, values in zip(("gate_up", "down"), stored, strict=True)
    }
    write(tmp_path / "model.safetensors", tensors)
    weights = fp4lt.load_moe(tmp_path)
    for operand, values in ((weights.w13, first), (weights.w2, second)):
        assert dense(operand).dtype == torch.bfloat16
        assert dense(operand).view(torch.uint8).numpy().tobytes() == values.tobytes()
    assert (weights.order, weights.gate_up_scales) == ("gate_up", None)
    parts = [fp4lt.load_moe(tmp_path, ep_rank=rank, ep_size=2) for rank in (0, 1)]
    assert torch.equal(torch.cat([dense(part.w2) for part in parts]), dense(weights.w2))


# ---- refusals


@pytest.mark.parametrize(
    "name",
    [
        "gate_up_proj_packed",
        "gate_up_proj_blocks",
        "gate_up_proj_global_scale",
        "gate_up_proj_zero",
        "down_proj.weight_scale_inv",
        "gate_up_proj.weight",
        "w13_weight",
        "post_expert_norm.weight",
    ],
)
def test_unknown_tensor_beside_stacks(tmp_path: Path, name: str) -> None:
    tensors = stacked(original(MO)) | {ROOT + name: Raw("U8", (1,), b"\0")}
    found = ", ".join(sorted(n for n in tensors if n.startswith(ROOT)))
    told = "gate_up_proj" if name == "gate_up_proj.weight" else name
    refuse(save(tmp_path, MO, tensors), told, found, "MoEWeights", error=UnsupportedError)


@pytest.mark.parametrize("name", ["w13_weight", "up_proj", "gate_up_proj", "experts_weight"])
def test_stacks_that_are_not_all_there(tmp_path: Path, name: str) -> None:
    write(tmp_path / "model.safetensors", {ROOT + name: Raw("U8", (2, 2), bytes(4))})
    refuse(tmp_path, f"found {ROOT}{name}.", "stacked", "MoEWeights", error=UnsupportedError)


def test_stack_beside_single_experts(tmp_path: Path) -> None:
    tensors = original(MO) | stacked(original(MO))
    refuse(save(tmp_path, MO, tensors), f"{ROOT}down_proj ", error=UnsupportedError)


def test_both_formats_in_a_stack(tmp_path: Path) -> None:
    tensors = stacked(original(CT), dot=".")
    tensors[f"{ROOT}down_proj.input_scale"] = raw("F32", np.ones(E, np.float32))
    refuse(save(tmp_path, CT, tensors), "mixes formats", "input_scale", "weight_packed")


Change = Callable[[Raw], "Raw | None"]


def put(index: Any, value: float) -> Callable[[Raw], Raw]:
    def change(stored: Raw) -> Raw:
        values = array(stored).copy()
        values[index] = value
        return raw(stored.dtype, values)

    return change


def shaped(*shape: int) -> Change:
    def change(stored: Raw) -> Raw:
        width = len(stored.data) // int(np.prod(stored.shape))
        return Raw(stored.dtype, shape, bytes(width * int(np.prod(shape))))

    return change


def zeros(dtype: str, *shape: int) -> Raw:
    return Raw(dtype, shape, bytes(int(np.prod(shape)) * (2 if dtype == "BF16" else 1)))


def gone(_: Raw) -> None:
    return None


DAMAGE: dict[str, tuple[str, Change, tuple[str, ...]]] = {
    "no block scales": ("gate_up_proj_weight_scale", gone, ("(all experts)", "missing")),
    "no global scale": ("down_proj_weight_scale_2", gone, ("(all experts)", "missing")),
    "no input scale": ("down_proj_input_scale", gone, ("(all experts)", "missing")),
    "bias of another shape": ("down_proj_bias", shaped(E, I), (f"({E}, {I})", f"({E}, {H})")),
    "global NaN": ("down_proj_weight_scale_2", put(5, np.nan), ("(expert 5", "nan", "finite")),
    "global 0": ("gate_up_proj_weight_scale_2", put((3, 1), 0), ("(expert 3", "0.0", "positive")),
    "global of gate": ("gate_up_proj_weight_scale_2", put((2, 0), -1), ("(expert 2", "-1.0")),
    "input inf": ("gate_up_proj_input_scale", put(7, np.inf), ("(expert 7", "inf", "finite")),
    "too many": ("down_proj_weight_scale_2", shaped(E, 2), (f"({E}, 2)", f"({E},), ({E}, 1)")),
    "too few": ("gate_up_proj_weight_scale_2", shaped(2), ("(2,)", f"({E}, 2)")),
    "scales of another type": (
        "gate_up_proj_weight_scale",
        lambda stored: stored._replace(dtype="U8"),
        ("is U8", "need F8_E4M3"),
    ),
    "codes of another type": (
        "down_proj",
        lambda stored: stored._replace(dtype="I8"),
        ("is I8", "need U8"),
    ),
    "bias of another type": (
        "gate_up_proj_bias",
        lambda stored: stored._replace(dtype="I16"),
        ("is I16", "BF16, F16, F32"),
    ),
    "blocks of 32": (
        "down_proj_weight_scale",
        shaped(E, H, I // 32),
        (f"({E}, {H}, 4)", f"({E}, {H}, 8)", f"({E}, 32, 64)"),
    ),
    "one matrix": ("gate_up_proj", shaped(2 * E * I, H // 2), ("one matrix per expert",)),
    "fewer experts": (
        "gate_up_proj_weight_scale",
        shaped(E - 1, 2 * I, H // 16),
        (f"({E - 1},", f"({E}, {2 * I}, {H // 16})"),
    ),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_damaged_stack(tmp_path: Path, damage: tuple[str, Change, tuple[str, ...]]) -> None:
    name, change, fragments = damage
    tensors = stacked(with_biases(original(SPLIT)))
    changed = change(tensors.pop(ROOT + name))
    if changed is not None:
        tensors[ROOT + name] = changed
    refuse(save(tmp_path, MO, tensors), f"tensor {ROOT}{name} (", *fragments)


@pytest.mark.parametrize("swapped", [False, True])
def test_block_scale_that_is_nan(tmp_path: Path, swapped: bool) -> None:
    tensors = stacked(original(MO), swapped=swapped)
    name = f"{ROOT}gate_up_proj_weight_scale"
    tensors[name] = put((6, 3, 200) if swapped else (6, 200, 3), 0x7F)(tensors[name])
    folder = save(tmp_path, MO, tensors)
    place = ("(expert 6", "0x7F (NaN) at row 200, block 3")
    refuse(folder, name, *place)
    refuse(folder, name, *place, ep_rank=3, ep_size=4, tp_rank=1, tp_size=2)
    assert fp4lt.load_moe(folder, ep_rank=0, ep_size=2).expert_start == 0


def test_shared_global_that_is_nan(tmp_path: Path) -> None:
    tensors = stacked(original(MO))
    tensors[f"{ROOT}down_proj_weight_scale_2"] = raw("F32", np.array(np.nan, np.float32))
    refuse(save(tmp_path, MO, tensors), "down_proj_weight_scale_2 (all experts", "nan")


@pytest.mark.parametrize("order", ["interleaved", "up_gate"])
def test_two_globals_need_the_order_that_they_are_known_in(tmp_path: Path, order: str) -> None:
    folder = save(tmp_path, MO, stacked(original(SPLIT)))
    refuse(
        folder, f"order='{order}'", "gate_up_proj_weight_scale_2", order=order, error=ArgumentError
    )
    one = save(tmp_path, MO, stacked(original(MO)))
    assert fp4lt.load_moe(one, order=order).order == order  # type: ignore[arg-type]


def test_blocks_along_the_wrong_axis(tmp_path: Path) -> None:
    # H = 64, I = 48, and gate_up (H, 2I) quantized along 2I: its blocks do not run along K.
    tensors = {
        f"{ROOT}gate_up_proj": zeros("U8", 2, 64, 48),
        f"{ROOT}gate_up_proj_weight_scale": zeros("F8_E4M3", 2, 64, 6),
        f"{ROOT}down_proj": zeros("U8", 2, 64, 24),
        f"{ROOT}down_proj_weight_scale": zeros("F8_E4M3", 2, 64, 3),
    }
    write(tmp_path / "model.safetensors", tensors)
    refuse(tmp_path, f"{ROOT}down_proj ", "(2, 64, 24)", "(2, 64, 48)", "along H and I")


def test_experts_of_the_config(tmp_path: Path) -> None:
    folder = save(tmp_path, MO, stacked(original(MO)), num_experts=9)
    refuse(folder, "num_experts 9", "holds 8 experts", "expert 8")


def test_plain_stacks_that_do_not_fit(tmp_path: Path) -> None:
    for down in ((2, 32, 32), (3, 32, 16), (2, 16, 32)):
        tensors = {
            f"{ROOT}gate_up_proj": zeros("BF16", 2, 32, 32),
            f"{ROOT}down_proj": zeros("BF16", *down),
        }
        write(tmp_path / "model.safetensors", tensors)
        if down == (2, 16, 32):
            assert fp4lt.load_moe(tmp_path).w2.shape == (2, 32, 16)
        else:
            refuse(tmp_path, str(down), "(2, 32, 32)", "(E, 2I, H)")
    tensors[f"{ROOT}gate_up_proj"] = Raw("F32", (2, 32, 32), bytes(8192))
    write(tmp_path / "model.safetensors", tensors)
    refuse(tmp_path, "is F32 without", error=UnsupportedError)
