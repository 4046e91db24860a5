# SPDX-License-Identifier: Apache-2.0
"""The installed package: what it links, what it imports, and its device code."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fp4lt
from fp4lt import _C, errors

ROOT = Path(__file__).resolve().parent.parent


def test_links_neither_torch_nor_cuda() -> None:
    readelf = shutil.which("readelf")
    if readelf is None:
        pytest.skip("no readelf on this machine")
    assert _C.__file__ is not None
    shown = subprocess.run(
        [readelf, "-d", _C.__file__], check=True, capture_output=True, text=True
    ).stdout
    needed = [line.split("[")[1].rstrip("]") for line in shown.splitlines() if "(NEEDED)" in line]
    assert needed
    for library in needed:
        assert not any(word in library for word in ("torch", "c10", "cuda", "cublas", "nvrtc"))


def test_import_is_light() -> None:
    """Importing loads no optional package, opens no library and starts no thread."""
    code = """
import sys, torch
before = set(sys.modules)
import fp4lt
loaded = {name.split(".")[0] for name in set(sys.modules) - before}
assert not loaded & {"safetensors", "rich", "hypothesis", "pytest"}, loaded
assert fp4lt._C.pool_size() == 0
assert fp4lt.load_moe
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_unknown_attribute() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        fp4lt.nothing  # noqa: B018


def test_types_travel_with_the_package() -> None:
    folder = Path(fp4lt.__file__).parent
    assert (folder / "py.typed").exists()
    assert (folder / "_C.pyi").exists()


def test_device_code_is_there_or_says_why_not() -> None:
    if _C.cuda_built_with():
        assert _C.cuda_architectures()
        if _C.cuda_device_count() == 0:
            with pytest.raises(errors.LibraryError, match=r"cudaGetDeviceProperties.*\(\d+\)"):
                _C.cuda_device_info(0)
    else:
        assert _C.cuda_device_count() == 0
        assert _C.cuda_architectures() == ""
        with pytest.raises(errors.UnsupportedError, match="no CUDA code"):
            _C.cuda_device_info(0)


def cmake(tmp_path: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Configure a project that only includes cmake/Cuda.cmake."""
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.24...4.1)\nproject(probe LANGUAGES CXX)\n"
        f'include("{ROOT}/cmake/Cuda.cmake")\nmessage(STATUS "has cuda: ${{FP4LT_HAS_CUDA}}")\n'
    )
    program = shutil.which("cmake")
    if program is None:
        pytest.skip("no cmake on this machine")
    command = [program, "-S", str(tmp_path), "-B", str(tmp_path / "build"), *options]
    return subprocess.run(
        command, capture_output=True, text=True, env=os.environ | environment, check=False
    )


def test_broken_toolkit_is_an_error_and_no_quiet_cpu_build(tmp_path: Path) -> None:
    fake = tmp_path / "bin" / "nvcc"
    fake.parent.mkdir()
    fake.write_text("#!/bin/sh\nexit 3\n")
    fake.chmod(0o755)
    path = f"{fake.parent}{os.pathsep}{os.environ['PATH']}"
    for i, found in enumerate(({"CUDACXX": str(fake)}, {"PATH": path})):
        project = tmp_path / f"project{i}"
        project.mkdir()
        result = cmake(project, "-DFP4LT_CUDA=AUTO", **found)
        assert result.returncode != 0
        assert "has cuda" not in result.stdout
        assert str(fake) in result.stdout + result.stderr


def test_cuda_can_be_left_out(tmp_path: Path) -> None:
    result = cmake(tmp_path, "-DFP4LT_CUDA=OFF")
    assert result.returncode == 0, result.stderr
    assert "has cuda: OFF" in result.stdout


@pytest.mark.gpu
def test_reads_device_memory() -> None:
    info = _C.cuda_device_info(0)
    properties = torch.cuda.get_device_properties(0)
    assert (info.major, info.minor) == (properties.major, properties.minor)
    assert info.multiprocessors == properties.multi_processor_count
    data = torch.full((1 << 22,), 7, dtype=torch.int32, device="cuda")
    sink = torch.zeros(1, dtype=torch.int32, device="cuda")
    stream = torch.cuda.Stream()
    arguments = {"device": 0, "data": data.data_ptr(), "sink": sink.data_ptr()}
    _C.cuda_read_memory(**arguments, bytes=data.nbytes, stream=stream.cuda_stream)
    stream.synchronize()
    assert sink.item() == 0
    # Words of ones in all four lanes are what the kernel reports, so it did read the last bytes.
    data[-4:] = -1
    torch.cuda.synchronize()
    _C.cuda_read_memory(**arguments, bytes=data.nbytes, stream=stream.cuda_stream)
    stream.synchronize()
    assert sink.item() == -1
    with pytest.raises(errors.ArgumentError, match="multiple of 16"):
        _C.cuda_read_memory(**arguments, bytes=8, stream=stream.cuda_stream)
