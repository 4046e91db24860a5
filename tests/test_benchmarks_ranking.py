# SPDX-License-Identifier: Apache-2.0
"""Ratios to the best peer, boundaries, and what a row of the report may hold."""

from __future__ import annotations

import io
import json
import re
import typing
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from benchmark_cases import COMPUTE, READ, TINY, CountingTimer
from rich.console import Console

from benchmarks import accounting, fused_stages, layers, moe_decode, ranking, report, runner
from benchmarks.contenders import PEER_NAMES, Fp4lt, Grouped
from benchmarks.prepared import BOUNDARIES, Boundary
from benchmarks.reference import Reference
from benchmarks.report import Row

ROOT = Path(__file__).resolve().parent.parent
CHECKPOINT = ROOT / "tests" / "data" / "checkpoints" / "modelopt"


def _row(
    contender: str,
    us: float | None,
    gemms: tuple[float | None, float | None] = (None, None),
    *,
    weights: str = "nvfp4",
    recipe: str = "w4a16",
    size: int = 4,
) -> Row:
    status: report.Status = "FAILED" if us is None else "ok"
    return Row(
        "layer",
        contender,
        recipe,
        status,
        size=size,
        us_median=us,
        gemm1_us=gemms[0],
        gemm2_us=gemms[1],
        weight_format=weights,
    )


ROWS = [
    _row("fp4lt-fused", 80.0, (50.0, 20.0)),
    _row("fp4lt-fused", 90.0, (50.0, 20.0), recipe="w4a4"),
    _row("torch-dequant", 10.0),
    _row("torch-grouped", 300.0, (150.0, 100.0), weights="bf16"),
    _row("marlin", 110.0, (40.0, 30.0)),
    _row("humming", 100.0, (45.0, 25.0)),
    _row("triton-mxfp4", 64.0, (30.0, 10.0), weights="mxfp4"),
    _row("humming", 1000.0, size=8),
    _row("fp4lt-fused", 500.0, size=8),
    _row("marlin", None, size=8),
]


def _ranked(contender: str, recipe: str = "w4a16", size: int = 4) -> Row:
    rows = ranking.with_best_peers(ROWS, PEER_NAMES)
    assert len(rows) == len(ROWS)
    key = (contender, recipe, size)
    return next(row for row in rows if (row.contender, row.recipe, row.size) == key)


def test_ratios_are_within_one_number_format() -> None:
    row = _ranked("fp4lt-fused")
    assert (row.best_peer, row.best_peer_ratio) == ("humming", 0.8)
    assert (row.gemm1_best_peer, row.gemm1_ratio) == ("marlin", 1.25)
    assert (row.gemm2_best_peer, row.gemm2_ratio) == ("humming", 0.8)
    assert (row.any_format_best_peer, row.any_format_ratio) == (
        "triton-mxfp4 (mxfp4 4.25 bit)",
        1.25,
    )
    later = _ranked("fp4lt-fused", size=8)
    assert (later.best_peer, later.best_peer_ratio) == ("humming", 0.5)
    assert (later.gemm1_best_peer, later.gemm1_ratio) == (None, None)


def test_other_recipes_and_failures_have_no_ratio() -> None:
    for row in (_ranked("fp4lt-fused", "w4a4"), _ranked("marlin", size=8)):
        assert (row.best_peer, row.best_peer_ratio, row.any_format_ratio) == (None, None, None)


def test_a_peer_is_compared_with_the_peers_of_its_format() -> None:
    grouped = _ranked("torch-grouped")
    assert (grouped.best_peer, grouped.best_peer_ratio) == ("torch-grouped", 1.0)
    assert grouped.any_format_ratio == 300 / 64
    marlin = _ranked("marlin")
    assert (marlin.best_peer, marlin.gemm1_best_peer) == ("humming", "marlin")


def _printed(rows: list[Row]) -> str:
    text = io.StringIO()
    ranking.print_table(Console(width=200, file=text), rows, "T")
    return text.getvalue()


def test_the_table_names_the_best_peer() -> None:
    text = _printed(ranking.with_best_peers(ROWS, PEER_NAMES))
    lines = [line.split() for line in text.splitlines() if "fp4lt-fused" in line]
    first = ["4", "fp4lt-fused", "w4a16", "nvfp4", "80.00", "0.80", "humming"]
    first += ["50.00", "1.25", "marlin", "20.00", "0.80", "humming"]
    assert lines[0] == [*first, "1.25", "triton-mxfp4", "(mxfp4", "4.25", "bit)"]
    own = [line.split() for line in text.splitlines() if line.split()[1:2] == ["marlin"]]
    assert own[0][4:] == [*("110.0", "1.10", "humming"), *("40.00", "best"), *own[0][9:]]
    assert not _printed([_row("fp4lt-cpu", 1.0)])


def test_bits_are_those_of_the_counted_bytes() -> None:
    for name, bits in accounting.BITS.items():
        assert accounting.weight_bytes(64, name) * 8 == 64 * bits


def test_columns_without_a_value_are_left_out() -> None:
    headings = [str(c.header) for c in report.table("title", ROWS, "T").columns]
    assert headings == ["T", "contender", "recipe", "weights", "error", "us median"]


@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_a_boundary_is_what_is_timed(boundary: Boundary) -> None:
    class Host(Grouped):
        def refusal(self, layer: layers.Layer) -> str | None:
            return None

    timer = CountingTimer()
    layer = layers.from_preset(TINY)
    rows = runner.run_layer(
        layer,
        [Host(2**30)],
        timer,
        reference=Reference(layer),
        read=READ,
        compute=COMPUTE,
        boundary=boundary,
    )
    assert [row.status for row in rows] == ["ok", "ok"]
    assert timer.measured == 2 * {"block": 1, "gemms": 2, "all": 3}[boundary]
    for row in rows:
        assert (row.us_median is not None) == (boundary != "gemms")
        assert (row.gemm1_us is not None) == (boundary != "block")
        assert (row.gemm2_us is not None) == (boundary != "block")


# --- the report's schema ---------------------------------------------------------------------


def test_every_field_and_boundary_is_documented() -> None:
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    section = text[text.index("## JSON") : text.index("## Limits")]
    known = set(re.findall(r"`([a-z0-9_.]+)`", section))
    assert {field.name for field in fields(Row)} <= known
    assert {"boundary", "boundaries", "bits_per_weight"} <= known
    assert f"`schema_version` here is {report.SCHEMA_VERSION}" in section
    for name in (*BOUNDARIES, *PEER_NAMES, *accounting.BITS):
        assert f"`{name}`" in text


def test_rows_are_written_with_the_types_they_declare(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    options = ["--checkpoint", str(CHECKPOINT), "--tokens", "1", "--quick", "--device", "cpu"]
    assert moe_decode.main([*options, "--json", str(path), "--boundary", "all"]) == 0
    data = json.loads(path.read_text())
    assert data["settings"]["boundary"] == "all"
    assert data["settings"]["boundaries"] == BOUNDARIES
    assert data["settings"]["bits_per_weight"] == accounting.BITS
    hints = typing.get_type_hints(Row)
    for row in data["rows"]:
        assert list(row) == [field.name for field in fields(Row)]
        assert row["weight_format"] in accounting.BITS
        for key, value in row.items():
            options_of = typing.get_args(hints[key]) or (hints[key],)
            if key == "status":
                assert value in options_of
            else:
                assert type(value) in options_of or (type(value) is int and float in options_of)
    absent = {row["contender"]: row["reason"] for row in data["rows"] if row["reason"]}
    assert absent["marlin"].startswith(("needs", "its tiles", "it is raced"))


# --- on a GPU --------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["w4a4", "w4a16"])
@pytest.mark.parametrize("top_k", [1, 2])
def test_the_fused_stages_are_the_blocks_own(recipe: typing.Any, top_k: int) -> None:
    from fp4lt.backends import fused

    preset = replace(TINY, top_k=top_k, router_weight_on_input=top_k == 1, bias=True)
    layer = layers.from_preset(preset, sweep=(40,), device=torch.device("cuda"))
    assert isinstance(layer, layers.MoELayer)
    (part,) = fused_stages.passes(layer, recipe, layer.batch(40, 0))
    whole = fused.run_block(part.problem, part.call)
    rows = int(whole.routes.rows)
    assert torch.equal(part.gemm1()[:rows], whole.h[:rows])
    assert torch.equal(part.gemm2(part.activated())[:rows], whole.z[:rows])
    first, second = fused_stages.gemms(layer, recipe)
    assert torch.equal(first(layer.batch(40, 0))()[0][:rows], whole.h[:rows])  # type: ignore[index]
    assert torch.equal(second(layer.batch(40, 0))()[0][:rows], whole.z[:rows])  # type: ignore[index]


@pytest.mark.gpu
def test_a_run_on_cuda_times_each_gemm(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    options = ["--preset", "qwen3-30b", "--experts", "16", "--tokens", "1,40", "--quick"]
    options += ["--contenders", "fp4lt-fused,torch-grouped", "--recipe", "w4a16"]
    assert moe_decode.main([*options, "--device", "cuda", "--json", str(path)]) == 0
    for row in json.loads(path.read_text())["rows"]:
        assert row["gemm1_us"] > 0
        assert row["gemm2_us"] > 0
        other = "bf16" if row["contender"] == "torch-grouped" else None
        assert (row["best_peer"] is None) == (other is None)
        assert row["any_format_best_peer"] == "torch-grouped (bf16 16 bit)"


def test_fp4lt_on_a_cpu_has_no_gemms_apart() -> None:
    layer = layers.from_preset(TINY)
    assert getattr(Fp4lt("cpu", "w4a16").prepare(layer), "gemm1", None) is None
