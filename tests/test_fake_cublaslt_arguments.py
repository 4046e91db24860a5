# SPDX-License-Identifier: Apache-2.0
"""NULL pointers, sizes and versions of the fake's lower-level calls."""

from __future__ import annotations

import ctypes
from ctypes import byref, c_int, c_size_t

import lt_cases
import lt_driver as lt
import native_libraries
import pytest
from lt_driver import Algo, Lt, Result, i32

if native_libraries.cxx() is None:
    pytest.skip("no C++ compiler on this machine", allow_module_level=True)

TYPES = (68, 0, 33, 33, 14, 14)


@pytest.fixture
def fake() -> Lt:
    return Lt(native_libraries.fake_cublaslt())


@pytest.fixture
def algo(fake: Lt) -> Algo:
    made = Algo()
    assert fake.call("MatmulAlgoInit", fake.handle, *TYPES, 66, byref(made)) == lt.OK
    return made


def test_attributes_of_algorithms(fake: Lt, algo: Algo) -> None:
    value, written = ctypes.create_string_buffer(8), c_size_t()
    for name, attribute, held in (("Config", 2, 4), ("Config", 7, 2), ("Cap", 0, 4)):
        get = f"MatmulAlgo{name}GetAttribute"
        assert fake.call(get, byref(algo), attribute, value, c_size_t(held), byref(written)) == 0
        assert written.value == held
        assert fake.call(get, byref(algo), attribute, None, c_size_t(0), byref(written)) == 0
        for target, place, size, counted in (
            (None, value, held, byref(written)),
            (byref(algo), None, held, byref(written)),
            (byref(algo), value, 8, byref(written)),
            (byref(algo), value, 0, None),
        ):
            status = fake.call(get, target, attribute, place, c_size_t(size), counted)
            assert status == lt.INVALID, (name, attribute, size)
    assert fake.call("MatmulAlgoCapGetAttribute", byref(algo), 99, value, c_size_t(4), None) == 7
    put = "MatmulAlgoConfigSetAttribute"
    assert fake.call(put, byref(algo), 1, i32(18), c_size_t(4)) == lt.OK
    assert fake.call(put, byref(algo), 1, bytes(8), c_size_t(8)) == lt.INVALID
    assert fake.call(put, byref(algo), 1, None, c_size_t(4)) == lt.INVALID
    assert fake.call(put, None, 1, i32(18), c_size_t(4)) == lt.INVALID
    assert fake.call(put, byref(algo), 5, i32(1), c_size_t(4)) == lt.UNSUPPORTED


def test_algorithms_by_id(fake: Lt, algo: Algo) -> None:
    ids, count = (c_int * 4)(), c_int()
    arguments = [fake.handle, *TYPES]
    assert fake.call("MatmulAlgoGetIds", *arguments, 2, ids, byref(count)) == lt.OK
    assert count.value == 2
    assert fake.call("MatmulAlgoGetIds", *arguments, 0, ids, byref(count)) == lt.INVALID
    assert fake.call("MatmulAlgoGetIds", *arguments, 2, None, byref(count)) == lt.INVALID
    assert fake.call("MatmulAlgoGetIds", *arguments, 2, ids, None) == lt.INVALID
    other = [fake.handle, 64, 0, 33, 33, 14, 14]
    assert fake.call("MatmulAlgoGetIds", *other, 2, ids, byref(count)) == lt.OK
    assert count.value == 0
    assert fake.call("MatmulAlgoInit", *other, 66, byref(algo)) == lt.UNSUPPORTED
    assert fake.call("MatmulAlgoInit", *arguments, 66, None) == lt.INVALID


def test_places_for_results(fake: Lt, algo: Algo) -> None:
    matmul = lt_cases.small(fake)
    made = [fake.handle, *matmul.make()]
    preference, count = fake.made("MatmulPreferenceCreate"), c_int()
    results, none = (Result * 2)(), ctypes.c_void_p()
    ask = "MatmulAlgoGetHeuristic"
    assert fake.call(ask, *made, preference, 2, results, byref(count)) == lt.OK
    assert fake.call(ask, *made, preference, 2, None, byref(count)) == lt.INVALID
    assert fake.call(ask, *made, preference, 2, results, None) == lt.INVALID
    assert fake.call(ask, *made, none, 2, results, byref(count)) == lt.INVALID
    check = "MatmulAlgoCheck"
    assert fake.call(check, *made, byref(algo), byref(results[0])) == lt.OK
    assert fake.call(check, *made, byref(algo), None) == lt.INVALID
    assert fake.call(check, *made, None, byref(results[0])) == lt.INVALID


def test_calls_for_a_stream(fake: Lt, monkeypatch: pytest.MonkeyPatch) -> None:
    for version, status in ((130402, lt.UNSUPPORTED), (130501, lt.OK)):
        monkeypatch.setenv("FAKE_CUBLASLT_VERSION", str(version))
        made = [fake.handle, *lt_cases.small(fake).make()]
        preference, count, result = fake.made("MatmulPreferenceCreate"), c_int(), Result()
        ask = (*made, preference, 1, byref(result), byref(count), None)
        assert fake.call("MatmulAlgoGetHeuristicForStream", *ask) == status
        algo = Algo()
        assert fake.call("MatmulAlgoInit", fake.handle, *TYPES, 66, byref(algo)) == lt.OK
        check = (*made, byref(algo), byref(result), None)
        assert fake.call("MatmulAlgoCheckForStream", *check) == status


def test_attributes_are_read_by_their_size(fake: Lt) -> None:
    value = ctypes.create_string_buffer(8)
    made = fake.made("MatmulDescCreate", 68, 0)
    get = "MatmulDescGetAttribute"
    assert fake.call(get, made, 3, value, c_size_t(4), None) == lt.OK
    assert fake.call(get, made, 3, value, c_size_t(8), None) == lt.INVALID
    assert fake.call(get, made, 3, None, c_size_t(4), None) == lt.INVALID
    assert fake.call("LoggerSetLevel", 5) == lt.OK
    assert fake.call("LoggerSetLevel", 6) == lt.INVALID
    assert fake.call("Create", None) == lt.INVALID
    assert fake.call("MatmulDescCreate", None, 68, 0) == lt.INVALID
    assert fake.call("MatmulPreferenceCreate", None) == lt.INVALID
