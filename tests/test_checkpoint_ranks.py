# SPDX-License-Identifier: Apache-2.0
"""One rank's part of a layer: slices of I, runs of experts, and that the rest is not read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import torch
from checkpoint_files import (
    CHECKPOINTS,
    DATA,
    MO,
    ROOT,
    E,
    H,
    I,
    Raw,
    Tensors,
    array,
    dense,
    joined,
    layer_bytes,
    original,
    packed,
    raw,
    refuse,
    save,
    scalar,
    stacked,
    with_biases,
    write,
)

import fp4lt
from fp4lt.errors import ArgumentError

GRIDS = [(2, 1), (8, 1), (1, 2), (1, 8), (4, 2)]


# ---- all ranks together are the whole


def require_whole(path: Path, tp: int, ep: int, halves: int = 2) -> None:
    """Load every rank, put the parts together, and compare each byte."""
    whole = fp4lt.load_moe(path)
    own = E // ep
    found = []
    for run in range(ep):
        parts = [
            fp4lt.load_moe(path, tp_rank=rank, tp_size=tp, ep_rank=run, ep_size=ep)
            for rank in range(tp)
        ]
        for part in parts:
            assert (part.expert_start, part.num_experts) == (run * own, E)
            assert part.w13.shape == (own, 2 * I // tp, H)
            assert part.w2.shape == (own, H, I // tp)
            assert (part.order, part.activation) == (whole.order, whole.activation)
            experts = slice(run * own, (run + 1) * own)
            for name in ("gate_up_scales", "a1_scale", "a2_scale"):
                all_of_them, some = getattr(whole, name), getattr(part, name)
                assert (some is None) == (all_of_them is None)
                assert some is None or torch.equal(some, all_of_them[experts])
            for name in ("w13", "w2"):
                all_of_them = packed(getattr(whole, name)).global_scale
                assert torch.equal(packed(getattr(part, name)).global_scale, all_of_them[experts])
        assert [part.w2_bias is None for part in parts[1:]] == [True] * (tp - 1)
        if whole.w2_bias is not None:
            assert torch.equal(dense(parts[0].w2_bias), whole.w2_bias[experts])
        found.append(joined(parts, halves))
    for again, expected in zip(zip(*found, strict=True), joined([whole], halves), strict=True):
        assert torch.equal(torch.cat(again), expected)


@pytest.mark.parametrize(("tp", "ep"), GRIDS)
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_ranks_together_are_the_whole(checkpoint: str, tp: int, ep: int) -> None:
    require_whole(DATA / checkpoint, tp, ep)


@pytest.mark.parametrize(("tp", "ep"), GRIDS)
@pytest.mark.parametrize("swapped", [False, True])
def test_ranks_of_stacked_experts(tmp_path: Path, swapped: bool, tp: int, ep: int) -> None:
    tensors = stacked(with_biases(original("modelopt_split")), swapped=swapped)
    require_whole(save(tmp_path, MO, tensors), tp, ep)


@pytest.mark.parametrize(("tp", "ep"), GRIDS)
@pytest.mark.parametrize("swapped", [False, True])
def test_ranks_of_interleaved_stacks(tmp_path: Path, swapped: bool, tp: int, ep: int) -> None:
    tensors = stacked(with_biases(original(MO)), swapped=swapped, interleaved=True)
    require_whole(save(tmp_path, MO, tensors, model_type="gpt_oss"), tp, ep, halves=1)


def test_one_expert_with_two_globals_decides_for_all_ranks(tmp_path: Path) -> None:
    # Rank 0's experts agree, but the whole layer keeps gate and up apart.
    tensors = original(MO)
    name = f"{ROOT}7.up_proj.weight_scale_2"
    tensors[name] = scalar(0.125)
    folder = save(tmp_path, MO, tensors)
    require_whole(folder, 1, 2)
    assert fp4lt.load_moe(folder, ep_size=2).gate_up_scales is not None


# ---- and the rest is not read


class Recorder:
    """safetensors.safe_open, with a list of what is read and how many bytes it has."""

    read: list[tuple[str, int]]

    def __init__(self, file: Path, **arguments: Any) -> None:
        self._file: Any = safe_open(file, **arguments)

    def __enter__(self) -> Recorder:
        self._handle = self._file.__enter__()
        return self

    def __exit__(self, *arguments: object) -> None:
        self._file.__exit__(*arguments)

    def keys(self) -> Any:
        return self._handle.keys()

    def get_tensor(self, name: str) -> torch.Tensor:
        value: torch.Tensor = self._handle.get_tensor(name)
        Recorder.read.append((name, value.nbytes))
        return value

    def get_slice(self, name: str) -> Any:
        return Slice(name, self._handle.get_slice(name))


class Slice:
    def __init__(self, name: str, part: Any) -> None:
        self._name, self._part = name, part
        self.get_dtype, self.get_shape = part.get_dtype, part.get_shape

    def __getitem__(self, index: Any) -> torch.Tensor:
        value: torch.Tensor = self._part[index]
        Recorder.read.append((self._name, value.nbytes))
        return value


safe_open = safetensors.safe_open


@pytest.mark.parametrize("form", ["per expert", "stacked", "stacked, K first"])
def test_only_the_ranks_bytes_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    tensors = with_biases(original("modelopt_split"))
    if form != "per expert":
        tensors = stacked(tensors, swapped="K" in form)
    folder = save(tmp_path, MO, tensors)
    monkeypatch.setattr(safetensors, "safe_open", Recorder)
    for tp, ep in GRIDS:
        Recorder.read = []
        fp4lt.load_moe(folder, tp_rank=tp - 1, tp_size=tp, ep_rank=ep - 1, ep_size=ep)
        own, inner = E // ep, I // tp
        weights = own * 3 * inner * H
        biases = own * 2 * (2 * inner + (H if tp == 1 else 0))
        # Two weight globals of every expert; down's and three inputs of one's own.  A stack's
        # are read whole; gate and up have one input scale there.
        scalars = 4 * (5 * E if form != "per expert" else 2 * E + 4 * own)
        assert sum(size for _, size in Recorder.read) == weights * 9 // 16 + biases + scalars
        if form == "per expert":
            numbers = {int(name.removeprefix(ROOT).split(".")[0]) for name, size in Recorder.read}
            heavy = {
                int(name.removeprefix(ROOT).split(".")[0])
                for name, size in Recorder.read
                if size > 4
            }
            assert numbers == set(range(E))
            assert heavy == set(range(E - own, E))


def test_a_slice_is_a_view_of_the_file() -> None:
    # What the count above rests on: taking a part does not read the tensor first.
    name = f"{ROOT}0.down_proj.weight"
    with safe_open(DATA / MO / "model.safetensors", framework="pt", device="cpu") as file:
        parts = [file.get_slice(name)[0:H, start : start + 8] for start in (0, 8)]
    assert parts[0].stride() == (I // 2, 1)
    assert parts[1].data_ptr() - parts[0].data_ptr() == 8


def test_damage_outside_the_ranks_part_does_not_matter(tmp_path: Path) -> None:
    tensors = original("modelopt_split")
    clean = fp4lt.load_moe(DATA / "modelopt_split", tp_rank=1, tp_size=4, ep_rank=1, ep_size=2)
    mine = slice(I // 4, I // 2)
    for name, stored in tensors.items():
        if not name.startswith(ROOT):
            continue
        expert, projection, parameter = name.removeprefix(ROOT).split(".")
        values = array(stored)
        broken = np.full_like(values, 255 if values.dtype == np.uint8 else np.nan)
        if parameter == "weight_scale_2":
            continue
        if int(expert) >= E // 2:
            if values.ndim < 2:
                continue
            per = 1 if projection != "down_proj" else 2 if parameter == "weight" else 16
            part = slice(mine.start // per, mine.stop // per)
            index = (slice(None), part) if projection == "down_proj" else (part, slice(None))
            broken[index] = values[index]
        tensors[name] = raw(stored.dtype, broken)
    folder = save(tmp_path, MO, tensors)
    found = fp4lt.load_moe(folder, tp_rank=1, tp_size=4, ep_rank=1, ep_size=2)
    assert layer_bytes(found) == layer_bytes(clean)
    refuse(folder, f"{ROOT}0.gate_proj.weight_scale (expert 0", "0xFF")
    # The place of damage is counted in the whole matrix, not in the slice.
    refuse(
        folder,
        "experts.4.gate_proj",
        "at row 64, block 0",
        tp_rank=2,
        tp_size=4,
        ep_rank=1,
        ep_size=2,
    )


def test_shards_of_other_experts_may_be_absent(tmp_path: Path) -> None:
    tensors = original(MO)
    here = {n: t for n, t in tensors.items() if n < f"{ROOT}4" or n.endswith("_scale_2")}
    write(tmp_path / "a.safetensors", here)
    places = {name: "a.safetensors" if name in here else "b.safetensors" for name in tensors}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    assert fp4lt.load_moe(tmp_path, ep_size=2).num_experts == E
    refuse(tmp_path, "b.safetensors", "does not exist", ep_rank=1, ep_size=2)


# ---- sums over ranks


def test_outputs_of_expert_ranks_sum_to_the_whole() -> None:
    whole = fp4lt.load_moe(DATA / "modelopt_split")
    rng = torch.Generator().manual_seed(7)
    hidden = torch.randn(40, H, generator=rng)
    ids = torch.stack([torch.randperm(E, generator=rng)[:2] for _ in range(40)])
    # Powers of two: each product is exact, so a sum of two rounds once, wherever it is made.
    routing = 2.0 ** -torch.randint(0, 4, (40, 2), generator=rng)
    expected = fp4lt.moe(hidden, whole, topk_weights=routing, topk_ids=ids)
    assert expected.count_nonzero() > 0.9 * expected.numel()
    for ep in (2, 4, 8):
        parts = [
            fp4lt.moe(
                hidden,
                fp4lt.load_moe(DATA / "modelopt_split", ep_rank=rank, ep_size=ep),
                topk_weights=routing,
                topk_ids=ids,
            )
            for rank in range(ep)
        ]
        assert torch.equal(torch.stack(parts).sum(dim=0), expected)


def integers(folder: Path) -> Path:
    """Experts in small bf16 integers and biases, without a gate: every sum is exact."""
    rng = np.random.default_rng(3)
    tensors: Tensors = {}
    for expert in range(2):
        for name, shape in (("up", (64, 32)), ("down", (32, 64))):
            sparse = rng.integers(-1, 2, shape) * (rng.random(shape) < 0.1)
            bias = rng.integers(1, 4, shape[0])
            for what, values in (("weight", sparse), ("bias", bias)):
                bits = values.astype(np.float32).view(np.uint32) >> 16
                tensors[f"{ROOT}{expert}.{name}_proj.{what}"] = Raw(
                    "BF16", values.shape, bits.astype(np.uint16).tobytes()
                )
    write(folder / "model.safetensors", tensors)
    (folder / "config.json").write_text('{"mlp_hidden_act": "relu2"}')
    return folder


def test_outputs_of_all_ranks_have_the_biases_once(tmp_path: Path) -> None:
    folder = integers(tmp_path)
    rng = torch.Generator().manual_seed(5)
    hidden = torch.randint(0, 2, (12, 32), generator=rng).to(torch.bfloat16)
    ids = torch.randint(0, 2, (12, 1), generator=rng)

    def run(**rank: Any) -> torch.Tensor:
        weights = fp4lt.load_moe(folder, **rank)
        return fp4lt.moe(hidden, weights, topk_weights=torch.ones(12, 1), topk_ids=ids)

    expected = run()
    # Integers up to 256 are exact in bf16, in every part as in the whole.
    assert expected.float().abs().max() <= 256
    for tp, ep in ((2, 1), (4, 1), (1, 2), (4, 2)):
        parts = [
            run(tp_rank=rank, tp_size=tp, ep_rank=place, ep_size=ep)
            for rank in range(tp)
            for place in range(ep)
        ]
        assert max(part.float().abs().max() for part in parts) <= 256
        assert torch.equal(torch.stack(parts).float().sum(dim=0), expected.float())


# ---- what cannot be divided


@pytest.mark.parametrize(
    ("arguments", "fragments"),
    [
        ({"tp_size": 16}, ("I/tp = 128/16 = 8", "cuts a block of 16", "[1, 2, 4, 8]", "ep_size")),
        ({"tp_size": 3}, ("tp_size=3 does not divide I=128", "[1, 2, 4, 8]")),
        ({"tp_size": 256}, ("tp_size=256 does not divide I=128", "multiple of 16")),
        ({"ep_size": 3}, ("ep_size=3 does not divide the E=8", "[1, 2, 4, 8]")),
        ({"ep_size": 16}, ("ep_size=16", "E=8")),
        ({"tp_rank": 2, "tp_size": 2}, ("tp_rank=2 with tp_size=2", "0 <= tp_rank < tp_size")),
        ({"ep_rank": -1, "ep_size": 2}, ("ep_rank=-1 with ep_size=2",)),
        ({"tp_size": 0}, ("tp_rank=0 with tp_size=0",)),
        ({"ep_size": "2"}, ("ep_size must be an int, got str '2'",)),
        ({"tp_rank": True, "tp_size": 2}, ("tp_rank must be an int, got bool",)),
        ({"order": "gate_up"}, ("order='gate_up'", "a tensor for each", "leave order out")),
        ({"order": "up"}, ("order='up'", "interleaved")),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_arguments_that_do_not_fit(arguments: dict[str, Any], fragments: tuple[str, ...]) -> None:
    refuse(DATA / MO, *fragments, error=ArgumentError, **arguments)
