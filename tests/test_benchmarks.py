# SPDX-License-Identifier: Apache-2.0
"""Presets, routing, counting, timing, ceilings and report files of the benchmark.

No test here looks at how long anything took.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import accounting, ceilings, layers, presets, report, routing, timing

# --- presets ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "gemms", "experts", "top_k", "tp", "megabytes"),
    [
        ("glm5-tp8", ((512, 6144), (6144, 256)), 256, 8, 8, 2.65),
        ("deepseek-v3", ((4096, 7168), (7168, 2048)), 256, 8, 1, 24.8),
        ("qwen3-30b", ((1536, 2048), (2048, 768)), 128, 8, 1, 2.7),
        ("seed-probe", ((7168, 7168),), 1, None, 1, 28.9),
    ],
)
def test_preset_numbers(
    name: str,
    gemms: tuple[tuple[int, int], ...],
    experts: int,
    top_k: int | None,
    tp: int,
    megabytes: float,
) -> None:
    preset = presets.available()[name]
    assert preset.gemms == gemms
    assert (preset.experts, preset.tp) == (experts, tp)
    assert getattr(preset, "top_k", None) == top_k
    digits = len(str(megabytes).partition(".")[2])
    assert round(layers.stored_bytes(preset, 1) / 1e6, digits) == megabytes


def test_seed_probe_sweeps_rows_of_a_plain_gemm() -> None:
    preset = presets.available()["seed-probe"]
    assert preset.kind == "gemm"
    assert preset.sweep == (8, 16, 32, 64, 128, 256)


def _preset_data(name: str = "glm5-tp8") -> dict[str, Any]:
    data: dict[str, Any] = json.loads((presets.FOLDER / f"{name}.json").read_text())
    return data


def test_every_preset_file_follows_the_schema() -> None:
    files = sorted(presets.FOLDER.iterdir())
    assert [path.suffix for path in files] == [".json"] * len(files)
    for path in files:
        assert presets.validate(json.loads(path.read_text()), path.name)["source"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema_version": 2}, "schema_version 2"),
        ({"kind": "dense"}, "kind must be one of"),
        ({"hidden": True}, "hidden must be int"),
        ({"hidden": "6144"}, "hidden must be int"),
        ({"gated": 1}, "gated must be bool"),
        ({"experts": 0}, "experts must be at least 1"),
        ({"hidden": 6152}, "hidden must be a multiple of 16"),
        ({"activation": "situ"}, "activation must be one of"),
        ({"top_k": 257}, "top_k 257 of only 256"),
        ({"sweep": [4, 1]}, "increasing positive"),
        ({"sweep": [1, 1]}, "increasing positive"),
        ({"sweep": []}, "increasing positive"),
        ({"sweep": [0, 1]}, "increasing positive"),
        ({"sweep": [1.0]}, "increasing positive"),
        ({"colour": "red"}, "unknown colour"),
        ({"source": None}, "source must be str"),
    ],
)
def test_schema_refuses(change: dict[str, Any], message: str) -> None:
    with pytest.raises(presets.PresetError, match=message):
        presets.validate(_preset_data() | change, "x.json")


@pytest.mark.parametrize("name", ["glm5-tp8", "seed-probe"])
def test_schema_needs_every_key(name: str) -> None:
    complete = _preset_data(name)
    for key in complete.keys() - {"kind"}:
        rest = {k: v for k, v in complete.items() if k != key}
        with pytest.raises(presets.PresetError, match=f"missing {key}"):
            presets.validate(rest, "x.json")


def test_a_preset_is_named_as_its_file(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(json.dumps(_preset_data()))
    with pytest.raises(presets.PresetError, match="'glm5-tp8' must be the file's own"):
        presets.read(path)


# --- routing ---------------------------------------------------------------------------------


def test_routing_depends_on_seed_size_and_call_only() -> None:
    first = routing.uniform(9, 16, 4, seed=3, call=7)
    routing.uniform(9, 16, 4, seed=3, call=8)
    again = routing.uniform(9, 16, 4, seed=3, call=7)
    assert torch.equal(first.ids, again.ids)
    assert torch.equal(first.weights, again.weights)
    for other in ({"seed": 4, "call": 7}, {"seed": 3, "call": 8}, {"seed": 3, "call": -7}):
        assert not torch.equal(first.ids, routing.uniform(9, 16, 4, **other).ids)


@pytest.mark.parametrize(("experts", "top_k"), [(8, 2), (8, 8), (256, 8), (1, 1)])
def test_routing_picks_distinct_experts(experts: int, top_k: int) -> None:
    drawn = routing.uniform(50, experts, top_k, seed=0, call=0)
    assert drawn.ids.shape == drawn.weights.shape == (50, top_k)
    assert int(drawn.ids.min()) >= 0
    assert int(drawn.ids.max()) < experts
    assert all(len(set(row)) == top_k for row in drawn.ids.tolist())
    assert bool((drawn.weights > 0).all())
    # k float32 roundings of numbers up to 1, twice.
    assert float((drawn.weights.double().sum(1) - 1).abs().max()) <= top_k * 2.0**-23
    assert drawn.rows_per_expert(experts).sum() == 50 * top_k


def test_routing_reaches_every_expert_in_every_slot() -> None:
    drawn = routing.uniform(400, 8, 2, seed=0, call=0)
    for slot in range(2):
        assert set(drawn.ids[:, slot].tolist()) == set(range(8))


def test_routing_needs_as_many_experts_as_it_picks() -> None:
    with pytest.raises(ValueError, match="the number of experts, got 9"):
        routing.uniform(1, 8, 9, seed=0, call=0)


# --- counting --------------------------------------------------------------------------------


def test_count_by_hand() -> None:
    # Two matrices of 32 x 16 and 16 x 16: 768 weights; experts 0 and 2 meet 2 and 1 rows.
    work = accounting.count(((32, 16), (16, 16)), np.array([2, 0, 1]), inputs=48, outputs=32)
    assert (work.active, work.rows, work.weights) == (2, 3, 1536)
    assert work.rows_per_active == 1.5
    assert work.activation_bytes == 160
    assert work.flops == 2 * 3 * 768
    assert work.bytes("nvfp4") == 1536 // 2 + 1536 // 16 + 160
    assert work.bytes("bf16") == 2 * 1536 + 160
    assert work.bytes("fp32") == 4 * 1536 + 160


def test_count_matches_the_published_floor() -> None:
    # GLM-5 TP8 with all 256 experts on 1.792 TB/s: 379 us for the weights alone.
    gemms = presets.available()["glm5-tp8"].gemms
    work = accounting.count(gemms, np.full(256, 8), inputs=0, outputs=0)
    floor = accounting.floor(work, read_bytes_per_s=1.792e12, flops_per_s=2e15)
    assert (round(floor.us), floor.bound) == (379, "memory")
    assert round(work.flops / floor.us / 1e6) == 51


def test_floor_is_the_larger_time() -> None:
    work = accounting.count(((16, 16),), np.array([100]), inputs=0, outputs=0)
    memory = accounting.floor(work, read_bytes_per_s=144e6, flops_per_s=51.2e9)
    assert memory.bound == "memory"
    assert memory.us == pytest.approx(1.0)
    compute = accounting.floor(work, read_bytes_per_s=144e6, flops_per_s=25.6e9)
    assert compute.bound == "compute"
    assert compute.us == pytest.approx(2.0)


def test_mean_of_calls() -> None:
    one = accounting.count(((16, 16),), np.array([4, 0]), inputs=8, outputs=8)
    two = accounting.count(((16, 16),), np.array([2, 2]), inputs=8, outputs=8)
    work = accounting.mean([one, two])
    assert (work.active, work.rows, work.weights) == (1.5, 4, 384)
    with pytest.raises(ValueError, match="no calls"):
        accounting.mean([])


# --- timing ----------------------------------------------------------------------------------


class FakeClock:
    def __init__(self) -> None:
        self.now = 0
        self.events: list[str] = []

    def perf_counter_ns(self) -> int:
        return self.now

    def prepare(self, i: int) -> timing.Call:
        self.now += 1_000_000
        self.events.append(f"prepare {i}")

        def call() -> None:
            self.now += 1000 * (10 + i)
            self.events.append(f"call {i}")

        return call


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    fake = FakeClock()
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter_ns=fake.perf_counter_ns))
    return fake


def test_wall_clock_times_the_call_and_nothing_else(clock: FakeClock) -> None:
    timer = timing.WallClock(flush_bytes=4096, warmup=2, repeats=3, min_time=0)
    assert timer.measure(clock.prepare).us == (10.0, 11.0, 12.0)
    assert clock.events == [f"{what} {i}" for i in range(-2, 3) for what in ("prepare", "call")]


def test_wall_clock_goes_on_for_min_time(clock: FakeClock) -> None:
    # 10 + 11 + 12 + 13 us are the first to reach 40.
    timer = timing.WallClock(flush_bytes=0, warmup=0, repeats=2, min_time=40e-6)
    assert timer.measure(clock.prepare).n == 4
    capped = timing.WallClock(flush_bytes=0, warmup=0, repeats=2, min_time=1e9, max_repeats=5)
    assert capped.measure(clock.prepare).n == 5


def test_wall_clock_loses_patience(clock: FakeClock) -> None:
    # 10 + 11 + 12 + 13 us are the first to reach 40; 5 us are over after one call.
    timer = timing.WallClock(flush_bytes=0, warmup=0, repeats=9, min_time=1.0, max_time=40e-6)
    assert timer.measure(clock.prepare).n == 4
    short = timing.WallClock(flush_bytes=0, warmup=0, repeats=9, min_time=1.0, max_time=5e-6)
    assert short.measure(clock.prepare).n == 3


def test_wall_clock_says_whether_caches_are_cold() -> None:
    assert "cold: 64 MiB" in timing.WallClock(flush_bytes=64 * 2**20).description
    assert "warm" in timing.WallClock(flush_bytes=0).description
    with pytest.raises(ValueError, match="repeats >= 1"):
        timing.WallClock(flush_bytes=0, repeats=0)


def test_samples() -> None:
    samples = timing.Samples(tuple(float(i) for i in range(10, -1, -1)))
    assert (samples.n, samples.median) == (11, 5.0)
    assert (samples.percentile(10), samples.percentile(90)) == (1.0, 9.0)
    with pytest.raises(ValueError, match="no samples"):
        timing.Samples(())


# --- ceilings --------------------------------------------------------------------------------


def test_caches_from_sysfs(tmp_path: Path) -> None:
    entries = [("Data", "1", "48K"), ("Instruction", "1", "32K"), ("Unified", "3", "32M")]
    for i, (kind, level, size) in enumerate(entries):
        index = tmp_path / f"index{i}"
        index.mkdir()
        for name, text in (("type", kind), ("level", level), ("size", size)):
            (index / name).write_text(f"{text}\n")
    (tmp_path / "index9").mkdir()
    assert ceilings.caches(tmp_path) == {"L1d": 48 * 2**10, "L3": 32 * 2**20}
    llc, where = ceilings.last_level_cache(tmp_path)
    assert llc == 32 * 2**20
    assert where.startswith("L3")


def test_missing_sysfs_is_said(tmp_path: Path) -> None:
    size, where = ceilings.last_level_cache(tmp_path / "none")
    assert size == 64 * 2**20
    assert "assumed" in where


def test_a_ceiling_names_its_best_method() -> None:
    best = ceilings.Ceiling.best({"slow": 1.0, "fast": 3.0, "middling": 2.0})
    assert (best.value, best.method) == (3.0, "fast")


# --- report ----------------------------------------------------------------------------------


def test_json_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    report.write_json(path, {"a": 1})
    assert json.loads(path.read_text()) == {"a": 1}
    with pytest.raises(ValueError, match="JSON"):
        report.write_json(path, {"filler": "x" * 100_000, "a": float("nan")})
    with pytest.raises(TypeError):
        report.write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["report.json"]


def test_numbers_keep_their_significant_digits() -> None:
    values = (0.0, 2e-7, 0.012345, 1.2345, 9.999, 123.45, 123456.0)
    shown = [report._significant(value) for value in values]
    assert shown == ["0", "0.00000", "0.0123", "1.23", "10.0", "123", "123,000"]
