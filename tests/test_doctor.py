# SPDX-License-Identifier: Apache-2.0
"""What doctor says about this machine, and about machines that it is told of."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from cublaslt_files import stub

import fp4lt
from fp4lt import _C, _library, backends, doctor
from fp4lt.__main__ import main
from fp4lt._build import covers
from fp4lt.errors import LibraryError
from fp4lt.problem import GroupedProblem, MoEProblem


@pytest.fixture(autouse=True)
def no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FP4LT_CUBLASLT", raising=False)


def run_doctor(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = main(["doctor", *arguments])
    return code, capsys.readouterr().out


# ---- this machine


def test_text(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = run_doctor(capsys)
    assert code == 0, text
    for words in (fp4lt.__version__, torch.__version__, np.__version__, "cpu on cpu", "available"):
        assert str(words) in text
    assert f"{_C.selected_cpu_kernels()} (in use)" in text
    rows = [line for line in text.splitlines() if line.startswith("  ")]
    assert len(rows) > 10
    titles = [line for line in text.splitlines() if not line.startswith("  ")]
    assert titles[:6] == ["Versions", "Build", "CPU", "CUDA", "libcublasLt", "Backends"]


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = run_doctor(capsys, "--json")
    report = json.loads(text)
    assert code == 0
    assert report["schema_version"] == doctor.SCHEMA_VERSION
    assert report["ok"] is True
    assert report["cpu"]["kernels"] == _C.cpu_kernels()
    assert report["cuda"]["built_with"] == _C.cuda_built_with()
    assert report["cuda"]["architectures"] == _C.cuda_architectures().split()
    assert {b["name"] for b in report["backends"]} == {b.name for b in backends.BACKENDS}
    (cpu,) = (b for b in report["backends"] if b["name"] == b["device"] == "cpu")
    assert cpu["available"] is True
    assert set(cpu["refusals"].values()) == {None}


def test_as_a_command() -> None:
    environ = {k: v for k, v in os.environ.items() if k != "FP4LT_CUBLASLT"}
    command = [sys.executable, "-m", "fp4lt", "doctor", "--json"]
    result = subprocess.run(command, capture_output=True, text=True, check=True, env=environ)
    assert json.loads(result.stdout)["versions"]["fp4lt"] == fp4lt.__version__


@pytest.mark.parametrize("arguments", [[], ["nothing"], ["doctor", "--what"], ["verify", "x"]])
def test_wrong_arguments_exit_with_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as info:
        main(arguments)
    assert info.value.code == 2


# ---- libcublasLt


def test_named_library_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FP4LT_CUBLASLT", str(tmp_path / "gone.so"))
    code, text = run_doctor(capsys)
    assert code == 1
    assert "gone.so: this file is not there" in text
    code, text = run_doctor(capsys, "--json")
    assert code == 1
    assert [f["severity"] for f in json.loads(text)["findings"] if "gone.so" in f["text"]] == [
        "error"
    ]


def test_named_library_that_does_not_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "libcublasLt.so.13").write_bytes(b"no library")
    monkeypatch.setenv("FP4LT_CUBLASLT", str(tmp_path / "libcublasLt.so.13"))
    code, text = run_doctor(capsys)
    assert code == 1
    assert "does not load" in text
    assert "unknown: it does not load" in text


def test_found_library_that_does_not_load_is_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = _library.Candidate(str(tmp_path / "libcublasLt.so.13"), "the loader")
    monkeypatch.setattr(_library, "find", lambda: found)
    code, text = run_doctor(capsys)
    assert code == 0
    assert "does not load" in text


def test_no_library_is_fine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_library, "find", lambda: None)
    code, text = run_doctor(capsys)
    assert code == 0
    assert "none found" in text


def test_named_library_is_opened_for_its_version(tmp_path: Path) -> None:
    library = stub(tmp_path, 130100)
    result = subprocess.run(
        [sys.executable, "-m", "fp4lt", "doctor", "--json"],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"FP4LT_CUBLASLT": str(library)},
    )
    found = json.loads(result.stdout)["cublaslt"]
    assert (found["path"], found["version"]) == (str(library), "13.1.0")


# ---- a machine that doctor is told of


def device(**changes: Any) -> SimpleNamespace:
    given = {
        "name": "NVIDIA B200",
        "major": 10,
        "minor": 0,
        "multiprocessors": 148,
        "memory_bytes": 180 << 30,
        "l2_bytes": 126 << 20,
    }
    return SimpleNamespace(**(given | changes))


def with_cuda(monkeypatch: pytest.MonkeyPatch, **values: Any) -> None:
    """Let the compiled module tell of another build, driver and device."""
    given: dict[str, Any] = {
        "cuda_built_with": "13.0",
        "cuda_architectures": "80 90a-real 100a-real",
        "cuda_driver": "13.0",
        "cuda_device_count": 1,
        "cuda_device_info": device(),
    }
    for name, value in (given | values).items():
        monkeypatch.setattr(_C, name, lambda *_, value=value: value)


def test_device_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with_cuda(monkeypatch)
    _, text = run_doctor(capsys)
    line = "NVIDIA B200, compute capability 10.0, 148 SMs, 180.0 GiB, device code: as built"
    assert line in text
    assert "CUDA 13.0 for 80, 90a-real, 100a-real" in text


def test_known_defects_of_the_library_on_this_device(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with_cuda(monkeypatch)
    monkeypatch.setattr(_library, "find", lambda: _library.Candidate("/x.so", "a test"))
    opened = SimpleNamespace(path="/x.so", version=130100, absent=[])
    monkeypatch.setattr(_library, "open_candidate", lambda candidate: opened)
    code, text = run_doctor(capsys)
    assert code == 0
    assert "libcublasLt 13.1.0 on cuda:0 (compute capability 10.0): wrong results when" in text
    assert "at the same time: refused; install 12.8.5, 12.9.2, 13.1.1" in text
    assert "wrong results from split-K algorithms at some K: such algorithms are not used" in text


def test_device_that_cannot_be_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(index: int) -> None:
        raise LibraryError("cudaGetDeviceProperties failed (999)")

    with_cuda(monkeypatch)
    monkeypatch.setattr(_C, "cuda_device_info", fail)
    code, text = run_doctor(capsys)
    assert code == 1
    assert "cuda:0: cudaGetDeviceProperties failed (999)" in text


def cuda(**changes: Any) -> dict[str, Any]:
    shown = {"device": "cuda:0", "name": "GPU", "capability": "9.0", "code": "as built"}
    given = {
        "built_with": "13.0",
        "architectures": ["90a-real"],
        "driver": "13.0",
        "kernel_driver": "580.95.05",
        "torch": "13.0",
        "devices": [shown],
    }
    return given | changes


def test_nothing_to_say_where_all_fits() -> None:
    assert doctor.check_cuda(cuda(), torch_devices=1) == []
    nothing = cuda(built_with="", driver="", kernel_driver="", torch="", devices=[])
    assert doctor.check_cuda(nothing, torch_devices=0) == []
    assert doctor.check_cuda(cuda(driver="", kernel_driver="", devices=[]), torch_devices=0) == []


@pytest.mark.parametrize(
    ("changes", "torch_devices", "words"),
    [
        ({"driver": "12.4"}, 1, "only knows CUDA 12.4.*series 580 or later"),
        ({"built_with": "13.2"}, 1, "cannot compile PTX"),
        ({"built_with": ""}, 1, "no device code; reinstall"),
        ({"torch": ""}, 0, "torch is a build without CUDA"),
        ({}, 0, "this torch cannot use them"),
        ({"devices": []}, 0, "no usable CUDA device"),
    ],
)
def test_what_does_not_fit(changes: dict[str, Any], torch_devices: int, words: str) -> None:
    notes = doctor.check_cuda(cuda(**changes), torch_devices)
    assert len(notes) == 1
    assert re.search(words, notes[0])


def test_hidden_devices_are_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "CUDA_VISIBLE_DEVICES is ''" in doctor.check_cuda(cuda(devices=[]), 0)[0]


def test_device_without_code() -> None:
    other = {"device": "cuda:0", "name": "GPU", "capability": "12.0", "code": None}
    (note,) = doctor.check_cuda(cuda(devices=[other]), 1)
    assert "no code (it has 90a-real); reinstall with CUDAARCHS=120" in note


@pytest.mark.parametrize(
    ("architecture", "capability", "how"),
    [
        ("80", (8, 0), "as built"),
        ("80", (8, 6), "as built"),
        ("80", (9, 0), "PTX"),
        ("80-real", (9, 0), None),
        ("80-virtual", (8, 0), "PTX"),
        ("86", (8, 0), None),
        ("90a-real", (9, 0), "as built"),
        ("100a-real", (10, 3), None),
        ("100a", (12, 0), None),
        ("100f-real", (10, 3), "as built"),
        ("100f", (12, 0), None),
        ("120a-real", (12, 1), None),
        ("native", (9, 0), "unknown"),
    ],
)
def test_coverage(architecture: str, capability: tuple[int, int], how: str | None) -> None:
    assert covers(architecture, capability) == how


def test_missing_kernel_tables_are_errors() -> None:
    flags = ["avx2", "fma", "f16c"]
    assert doctor.check_tables(["scalar", "avx2"], flags) == []
    assert doctor.check_tables(["scalar"], ["avx2", "fma"]) == []
    (text,) = doctor.check_tables(["scalar"], flags)
    assert "no avx2 kernels" in text
    (text,) = doctor.check_tables([], flags)
    assert "no CPU kernels" in text


def test_unused_bf16_units_are_a_note() -> None:
    name, flags = doctor.BF16_TABLE
    assert doctor.check_bf16_table(["scalar", "avx2", "avx512"], list(flags[:-1])) == []
    assert doctor.check_bf16_table(["scalar", "avx2", "avx512", name], list(flags)) == []
    (text,) = doctor.check_bf16_table(["scalar", "avx2", "avx512"], list(flags))
    assert "bf16 units" in text
    # Whoever has the units has the rest, for which a missing table is an error.
    assert doctor.check_tables(["scalar", "avx2", "avx512"], list(flags)) == []


def test_missing_kernel_tables_exit_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_C, "cpu_kernels", list)
    code, text = run_doctor(capsys)
    assert code == 1
    assert "the compiled module has no CPU kernels" in text


def test_cpu_info(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text(
        "processor\t: 0\nmodel name\t: Some CPU\nflags\t\t: fma avx2\n\n"
        "processor\t: 1\nmodel name\t: Other\nflags\t\t: none\n"
    )
    assert doctor.cpu_info(file) == ("Some CPU", ["fma", "avx2"])
    file.write_text("processor : 0\nFeatures : asimd fphp\n")
    assert doctor.cpu_info(file)[1] == ["asimd", "fphp"]
    model, flags = doctor.cpu_info(tmp_path / "missing")
    assert model
    assert flags == []


def test_kernel_driver(tmp_path: Path) -> None:
    file = tmp_path / "version"
    file.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\n"
        "GCC version:  gcc version 12.2.0 (Debian 12.2.0-14)\n"
    )
    assert doctor.kernel_driver(file) == "580.95.05"
    assert doctor.kernel_driver(tmp_path / "missing") == ""


# ---- backends


class Picky:
    """A backend that refuses part of what it is asked."""

    name = "picky"

    def __init__(self, reason: str | None, moe_reason: str | None) -> None:
        self.reasons = reason, moe_reason

    def refusal(self, problem: GroupedProblem | MoEProblem, device: torch.device) -> str | None:
        return self.reasons[isinstance(problem, MoEProblem)]


@pytest.mark.parametrize(
    ("reason", "moe_reason", "line", "code"),
    [
        (None, None, "picky on cpu    available", 0),
        ("it is not for this", "it is not for this", "refuses: it is not for this", 1),
        ("no", "never", "refuses grouped_mm w4a4, grouped_mm w4a16, grouped_mm bf16: no; moe", 1),
        (None, "no blocks", "available, but refuses moe w4a4, moe w4a16, moe bf16: no blocks", 0),
    ],
)
def test_refusals_are_told(
    reason: str | None,
    moe_reason: str | None,
    line: str,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """And without any usable backend the exit code is 1."""
    monkeypatch.setattr(backends, "BACKENDS", (Picky(reason, moe_reason),))
    got, text = run_doctor(capsys)
    assert got == code
    picky = next(row for row in text.splitlines() if "picky on cpu" in row)
    assert " ".join(line.split()) in " ".join(picky.split())
