# SPDX-License-Identifier: Apache-2.0
"""The benchmarks' command lines: what they print and write, and what they refuse."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmark_cases import Altered

from benchmarks import (
    accounting,
    cli,
    environment,
    gemm_sweep,
    moe_decode,
    plot,
    presets,
    report,
    routing,
)
from benchmarks.contenders import PEERS, contenders

CHECKPOINTS = Path(__file__).parent / "data" / "checkpoints"
TINY_RUN = [
    *("--checkpoint", str(CHECKPOINTS / "modelopt"), "--tokens", "1", "--quick"),
    *("--device", "cpu"),
]


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
            per_weight = accounting.BITS[row["weight_format"]] / 8
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
        (["--preset", "gpt-oss-20b-tp8"], "22.5 blocks of 16"),
        (["--preset", "gpt-oss-20b", "--tp", "8"], "22.5 blocks of 16"),
        (["--tp", "8"], "give --preset"),
        (["--routing", "even"], "no routing 'even'; there are uniform"),
        (["--routing", "trace:/nonexistent/t.npy"], "/nonexistent/t.npy: No such file"),
        (["--device", "tpu"], "--device is cpu or cuda, got 'tpu'"),
        (["--plot", "x.pdf"], "must end in .svg or .png"),
        (["--plot", "/nonexistent/x.svg"], "no such folder"),
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
    out = " ".join(capsys.readouterr().out.split())
    for name in (
        *presets.available(),
        *presets.SUGGESTED,
        routing.KINDS,
        "fp4lt-cpu",
        "torch-dequant",
        "flashinfer-cutlass",
        "marlin",
        "humming",
        "triton-mxfp4",
    ):
        assert name in out


def test_cuda_is_refused_where_there_is_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert moe_decode.main(["--device", "cuda"]) == 2
    assert "sees no CUDA device" in capsys.readouterr().err
    assert cli._device(None) == torch.device("cpu")


def test_a_traced_run_says_its_routing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, path = tmp_path / "ids.jsonl", tmp_path / "out.json"
    trace.write_text("[0, 7]\n[7, 1]\n")
    options = ["--routing", f"trace:{trace}", "--contenders", "fp4lt-cpu", "--json", str(path)]
    arguments = [*TINY_RUN, *options]
    arguments[arguments.index("--tokens") + 1] = "2"
    assert moe_decode.main(arguments) == 0
    data = json.loads(path.read_text())
    assert data["settings"]["routing"] == f"trace:{trace}"
    assert [row["active_experts"] for row in data["rows"]] == [3, 3]
    assert "trace:" in capsys.readouterr().out
    arguments[arguments.index("--tokens") + 1] = "3"
    assert moe_decode.main(arguments) == 2
    assert "2 tokens, a call needs 3" in capsys.readouterr().err


# --- gemm_sweep ------------------------------------------------------------------------------

TINY_SWEEP = [
    *("--n", "48", "--k", "64", "--experts", "2", "--rows", "1,8", "--quick", "--repeats", "2"),
    *("--device", "cpu"),
]


def test_tiny_sweep_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.json"
    assert gemm_sweep.main([*TINY_SWEEP, "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [(r["contender"], r["recipe"], r["size"], r["status"]) for r in rows] == [
        (name, recipe, size, "ok")
        for name, recipe in (
            ("fp4lt-cpu", "w4a4"),
            ("fp4lt-cpu", "w4a16"),
            ("torch-bf16", "w4a16"),
            ("torch-fp32", "w4a16"),
        )
        for size in (1, 8)
    ]
    assert all(row["active_experts"] == 2 for row in rows)
    # 2 x 48 x 64 weights; rows of 64 in and 48 out.
    assert rows[1]["megabytes"] == (6144 * 0.5625 + 2 * 16 * (64 + 48)) / 1e6
    out = capsys.readouterr().out
    assert "x torch-fp32" in out
    assert "x torch-bf16" in out


def _row(contender: str, recipe: str, us: float | None, size: int = 8) -> report.Row:
    status: report.Status = "ok" if us else "FAILED"
    return report.Row("layer", contender, recipe, status, size=size, us_median=us)


def test_ratios_by_hand() -> None:
    rows = [
        _row("fp4lt-cpu", "w4a4", 10.0),
        _row("fp4lt-cpu", "w4a4", 50.0, size=64),
        _row("fp4lt-cpu", "w4a16", None),
        _row("torch-fp32", "w4a16", 35.0),
        _row("torch-bf16", "w4a16", 5.0),
        _row("torch-bf16", "w4a16", 25.0, size=64),
    ]
    table = gemm_sweep.ratios(rows)
    assert table is not None
    cells = [list(column.cells) for column in table.columns]
    assert cells == [
        ["8", "64"],
        ["fp4lt-cpu", "fp4lt-cpu"],
        ["w4a4", "w4a4"],
        ["3.50", ""],
        ["0.50", "0.50"],
    ]
    assert gemm_sweep.ratios(rows[:3]) is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--k", "72"], "--k must be a multiple of 16, got 72"),
        (["--experts", "100000"], "use fewer --experts"),
        (["--contenders", "cutlass"], "no contender 'cutlass'; there are"),
    ],
)
def test_unusable_sweeps(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gemm_sweep.main(arguments) == 2
    assert message in capsys.readouterr().err


# --- plots -----------------------------------------------------------------------------------


def test_a_missing_matplotlib_is_said_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for main in (moe_decode.main, gemm_sweep.main):
        assert main(["--plot", str(tmp_path / "x.svg")]) == 2
        output = capsys.readouterr()
        assert "--plot needs matplotlib" in output.err
        assert "[bench]" in output.err
        assert output.out == ""


def test_a_plot_has_contenders_floor_units_and_machine(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for suffix, start in ((".svg", b"<?xml"), (".png", b"\x89PNG")):
        path = tmp_path / f"x{suffix}"
        assert gemm_sweep.main([*TINY_SWEEP, "--plot", str(path)]) == 0
        assert path.read_bytes().startswith(start)
    text = (tmp_path / "x.svg").read_text()
    machine = environment.machine(environment.describe(torch.device("cpu")))
    for shown in ("fp4lt-cpu w4a4", "torch-fp32 w4a16", "floor", "(us)", "rows per expert"):
        assert shown in text
    assert machine in text
    assert "48x64" in text


def test_a_plot_of_nothing_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [_row("fp4lt-cpu", "w4a4", None)]
    with pytest.raises(plot.PlotError, match="nothing was timed"):
        plot.write(tmp_path / "x.svg", rows, {"layer": "a title"}, {"layer": "T"}, "a machine")
    assert not (tmp_path / "x.svg").exists()


# --- on a GPU --------------------------------------------------------------------------------


def _gpu_rows(main: Any, arguments: list[str], path: Path) -> list[dict[str, Any]]:
    status = main([*arguments, "--quick", "--device", "cuda", "--json", str(path)])
    data = json.loads(path.read_text())
    failed = [row for row in data["rows"] if row["status"] == "FAILED"]
    assert (status, failed) == (0, [])
    assert data["environment"]["gpu"]["l2_bytes"] > 0
    assert data["ceilings"]["read_bytes_per_s"]["value"] > 1e9
    rows: list[dict[str, Any]] = data["rows"]
    return rows


@pytest.mark.gpu
@pytest.mark.parametrize(
    "preset", ["qwen3-30b", "gpt-oss-20b", "nemotron3-nano", "llama4-scout-tp8", "glm5-ep8"]
)
def test_blocks_on_cuda(preset: str, tmp_path: Path) -> None:
    options = ["--preset", preset, "--experts", "16", "--tokens", "1,40"]
    options += ["--contenders", "fp4lt-fused,torch-grouped,torch-dequant,torch-bf16"]
    rows = _gpu_rows(moe_decode.main, options, tmp_path / "x.json")
    ran = {(row["contender"], row["recipe"], row["size"]) for row in rows if row["status"] == "ok"}
    for size in (1, 40):
        assert {
            ("fp4lt-fused", "w4a4", size),
            ("fp4lt-fused", "w4a16", size),
            ("torch-grouped", "w4a16", size),
            ("torch-dequant", "w4a16", size),
        } <= ran


@pytest.mark.gpu
def test_a_sweep_on_cuda(tmp_path: Path) -> None:
    options = ["--n", "512", "--k", "1024", "--experts", "4", "--rows", "1,100"]
    rows = _gpu_rows(gemm_sweep.main, options, tmp_path / "x.json")
    ran = {row["contender"] for row in rows if row["status"] == "ok"}
    assert {"fp4lt-fused", "torch-bf16", "torch-grouped"} <= ran
