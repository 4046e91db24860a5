# SPDX-License-Identifier: Apache-2.0
"""Grouped descriptions: what the fake refuses of them, and where it runs them."""

from __future__ import annotations

from collections.abc import Callable

import lt_cases
import lt_driver as lt
import native_libraries
import numpy as np
import numpy.typing as npt
import pytest
import torch
from lt_driver import Layout, Lt, Matmul, buffer, i32, i64, placed

from fp4lt.testing import bounds, cases

if native_libraries.cxx() is None:
    pytest.skip("no C++ compiler on this machine", allow_module_level=True)


@pytest.fixture
def fake() -> Lt:
    library = Lt(native_libraries.fake_cublaslt())
    library.check()
    library.lib.fake_forget_reason()
    return library


def refused(fake: Lt, status: int, want: int, words: str) -> None:
    assert status == want, fake.reason()
    assert words in fake.reason()


def every(name: str, value: object) -> Callable[[Matmul], None]:
    def change(matmul: Matmul) -> None:
        for layout in (matmul.a, matmul.b, matmul.c, matmul.d):
            setattr(layout, name, value)

    return change


def no_array(matmul: Matmul) -> None:
    matmul.b.attributes[10] = i64(0)


def misaligned_array(matmul: Matmul) -> None:
    matmul.b.attributes[11] = i64(matmul.keep[0].ctypes.data + 2)


def one_plain(matmul: Matmul) -> None:
    matmul.b = Layout(lt.FP4, 96, 2, 96)


def bias(stride: int, epilogue: int = 4) -> Callable[[Matmul], None]:
    def change(matmul: Matmul) -> None:
        matmul.desc |= {lt.EPILOGUE: i32(epilogue), lt.BIAS_STRIDE: i64(stride)}
        vector = buffer(128)
        matmul.keep.append(vector)
        matmul.point(lt.BIAS, placed(np.array([vector.ctypes.data] * 2, np.uint64)))

    return change


@pytest.mark.parametrize(
    ("change", "status", "words"),
    [
        (lambda x: setattr(x.b, "groups", 3), 7, "B has 3 groups, A has 2"),
        (every("groups", 0), 7, "A has 0 groups"),
        (no_array, 7, "B: the array of columns is NULL"),
        (misaligned_array, 7, "B: the array of ld is not aligned to its 4-byte elements"),
        (one_plain, 7, "B has batch mode 0, A has 2"),
        (lambda x: x.a.attributes.update({12: i32(2)}), 7, "A: integer width 2"),
        (lambda x: x.d.attributes.update({13: i32(3)}), 7, "C: integer width 3 of ld"),
        (lambda x: x.a.attributes.update({1: i32(1)}), 15, "A has order 1"),
        (lambda x: x.desc.update({lt.POINTER_MODE: i32(0)}), 15, "needs POINTER_MODE DEVICE"),
        (lambda x: x.desc.update({lt.ALPHA_STRIDE: i64(2)}), 7, "alpha or beta is 2: 0 or 1"),
        (lambda x: x.desc.update({lt.BETA_STRIDE: i64(4)}), 7, "alpha or beta is 4: 0 or 1"),
        (lambda x: x.desc.update({lt.EPILOGUE: i32(2)}), 15, "EPILOGUE 2: grouped matmuls take"),
        (bias(0), 7, "BIAS_BATCH_STRIDE is 0: a grouped bias needs 1"),
        (bias(1, 6), 15, "EPILOGUE 6: grouped matmuls take DEFAULT or BIAS"),
        (lambda x: x.desc.update({lt.B_MODE: i32(0)}), 7, "B has scale mode 0"),
        (lambda x: x.preference.update({lt.AVERAGE_K: i64(-1)}), 7, "average is negative"),
        (lambda x: x.preference.update({lt.MAX_WORKSPACE: i64(65536)}), 15, "no algorithm fits"),
    ],
)
def test_broken_grouped_descriptions(
    fake: Lt, change: Callable[[Matmul], object], status: int, words: str
) -> None:
    matmul = lt_cases.grouped(fake, (2, 3))[0]
    assert matmul.run() == lt.OK, fake.reason()
    change(matmul)
    refused(fake, matmul.run(), status, words)


@pytest.mark.parametrize(
    ("version", "cc", "status"),
    [
        (130400, "10.0", lt.OK),
        (130400, "10.3", lt.OK),
        (130400, "11.0", lt.OK),
        (130301, "10.0", lt.UNSUPPORTED),
        (130400, "12.0", lt.UNSUPPORTED),
        (130400, "9.0", lt.UNSUPPORTED),
    ],
)
def test_where_grouped_fp4_runs(
    fake: Lt, monkeypatch: pytest.MonkeyPatch, version: int, cc: str, status: int
) -> None:
    monkeypatch.setenv("FAKE_CUBLASLT_CC", cc)
    monkeypatch.setenv("FAKE_CUBLASLT_VERSION", str(version))
    assert lt_cases.grouped(fake, (2, 3))[0].run() == status, fake.reason()


def test_grouped_workspace_grows_with_the_groups(fake: Lt) -> None:
    few, many = (lt_cases.grouped(fake, counts)[0] for counts in ((1,), (1,) * 9))
    sizes = [x.heuristic()[1][0].workspace_size for x in (few, many)]
    assert sizes[1] > sizes[0]
    many.data["workspace"] = buffer(sizes[0])
    refused(fake, many.run(), lt.INVALID, f"a workspace of {sizes[0]} bytes")


def sixteen_bit(fake: Lt) -> tuple[Matmul, list[npt.NDArray[np.float64]], list[lt.U8]]:
    """Two bf16 groups of 3 and 0 rows with one alpha of 2, what they give, and their outputs."""
    matmul = lt_cases.grouped(fake, (3, 0), m=16, k=32)[0]
    rng = cases.generator(4)
    weights = [cases.exact_matrix(rng, (16, 32)) for _ in range(2)]
    rows = [cases.exact_matrix(rng, (n, 32)) for n in (3, 0)]
    outs = [buffer(n * 16 * 2, fill=0xFF) for n in (3, 0)]
    held = [[placed(x.view(torch.int16).numpy()) for x in xs] for xs in (weights, rows)]
    for layout in (matmul.a, matmul.b):
        layout.type = lt.BF16
    for name, arrays in (("a", held[0]), ("b", held[1]), ("c", outs), ("d", outs)):
        matmul.data[name] = placed(np.array([x.ctypes.data for x in arrays], np.uint64))
    for attribute in (lt.A_MODE, lt.B_MODE, lt.A_SCALE, lt.B_SCALE, lt.ALPHA_STRIDE):
        del matmul.desc[attribute]
    matmul.data["alpha"] = lt_cases.scalar(2.0)
    matmul.keep += [*held[0], *held[1], *outs]
    pairs = zip(rows, weights, strict=True)
    want = [2 * bounds.to_float64(x) @ bounds.to_float64(w).T for x, w in pairs]
    return matmul, want, outs


@pytest.mark.parametrize(
    ("version", "cc", "status"),
    [
        (130200, "10.0", lt.OK),
        (130400, "9.0", lt.OK),
        (130301, "9.0", lt.UNSUPPORTED),
        (130104, "10.0", lt.UNSUPPORTED),
        (130602, "12.0", lt.UNSUPPORTED),
    ],
)
def test_groups_of_16_bit_operands(
    fake: Lt, monkeypatch: pytest.MonkeyPatch, version: int, cc: str, status: int
) -> None:
    matmul, want, outs = sixteen_bit(fake)
    made = matmul.make()
    monkeypatch.setenv("FAKE_CUBLASLT_CC", cc)
    monkeypatch.setenv("FAKE_CUBLASLT_VERSION", str(version))
    if version >= 130200:
        assert matmul.ask(made)[0] == status, fake.reason()
    else:
        # The layouts were made by a newer library; an older one could not have.
        matmul.preference.pop(lt.AVERAGE_COLS)
        assert matmul.ask(made)[0] == status, fake.reason()
    if status == lt.OK:
        assert matmul.run() == lt.OK, fake.reason()
        assert fake.check() == lt.OK, fake.reason()
        got = bounds.to_float64(torch.from_numpy(outs[0].copy()).view(torch.bfloat16))
        rounded = bounds.round_to(want[0], torch.bfloat16)
        bounds.assert_bitwise(got.reshape(3, 16), rounded, signed_zeros=False)


def test_what_hopper_and_older_versions_lack(fake: Lt, monkeypatch: pytest.MonkeyPatch) -> None:
    strided = sixteen_bit(fake)[0]
    strided.desc[lt.BETA_STRIDE] = i64(1)
    biased = sixteen_bit(fake)[0]
    bias(1)(biased)
    for matmul in (strided, biased):
        assert matmul.heuristic()[0] == lt.OK, fake.reason()
    monkeypatch.setenv("FAKE_CUBLASLT_CC", "9.0")
    refused(fake, strided.heuristic()[0], lt.UNSUPPORTED, "on compute capability 9.0")
    refused(fake, biased.heuristic()[0], lt.UNSUPPORTED, "grouped matmuls take DEFAULT")
    monkeypatch.undo()
    monkeypatch.setenv("FAKE_CUBLASLT_VERSION", "130301")
    refused(fake, biased.heuristic()[0], lt.UNSUPPORTED, "grouped BIAS exists from 13.4.0 on")
