# SPDX-License-Identifier: Apache-2.0
"""Where libcublasLt is looked for, in which order, and that nothing is opened by looking."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from cublaslt_files import stub

from fp4lt import _library
from fp4lt._library import Candidate
from fp4lt.errors import LibraryError

MAPS = """\
7f00-7f10 r--p 00000000 00:2f 11  /usr/lib/x86_64-linux-gnu/libc.so.6
7f10-7f20 r-xp 00000000 00:2f 12  /opt/my env/nvidia/cublas/lib/libcublasLt.so.12
7f20-7f30 r--p 00000000 00:2f 12  /opt/my env/nvidia/cublas/lib/libcublasLt.so.12
7f30-7f40 r-xp 00000000 00:2f 13  /cuda/lib64/libcublasLt.so.13.1.0.3
7f40-7f50 r-xp 00000000 00:2f 14  /cuda/lib64/libcublas.so.13
7f50-7f60 r-xp 00000000 00:2f 15  /gone/libcublasLt.so.13 (deleted)
7f60-7f70 rw-p 00000000 00:00 0
7f70-7f80 rw-p 00000000 00:00 0   [heap]
"""


def touch(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"no library")
    return path


def test_environment_names_a_file(tmp_path: Path) -> None:
    file = touch(tmp_path / "libcublasLt.so.13")
    found = _library.from_environment({"FP4LT_CUBLASLT": str(file)})
    assert found == Candidate(str(file), "FP4LT_CUBLASLT")
    assert _library.from_environment({}) is None
    assert _library.from_environment({"FP4LT_CUBLASLT": ""}) is None


def test_environment_that_names_no_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(LibraryError, match=r"FP4LT_CUBLASLT=.*nowhere.*not there.*name the file"):
        _library.from_environment({"FP4LT_CUBLASLT": str(tmp_path / "nowhere")})
    with pytest.raises(LibraryError, match=r"is a folder"):
        _library.from_environment({"FP4LT_CUBLASLT": str(tmp_path)})


def test_mapped_copies_newest_first_and_once() -> None:
    assert [c.path for c in _library.mapped(MAPS)] == [
        "/cuda/lib64/libcublasLt.so.13.1.0.3",
        "/opt/my env/nvidia/cublas/lib/libcublasLt.so.12",
    ]
    assert _library.mapped("") == []


def test_wheels_newest_first(tmp_path: Path) -> None:
    old = touch(tmp_path / "a" / "cublas/lib/libcublasLt.so.12")
    new = touch(tmp_path / "b" / "cu13/lib/libcublasLt.so.13")
    touch(tmp_path / "b" / "cu13/lib/libcublas.so.13")
    folders = [str(tmp_path / name) for name in ("a", "b", "missing")]
    assert _library.wheels(folders) == [
        Candidate(str(new), "wheel nvidia-cublas"),
        Candidate(str(old), "wheel nvidia-cublas-cu12"),
    ]
    assert _library.wheels([]) == []


def test_wheels_are_found_without_an_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "nvidia" in sys.modules:
        pytest.skip("something has imported a package nvidia")
    file = touch(tmp_path / "nvidia" / "cu13/lib/libcublasLt.so.13")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert [c.path for c in _library.wheels()] == [str(file)]
    assert "nvidia" not in sys.modules


def test_loader_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.util.find_library", lambda name: f"lib{name}.so.12")
    file = touch(tmp_path / "libcublasLt.so.12")
    environ = {"LD_LIBRARY_PATH": f"/nowhere::{tmp_path}"}
    assert list(_library.loader(environ)) == [
        Candidate(str(file), "LD_LIBRARY_PATH"),
        Candidate("libcublasLt.so.12", "the loader"),
    ]
    monkeypatch.setattr("ctypes.util.find_library", lambda name: None)
    assert list(_library.loader({})) == []


def test_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Named, mapped, wheel, loader: take the first away, and the next one is found."""
    named = touch(tmp_path / "libcublasLt.so.13")
    places = {name: [Candidate(f"/{name}", name)] for name in ("mapped", "wheels", "loader")}
    for name in places:
        monkeypatch.setattr(_library, name, lambda name=name: iter(places[name]))
    monkeypatch.setenv("FP4LT_CUBLASLT", str(named))
    assert _library.find() == Candidate(str(named), "FP4LT_CUBLASLT")
    monkeypatch.delenv("FP4LT_CUBLASLT")
    for name in list(places):
        assert _library.find() == Candidate(f"/{name}", name)
        places[name] = []
    assert _library.find() is None


def test_looking_opens_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = touch(tmp_path / "libcublasLt.so.13")
    monkeypatch.setenv("FP4LT_CUBLASLT", str(file))
    before = Path("/proc/self/maps")
    if not before.exists():
        pytest.skip("no /proc/self/maps on this machine")
    assert _library.find() is not None
    assert str(file) not in before.read_text()


def test_what_does_not_load(tmp_path: Path) -> None:
    file = touch(tmp_path / "libcublasLt.so.13")
    with pytest.raises(LibraryError, match=r"libcublasLt\.so\.13 does not load: .* by me\)"):
        _library.open_candidate(Candidate(str(file), "me"))


OPEN = """
import os
from fp4lt import _library
before = _library.mapped()
library = _library.opened()
print(library.version)
assert library is _library.opened()
paths = [c.path for c in before]
assert [c.path for c in _library.mapped()] == [*paths, os.environ["FP4LT_CUBLASLT"]]
"""


def run_open(library: Path) -> subprocess.CompletedProcess[str]:
    """In a process of its own: what is opened stays open."""
    environ = os.environ | {"FP4LT_CUBLASLT": str(library)}
    return subprocess.run(
        [sys.executable, "-c", OPEN], capture_output=True, text=True, check=False, env=environ
    )


def test_the_library_is_opened_once_and_is_then_mapped(tmp_path: Path) -> None:
    result = run_open(stub(tmp_path, 130602))
    assert result.stdout.strip() == "130602", result.stderr


def test_another_library_is_told(tmp_path: Path) -> None:
    result = run_open(stub(tmp_path, 130602, leave_out="cublasLtMatmul"))
    assert result.returncode != 0
    assert "has no cublasLtMatmul: it is another library" in result.stderr


def test_no_library_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    _library.opened.cache_clear()
    monkeypatch.setattr(_library, "find", lambda: None)
    with pytest.raises(LibraryError, match=r"install nvidia-cublas.*FP4LT_CUBLASLT"):
        _library.opened()


def test_version_names() -> None:
    assert _library.version_name(120804) == "12.8.4"
    assert _library.version_name(131000) == "13.10.0"


def test_importing_the_package_opens_no_library() -> None:
    code = (
        "import torch\nfrom fp4lt import _library\nbefore = _library.mapped()\n"
        "_library.find()\nassert _library.mapped() == before"
    )
    environ = {k: v for k, v in os.environ.items() if k != "FP4LT_CUBLASLT"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environ)
