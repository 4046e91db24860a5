# SPDX-License-Identifier: Apache-2.0
"""The benchmark times only what passed its check, and says why the rest was not timed."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import fp4lt
from benchmarks import accounting, ceilings, layers, moe_decode, presets, report, timing
from benchmarks.contenders import PEERS, Absent, Fp4lt, Recipe, Runner, Torch, contenders
from benchmarks.reference import Reference
from benchmarks.runner import run_layer
from fp4lt.problem import Order

READ = ceilings.Ceiling(1e9, "given", {"given": 1e9})
COMPUTE = ceilings.Ceiling(1e12, "given", {"given": 1e12})
CHECKPOINTS = Path(__file__).parent / "data" / "checkpoints"
TINY_RUN = ["--checkpoint", str(CHECKPOINTS / "modelopt"), "--tokens", "1", "--quick"]

TINY = presets.MoEPreset(
    name="tiny",
    model="none",
    hidden=64,
    intermediate=48,
    experts=6,
    top_k=2,
    activation="silu",
    gated=True,
    tp=1,
    sweep=(1, 5),
    source="made up",
)
TINY_GEMM = presets.GemmPreset(
    name="tiny-gemm",
    model="none",
    out_features=40,
    in_features=96,
    experts=3,
    tp=1,
    sweep=(1, 2, 7),
    source="made up",
)


@dataclass
class CountingTimer:
    """Makes ``calls`` calls and reports that each took the time it was told to report."""

    us: float = 100.0
    calls: int = 3
    measured: int = 0

    @property
    def description(self) -> str:
        return "a counter"

    def measure(self, prepare: timing.Prepare) -> timing.Samples:
        self.measured += 1
        for i in range(self.calls):
            prepare(i)()
        return timing.Samples((self.us,) * self.calls)


@dataclass(frozen=True)
class Altered:
    """The CPU backend with its result passed through ``alter``."""

    alter: Callable[[torch.Tensor], torch.Tensor]
    name: str = "altered"
    recipe: Recipe = "w4a16"
    limit: float = 3e-3
    weight_format: accounting.WeightFormat = "nvfp4"

    def refusal(self, layer: layers.Layer) -> str | None:
        return None

    def prepare(self, layer: layers.Layer) -> Runner:
        run = Fp4lt("cpu", self.recipe).prepare(layer)
        return lambda batch: self.alter(run(batch))


def race(layer: layers.Layer, contender: Any, timer: timing.Timer) -> list[report.Row]:
    return run_layer(
        layer, [contender], timer, reference=Reference(layer), read=READ, compute=COMPUTE
    )


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


@pytest.mark.parametrize("preset", [TINY, TINY_GEMM], ids=["moe", "gemm"])
@pytest.mark.parametrize(
    "contender",
    [
        Torch(torch.bfloat16, ahead=True, memory_budget=2**30),
        Torch(torch.float32, ahead=True, memory_budget=2**30),
        Torch(torch.bfloat16, ahead=False, memory_budget=0),
    ],
    ids=lambda contender: contender.name,
)
def test_torch_loops_pass(preset: presets.Preset, contender: Torch) -> None:
    rows = race(layers.from_preset(preset), contender, CountingTimer())
    assert [row.status for row in rows] == ["ok"] * len(preset.sweep)


@pytest.mark.parametrize("order", ["gate_up", "up_gate", "interleaved"])
def test_torch_loop_knows_every_order(order: Order) -> None:
    layer = layers.from_preset(TINY)
    assert isinstance(layer, layers.MoELayer)
    weights = fp4lt.MoEWeights(
        layer.weights.w13,
        layer.weights.w2,
        order=order,
        gate_up_scales=torch.linspace(0.25, 4.0, 12).reshape(6, 2),
    )
    contender = Torch(torch.float32, ahead=True, memory_budget=2**30)
    rows = race(replace(layer, weights=weights), contender, CountingTimer())
    assert [row.status for row in rows] == ["ok", "ok"]


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
        (lambda y: y * 1.01, r"relative error 1\.\d\de-02"),
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


def test_torch_loop_refuses_what_it_does_not_compute() -> None:
    layer = layers.from_preset(TINY)
    assert isinstance(layer, layers.MoELayer)
    contender = Torch(torch.bfloat16, ahead=False, memory_budget=0)
    biased = replace(layer.weights, w2_bias=torch.zeros(6, 64))
    reason = contender.refusal(replace(layer, weights=biased))
    assert reason is not None
    assert "w2_bias" in reason


def test_the_reference_is_the_same_at_every_size() -> None:
    layer = layers.from_preset(TINY)
    assert isinstance(layer, layers.MoELayer)
    large, small = layer.check_batch(5), layer.check_batch(1)
    assert torch.equal(large.x[:1], small.x)
    assert torch.equal(large.routing.ids[:1], small.routing.ids)


# --- command line ----------------------------------------------------------------------------


def test_tiny_run_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.json"
    status = moe_decode.main([*TINY_RUN, "--json", str(path)])
    out = capsys.readouterr().out
    assert status == 0, out
    data = json.loads(path.read_text())
    assert data["schema_version"] == report.SCHEMA_VERSION
    assert data["environment"]["threads"] >= 1
    assert data["ceilings"]["read_bytes_per_s"]["value"] > 0
    rows = {(row["contender"], row["recipe"]): row for row in data["rows"]}
    everyone = contenders(("w4a4", "w4a16"), 0)
    assert list(rows) == [(c.name, c.recipe) for c in everyone]
    ran = {key for key, row in rows.items() if row["status"] == "ok"}
    assert {("fp4lt-cpu", "w4a4"), ("fp4lt-cpu", "w4a16"), ("torch-bf16", "w4a16")} <= ran
    for key, row in rows.items():
        if key in ran:
            assert (row["size"], row["active_experts"], row["rows_per_active_expert"]) == (1, 2, 1)
            assert row["error"] <= row["limit"]
            assert row["calls"] == 3
            # H 256, I 128: 98304 weights an expert, two active; x and y.
            per_weight = {"nvfp4": 0.5625, "bf16": 2, "fp32": 4}[row["weight_format"]]
            assert row["megabytes"] == (2 * 98304 * per_weight + 2 * 2 * 256) / 1e6
        else:
            assert row["status"] == "unavailable"
            assert row["reason"]
            assert row["reason"] in out
    assert {peer.name for peer in PEERS} <= {contender for contender, _ in rows}
    for heading in ("read ceiling", "compute ceiling", "timing", "% floor"):
        assert heading in out


def test_a_failed_check_is_the_exit_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(moe_decode, "contenders", lambda *_: (Altered(lambda y: -y),))
    status = moe_decode.main(TINY_RUN)
    assert status == 1
    assert "FAILED" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--preset", "glm6"], "no preset 'glm6'; there are"),
        (["--preset", "glm5-tp8", "--contenders", "cutlass"], "no contender 'cutlass'; there are"),
        (["--preset", "glm5-tp8", "--memory-budget", "0.1"], "use --experts"),
        (["--json", "/nonexistent/folder/x.json"], "no such folder"),
        (["--min-time", "-1"], "--min-time"),
        (["--checkpoint", "/nonexistent/checkpoint", "--quick"], "/nonexistent/checkpoint"),
        (["--preset", "qwen3-30b", "--experts", "4", "--quick"], "--experts 4 is too few"),
    ],
)
def test_unusable_options(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert moe_decode.main(arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("tokens", ["0", "4,1", "1,,2", "one"])
def test_token_lists_are_increasing_positive_integers(
    tokens: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        moe_decode.main(["--tokens", tokens])
    assert caught.value.code == 2
    assert "--tokens" in capsys.readouterr().err


def test_list_names_presets_and_contenders(capsys: pytest.CaptureFixture[str]) -> None:
    assert moe_decode.main(["--list"]) == 0
    out = capsys.readouterr().out
    for name in (*presets.available(), "fp4lt-cpu", "torch-dequant", "flashinfer-cutlass"):
        assert name in out


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
