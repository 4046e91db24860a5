# SPDX-License-Identifier: Apache-2.0
"""benchmarks.expert_parallel: two real ranks, what it writes, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks import ep_block, expert_parallel, presets, report
from fp4lt.distributed import ExpertParallelMoE

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")

ROOT = Path(__file__).resolve().parent.parent
SMALL = ["--preset", "qwen3-30b", "--experts", "9", "--tokens", "1,3", "--device", "cpu", "--quick"]


@pytest.mark.parametrize("combine", ["exact", "partial"])
def test_two_ranks(tmp_path: Path, combine: str) -> None:
    path = tmp_path / "out.json"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    options = [*SMALL, "--combine", combine, "--threads", "1", "--json", str(path)]
    command = [*launch, "-m", "benchmarks.expert_parallel", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("Scaling") == 1  # the first rank alone prints
    data = json.loads(path.read_text())
    assert data["schema_version"] == report.SCHEMA_VERSION
    assert data["environment"]["torch"]
    assert data["settings"]["world"] == 2
    assert data["settings"]["combine"] == combine
    rows: dict[tuple[str, str, int], dict[str, Any]] = {}
    for row in data["rows"]:
        assert row["status"] == "ok"
        assert row["calls"] == 3
        assert row["error"] <= row["limit"]
        assert (row["limit"] == 0) == (combine == "exact")
        assert row["us_median"] > 0
        if row["recipe"] == "w4a4":
            rows[row["layer"], row["contender"], row["size"]] = row
    stages = (*ep_block.STAGES, "call")
    layers = ["qwen3-30b-cut9-ep1", "qwen3-30b-cut9-ep2"]
    assert list(rows) == [(name, s, t) for name in layers for t in (1, 3) for s in stages]
    for t in (1, 3):
        # One rank sends nothing; of two, a token's row goes over at most once, its results
        # as float32, one a slot or one a token.
        assert rows[layers[0], "dispatch", t]["megabytes"] == 0
        assert rows[layers[1], "dispatch", t]["megabytes"] == t * 2048 * 2 / 1e6
        back = rows[layers[1], "combine", t]["megabytes"] / (2048 * 4 / 1e6)
        assert back == pytest.approx(t) if combine == "partial" else t < back <= 8 * t
        alone, shared = (rows[name, "gemms", t] for name in layers)
        assert alone["active_experts"] * alone["rows_per_active_expert"] == pytest.approx(8 * t)
        mean = shared["active_experts"] * shared["rows_per_active_expert"]
        assert mean == pytest.approx(8 * t)
    points = {(p["recipe"], p["tokens_per_rank"], p["ranks"]): p for p in data["scaling"]}
    assert set(points) == {(r, t, n) for r in ("w4a4", "w4a16") for t in (1, 3) for n in (1, 2)}
    one, two = points["w4a4", 3, 1], points["w4a4", 3, 2]
    assert one["efficiency"] == 1
    assert two["tokens_per_s"] == pytest.approx(6 / two["us_median"] * 1e6)
    assert two["efficiency"] == pytest.approx(one["us_median"] / two["us_median"])


def test_a_wrong_result_is_the_exit_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = ExpertParallelMoE.dispatch

    def shifted(self: Any, exchange: Any, hidden: Any) -> Any:
        return real(self, exchange, hidden).roll(1, dims=1)

    monkeypatch.setattr(ExpertParallelMoE, "dispatch", shifted)
    assert expert_parallel.main([*SMALL, "--recipe", "w4a4"]) == 1
    assert "against one process" in capsys.readouterr().out
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--preset", "nothing"], "no preset 'nothing'"),
        (["--preset", "qwen3-30b-ep2"], "a whole MoE model is needed"),
        (["--preset", "seed-probe"], "a whole MoE model is needed"),
        (["--preset", "qwen3-30b", "--experts", "7"], "8 for a token"),
        (["--ranks", "1,2"], "torchrun started 1"),
        (["--routing", "random"], "no routing 'random'"),
        (["--json", "/nowhere/out.json"], "no such folder"),
    ],
)
def test_refuses(options: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert expert_parallel.main(["--device", "cpu", *options]) == 2
    assert text in capsys.readouterr().err


def test_too_large_for_the_budget_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert expert_parallel.main([*SMALL, "--memory-budget", "0.001"]) == 0
    assert "the budget is 0.0 GiB" in capsys.readouterr().out


def test_an_experts_weights_depend_on_its_number_alone() -> None:
    preset = presets.resolve("qwen3-30b")
    assert isinstance(preset, presets.MoEPreset)
    device = torch.device("cpu")
    many = ep_block.make_weights(preset, [3, 5], 7, device)
    for stack, single in zip(many, ep_block.make_weights(preset, [5], 7, device), strict=True):
        assert torch.equal(stack.codes[1], single.codes[0])
        assert float(stack.global_scale[1]) == float(single.global_scale[0])
        assert not torch.equal(stack.codes[0], stack.codes[1])


def test_scaling_starts_at_the_smallest_group() -> None:
    us = {"m-ep2": 100.0, "m-ep4": 125.0}
    rows = [
        report.Row(name, "call", "w4a4", "ok", size=8, us_median=value)
        for name, value in us.items()
    ]
    points = expert_parallel.scaling(rows, {"m-ep2": 2, "m-ep4": 4})
    assert [p["efficiency"] for p in points] == [1.0, 0.8]
    assert [p["tokens_per_s"] for p in points] == [160000.0, pytest.approx(256000.0)]
