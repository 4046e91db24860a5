# SPDX-License-Identifier: Apache-2.0
"""Biases, what lies beside the experts, and the progress bar."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoint_files import (
    CHECKPOINTS,
    CT,
    DATA,
    MO,
    ROOT,
    E,
    H,
    I,
    Raw,
    Tensors,
    dense,
    layer_bytes,
    mixtral,
    original,
    refuse,
    rename,
    save,
    stacked,
    with_biases,
)

import fp4lt
from fp4lt.checkpoint import progress as progress_module
from fp4lt.errors import ArgumentError, UnsupportedError

# ---- biases


@pytest.mark.parametrize("names", ["gate/up/down", "w1/w3/w2"])
@pytest.mark.parametrize("dtype", ["BF16", "F32"])
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_biases_are_the_stored_values(
    tmp_path: Path, checkpoint: str, dtype: str, names: str
) -> None:
    tensors = with_biases(original(checkpoint), dtype)
    if names == "w1/w3/w2":
        tensors = rename(tensors, mixtral)
    weights = fp4lt.load_moe(save(tmp_path, checkpoint, tensors))
    w13, w2 = dense(weights.w13_bias), dense(weights.w2_bias)
    assert w13.dtype == w2.dtype == torch.float32
    for expert in range(E):
        row = torch.arange(1.0, 2 * I + 1)
        assert torch.equal(w13[expert, :I], row[:I] * 2.0**expert)
        assert torch.equal(w13[expert, I:], -row[:I] * 2.0 ** (8 + expert))
        assert torch.equal(w2[expert], row * 2.0 ** (16 + expert))


def test_biases_of_half_precision(tmp_path: Path) -> None:
    tensors = with_biases(original(MO))
    values = np.linspace(-2, 2, H).astype(np.float16)
    for expert in range(E):
        tensors[f"{ROOT}{expert}.down_proj.bias"] = Raw("F16", (H,), values.tobytes())
    found = dense(fp4lt.load_moe(save(tmp_path, MO, tensors)).w2_bias)
    assert torch.equal(found, torch.from_numpy(values).float().expand(E, H))


@pytest.mark.parametrize("form", ["per expert", "stacked"])
@pytest.mark.parametrize("kept", ["first", "down"])
def test_bias_on_one_of_the_two_products(tmp_path: Path, form: str, kept: str) -> None:
    tensors = {
        name: raw
        for name, raw in with_biases(original(MO)).items()
        if not name.endswith("bias") or ("down" in name) == (kept == "down")
    }
    if form == "stacked":
        biased = stacked(with_biases(original(MO)))
        other = f"{ROOT}{'gate_up' if kept == 'down' else 'down'}_proj_bias"
        tensors = {name: raw for name, raw in biased.items() if name != other}
    folder = save(tmp_path, MO, tensors)
    whole, first, last = (
        fp4lt.load_moe(folder),
        fp4lt.load_moe(folder, tp_size=2),
        fp4lt.load_moe(folder, tp_rank=1, tp_size=2),
    )
    for weights in (whole, first, last):
        assert (weights.w13_bias is None) == (kept == "down")
    assert [w.w2_bias is None for w in (whole, first, last)] == [kept != "down"] * 2 + [True]


@pytest.mark.parametrize(
    ("name", "stored", "fragments"),
    [
        ("3.up_proj.bias", None, ("(expert 3", "missing")),
        ("0.gate_proj.bias", None, ("(expert 0", "missing")),
        ("7.down_proj.bias", None, ("(expert 7", "missing")),
        ("5.down_proj.bias", Raw("F32", (I,), bytes(4 * I)), (f"({I},)", f"need ({H},)")),
        ("5.up_proj.bias", Raw("F32", (1, I), bytes(4 * I)), (f"(1, {I})", f"need ({I},)")),
        ("2.up_proj.bias", Raw("U8", (I,), bytes(I)), ("is U8", "BF16, F16, F32")),
    ],
)
def test_damaged_bias(
    tmp_path: Path, name: str, stored: Raw | None, fragments: tuple[str, ...]
) -> None:
    tensors = with_biases(original(MO))
    del tensors[ROOT + name]
    if stored is not None:
        tensors[ROOT + name] = stored
    refuse(save(tmp_path, MO, tensors), f"tensor {ROOT}{name}", *fragments)


def test_bias_of_up_alone(tmp_path: Path) -> None:
    tensors = original(MO)
    tensors[f"{ROOT}2.up_proj.bias"] = Raw("F32", (I,), bytes(4 * I))
    refuse(save(tmp_path, MO, tensors), f"{ROOT}0.gate_proj.bias (expert 0", "missing")


def test_bias_counts_in_the_output(tmp_path: Path) -> None:
    tensors = original(MO)
    bias = np.arange(E * H, dtype=np.float32).reshape(E, H)
    for expert in range(E):
        tensors[f"{ROOT}{expert}.down_proj.bias"] = Raw("F32", (H,), bias[expert].tobytes())
    weights = fp4lt.load_moe(save(tmp_path, MO, tensors))
    # Of a token of zeros, nothing but the bias is left.
    ids = torch.arange(E).view(E, 1)
    found = fp4lt.moe(torch.zeros(E, H), weights, topk_weights=torch.ones(E, 1), topk_ids=ids)
    assert torch.equal(found, torch.from_numpy(bias))


# ---- beside the experts


@pytest.mark.parametrize("checkpoint", [MO, CT])
def test_everything_else_is_left_alone(tmp_path: Path, checkpoint: str) -> None:
    junk = Raw("I64", (1,), b"\xff" * 8)
    layer = "model.layers.0."
    others = (
        "mlp.gate.weight",
        "mlp.gate.e_score_correction_bias",
        "mlp.shared_experts.gate_proj.weight_scale_2",
        "mlp.shared_expert.down_proj.bias",
        "mlp.shared_expert_gate.weight",
        "self_attn.k_proj.k_scale",
        "self_attn.v_proj.v_scale",
        "self_attn.kv_b_proj.input_scale",
    )
    tensors: Tensors = {layer + name: junk for name in others}
    tensors |= {"lm_head.weight": junk, "model.layers.1.mlp.down_proj.weight_packed": junk}
    tensors |= original(checkpoint)
    weights = fp4lt.load_moe(save(tmp_path, checkpoint, tensors))
    assert layer_bytes(weights) == layer_bytes(fp4lt.load_moe(DATA / checkpoint))


# ---- progress


def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make stderr say that it is a terminal, and 8 experts a large load."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    # rich draws nothing on a dumb one.
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(progress_module, "LARGE_EXPERTS", E)


def drawn(capsys: pytest.CaptureFixture[str]) -> str:
    out, err = capsys.readouterr()
    assert out == ""
    return err


@pytest.mark.parametrize("form", ["per expert", "stacked"])
def test_bar_goes_to_stderr_and_to_its_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str
) -> None:
    pytest.importorskip("rich")
    tensors = original(MO) if form == "per expert" else stacked(original(MO), swapped=True)
    folder = tmp_path / "[red]model"
    folder.mkdir()
    fp4lt.load_moe(save(folder, MO, tensors), tp_size=2, progress=True)
    text = drawn(capsys)
    assert "[red]model, layer 0" in text
    # 8 experts of 3 x 64 x 256 weights, 9 bits each after 16.
    size = f"{E * 3 * (I // 2) * H * 9 / 16 / 1024:.1f}"
    assert re.search(rf"{size}/{size}\s+KiB", text)


def test_no_bar_unless_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    for progress in (None, False):
        fp4lt.load_moe(DATA / MO, progress=progress)
    assert drawn(capsys) == ""


def test_bar_of_a_large_load_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("rich")
    terminal(monkeypatch)
    fp4lt.load_moe(DATA / MO, progress=False)
    fp4lt.load_moe(DATA / MO, ep_size=2)
    assert drawn(capsys) == ""
    fp4lt.load_moe(DATA / MO)
    assert "layer 0" in drawn(capsys)
    monkeypatch.setattr(progress_module, "LARGE_BYTES", 200_000)
    fp4lt.load_moe(DATA / MO, ep_size=2)
    assert "layer 0" in drawn(capsys)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False)
    fp4lt.load_moe(DATA / MO)
    assert drawn(capsys) == ""


def test_rich_is_optional(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal(monkeypatch)
    monkeypatch.setattr(progress_module, "find_spec", lambda name: None)
    assert fp4lt.load_moe(DATA / MO).num_local_experts == E
    assert drawn(capsys) == ""
    refuse(DATA / MO, "pip install rich", progress=True, error=UnsupportedError)


@pytest.mark.parametrize("progress", [1, "yes"])
def test_progress_is_a_bool(progress: object) -> None:
    refuse(DATA / MO, "True, False or None", repr(progress), progress=progress, error=ArgumentError)


def test_a_failed_load_leaves_its_message_below_the_bar(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("rich")
    tensors = original(MO)
    name = f"{ROOT}7.down_proj.weight_scale"
    tensors[name] = tensors[name]._replace(data=b"\x7f" * len(tensors[name].data))
    refuse(save(tmp_path, MO, tensors), f"{name} (expert 7", progress=True)
    assert "layer 0" in drawn(capsys)
