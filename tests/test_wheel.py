# SPDX-License-Identifier: Apache-2.0
"""tools/wheel.py's checks of a wheel, on made-up ones; the record of what was built."""

from __future__ import annotations

import importlib.util
import shutil
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

from fp4lt import _C, _build

NAME = "fp4lt-0.1.0-cp311-cp311-manylinux_2_28_x86_64.whl"
MODULE = "fp4lt/_C.cpython-311-x86_64-linux-gnu.so"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    if shutil.which("readelf") is None:
        pytest.skip("no readelf on this machine")
    path = Path(__file__).resolve().parent.parent / "tools" / "wheel.py"
    spec = importlib.util.spec_from_file_location("wheel_tool", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make(folder: Path, name: str = NAME, drop: str = "", more: str = "", module: str = "") -> Path:
    assert _C.__file__ is not None
    wheel = folder / name
    texts = {"fp4lt/py.typed", "fp4lt/_C.pyi", "fp4lt-0.1.0.dist-info/METADATA", more} - {drop, ""}
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(module or _C.__file__, MODULE)
        for text in sorted(texts):
            archive.writestr(text, "")
    return wheel


def test_a_right_wheel_passes(tool: ModuleType, tmp_path: Path) -> None:
    assert tool.check(make(tmp_path)) == []


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"name": NAME.replace("manylinux_2_28", "linux")}, "not repaired"),
        ({"drop": "fp4lt/_C.pyi"}, "no fp4lt/_C.pyi"),
        ({"more": "fp4lt.libs/libcudart.so.13"}, "there must be fp4lt/_C alone"),
        ({"more": "tests/test_moe.py"}, "folders beside fp4lt"),
    ],
)
def test_a_wrong_wheel_does_not(
    tool: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, str],
    text: str,
) -> None:
    # readelf refuses the made-up libraries.
    monkeypatch.setattr(tool, "needed", lambda _: [])
    wrong = tool.check(make(tmp_path, **options))
    assert any(text in line for line in wrong), wrong


def test_libraries_that_no_system_has_are_found(tool: ModuleType, tmp_path: Path) -> None:
    import torch

    linked = Path(torch.__file__).parent / "lib" / "libtorch_python.so"
    wrong = tool.check(make(tmp_path, module=str(linked)))
    assert any("needs libtorch" in line for line in wrong), wrong


def test_size_limit(tool: ModuleType, tmp_path: Path) -> None:
    wheel = make(tmp_path)
    size = wheel.stat().st_size
    assert tool.check(wheel, size + 1) == []
    assert "must be under" in tool.check(wheel, size)[0]


def test_record_names_toolkit_and_architectures(monkeypatch: pytest.MonkeyPatch) -> None:
    record = _build.record()
    assert record["compiler"].split()[0] in ("gcc", "clang")
    assert (record["name"] == "cpu") == (not record["toolkit"])
    monkeypatch.setattr(_C, "cuda_built_with", lambda: "13.0")
    monkeypatch.setattr(_C, "cuda_architectures", lambda: "80 90a-real 120f-virtual native")
    assert _build.record() | {"compiler": ""} == {
        "name": "cu13.0-sm80+ptx-sm90a-ptx120f-native",
        "toolkit": "13.0",
        "architectures": ["80", "90a-real", "120f-virtual", "native"],
        "compiler": "",
    }
