# SPDX-License-Identifier: Apache-2.0
"""The peers' files are the pinned ones or are refused, with what to do; nothing here is fetched."""

from __future__ import annotations

import io
import json
import lzma
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from benchmarks.environment import ROOT
from benchmarks.peers import bundle, prepare
from benchmarks.peers.bundle import BundleError

OPERATORS = b"\x7fELF not really" * 100
MODULE = b"answer = 42\n"


def _zip(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return buffer.getvalue()


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two small wheels, pinned in place of the real ones."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    vllm = _zip(
        {
            bundle.OPERATORS_MEMBER: OPERATORS,
            bundle.TRITON_PACKAGE + "__init__.py": MODULE,
            bundle.TRITON_PACKAGE + "notes.txt": b"not code",
            "vllm/other.py": b"not wanted",
        }
    )
    humming = _zip(
        {"humming/__init__.py": MODULE, "humming/_native/x86_64/nvrtc_compile": b"#!/bin/sh\n"}
    )
    for name, data in (("VLLM", vllm), ("HUMMING", humming)):
        wheel = bundle.Wheel(f"{name}==1", f"{name}.whl", len(data), bundle.sha256(data))
        for module in (bundle, prepare):
            monkeypatch.setattr(module, name, wheel)
        (folder / wheel.file).write_bytes(data)
    triton = _zip({"triton_kernels/__init__.py": MODULE})
    monkeypatch.setattr(bundle, "TRITON_DIGEST", bundle.zip_digest(triton))
    monkeypatch.setattr(bundle, "OPERATORS_SHA256", bundle.sha256(OPERATORS))
    monkeypatch.setattr(bundle, "OPERATORS_BYTES", len(OPERATORS))
    monkeypatch.setattr(bundle, "FILES", (bundle.OPERATORS_FILE, bundle.TRITON_FILE, "HUMMING.whl"))
    return folder


@pytest.fixture
def filled(wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    target = tmp_path / "peers"
    assert prepare.prepare(target, wheels)
    monkeypatch.setenv("FP4LT_PEERS", str(target))
    monkeypatch.setenv("FP4LT_PEERS_CACHE", str(tmp_path / "cache"))
    return target


def test_the_bundle_is_what_is_needed_of_the_wheels(filled: Path, wheels: Path) -> None:
    assert sorted(path.name for path in filled.iterdir()) == sorted(bundle.FILES)
    with zipfile.ZipFile(filled / bundle.TRITON_FILE) as archive:
        assert archive.namelist() == ["triton_kernels/__init__.py"]
    for path in wheels.iterdir():
        path.unlink()
    assert not prepare.prepare(filled, wheels)  # complete: no wheel is needed


def test_the_command_says_what_it_did(
    filled: Path, wheels: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert prepare.main([str(filled)]) == 0
    assert "complete already" in capsys.readouterr().out
    (filled / bundle.TRITON_FILE).unlink()
    assert prepare.main([str(filled), "--wheels", str(wheels)]) == 0
    assert "ready" in capsys.readouterr().out


def test_a_damaged_file_is_fetched_again(filled: Path, wheels: Path) -> None:
    (filled / bundle.OPERATORS_FILE).write_bytes(lzma.compress(OPERATORS[:-1] + b"!"))
    assert prepare.prepare(filled, wheels)
    bundle.verify(filled)


def test_another_wheel_is_refused(wheels: Path, tmp_path: Path) -> None:
    path = wheels / "VLLM.whl"
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(BundleError, match=r"VLLM\.whl has SHA-256 [0-9a-f]{16}\.\.\., and"):
        prepare.prepare(tmp_path / "peers", wheels)


def test_pip_is_held_to_the_pinned_hash(
    wheels: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], *, check: bool) -> SimpleNamespace:
        commands.append(command)
        assert Path(command[-1]).read_text() == f"HUMMING==1 --hash=sha256:{pin}\n"
        return SimpleNamespace(returncode=1)

    pin = bundle.HUMMING.sha256
    monkeypatch.setattr(subprocess, "run", run)
    assert prepare.main([str(tmp_path / "peers"), "--wheels", str(tmp_path)]) == 1
    assert "pip could not download HUMMING==1" in capsys.readouterr().err
    assert "--require-hashes" in commands[0]


@pytest.mark.parametrize(
    ("file", "data", "message"),
    [
        ("HUMMING.whl", b"other", "HUMMING.whl has SHA-256"),
        (bundle.TRITON_FILE, _zip({"triton_kernels/__init__.py": b""}), "has SHA-256"),
        (bundle.TRITON_FILE, b"no zip", "not a zip file; delete it and run"),
        (bundle.OPERATORS_FILE, lzma.compress(b"other"), "has SHA-256"),
        (bundle.OPERATORS_FILE, lzma.compress(OPERATORS * 9), "has SHA-256"),
        (bundle.OPERATORS_FILE, b"no xz", "delete it and run `python -m benchmarks.peers.prepare`"),
    ],
)
def test_other_contents_are_refused(filled: Path, file: str, data: bytes, message: str) -> None:
    (filled / file).write_bytes(data)
    with pytest.raises(BundleError, match=message):
        bundle.verify(filled)


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_missing_file_says_how_to_get_it(filled: Path, missing: int) -> None:
    (filled / bundle.FILES[missing]).unlink()
    with pytest.raises(BundleError, match=r"fetch the peers with `python -m benchmarks\.peers"):
        bundle.verify(filled)


def test_where_the_bundle_and_the_caches_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("CUDA_CACHE_PATH", "CUDA_CACHE_MAXSIZE", "TRITON_CACHE_DIR", "HUMMING_CACHE_DIR")
    for name in ("FP4LT_PEERS", "FP4LT_PEERS_CACHE", *names):
        monkeypatch.setenv(name, "x")  # so that what is set below is undone
        monkeypatch.delenv(name)
    assert bundle.folder() == ROOT / ".peers"
    assert "fp4lt-peers-" in str(bundle.cache_folder())
    monkeypatch.setenv("FP4LT_PEERS", str(tmp_path))
    monkeypatch.setenv("FP4LT_PEERS_CACHE", str(tmp_path / "c"))
    monkeypatch.setenv("TRITON_CACHE_DIR", "mine")
    assert bundle.folder() == tmp_path
    bundle.set_cache_variables()
    assert os.environ["CUDA_CACHE_PATH"] == str(tmp_path / "c" / "driver")
    assert os.environ["TRITON_CACHE_DIR"] == "mine"


def test_files_are_unpacked_once_into_a_cache_of_ones_own(filled: Path, tmp_path: Path) -> None:
    library, site = bundle.operator_library(), bundle.site()
    assert library.read_bytes() == OPERATORS
    assert (site / "humming/_native/x86_64/nvrtc_compile").stat().st_mode & 0o111
    assert (tmp_path / "cache").stat().st_mode & 0o077 == 0
    library.write_bytes(b"changed")
    (site / "mark").touch()
    assert bundle.operator_library().read_bytes() == OPERATORS
    assert (bundle.site() / "mark").exists()
    for file in bundle.FILES:
        (filled / file).unlink()
    assert bundle.operator_library() == library  # the cache is enough


def test_a_cache_that_others_can_write_is_refused(filled: Path, tmp_path: Path) -> None:
    del filled
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    with pytest.raises(BundleError, match="FP4LT_PEERS_CACHE"):
        bundle.operator_library()


def test_a_package_comes_from_the_bundle_or_not_at_all(
    filled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    del filled
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("humming", "triton_kernels"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert bundle.load_package("humming").answer == 42
    foreign = ModuleType("triton_kernels")
    foreign.__file__ = "/elsewhere/triton_kernels/__init__.py"
    monkeypatch.setitem(sys.modules, "triton_kernels", foreign)
    with pytest.raises(BundleError, match="was imported from /elsewhere/triton_kernels already"):
        bundle.load_package("triton_kernels")
    monkeypatch.delitem(sys.modules, "humming")


def test_the_real_bundle_is_the_pinned_one() -> None:
    if not bundle.folder().is_dir():
        pytest.skip(f"no {bundle.folder()}; `{bundle.PREPARE}` fetches it")
    bundle.verify(bundle.folder())


def test_fetching_needs_the_standard_library_only() -> None:
    code = (
        "import sys; import benchmarks.peers.prepare; "
        "print({'torch', 'fp4lt', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "set()"


def test_git_ignores_the_bundle() -> None:
    assert ".peers/" in (ROOT / ".gitignore").read_text().splitlines()
    assert json.dumps(".peers") not in (ROOT / "pyproject.toml").read_text()
