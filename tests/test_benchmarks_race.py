# SPDX-License-Identifier: Apache-2.0
"""The benchmark times only what passed its check, and says why the rest was not timed."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from benchmark_cases import TINY, TINY_GEMM, Altered, CountingTimer, race
from rich.console import Console

import fp4lt
from benchmarks import accounting, layers, presets, report, timing
from benchmarks.contenders import Absent, Fp4lt, Recipe, Runner, Torch

CHECKPOINTS = Path(__file__).parent / "data" / "checkpoints"


def _printed(rows: list[report.Row]) -> str:
    text = io.StringIO()
    console = Console(width=200, file=text)
    report.print_layer(console, "title", rows, "T")
    report.print_absent(console, rows)
    return text.getvalue()


def test_layers_count_the_routing_they_draw() -> None:
    layer = layers.from_preset(TINY)
    assert isinstance(layer, layers.MoELayer)
    for call in range(5):
        batch = layer.batch(5, call)
        active = len(set(batch.routing.ids.flatten().tolist()))
        assert (batch.work.active, batch.work.rows) == (active, 10)
        assert batch.work.weights == active * (96 * 64 + 64 * 48)
        assert batch.work.activation_bytes == 2 * 2 * 5 * 64
    gemm = layers.from_preset(TINY_GEMM)
    work = gemm.batch(7, 0).work
    assert (work.active, work.rows, work.activation_bytes) == (3, 21, 2 * 21 * (96 + 40))


# --- checking before timing ------------------------------------------------------------------


@pytest.mark.parametrize("preset", [TINY, TINY_GEMM], ids=["moe", "gemm"])
@pytest.mark.parametrize("recipe", ["w4a4", "w4a16"])
def test_cpu_backend_passes_and_is_timed(preset: presets.Preset, recipe: Recipe) -> None:
    layer = layers.from_preset(preset)
    timer = CountingTimer(us=100.0, calls=3)
    rows = race(layer, Fp4lt("cpu", recipe), timer)
    assert [(row.status, row.size, row.calls) for row in rows] == [
        ("ok", size, 3) for size in preset.sweep
    ]
    assert timer.measured == len(preset.sweep)
    for row in rows:
        assert row.size is not None
        work = accounting.mean([layer.batch(row.size, i).work for i in range(3)])
        floor = work.bytes("nvfp4") / 1e9 * 1e6
        assert row.megabytes == work.bytes("nvfp4") / 1e6
        assert row.gb_per_s == pytest.approx(work.bytes("nvfp4") / 100e-6 / 1e9)
        assert row.tflop_per_s == pytest.approx(work.flops / 100e-6 / 1e12)
        assert row.floor_bound == "memory"
        assert row.floor_us == pytest.approx(floor)
        assert row.floor_percent == pytest.approx(floor)


def _zero_last_column(y: torch.Tensor) -> torch.Tensor:
    y[:, -1] = 0
    return y


def _poison_last_row(y: torch.Tensor) -> torch.Tensor:
    y[-1, 0] = torch.nan
    return y


def _raise(y: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("no result today")


@pytest.mark.parametrize(
    ("alter", "reason"),
    [
        (lambda y: y * 2, r"relative error (1\.00e\+00|9\.9\de-01) .* limit 3\.00e-03"),
        (lambda y: y * 1.01, r"relative error (1\.\d\de-02|9\.\d\de-03)"),
        (_zero_last_column, "relative error"),
        (_poison_last_row, "NaN or infinity"),
        (lambda y: y[:, :-1], "shape"),
        (_raise, "RuntimeError: no result today"),
    ],
    ids=["doubled", "1 percent", "zero column", "nan", "narrow", "raises"],
)
def test_a_wrong_contender_fails_and_is_not_timed(
    alter: Callable[[torch.Tensor], torch.Tensor], reason: str
) -> None:
    timer = CountingTimer()
    rows = race(layers.from_preset(TINY), Altered(alter), timer)
    assert timer.measured == 0
    assert [row.status for row in rows] == ["FAILED", "FAILED"]
    for row in rows:
        assert row.us_median is None
        assert row.reason is not None
        assert re.search(reason, row.reason)
    assert "FAILED" in _printed(rows)


def test_a_recipe_is_held_to_its_own_reference() -> None:
    @dataclass(frozen=True)
    class Mislabelled(Altered):
        def prepare(self, layer: layers.Layer) -> Runner:
            return Fp4lt("cpu", "w4a4").prepare(layer)

    rows = race(layers.from_preset(TINY), Mislabelled(lambda y: y), CountingTimer())
    assert [row.status for row in rows] == ["FAILED", "FAILED"]


def test_unavailable_contenders_keep_their_reason() -> None:
    layer = layers.from_preset(TINY)
    timer = CountingTimer()
    absent = Absent("elsewhere", "another machine")
    (row,) = race(layer, absent, timer)
    assert (row.status, row.reason) == ("unavailable", absent.refusal(layer))
    assert "needs another machine" in str(row.reason)
    assert timer.measured == 0
    assert f"not run: elsewhere (w4a16): {row.reason}" in _printed([row])
    other = replace(row, layer="other", status="ok", reason=None)
    assert f"not run: elsewhere (w4a16) on tiny: {row.reason}" in _printed([row, other])


@pytest.mark.parametrize("backend", ["fused", "dequant", "cublaslt", "cublaslt_grouped"])
def test_refused_backends_give_the_packages_reason(backend: str) -> None:
    layer = layers.from_preset(TINY)
    (row,) = race(layer, Fp4lt(backend, "w4a4"), CountingTimer())
    assert row.status == "unavailable"
    batch = layer.check_batch(1)
    assert isinstance(batch, layers.MoEBatch)
    assert isinstance(layer, layers.MoELayer)
    with pytest.raises(fp4lt.errors.Error) as caught:
        fp4lt.moe(
            batch.x,
            layer.weights,
            topk_weights=batch.routing.weights,
            topk_ids=batch.routing.ids,
            backend=backend,
        )
    assert row.reason == str(caught.value)


def test_dense_copies_respect_the_memory_budget() -> None:
    layer = layers.from_preset(TINY)
    need = 2 * 6 * (96 * 64 + 64 * 48)
    assert Torch(torch.bfloat16, ahead=True, memory_budget=need).refusal(layer) is None
    reason = Torch(torch.bfloat16, ahead=True, memory_budget=need - 1).refusal(layer)
    assert reason is not None
    assert "the budget is" in reason


def test_a_batch_is_drawn_once_and_no_layer_has_anothers() -> None:
    layer, other = layers.from_preset(TINY), layers.from_preset(TINY, seed=1)
    assert isinstance(layer, layers.MoELayer)
    assert isinstance(other, layers.MoELayer)
    assert layer.batch(5, 0) is layer.batch(5, 0)
    assert layer.batch(1, 0).x.shape[0] == 1
    assert not torch.equal(layer.batch(5, 0).routing.ids, layer.batch(5, 1).routing.ids)
    assert not torch.equal(layer.batch(5, 0).routing.ids, other.batch(5, 0).routing.ids)
    for far in (-1, layers.MOST_KEPT):
        assert layer.batch(5, far) is not layer.batch(5, far)
        assert torch.equal(layer.batch(5, far).routing.ids, layer.batch(5, far).routing.ids)
    copies = layers.with_copies(layer, 2)
    assert [copies.batch(5, i).copy for i in range(2)] == [0, 1]


def test_the_reference_is_the_same_at_every_size() -> None:
    layer = layers.from_preset(TINY)
    assert isinstance(layer, layers.MoELayer)
    large, small = layer.check_batch(5), layer.check_batch(1)
    assert torch.equal(large.x[:1], small.x)
    assert torch.equal(large.routing.ids[:1], small.routing.ids)


def test_calls_take_the_copies_of_the_weights_in_turn() -> None:
    one = layers.from_preset(TINY)
    layer = layers.with_copies(one, 3)
    assert [layer.batch(1, i).copy for i in range(5)] == [0, 1, 2, 0, 1]
    assert [one.batch(1, i).copy for i in range(3)] == [0, 0, 0]
    assert isinstance(layer, layers.MoELayer)
    places = {id(w.w13.codes) for w in layer.copies if isinstance(w.w13, fp4lt.NVFP4Tensor)}
    assert len(places) == 3
    gemm = layers.with_copies(layers.from_preset(TINY_GEMM), 2)
    for held in (layer, gemm):
        for contender in (
            Fp4lt("cpu", "w4a16"),
            Torch(torch.bfloat16, ahead=True, memory_budget=2**30),
            Torch(torch.bfloat16, ahead=False, memory_budget=0),
        ):
            run = contender.prepare(held)
            calls = [run(replace(held.batch(5, 1), copy=copy)) for copy in range(2)]
            assert torch.equal(calls[0], calls[1])


def test_copies_are_as_many_as_a_cache_and_the_memory_ask_for() -> None:
    layer = layers.from_preset(TINY)
    # 9216 weights an expert: 5184 bytes, two experts a token, six in all.
    assert layers.copies_needed(layer, 10368, 2**30) == (1, True)
    assert layers.copies_needed(layer, 10369, 2**30) == (2, True)
    assert layers.copies_needed(layer, 100 * 10368, 2**30) == (layers.MOST_COPIES, False)
    assert layers.copies_needed(layer, 5 * 10368, 2 * 6 * 5184) == (2, False)
    assert layers.copies_needed(layers.from_preset(TINY_GEMM), 1, 0) == (1, True)


def test_a_grouped_sample_counts_the_calls_of_its_group() -> None:
    @dataclass
    class Grouping(CountingTimer):
        def measure(self, prepare: timing.Prepare) -> timing.Samples:
            return replace(super().measure(prepare), group=4)

    layer = layers.from_preset(TINY)
    (_, row) = race(layer, Fp4lt("cpu", "w4a16"), Grouping())
    work = accounting.mean([layer.batch(5, i).work for i in range(4)])
    assert (row.calls, row.megabytes) == (3, work.bytes("nvfp4") / 1e6)


def test_cut_experts_are_said_in_the_title() -> None:
    layer = layers.from_preset(TINY, experts=3)
    assert layer.experts == 3
    assert "CUT to 3 of 6 experts" in layer.title
    assert "CUT" not in layers.from_preset(TINY, experts=99).title


def test_top_k_comes_from_the_checkpoints_config(tmp_path: Path) -> None:
    assert layers.checkpoint_top_k(CHECKPOINTS / "modelopt") == 2
    assert layers.checkpoint_top_k(CHECKPOINTS / "modelopt" / "model.safetensors") == 2
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="--top-k"):
        layers.checkpoint_top_k(tmp_path)


def test_random_weights_are_plausible_and_reproducible() -> None:
    def w13(seed: int) -> fp4lt.NVFP4Tensor:
        layer = layers.from_preset(TINY, seed=seed)
        assert isinstance(layer, layers.MoELayer)
        return layer.matrices[0]

    one, same, other = w13(0), w13(0), w13(1)
    assert torch.equal(one.codes, same.codes)
    assert torch.equal(one.global_scale, same.global_scale)
    assert not torch.equal(one.codes, other.codes)
    one.validate()
    scales = one.scales.view(torch.uint8)
    assert set(scales[scales != 0].tolist()) == set(range(0x68, 0x7F))
    nibbles = torch.cat([one.codes & 15, one.codes >> 4])
    assert set(nibbles.flatten().tolist()) == set(range(16))
