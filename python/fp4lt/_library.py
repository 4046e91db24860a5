# SPDX-License-Identifier: Apache-2.0
"""Which libcublasLt a process uses.

Nothing is opened by importing this or by searching: glibc matches libraries by name, so a copy that
is opened before torch's would become torch's.  Torch is imported first, here, for the same reason.
"""

from __future__ import annotations

import ctypes.util
import importlib.util
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Final, NamedTuple

import torch  # noqa: F401 - its libcublasLt has to be mapped before one is looked for

from fp4lt import _C
from fp4lt.errors import LibraryError

VARIABLE: Final = "FP4LT_CUBLASLT"
"""Environment variable that names the file to use."""

MAJORS: Final = (13, 12)
"""Major versions looked for, the preferred one first."""

_NAME: Final = re.compile(r"libcublasLt\.so(?:\.(\d+)[.\d]*)?$")
_WHEELS: Final = {13: "cu13/lib/libcublasLt.so.13", 12: "cublas/lib/libcublasLt.so.12"}


class Candidate(NamedTuple):
    """A library that was found, not opened.

    Attributes
    ----------
    path : str
        A file; from the loader possibly a bare name.
    origin : str
        How it was found, for reports.
    """

    path: str
    origin: str


def from_environment(environ: Mapping[str, str] | None = None) -> Candidate | None:
    """The file that ``FP4LT_CUBLASLT`` names; None where it is unset or empty.

    Raises
    ------
    LibraryError
        If there is no such file.
    """
    path = (os.environ if environ is None else environ).get(VARIABLE, "")
    if not path:
        return None
    if not Path(path).is_file():
        what = "a folder" if Path(path).is_dir() else "not there"
        raise LibraryError(
            f"{VARIABLE}={path}: this file is {what}; name the file itself, such as "
            "/usr/local/cuda/lib64/libcublasLt.so.13, or unset the variable to have it looked for"
        )
    return Candidate(path, VARIABLE)


def mapped(maps: str | None = None) -> list[Candidate]:
    """Copies that this process has mapped already, the preferred major version first.

    Parameters
    ----------
    maps : str, optional
        Text of ``/proc/self/maps``; empty where the system has no such file.
    """
    if maps is None:
        try:
            maps = Path("/proc/self/maps").read_text()
        except OSError:
            maps = ""
    paths: dict[str, int] = {}
    for line in maps.splitlines():
        # address, permissions, offset, device, inode, path; a path may have spaces.
        fields = line.split(maxsplit=5)
        match = _NAME.search(fields[5]) if len(fields) == 6 else None
        if match is not None:
            paths[fields[5]] = int(match[1] or 0)
    found = sorted(paths, key=lambda path: -paths[path])
    return [Candidate(path, "mapped by this process") for path in found]


def wheels(folders: Iterable[str] | None = None) -> list[Candidate]:
    """Copies in NVIDIA's wheels, ``nvidia-cublas`` (13) before ``nvidia-cublas-cu12``.

    Parameters
    ----------
    folders : iterable of str, optional
        Where the namespace package ``nvidia`` lies; looked up without importing it.
    """
    if folders is None:
        try:
            spec = importlib.util.find_spec("nvidia")
        except (ImportError, ValueError):
            spec = None
        folders = (spec.submodule_search_locations or ()) if spec is not None else ()
    names = {13: "wheel nvidia-cublas", 12: "wheel nvidia-cublas-cu12"}
    roots = [Path(folder) for folder in folders]
    files = ((root / _WHEELS[major], names[major]) for major in MAJORS for root in roots)
    return [Candidate(str(path), name) for path, name in files if path.is_file()]


def loader(environ: Mapping[str, str] | None = None) -> Iterator[Candidate]:
    """Copies that the dynamic loader would find: ``LD_LIBRARY_PATH``, then its cache.

    Lazy, since asking for the cache may start a process.
    """
    search = (os.environ if environ is None else environ).get("LD_LIBRARY_PATH", "")
    folders = [Path(folder) for folder in search.split(":") if folder]
    for major in MAJORS:
        for folder in folders:
            path = folder / f"libcublasLt.so.{major}"
            if path.is_file():
                yield Candidate(str(path), "LD_LIBRARY_PATH")
    name = ctypes.util.find_library("cublasLt")
    if name is not None:
        yield Candidate(name, "the loader")


def find() -> Candidate | None:
    """The libcublasLt that would be used: named, else mapped, else in a wheel, else the loader's.

    Raises
    ------
    LibraryError
        If ``FP4LT_CUBLASLT`` names no file; nothing else is taken in its place.
    """
    named = from_environment()
    if named is not None:
        return named
    return next(iter([*mapped(), *wheels()]), None) or next(loader(), None)


def open_candidate(candidate: Candidate) -> _C.CublasLt:
    """Open the library, for good.

    Raises
    ------
    LibraryError
        If it cannot be loaded, or is no libcublasLt that serves.
    """
    try:
        return _C.CublasLt(candidate.path)
    except LibraryError as error:
        raise LibraryError(f"{error} (found by {candidate.origin})") from None


@lru_cache(maxsize=1)
def opened() -> _C.CublasLt:
    """The library of this process: found and opened at the first call, and kept.

    Raises
    ------
    LibraryError
        If there is none, or it does not load or lacks functions.
    """
    candidate = find()
    if candidate is None:
        raise LibraryError(
            "no libcublasLt was found: install nvidia-cublas (CUDA 13) or nvidia-cublas-cu12, or "
            f"name the file in {VARIABLE}"
        )
    return open_candidate(candidate)


def version_name(version: int) -> str:
    """``130102`` as ``"13.1.2"``."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"
