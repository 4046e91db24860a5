# SPDX-License-Identifier: Apache-2.0
"""Which libcublasLt a process would use, and what is known to be wrong with its version.

Nothing is opened by importing this or by searching: glibc matches libraries by name, so a copy that
is opened before torch's would become torch's.  Torch is imported first, here, for the same reason.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import importlib.util
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

import torch  # noqa: F401 - its libcublasLt has to be mapped before one is looked for

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


def read_version(candidate: Candidate) -> int:
    """Open the library, for good, and ask for its version.

    Returns
    -------
    int
        ``major * 10000 + minor * 100 + patch``.

    Raises
    ------
    LibraryError
        If it cannot be loaded, or is no libcublasLt.
    """
    where = f"libcublasLt {candidate.path} (from {candidate.origin})"
    try:
        library = ctypes.CDLL(candidate.path, mode=os.RTLD_NOW | os.RTLD_LOCAL)
    except OSError as error:
        raise LibraryError(f"{where} does not load: {error}") from None
    try:
        function = library.cublasLtGetVersion
    except AttributeError:
        raise LibraryError(f"{where} has no cublasLtGetVersion: it is another library") from None
    function.argtypes, function.restype = (), ctypes.c_size_t
    return int(function())


def version_name(version: int) -> str:
    """``130102`` as ``"13.1.2"``."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


class Hazard(NamedTuple):
    """A known defect of some versions, as far as it concerns what fp4lt asks of the library.

    Attributes
    ----------
    devices : tuple of str
        Beginnings of compute capabilities, ``"10."`` for all of 10.x.
    versions : tuple of (int, int)
        Ranges, first version with it and first one without.
    text : str
        What goes wrong.
    cure : str
        What to install.
    """

    devices: tuple[str, ...]
    versions: tuple[tuple[int, int], ...]
    text: str
    cure: str


_OPEN: Final = 1 << 30

HAZARDS: Final = (
    Hazard(("10.", "11."), ((0, 120800),), "it has no FP4 matmul", "12.8.0 or later"),
    Hazard(("12.",), ((0, 120804),), "it has no FP4 matmul for this GPU", "12.8.4 or later"),
    Hazard(
        ("10.", "11."),
        ((120800, 120805), (120900, 120902), (130000, 130101), (130200, 130202)),
        "wrong results when another kernel that uses Tensor Memory runs at the same time",
        "12.8.5, 12.9.2, 13.1.1, 13.2.2, or 13.3.0 and later",
    ),
    Hazard(
        ("10.3",),
        ((120800, 130300),),
        "wrong FP4 results where the out-features are no multiple of 64",
        "13.3.0 or later",
    ),
    Hazard(
        ("10.3", "10.7"),
        ((130501, 130602), (130700, 130800)),
        "wrong FP4 results from algorithms with stages of 768xAUTO",
        "13.6.2, or 13.8.0 and later",
    ),
    Hazard(
        ("9.0", "10.", "11."),
        ((120603, 130800),),
        "wrong results from split-K algorithms at some K",
        "13.8.0 or later",
    ),
    Hazard(
        ("10.", "12."),
        ((130100, 130601),),
        "a device alpha may be read before the kernel that writes it has ended",
        "13.6.1 or later",
    ),
    Hazard(
        ("",),
        ((130501, 130601),),
        "products of one row may be refused, and asking for algorithms breaks a graph capture",
        "13.6.1 or later",
    ),
    Hazard(
        ("10.", "11."),
        ((130700, _OPEN),),
        "grouped products may be wrong; no release is known to have the cure",
        "13.4 to 13.6 for grouped products",
    ),
)


def hazards(version: int, capability: str) -> list[Hazard]:
    """Known defects of a version on a device of a compute capability such as ``"10.3"``."""
    return [
        hazard
        for hazard in HAZARDS
        if capability.startswith(hazard.devices)
        and any(first <= version < fixed for first, fixed in hazard.versions)
    ]
