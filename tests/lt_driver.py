# SPDX-License-Identifier: Apache-2.0
"""Talks to a libcublasLt by ctypes: the fake, the recorder or NVIDIA's.

Written from the documentation and with numbers of its own, so that neither the package's
declarations nor the fake's are trusted here.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

F32, F16, BF16, FP8, FP4 = 0, 2, 14, 28, 33
COMPUTE_32F: Final = 68
OK, NOT_INITIALIZED, ALLOC_FAILED, INVALID, FAILED, INTERNAL, UNSUPPORTED = 0, 1, 3, 7, 13, 14, 15

# Matmul descriptor attributes.
SCALE_TYPE, POINTER_MODE, TRANSA, TRANSB, TRANSC, FILL, EPILOGUE, BIAS = 1, 2, 3, 4, 5, 6, 7, 8
BIAS_STRIDE, SM_COUNT, A_SCALE, B_SCALE, C_SCALE, D_SCALE, AMAX_D = 10, 15, 17, 18, 19, 20, 21
FAST_ACCUM, BIAS_TYPE, A_MODE, B_MODE, C_MODE, D_MODE = 25, 26, 31, 32, 33, 34
D_OUT_SCALE, D_OUT_MODE, ALPHA_STRIDE, BETA_STRIDE = 36, 37, 39, 40
# Preference attributes.
MAX_WORKSPACE, REDUCTION_MASK, ALIGN_A, ALIGN_B, ALIGN_C, ALIGN_D = 1, 3, 5, 6, 7, 8
AVERAGE_K, AVERAGE_ROWS, AVERAGE_COLS = 13, 14, 15

U8 = npt.NDArray[np.uint8]


def i32(value: int) -> bytes:
    return struct.pack("<i", value)


def i64(value: int) -> bytes:
    return struct.pack("<q", value)


class Algo(ctypes.Structure):
    _fields_ = [("data", ctypes.c_uint64 * 8)]


class Result(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = [
        ("algo", Algo),
        ("workspace_size", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    ]


def buffer(size: int, *, offset: int = 0, fill: int = 0) -> U8:
    """Bytes that start ``offset`` after a multiple of 256."""
    raw = np.full(size + offset + 256, fill, np.uint8)
    start = -raw.ctypes.data % 256 + offset
    return raw[start : start + size]


def placed(data: npt.NDArray[Any], *, offset: int = 0) -> U8:
    """Copy an array's bytes to an aligned buffer."""
    flat = np.ascontiguousarray(data).view(np.uint8).reshape(-1)
    out = buffer(flat.size, offset=offset)
    out[:] = flat
    return out


class Lt:
    """An open library and a handle of it."""

    def __init__(self, path: Path, *, handle: bool = True) -> None:
        self.lib = ctypes.CDLL(str(path))
        self.lib.cublasLtGetVersion.restype = ctypes.c_size_t
        self.lib.cublasLtGetStatusName.restype = ctypes.c_char_p
        self.handle = ctypes.c_void_p()
        if handle:
            assert self.call("Create", ctypes.byref(self.handle)) == OK

    def call(self, name: str, *arguments: Any) -> int:
        return int(getattr(self.lib, f"cublasLt{name}")(*arguments))

    def version(self) -> int:
        return int(self.lib.cublasLtGetVersion())

    def reason(self) -> str:
        """Say why the fake refused last."""
        self.lib.fake_last_reason.restype = ctypes.c_char_p
        return str(self.lib.fake_last_reason().decode())

    def check(self) -> int:
        """Ask the fake for violations that matmuls have found in their data."""
        return int(self.lib.fake_check())

    def made(self, name: str, *arguments: Any) -> ctypes.c_void_p:
        made = ctypes.c_void_p()
        status = self.call(name, ctypes.byref(made), *arguments)
        assert status == OK, (name, status)
        return made

    def set(self, kind: str, target: ctypes.c_void_p, attribute: int, value: bytes) -> int:
        size = ctypes.c_size_t(len(value))
        return self.call(f"{kind}SetAttribute", target, attribute, value, size)

    def get(self, kind: str, target: ctypes.c_void_p, attribute: int, size: int) -> bytes:
        out = ctypes.create_string_buffer(size)
        written = ctypes.c_size_t()
        status = self.call(
            f"{kind}GetAttribute",
            target,
            attribute,
            out,
            ctypes.c_size_t(size),
            ctypes.byref(written),
        )
        assert status == OK, (kind, attribute, status)
        assert written.value == size
        return out.raw


@dataclass
class Layout:
    """Arguments of a layout's Create call, and attributes set after it."""

    type: int
    rows: int
    cols: int
    ld: int
    attributes: dict[int, bytes] = field(default_factory=dict)
    arrays: tuple[U8, U8, U8] | None = None
    groups: int = 0

    def make(self, lt: Lt) -> ctypes.c_void_p:
        if self.arrays is not None:
            pointers = [ctypes.c_void_p(array.ctypes.data) for array in self.arrays]
            made = lt.made("GroupedMatrixLayoutCreate", self.type, self.groups, *pointers)
        else:
            rows, cols, ld = (
                ctypes.c_uint64(self.rows),
                ctypes.c_uint64(self.cols),
                ctypes.c_int64(self.ld),
            )
            made = lt.made("MatrixLayoutCreate", self.type, rows, cols, ld)
        for attribute, value in self.attributes.items():
            assert lt.set("MatrixLayout", made, attribute, value) == OK
        return made


@dataclass
class Matmul:
    """A whole description, to be changed before it is made: what a shim would say."""

    lt: Lt
    a: Layout
    b: Layout
    c: Layout
    d: Layout
    data: dict[str, U8 | None]  # "a", "b", "c", "d", "alpha", "beta", "workspace"
    desc: dict[int, bytes] = field(default_factory=dict)
    preference: dict[int, bytes] = field(default_factory=dict)
    compute: int = COMPUTE_32F
    scale: int = F32
    one_layout: bool = True  # C and D by the same object
    choice: int = 0
    workspace_bytes: int | None = None
    algo: Algo | None = None
    stream: int | None = None
    keep: list[Any] = field(default_factory=list)

    def point(self, attribute: int, array: U8 | None) -> None:
        """Set a pointer attribute."""
        self.keep.append(array)
        self.desc[attribute] = i64(0 if array is None else array.ctypes.data)

    def make(self) -> list[ctypes.c_void_p]:
        """Descriptor, A, B, C and D."""
        lt = self.lt
        desc = lt.made("MatmulDescCreate", self.compute, self.scale)
        for attribute, value in self.desc.items():
            assert lt.set("MatmulDesc", desc, attribute, value) == OK, lt.reason()
        d = self.d.make(lt)
        c = d if self.one_layout else self.c.make(lt)
        return [desc, self.a.make(lt), self.b.make(lt), c, d]

    def heuristic(self, requested: int = 8) -> tuple[int, list[Result]]:
        return self.ask(self.make(), requested)

    def ask(self, made: Sequence[ctypes.c_void_p], requested: int = 8) -> tuple[int, list[Result]]:
        lt = self.lt
        preference = lt.made("MatmulPreferenceCreate")
        for attribute, value in self.preference.items():
            assert lt.set("MatmulPreference", preference, attribute, value) == OK, lt.reason()
        results = (Result * max(requested, 1))()
        returned = ctypes.c_int(-1)
        status = lt.call(
            "MatmulAlgoGetHeuristic",
            lt.handle,
            *made,
            preference,
            requested,
            results,
            ctypes.byref(returned),
        )
        return status, list(results[: max(returned.value, 0)])

    def run(self) -> int:
        """Heuristic, then the matmul; the status of the first that is refused."""
        made = self.make()
        algo = self.algo
        if algo is None:
            status, results = self.ask(made)
            if status != OK:
                return status
            algo = results[self.choice].algo
        return self.matmul(made, algo)

    def matmul(self, made: Sequence[ctypes.c_void_p], algo: Algo | None) -> int:
        desc, a, b, c, d = made
        at = {
            name: ctypes.c_void_p(None if array is None else array.ctypes.data)
            for name, array in self.data.items()
        }
        workspace = self.data["workspace"]
        held = 0 if workspace is None else workspace.size
        size = held if self.workspace_bytes is None else self.workspace_bytes
        return self.lt.call(
            "Matmul",
            self.lt.handle,
            desc,
            at["alpha"],
            at["a"],
            a,
            at["b"],
            b,
            at["beta"],
            at["c"],
            c,
            at["d"],
            d,
            None if algo is None else ctypes.byref(algo),
            at["workspace"],
            ctypes.c_size_t(size),
            ctypes.c_void_p(self.stream),
        )
