# SPDX-License-Identifier: Apache-2.0
"""The real libcublasLt of this environment, and a stub that only exports its functions."""

from __future__ import annotations

import re
import shutil
import subprocess
from functools import lru_cache
from pathlib import Path

import pytest

from fp4lt import _C, _library

ABI = Path(__file__).parent.parent / "csrc" / "cublaslt" / "abi.h"


@lru_cache(maxsize=1)
def _found() -> _C.CublasLt | None:
    candidate = _library.find()
    return None if candidate is None else _library.open_candidate(candidate)


def real_library() -> _C.CublasLt:
    """The library that would be used here; skips the test where there is none."""
    library = _found()
    if library is None:
        pytest.skip("no libcublasLt here: install nvidia-cublas or nvidia-cublas-cu12")
    return library


def function_names() -> list[str]:
    """Names that the shim looks up and cannot do without."""
    text = ABI.read_text().split("#define FP4LT_CUBLASLT_OPTIONAL_FUNCTIONS")[0]
    return [f"cublasLt{name}" for name in re.findall(r"\bX\((\w+), ", text)]


def stub(folder: Path, version: int, status: int = 15, leave_out: str = "") -> Path:
    """Compile a library whose functions do nothing but return `status`."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler on this machine")
    names = [name for name in function_names() if name not in ("cublasLtGetVersion", leave_out)]
    code, library = folder / "stub.c", folder / "libcublasLt.so.13"
    lines = [f"int {name}(void) {{ return {status}; }}" for name in names]
    lines.append(f"unsigned long cublasLtGetVersion(void) {{ return {version}; }}")
    code.write_text("\n".join(lines))
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, code], check=True)
    return library
