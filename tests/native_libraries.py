# SPDX-License-Identifier: Apache-2.0
"""Builds the shared libraries that only tests use, and finds NVIDIA's to hold them against.

``python tests/native_libraries.py fake --cuda`` builds one and prints its path.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

TESTS = Path(__file__).resolve().parent
CACHE = TESTS.parent / "build" / "tests"
FLAGS = ["-std=c++17", "-O2"]
# No contraction: what the sources round twice, every compiler rounds twice.
WARNINGS = ["-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror"]
FAKE_SOURCES = (
    "algorithm_config.cpp",
    "algorithms.cpp",
    "check_description.cpp",
    "check_operands.cpp",
    "matmul.cpp",
    "objects.cpp",
    "report.cpp",
)


def cxx() -> str | None:
    """Find a C++ compiler: ``CXX``, else g++, c++ or clang++."""
    named = os.environ.get("CXX")
    found = (shutil.which(name) for name in ([named] if named else ["g++", "c++", "clang++"]))
    return next((path for path in found if path), None)


def nvcc() -> str | None:
    """Find nvcc: ``CUDACXX``, else on PATH, else in /usr/local/cuda."""
    named = os.environ.get("CUDACXX")
    return shutil.which(named or "nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")


def _run(command: Sequence[str | Path]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        line = " ".join(map(str, command))
        raise RuntimeError(f"{line}\n{result.stdout}{result.stderr}")


def _build(
    name: str, sources: Sequence[Path], compile_: Sequence[str], link: Sequence[str], file: str
) -> Path:
    """Compile what is not yet in the cache; its key is every byte that goes in."""
    key = hashlib.sha256(repr((compile_, link)).encode())
    for folder in sorted({source.parent for source in sources}):
        for path in sorted(folder.iterdir()):
            if path.suffix in {".h", ".cpp", ".cu"}:
                key.update(path.read_bytes())
    target = CACHE / f"{name}-{key.hexdigest()[:16]}" / file
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as temporary, ThreadPoolExecutor(2) as pool:
        objects = [Path(temporary) / f"{source.stem}.o" for source in sources]
        pairs = zip(sources, objects, strict=True)
        jobs = [pool.submit(_run, [*compile_, "-c", source, "-o", o]) for source, o in pairs]
        for job in jobs:
            job.result()
        made = Path(temporary) / file
        _run([*link, *objects, "-o", made])
        made.replace(target)
    return target


def fake_cublaslt(*, cuda: bool = False, grouped: bool = True) -> Path:
    """Build the fake libcublasLt.

    Parameters
    ----------
    cuda : bool, optional
        For a GPU, by nvcc; else for host memory.
    grouped : bool, optional
        Whether the symbols of 13.2 and later are there.
    """
    folder = TESTS / "fake_cublaslt"
    sources = [folder / name for name in FAKE_SOURCES]
    defines = [] if grouped else ["-DFAKE_CUBLASLT_NO_GROUPED"]
    name = f"fake-{'cuda' if cuda else 'host'}{'' if grouped else '-ungrouped'}"
    if not cuda:
        compiler = cxx()
        if compiler is None:
            raise FileNotFoundError("no C++ compiler: set CXX")
        sources.append(folder / "device_host.cpp")
        compile_ = [compiler, *FLAGS, *WARNINGS, *defines]
        return _build(name, sources, compile_, [compiler, "-shared"], "libcublasLt.so.13")
    compiler = nvcc()
    if compiler is None:
        raise FileNotFoundError("no nvcc: set CUDACXX")
    sources.append(folder / "device_cuda.cu")
    architecture = os.environ.get("FAKE_CUBLASLT_ARCH", "90")
    arch = f"-gencode=arch=compute_{architecture},code=[compute_{architecture},sm_{architecture}]"
    host = ",".join(flag for flag in WARNINGS if flag.startswith("-f"))
    compile_ = [compiler, *FLAGS, "-fmad=false", arch, "-x", "cu", f"-Xcompiler={host}", *defines]
    link = [compiler, arch, "-shared", "-cudart", "static", "-Xlinker", "--exclude-libs,ALL"]
    return _build(name, sources, compile_, link, "libcublasLt.so.13")


def recorder() -> Path:
    """Build the library that records what a program says to cuBLASLt."""
    compiler = cxx()
    if compiler is None:
        raise FileNotFoundError("no C++ compiler: set CXX")
    sources = sorted((TESTS / "recorder").glob("*.cpp"))
    # Its own C++ runtime: preloading must not choose the program's.
    static = ["-static-libstdc++", "-static-libgcc", "-Wl,--exclude-libs,ALL"]
    link = [compiler, "-shared", *static, "-ldl"]
    return _build("recorder", sources, [compiler, *FLAGS, *WARNINGS], link, "librecord_cublaslt.so")


def _wheels(*parts: str) -> list[Path]:
    spec = importlib.util.find_spec("nvidia")
    roots = list(spec.submodule_search_locations or ()) if spec else []
    folders = ("cu13", "cublas", "cuda_runtime")
    found = [Path(root, folder, *parts) for root in roots for folder in folders]
    extra = os.environ.get("FP4LT_CUBLAS_WHEELS", "")
    for root in extra.split(os.pathsep) if extra else ():
        found += [Path(root, "nvidia", folder, *parts) for folder in folders]
    return [path for path in found if path.exists()]


def cublas_includes() -> list[list[Path]]:
    """Include folders for each real cublasLt.h here, with those of the CUDA headers it needs."""
    toolkit = [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "include")]
    cuda = [p for p in [*_wheels("include"), *toolkit] if (p / "cuda_runtime_api.h").exists()]
    headers = [p for p in [*_wheels("include"), *toolkit] if (p / "cublasLt.h").exists()]
    return [[header, *cuda] for header in headers] if cuda else []


def cublas_libraries() -> list[Path]:
    """Real libraries of installed wheels."""
    return [*_wheels("lib", "libcublasLt.so.13"), *_wheels("lib", "libcublasLt.so.12")]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("library", choices=["fake", "recorder"])
    parser.add_argument("--cuda", action="store_true", help="the fake for a GPU, by nvcc")
    arguments = parser.parse_args()
    path = recorder() if arguments.library == "recorder" else fake_cublaslt(cuda=arguments.cuda)
    print(path)


if __name__ == "__main__":
    main()
