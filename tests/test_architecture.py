# SPDX-License-Identifier: Apache-2.0
"""Data flows one way: who may import or include whom, and what keeps to its own room."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "python" / "fp4lt"

# A module may import those of earlier lines, and those of its own folder.
ORDER = [
    ["errors", "formats"],
    ["_interop", "_library", "_build", "_algorithms"],
    ["_hazards"],
    ["layout"],
    ["codec"],
    ["tensor"],
    ["rounding"],
    ["problem"],
    ["backends"],
    ["plan", "arguments"],
    ["gemm"],
    ["experts"],
    ["block"],
    ["ops"],
    ["checkpoint", "distributed"],
    ["integrations"],
    ["testing"],
    ["tuning"],
    ["doctor"],
    ["__init__"],
    ["__main__"],
]
RANK = {name: rank for rank, names in enumerate(ORDER) for name in names}

# C++ folders, with those they may include.
INCLUDES = {
    "core": {"core"},
    "cpu": {"core", "cpu"},
    "cuda": {"core", "cuda"},
    "cublaslt": {"core", "cpu", "cuda", "cublaslt"},
    "bindings": {"core", "cpu", "cuda", "cublaslt", "bindings"},
}


def room(path: Path) -> str:
    """Top-level name of a module or of the folder it is in."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {n.split(".")[1] for n in names if n.startswith("fp4lt.")}


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: p.stem)
def test_python_imports_point_one_way(path: Path) -> None:
    own = room(path)
    assert own in RANK, f"{own}: give it a place in ORDER"
    for name in imported(path) - {own, "_C"}:
        assert name in RANK, f"{path.name} imports fp4lt.{name}, which has no place in ORDER"
        assert RANK[name] < RANK[own], f"{path.name} imports fp4lt.{name}, which comes after it"


def test_only_interop_takes_addresses() -> None:
    users = [p.name for p in PACKAGE.rglob("*.py") if "data_ptr()" in p.read_text()]
    assert users == ["_interop.py"]


def sources() -> list[Path]:
    suffixes = {".h", ".cpp", ".cu", ".cuh"}
    return sorted(p for p in (ROOT / "csrc").rglob("*") if p.suffix in suffixes)


def python_sources() -> list[Path]:
    # tools/stubs.py writes _C.pyi from the bindings: its length and first line are not our choice.
    package = {*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.pyi")} - {PACKAGE / "_C.pyi"}
    benches = (ROOT / "benchmarks").rglob("*.py")
    return sorted([*package, *(ROOT / "tests").rglob("*.py"), *benches])


@pytest.mark.parametrize("path", sources(), ids=lambda p: f"{p.parent.name}/{p.name}")
def test_cpp_includes_point_one_way(path: Path) -> None:
    own = path.relative_to(ROOT / "csrc").parts[0]
    text = path.read_text()
    for folder in re.findall(r'#include "([^/"]+)/', text):
        assert folder in INCLUDES[own], f"{path.name} includes {folder}/"
    if own != "bindings":
        assert not re.search(r"#include <(Python|pybind11|torch|ATen|c10)", text)
    if own == "core":
        assert "cuda_runtime" not in text


def test_two_files_hold_all_inline_ptx() -> None:
    # Host code spells its own instructions __asm__; in csrc/cuda no spelling will do.
    users = []
    for path in sources():
        name = path.relative_to(ROOT / "csrc").as_posix()
        word = r"\b(asm|__asm|__asm__)\b" if name.startswith("cuda/") else r"\basm\b"
        if re.search(word, path.read_text()):
            users.append(name)
    assert users == ["cuda/ptx.cuh", "cuda/ptx_wgmma.cuh"]


@pytest.mark.parametrize(
    "path",
    [*sources(), *python_sources()],
    ids=lambda p: f"{p.parent.name}/{p.name}",
)
def test_files_stay_small_and_licensed(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert len(lines) <= 400, f"{path.relative_to(ROOT)} has {len(lines)} lines, 400 are allowed"
    assert "SPDX-License-Identifier: Apache-2.0" in lines[0]
