# SPDX-License-Identifier: Apache-2.0
"""Objects, algorithms, versions, devices, captures and grouped descriptions of the fake."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator

import lt_cases
import lt_driver as lt
import native_libraries
import pytest
from lt_driver import Algo, Lt, Matmul, Result, buffer, i32, i64

if native_libraries.cxx() is None:
    pytest.skip("no C++ compiler on this machine", allow_module_level=True)

WORDS = (0, 1, 2, 3, 4, 5, 6, 7, 15, 22, 26, 31, 32, 33, 34, 35, 37)
LONGS = (8, 10, 11, 12, 13, 14, 17, 18, 19, 20, 21, 23, 24, 36, 38, 39, 40)
DESC_SIZES = dict.fromkeys(WORDS, 4) | dict.fromkeys(LONGS, 8)
PREFERENCE_SIZES = dict.fromkeys((0, 3, 5, 6, 7, 8, 9), 4) | dict.fromkeys((1, 12, 13, 14, 15), 8)
LAYOUT_SIZES = dict.fromkeys((0, 1, 5, 8), 4) | dict.fromkeys((2, 3, 4, 6, 7), 8)


@pytest.fixture(scope="module")
def library() -> Lt:
    return Lt(native_libraries.fake_cublaslt())


@pytest.fixture
def fake(library: Lt) -> Iterator[Lt]:
    library.check()
    library.lib.fake_forget_reason()
    yield library
    library.lib.fake_pretend_capture(0)


def refused(fake: Lt, status: int, want: int, words: str) -> None:
    assert status == want, fake.reason()
    assert words in fake.reason()


# Objects.


@pytest.mark.parametrize(
    ("kind", "sizes", "create"),
    [
        ("MatmulDesc", DESC_SIZES | {25: 1}, (68, 0)),
        ("MatmulPreference", PREFERENCE_SIZES, ()),
        ("MatrixLayout", LAYOUT_SIZES, (33, ctypes.c_uint64(64), ctypes.c_uint64(8), 64)),
    ],
)
def test_attributes_hold_what_is_set(
    fake: Lt, kind: str, sizes: dict[int, int], create: tuple[object, ...]
) -> None:
    """Nothing but the size is looked at; each attribute has a place of its own."""
    made = fake.made(f"{kind}Create", *create)
    values = {i: bytes([i + 1] * size) for i, size in sizes.items()}
    for i, value in values.items():
        assert fake.set(kind, made, i, value) == lt.OK, fake.reason()
    for i, value in values.items():
        assert fake.get(kind, made, i, len(value)) == value
        for wrong in {1, 4, 8} - {len(value)}:
            refused(fake, fake.set(kind, made, i, bytes(wrong)), lt.INVALID, f"{wrong} bytes given")
        written = ctypes.c_size_t()
        size = ctypes.c_size_t(0)
        assert fake.call(f"{kind}GetAttribute", made, i, None, size, ctypes.byref(written)) == lt.OK
        assert written.value == len(value)
        status = fake.call(f"{kind}GetAttribute", made, i, None, size, None)
        refused(fake, status, lt.INVALID, "sizeWritten is NULL")
        status = fake.call(f"{kind}SetAttribute", made, i, None, ctypes.c_size_t(len(value)))
        refused(fake, status, lt.INVALID, "the buffer is NULL")
    refused(fake, fake.set(kind, made, 99, bytes(4)), lt.INVALID, "attribute 99 is unknown")


@pytest.mark.parametrize("which", range(5))
def test_use_after_destroy(fake: Lt, which: int) -> None:
    matmul = lt_cases.small(fake)
    made = matmul.make()
    status, results = matmul.ask(made)
    assert status == lt.OK
    kind = "MatmulDesc" if which == 0 else "MatrixLayout"
    assert fake.call(f"{kind}Destroy", made[which]) == lt.OK
    refused(fake, matmul.matmul(made, results[0].algo), lt.INVALID, "used after it was destroyed")
    refused(fake, matmul.ask(made)[0], lt.INVALID, "used after it was destroyed")
    refused(fake, fake.call(f"{kind}Destroy", made[which]), lt.INVALID, "after it was destroyed")


def test_a_c_layout_left_out_is_that_of_d(fake: Lt) -> None:
    matmul = lt_cases.small(fake)
    made = matmul.make()
    made[3] = ctypes.c_void_p()
    status, results = matmul.ask(made)
    assert status == lt.OK
    assert matmul.matmul(made, results[0].algo) == lt.OK
    made[2] = ctypes.c_void_p()
    refused(fake, matmul.ask(made)[0], lt.INVALID, "B's layout is NULL")
    made[2] = made[0]
    refused(fake, matmul.ask(made)[0], lt.INVALID, "B's layout is no such object")


def test_handles(fake: Lt) -> None:
    other = Lt(native_libraries.fake_cublaslt())
    matmul = lt_cases.small(other)
    assert matmul.run() == lt.OK
    assert other.call("Destroy", other.handle) == lt.OK
    refused(fake, matmul.run(), lt.NOT_INITIALIZED, "handle is used after it was destroyed")
    other.handle = ctypes.c_void_p()
    refused(fake, matmul.run(), lt.NOT_INITIALIZED, "the handle is NULL")


def test_init_in_memory_of_the_caller(fake: Lt) -> None:
    """Plain layouts and preferences fit in the 64 bytes of headers before 13.2, grouped do not."""
    size = ctypes.c_size_t
    for n in (64, 112):
        memory = buffer(n + 8, fill=0xEE)
        at = ctypes.c_void_p(memory.ctypes.data)
        shape = (33, ctypes.c_uint64(96), ctypes.c_uint64(8), ctypes.c_int64(96))
        assert fake.call("MatrixLayoutInit_internal", at, size(n), *shape) == lt.OK
        assert (memory[n:] == 0xEE).all()
        assert fake.get("MatrixLayout", at, 2, 8) == i64(96)
        status = fake.set("MatrixLayout", at, 9, bytes(8))
        assert status == (lt.INVALID if n == 64 else lt.OK)
        assert n == 112 or "does not fit in a layout of 64 bytes" in fake.reason()
        status = fake.call("GroupedMatrixLayoutInit_internal", at, size(n), 33, 4, at, at, at)
        assert status == (lt.OK if n == 112 else lt.ALLOC_FAILED)
    keep, matmul = buffer(64), lt_cases.small(fake)
    made = matmul.make()
    small = ctypes.c_void_p(keep.ctypes.data)
    shape = (33, ctypes.c_uint64(96), ctypes.c_uint64(136), ctypes.c_int64(96))
    assert fake.call("MatrixLayoutInit_internal", small, size(64), *shape) == lt.OK
    made[1] = small
    assert matmul.ask(made)[0] == lt.OK, fake.reason()
    assert fake.set("MatrixLayout", small, 8, i32(2)) == lt.OK
    refused(fake, matmul.ask(made)[0], lt.INVALID, "A is grouped in a structure of 64 bytes")
    for n in (64, 96):
        memory = buffer(n + 8, fill=0xEE)
        at = ctypes.c_void_p(memory.ctypes.data)
        assert fake.call("MatmulPreferenceInit_internal", at, size(n)) == lt.OK
        assert (memory[n:] == 0xEE).all()
        assert fake.set("MatmulPreference", at, 13, bytes(8)) == (lt.OK if n == 96 else lt.INVALID)
    memory = buffer(256)
    at = ctypes.c_void_p(memory.ctypes.data)
    assert fake.call("MatmulDescInit_internal", at, size(256), 68, 0) == lt.OK
    assert fake.get("MatmulDesc", at, 7, 4) == i32(1)
    assert fake.call("MatmulDescInit_internal", at, size(128), 68, 0) == lt.ALLOC_FAILED


# Algorithms.


def configured(fake: Lt, algo: Algo, attribute: int) -> int:
    out = ctypes.c_int()
    status = fake.call(
        "MatmulAlgoConfigGetAttribute",
        ctypes.byref(algo),
        attribute,
        ctypes.byref(out),
        ctypes.c_size_t(4),
        None,
    )
    assert status == lt.OK, fake.reason()
    return out.value


def checked(fake: Lt, matmul: Matmul, algo: Algo) -> tuple[int, int]:
    result = Result()
    made = matmul.make()
    status = fake.call(
        "MatmulAlgoCheck", fake.handle, *made, ctypes.byref(algo), ctypes.byref(result)
    )
    return status, int(result.workspace_size)


def test_results_of_the_heuristic(fake: Lt) -> None:
    matmul = lt_cases.small(fake, k=256)
    status, results = matmul.heuristic()
    assert status == lt.OK
    assert [configured(fake, r.algo, 2) for r in results] == [1, 2, 1, 1]  # split-K
    assert [configured(fake, r.algo, 6) for r in results] == [0, 0, 38, 0]  # stages
    assert [r.workspace_size > 0 for r in results] == [True, True, True, False]
    assert all(r.state == lt.OK and 0 < r.waves < 1 for r in results)
    assert len(matmul.heuristic(2)[1]) == 2
    refused(fake, matmul.heuristic(0)[0], lt.INVALID, "0 results are requested")
    matmul.preference[lt.REDUCTION_MASK] = i32(0)
    assert len(matmul.heuristic()[1]) == 3
    matmul.preference[lt.MAX_WORKSPACE] = i64(0)
    assert [r.workspace_size for r in matmul.heuristic()[1]] == [0]
    for choice in range(4):
        run = lt_cases.small(fake, k=256)
        run.choice = choice
        assert run.run() == lt.OK


def test_algorithm_of_another_problem(fake: Lt) -> None:
    algo = lt_cases.small(fake).heuristic()[1][0].algo
    for n in (1, 2, 130):  # rows are free
        assert lt_cases.small(fake, n=n).matmul(lt_cases.small(fake, n=n).make(), algo) == lt.OK
    other = lt_cases.small(fake, k=128)
    other.algo = algo
    refused(fake, other.run(), lt.UNSUPPORTED, "made for another m and k")
    assert checked(fake, other, algo)[0] == lt.OK
    assert other.run() == lt.OK, fake.reason()
    changes: dict[str, Callable[[Matmul], object]] = {
        "other types": lambda x: setattr(x.d, "type", lt.F16),
        "another descriptor": lambda x: x.desc.update({lt.POINTER_MODE: i32(0)}),
    }
    for words, change in changes.items():
        matmul = lt_cases.small(fake)
        matmul.algo = algo
        change(matmul)
        refused(fake, matmul.run(), lt.UNSUPPORTED, words)
        refused(fake, checked(fake, matmul, algo)[0], lt.INVALID, words)
    bias = lt_cases.small(fake)
    bias.desc |= {lt.EPILOGUE: i32(4)}
    bias.point(lt.BIAS, buffer(512))
    bias.algo = algo
    refused(fake, bias.run(), lt.UNSUPPORTED, "another descriptor")


def test_algorithm_of_another_version(fake: Lt, monkeypatch: pytest.MonkeyPatch) -> None:
    matmul = lt_cases.small(fake)
    matmul.algo = matmul.heuristic()[1][0].algo
    monkeypatch.setenv("FAKE_CUBLASLT_VERSION", "130800")
    refused(fake, matmul.run(), lt.INVALID, "of version 130602, this is 130800")
    monkeypatch.undo()
    assert matmul.run() == lt.OK
    matmul.algo = Algo()
    refused(fake, matmul.run(), lt.INVALID, "was not filled by this library")


def test_no_algorithm_asks_the_heuristic(fake: Lt) -> None:
    matmul = lt_cases.small(fake)
    assert matmul.matmul(matmul.make(), None) == lt.OK
    matmul.data["workspace"] = None
    assert matmul.matmul(matmul.make(), None) == lt.OK


def test_algorithms_by_id(fake: Lt) -> None:
    ids, count, algo = (ctypes.c_int * 8)(), ctypes.c_int(), Algo()
    types = (68, 0, 33, 33, 14, 14)
    assert fake.call("MatmulAlgoGetIds", fake.handle, *types, 8, ids, ctypes.byref(count)) == lt.OK
    init = [fake.handle, *types]
    for i in list(ids)[: count.value]:
        assert fake.call("MatmulAlgoInit", *init, i, ctypes.byref(algo)) == lt.OK
        assert configured(fake, algo, 0) == i
    assert fake.call("MatmulAlgoInit", *init, 1, ctypes.byref(algo)) == lt.INVALID
    assert fake.call("MatmulAlgoInit", *init, ids[0], ctypes.byref(algo)) == lt.OK

    def put(attribute: int, value: int) -> int:
        size = ctypes.c_size_t(4)
        at = ctypes.byref(algo)
        return fake.call("MatmulAlgoConfigSetAttribute", at, attribute, i32(value), size)

    refused(fake, put(0, 66), lt.INVALID, "can only be read")
    matmul = lt_cases.small(fake, k=256)
    assert put(2, 2) == lt.OK
    refused(fake, checked(fake, matmul, algo)[0], lt.UNSUPPORTED, "SPLITK_NUM 2 with reduction")
    assert put(3, 2) == lt.OK
    matmul.algo = algo
    refused(fake, matmul.run(), lt.UNSUPPORTED, "cublasLtMatmulAlgoCheck was not asked")
    status, needed = checked(fake, matmul, algo)
    assert status == lt.OK
    matmul.data["workspace"] = buffer(needed - 1)
    refused(fake, matmul.run(), lt.INVALID, f"the algorithm needs {needed}")
    matmul.data["workspace"] = buffer(needed)
    assert matmul.run() == lt.OK


@pytest.mark.parametrize(
    ("id_", "splitk", "reduction", "words"),
    [
        (66, 0, 0, "SPLITK_NUM is 0"),
        (67, 2, 2, "algorithm 67 cannot split k"),
        (70, 1, 0, "algorithm 70 is only grouped"),
        (66, 1, 0, ""),
    ],
)
def test_configurations(fake: Lt, id_: int, splitk: int, reduction: int, words: str) -> None:
    algo = Algo()
    types = (68, 0, 33, 33, 14, 14)
    assert fake.call("MatmulAlgoInit", fake.handle, *types, id_, ctypes.byref(algo)) == lt.OK
    for attribute, value in ((2, splitk), (3, reduction)):
        change = (ctypes.byref(algo), attribute, i32(value), ctypes.c_size_t(4))
        assert fake.call("MatmulAlgoConfigSetAttribute", *change) == lt.OK
    status = checked(fake, lt_cases.small(fake), algo)[0]
    refused(fake, status, lt.UNSUPPORTED if words else lt.OK, words)


# Versions and devices.


@pytest.mark.parametrize(
    ("version", "cc", "runs"),
    [
        (120800, "10.0", True),
        (120703, "10.0", False),
        (120803, "12.0", False),
        (120804, "12.0", True),
        (120904, "11.0", False),
        (130000, "11.0", True),
        (130602, "12.1", True),
        (130602, "9.0", False),
    ],
)
def test_where_fp4_runs(
    fake: Lt, monkeypatch: pytest.MonkeyPatch, version: int, cc: str, runs: bool
) -> None:
    monkeypatch.setenv("FAKE_CUBLASLT_CC", cc)
    monkeypatch.setenv("FAKE_CUBLASLT_VERSION", str(version))
    matmul = lt_cases.small(fake)
    if version < 120800:
        made = fake.made("MatmulDescCreate", 68, 0)
        status = fake.set("MatmulDesc", made, lt.A_MODE, i32(1))
        refused(fake, status, lt.INVALID, "exists from version 120800 on")
        return
    assert matmul.run() == (lt.OK if runs else lt.UNSUPPORTED), fake.reason()
    assert runs or "FP4" in fake.reason()


def test_a_device_without_fp4_tells_wrong_scales_apart(
    fake: Lt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an H200 does with the real library: 15 for what is well formed, 7 for wrong scales."""
    monkeypatch.setenv("FAKE_CUBLASLT_CC", "9.0")
    assert lt_cases.small(fake).run() == lt.UNSUPPORTED
    for attribute in (lt.A_MODE, lt.B_MODE, lt.A_SCALE, lt.B_SCALE):
        matmul = lt_cases.small(fake)
        del matmul.desc[attribute]
        assert matmul.run() == lt.INVALID


def test_newer_attributes_and_calls(fake: Lt, monkeypatch: pytest.MonkeyPatch) -> None:
    made = fake.made("MatmulDescCreate", 68, 0)
    preference = fake.made("MatmulPreferenceCreate")
    cases = [("MatmulDesc", made, i, bytes(8), 130200) for i in (lt.ALPHA_STRIDE, lt.BETA_STRIDE)]
    cases += [("MatmulPreference", preference, i, bytes(8), 130200) for i in (13, 14, 15)]
    cases += [("MatmulDesc", made, 41, bytes(4), 130802)]
    for kind, target, attribute, value, first in cases:
        for version in (first - 1, first):
            monkeypatch.setenv("FAKE_CUBLASLT_VERSION", str(version))
            want = lt.OK if version == first else lt.INVALID
            assert fake.set(kind, target, attribute, value) == want
    monkeypatch.setenv("FAKE_CUBLASLT_VERSION", "130103")
    layout = ctypes.c_void_p()
    arguments = (ctypes.byref(layout), 33, 1, made, made, made)
    status = fake.call("GroupedMatrixLayoutCreate", *arguments)
    refused(fake, status, lt.UNSUPPORTED, "exist from 13.2.0 on")


# Captures.


def test_heuristic_during_a_capture(fake: Lt, monkeypatch: pytest.MonkeyPatch) -> None:
    matmul = lt_cases.small(fake)
    made = matmul.make()
    algo = matmul.ask(made)[1][0].algo
    fake.lib.fake_pretend_capture(1)
    assert matmul.ask(made)[0] == lt.OK
    for name, value in (("CAPTURE", "refuse"), ("VERSION", "130501")):
        monkeypatch.setenv(f"FAKE_CUBLASLT_{name}", value)
        refused(fake, matmul.ask(made)[0], lt.INTERNAL, "asked during a capture")
        refused(fake, matmul.matmul(made, None), lt.INTERNAL, "asked during a capture")
        monkeypatch.undo()
    monkeypatch.setenv("FAKE_CUBLASLT_CAPTURE", "refuse")
    assert matmul.matmul(made, algo) == lt.OK


def test_matmul_in_a_capture_needs_a_workspace(fake: Lt) -> None:
    matmul = lt_cases.small(fake)
    matmul.preference[lt.MAX_WORKSPACE] = i64(0)
    matmul.data["workspace"] = None
    assert matmul.run() == lt.OK
    fake.lib.fake_pretend_capture(1)
    refused(fake, matmul.run(), lt.INVALID, "a captured matmul needs a workspace")
    matmul.data["workspace"] = buffer(256)
    assert matmul.run() == lt.OK
