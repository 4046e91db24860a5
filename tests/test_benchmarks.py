# SPDX-License-Identifier: Apache-2.0
"""Presets, counting, timing, ceilings and report files of the benchmark.

No test here looks at how long anything took.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks import accounting, ceilings, layers, presets, report, timing

# --- presets ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "gemms", "experts", "top_k", "megabytes"),
    [
        ("glm5", ((4096, 6144), (6144, 2048)), 256, 8, 21.2),
        ("glm5-tp8", ((512, 6144), (6144, 256)), 256, 8, 2.65),
        ("glm5-ep8", ((4096, 6144), (6144, 2048)), 32, 8, 21.2),
        ("glm5.3-flash", ((4096, 4096), (4096, 2048)), 288, 8, 14.2),
        ("glm4.5", ((3072, 5120), (5120, 1536)), 160, 8, 13.3),
        ("deepseek-v3", ((4096, 7168), (7168, 2048)), 256, 8, 24.8),
        ("deepseek-v3-tp8", ((512, 7168), (7168, 256)), 256, 8, 3.1),
        ("deepseek-v4-flash", ((4096, 4096), (4096, 2048)), 256, 6, 14.2),
        ("kimi-k2-ep16", ((4096, 7168), (7168, 2048)), 24, 8, 24.8),
        ("kimi-k3-ep32", ((6144, 3584), (3584, 3072)), 28, 16, 18.6),
        ("qwen3-235b-tp8", ((384, 4096), (4096, 192)), 128, 8, 1.33),
        ("qwen3-30b", ((1536, 2048), (2048, 768)), 128, 8, 2.7),
        ("qwen3-30b-tp1", ((1536, 2048), (2048, 768)), 128, 8, 2.7),
        ("qwen3-30b-tp4-ep2", ((384, 2048), (2048, 192)), 64, 8, 0.7),
        ("qwen3-next-tp4", ((256, 2048), (2048, 128)), 512, 10, 0.4),
        ("qwen3.5-35b", ((1024, 2048), (2048, 512)), 256, 8, 1.8),
        ("qwen3.5-397b", ((2048, 4096), (4096, 1024)), 512, 10, 7.1),
        ("gpt-oss-120b-tp1", ((5760, 2880), (2880, 2880)), 128, 4, 14.0),
        ("gpt-oss-20b", ((5760, 2880), (2880, 2880)), 32, 4, 14.0),
        ("llama4-scout", ((16384, 5120), (5120, 8192)), 16, 1, 70.8),
        ("llama4-maverick-tp8", ((2048, 5120), (5120, 1024)), 128, 1, 8.8),
        ("minimax-m2-tp4", ((768, 3072), (3072, 384)), 256, 8, 2.0),
        ("minimax-m3", ((6144, 6144), (6144, 3072)), 128, 4, 31.9),
        ("nemotron3-nano-tp2", ((928, 2688), (2688, 928)), 128, 6, 2.8),
        ("nemotron3-super-ep8", ((2688, 1024), (1024, 2688)), 64, 22, 3.1),
        ("seed-probe", ((7168, 7168),), 1, None, 28.9),
    ],
)
def test_preset_numbers(
    name: str,
    gemms: tuple[tuple[int, int], ...],
    experts: int,
    top_k: int | None,
    megabytes: float,
) -> None:
    preset = presets.resolve(name)
    assert preset.name == name
    assert preset.gemms == gemms
    assert preset.local_experts == experts
    assert getattr(preset, "top_k", None) == top_k
    digits = len(str(megabytes).partition(".")[2])
    assert round(layers.stored_bytes(preset, 1) / 1e6, digits) == megabytes


def test_seed_probe_sweeps_rows_of_a_plain_gemm() -> None:
    preset = presets.available()["seed-probe"]
    assert preset.kind == "gemm"
    assert preset.sweep == (8, 16, 32, 64, 128, 256)


def test_a_share_is_named_by_suffix_or_option() -> None:
    assert presets.resolve("glm5", tp=8) == presets.resolve("glm5-tp8")
    assert presets.resolve("kimi-k2", tp=2, ep=16) == presets.resolve("kimi-k2-ep16-tp2")
    assert presets.resolve("kimi-k2-ep16").experts == 384
    assert {presets.resolve(name).name for name in presets.SUGGESTED} == set(presets.SUGGESTED)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("glm6", "no preset 'glm6'; there are .*deepseek-v3"),
        ("glm5-tp", "no preset 'glm5-tp'"),
        ("gpt-oss-120b-tp8", "TP8 .* 2880 into slices of 360, which is 22.5 blocks of 16"),
        ("nemotron3-nano-tp8", "1856 into slices of 232, which is 14.5 blocks .* be 1, 2, 4$"),
        ("qwen3-30b-tp5", "slices of 153.6"),
        ("glm5-ep7", "256 experts cannot be shared out to EP7"),
        ("glm5-tp0", "at least 1"),
        ("glm5-tp2-tp4", "TP of 4: give one"),
        ("seed-probe-tp2", "plain GEMM"),
    ],
)
def test_impossible_shares_are_refused_with_the_numbers(name: str, message: str) -> None:
    with pytest.raises(presets.PresetError, match=message):
        presets.resolve(name)


def test_models_keep_what_sets_them_apart() -> None:
    known = presets.available()

    def facts(name: str) -> tuple[object, ...]:
        preset = known[name]
        assert isinstance(preset, presets.MoEPreset)
        names = ("activation", "order", "swiglu_limit", "bias", "router_weight_on_input")
        return tuple(getattr(preset, key) for key in names)

    assert facts("gpt-oss-20b") == ("swigluoai", "interleaved", 7.0, True, False)
    assert facts("llama4-maverick") == ("silu", "gate_up", None, False, True)
    assert facts("nemotron3-nano") == ("relu2", None, None, False, False)
    assert facts("glm5.3-flash") == ("silu", "gate_up", 10.0, False, False)
    assert facts("glm5") == ("silu", "gate_up", None, False, False)
    assert "SiTU" in known["kimi-k3"].note


def _preset_data(name: str = "glm5") -> dict[str, Any]:
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
        ({"schema_version": 1}, "schema_version 1"),
        ({"kind": "dense"}, "kind must be one of"),
        ({"hidden": True}, "hidden must be int"),
        ({"hidden": "6144"}, "hidden must be int"),
        ({"bias": 1}, "bias must be bool"),
        ({"order": "up"}, "order must be one of"),
        ({"swiglu_limit": 7}, "swiglu_limit must be float or null"),
        ({"router_weight_on_input": True}, "is for top_k 1, got 8"),
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


@pytest.mark.parametrize("name", ["glm5", "seed-probe"])
def test_schema_needs_every_key(name: str) -> None:
    complete = _preset_data(name)
    for key in complete.keys() - {"kind"}:
        rest = {k: v for k, v in complete.items() if k != key}
        with pytest.raises(presets.PresetError, match=f"missing {key}"):
            presets.validate(rest, "x.json")


def test_a_preset_is_named_as_its_file(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(json.dumps(_preset_data()))
    with pytest.raises(presets.PresetError, match="'glm5' must be the file's own"):
        presets.read(path)


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
    gemms = presets.resolve("glm5-tp8").gemms
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
    # Preparing takes 1 ms each time; 5 us are over after one call.
    timer = timing.WallClock(flush_bytes=0, warmup=0, repeats=9, min_time=1.0, max_time=4.02e-3)
    assert timer.measure(clock.prepare).n == 4
    short = timing.WallClock(flush_bytes=0, warmup=0, repeats=9, min_time=1.0, max_time=5e-6)
    assert short.measure(clock.prepare).n == 3


def test_wall_clock_says_whether_caches_are_cold() -> None:
    assert "cold: 64 MiB" in timing.WallClock(flush_bytes=64 * 2**20).description
    assert "warm" in timing.WallClock(flush_bytes=0).description
    with pytest.raises(ValueError, match="repeats >= 1"):
        timing.WallClock(flush_bytes=0, repeats=0)


class FakeCuda:
    """Stands in for ``torch.cuda``: a replay takes 1 ms for each call in the graph."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events: list[str] = []
        self.recording: list[str] | None = None

    def synchronize(self) -> None:
        self.events.append("synchronize")

    def CUDAGraph(self) -> SimpleNamespace:  # noqa: N802 - torch's name
        return SimpleNamespace(replay=self.replay)

    @contextmanager
    def graph(self, graph: object) -> Iterator[None]:
        self.recording = []
        yield
        self.captured, self.recording = self.recording, None

    def replay(self) -> None:
        self.events.append("replay")
        self.now += len(self.captured)

    def Event(self, *, enable_timing: bool) -> SimpleNamespace:  # noqa: N802 - torch's name
        event = SimpleNamespace(at=0.0, synchronize=lambda: None)
        event.record = lambda: setattr(event, "at", self.now)
        event.elapsed_time = lambda other: other.at - event.at
        return event

    def prepare(self, i: int) -> timing.Call:
        self.events.append(f"prepare {i}")
        return lambda: (self.events if self.recording is None else self.recording).append(
            f"call {i}"
        )


def test_cuda_graph_replays_a_group_of_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeCuda()
    monkeypatch.setattr(timing, "torch", SimpleNamespace(cuda=fake))
    timer = timing.CudaGraph(calls=3, repeats=2, min_time=0, warmup=1)
    samples = timer.measure(fake.prepare)
    assert (samples.us, samples.calls) == ((1000.0, 1000.0), range(3))
    calls = [f"call {i}" for i in range(3)]
    assert fake.captured == calls
    assert fake.events == [
        *(f"prepare {i}" for i in range(3)),
        *calls,
        "synchronize",
        *["replay"] * 3,
    ]


def test_cuda_graph_goes_on_for_min_time(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeCuda()
    monkeypatch.setattr(timing, "torch", SimpleNamespace(cuda=fake))
    # A replay takes 4 ms: the fifth is the first to reach 20 ms.
    assert timing.CudaGraph(calls=4, repeats=1, min_time=20e-3).measure(fake.prepare).n == 5
    assert timing.CudaGraph(calls=4, min_time=1e9, max_repeats=20).measure(fake.prepare).n == 20
    for seconds, replays in ((5e-3, 3), (30e-3, 8)):  # three are made at least
        hasty = timing.CudaGraph(calls=4, min_time=1.0, max_time=seconds)
        assert hasty.measure(fake.prepare).n == replays
    assert "cold" in timing.CudaGraph().description
    assert "warm: one copy" in timing.CudaGraph(warm=True).description


def test_samples() -> None:
    samples = timing.Samples(tuple(float(i) for i in range(10, -1, -1)))
    assert (samples.n, samples.median) == (11, 5.0)
    assert (samples.percentile(10), samples.percentile(90)) == (1.0, 9.0)
    assert samples.calls == range(11)
    assert timing.Samples((1.0, 2.0), group=5).calls == range(5)
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
    shown = [report.significant(value) for value in values]
    assert shown == ["0", "0.00000", "0.0123", "1.23", "10.0", "123", "123,000"]
