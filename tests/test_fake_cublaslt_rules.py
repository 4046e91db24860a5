# SPDX-License-Identifier: Apache-2.0
"""The fake libcublasLt refuses each broken description with its status and its reason.

Every rule has a change that keeps it and one that breaks it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import lt_cases
import lt_driver as lt
import native_libraries
import numpy as np
import pytest
import torch
from lt_driver import Lt, Matmul, buffer, i32, i64, placed

from fp4lt.testing import cases

if native_libraries.cxx() is None:
    pytest.skip("no C++ compiler on this machine", allow_module_level=True)

Change = Callable[[Matmul], object]


@pytest.fixture(scope="module")
def fake() -> Lt:
    return Lt(native_libraries.fake_cublaslt())


@pytest.fixture(autouse=True)
def clean(fake: Lt) -> None:
    fake.check()
    fake.lib.fake_forget_reason()


class Rule(NamedTuple):
    """``good`` passes, ``bad`` gets the status from the heuristic or only from the matmul."""

    good: Change
    bad: Change
    status: int
    words: str
    heuristic: bool = True


def nothing(matmul: Matmul) -> None:
    """The description as it is."""


def desc(attribute: int, value: int) -> Change:
    size = i64 if attribute in (lt.BIAS_STRIDE, lt.ALPHA_STRIDE, lt.BETA_STRIDE) else i32
    return lambda matmul: matmul.desc.update({attribute: size(value)})


def pointer(attribute: int, *, offset: int = 0, null: bool = False) -> Change:
    def change(matmul: Matmul) -> None:
        matmul.point(attribute, None if null else buffer(4096, offset=offset))

    return change


def layout(names: str, **fields: int) -> Change:
    def change(matmul: Matmul) -> None:
        for name in names:
            for field, value in fields.items():
                setattr(getattr(matmul, name), field, value)
        matmul.one_layout = matmul.c == matmul.d

    return change


def attribute(names: str, number: int, value: bytes) -> Change:
    def change(matmul: Matmul) -> None:
        for name in names:
            getattr(matmul, name).attributes[number] = value

    return change


def preference(number: int, value: bytes) -> Change:
    return lambda matmul: matmul.preference.update({number: value})


def data(name: str, array: lt.U8 | None) -> Change:
    return lambda matmul: matmul.data.update({name: array})


def both(*changes: Change) -> Change:
    def change(matmul: Matmul) -> None:
        for one in changes:
            one(matmul)

    return change


def moved(name: str, offset: int) -> Change:
    """A matrix at ``offset`` bytes after a multiple of 256, promised 16."""

    def change(matmul: Matmul) -> None:
        array = matmul.data[name]
        assert array is not None
        copy = placed(array, offset=offset)
        matmul.data[name] = copy
        if name == "d":
            matmul.data["c"] = copy

    return change


def bias(kind: int = lt.BF16, offset: int = 0) -> Change:
    return both(desc(lt.EPILOGUE, 4), desc(lt.BIAS_TYPE, kind), pointer(lt.BIAS, offset=offset))


def apart(matmul: Matmul) -> None:
    """C somewhere else than D, with zeros."""
    d = matmul.data["d"]
    assert d is not None
    matmul.data["c"] = buffer(d.size)


# m = 136, n = 3, k = 96, bf16 out unless changed.
RULES = {
    "compute type": Rule(nothing, lambda x: setattr(x, "compute", 64), 15, "compute type 64"),
    "scale type": Rule(nothing, lambda x: setattr(x, "scale", lt.F16), 15, "scale type 2"),
    "FP4 x FP8": Rule(nothing, layout("b", type=lt.FP8), 15, "33, 28, 14, 14 are not in the"),
    "FP8 x FP4": Rule(nothing, layout("a", type=lt.FP8), 15, "28, 33, 14, 14 are not in the"),
    "C of D's type": Rule(nothing, layout("c", type=lt.F32), 15, "33, 33, 0, 14 are not in the"),
    "FP4 output": Rule(nothing, layout("d", type=lt.FP4), 15, "does not compute it"),
    "TRANSA": Rule(desc(lt.TRANSA, 1), desc(lt.TRANSA, 0), 15, "(TN); TRANSA is 0, TRANSB 0"),
    "TRANSB": Rule(desc(lt.TRANSB, 0), desc(lt.TRANSB, 1), 15, "(TN); TRANSA is 1, TRANSB 1"),
    "TRANSA left out": Rule(nothing, lambda x: x.desc.pop(lt.TRANSA), 15, "TRANSA is 0"),
    "operation": Rule(nothing, desc(lt.TRANSA, 7), 7, "TRANSA 7"),
    "TRANSC": Rule(desc(lt.TRANSC, 0), desc(lt.TRANSC, 1), 15, "TRANSC 1"),
    "fill mode": Rule(desc(lt.FILL, 2), desc(lt.FILL, 0), 15, "FILL_MODE 0"),
    "pointer mode": Rule(desc(lt.POINTER_MODE, 0), desc(lt.POINTER_MODE, 2), 15, "POINTER_MODE 2"),
    "alpha vector": Rule(nothing, desc(lt.POINTER_MODE, 4), 15, "POINTER_MODE 4"),
    "fast accumulation": Rule(
        lambda x: x.desc.update({lt.FAST_ACCUM: b"\0"}),
        lambda x: x.desc.update({lt.FAST_ACCUM: b"\7"}),
        7,
        "FAST_ACCUM is 7",
    ),
    "SM count": Rule(desc(lt.SM_COUNT, 100), desc(lt.SM_COUNT, -1), 7, "SM_COUNT_TARGET is -1"),
    "alpha stride": Rule(desc(lt.ALPHA_STRIDE, 0), desc(lt.ALPHA_STRIDE, 1), 15, "grouped matmuls"),
    "emulation": Rule(
        lambda x: x.desc.update({38: i64(0)}),
        lambda x: x.desc.update({38: i64(4096)}),
        15,
        "an emulation descriptor",
    ),
    # Scales.
    "A scale mode": Rule(nothing, desc(lt.A_MODE, 0), 7, "A has scale mode 0"),
    "B scale mode": Rule(nothing, desc(lt.B_MODE, 2), 7, "B has scale mode 2"),
    "A scale pointer": Rule(nothing, pointer(lt.A_SCALE, null=True), 7, "A has no scale pointer"),
    "B scale pointer": Rule(nothing, pointer(lt.B_SCALE, null=True), 7, "B has no scale pointer"),
    "A scale alignment": Rule(
        pointer(lt.A_SCALE, offset=16), pointer(lt.A_SCALE, offset=8), 7, "A's scale pointer"
    ),
    "B scale alignment": Rule(
        pointer(lt.B_SCALE, offset=16), pointer(lt.B_SCALE, offset=4), 7, "B's scale pointer"
    ),
    "C scale": Rule(
        pointer(lt.C_SCALE, null=True), pointer(lt.C_SCALE), 7, "C has a scale pointer"
    ),
    "D scale": Rule(
        pointer(lt.D_SCALE, null=True), pointer(lt.D_SCALE), 7, "D has a scale pointer"
    ),
    "C scale mode": Rule(desc(lt.C_MODE, 0), desc(lt.C_MODE, 1), 7, "C has scale mode 1"),
    "D scale mode": Rule(desc(lt.D_MODE, 0), desc(lt.D_MODE, 1), 7, "D has scale mode 1"),
    "D_OUT scale": Rule(nothing, pointer(lt.D_OUT_SCALE), 7, "D_OUT scales"),
    "D_OUT mode": Rule(desc(lt.D_OUT_MODE, 0), desc(lt.D_OUT_MODE, 1), 7, "D_OUT scales"),
    "amax": Rule(pointer(lt.AMAX_D, null=True), pointer(lt.AMAX_D), 7, "AMAX_D_POINTER"),
    # Shapes.
    "k of 32": Rule(layout("ab", rows=64), layout("ab", rows=80), 15, "k = 80 elements of 4 bits"),
    "m of 8": Rule(
        both(layout("a", cols=128), layout("cd", rows=128)),
        both(layout("a", cols=132), layout("cd", rows=132)),
        15,
        "m = 132 elements of 16 bits",
    ),
    "lda": Rule(layout("a", ld=128), layout("a", ld=112), 15, "A: ld = 112"),
    "ldb": Rule(layout("b", ld=128), layout("b", ld=112), 15, "B: ld = 112"),
    "ldd": Rule(layout("cd", ld=136), layout("cd", ld=140), 15, "C: ld = 140"),
    "ld below rows": Rule(layout("b", ld=96), layout("b", ld=64), 7, "B: ld 64 is below its 96"),
    "k of A and B": Rule(nothing, layout("b", rows=64), 7, "A has k = 96, B has 64"),
    "rows of D": Rule(nothing, layout("d", rows=128), 7, "D is 128 x 3, A and B give 136 x 3"),
    "columns of C": Rule(nothing, layout("c", cols=2), 7, "C is 136 x 2, A and B give 136 x 3"),
    "n = 0": Rule(
        both(layout("b", cols=1), layout("cd", cols=1)),
        both(layout("b", cols=0), layout("cd", cols=0)),
        7,
        "B is 96 x 0: an empty matrix",
    ),
    "order": Rule(
        attribute("b", 1, i32(0)), attribute("b", 1, i32(1)), 15, "B has order 1"
    ),
    "batch": Rule(attribute("a", 5, i32(1)), attribute("a", 5, i32(2)), 15, "A is a batch of 2"),
    "batch mode": Rule(
        attribute("d", 8, i32(0)), attribute("d", 8, i32(2)), 7, "has batch mode 2, A has 0"
    ),
    "int32": Rule(
        nothing,
        both(layout("b", cols=1 << 31), layout("cd", cols=1 << 31)),
        15,
        "B is 96 x 2147483648: beyond int32",
    ),
    "planar": Rule(attribute("a", 7, i64(0)), attribute("a", 7, i64(64)), 15, "A is planar"),
    # Epilogues and bias.
    "epilogue": Rule(desc(lt.EPILOGUE, 2), desc(lt.EPILOGUE, 0), 7, "EPILOGUE 0 is unknown"),
    "gelu": Rule(nothing, desc(lt.EPILOGUE, 32), 15, "EPILOGUE 32: this fake computes"),
    "bias gradient": Rule(nothing, desc(lt.EPILOGUE, 256), 15, "EPILOGUE 256: bias gradients"),
    "auxiliary": Rule(
        lambda x: x.desc.update({11: i64(0)}),
        lambda x: x.desc.update({11: i64(4096)}),
        7,
        "the epilogue has no auxiliary buffer",
    ),
    "bias type": Rule(bias(), bias(lt.F32), 15, "bias of type 0: these types take one of type 14"),
    "bias alignment": Rule(bias(offset=2), bias(offset=1), 7, "the bias pointer"),
    "bias pointer": Rule(bias(), desc(lt.EPILOGUE, 4), 7, "adds a bias: it is NULL", False),
    "bias type of fp32": Rule(
        bias(),
        both(layout("cd", type=lt.F32), desc(lt.EPILOGUE, 4), pointer(lt.BIAS)),
        15,
        "bias of type 0 (that of D, as BIAS_DATA_TYPE is not set): these types take one of type 14",
    ),
    # Preferences.
    "some algorithm fits": Rule(
        preference(lt.MAX_WORKSPACE, i64(0)),
        both(preference(lt.MAX_WORKSPACE, i64(0)), preference(9, np.float32(1e-9).tobytes())),
        15,
        "no algorithm fits",
    ),
    "alignment of A": Rule(
        preference(lt.ALIGN_A, i32(16)), preference(lt.ALIGN_A, i32(8)), 15, "alignment of A is 8"
    ),
    "alignment of D": Rule(
        preference(lt.ALIGN_D, i32(32)), preference(lt.ALIGN_D, i32(24)), 7, "alignment of D is 24"
    ),
    "reduction mask": Rule(
        preference(lt.REDUCTION_MASK, i32(0)), preference(lt.REDUCTION_MASK, i32(8)), 7, "MASK is 8"
    ),
    "search mode": Rule(preference(0, i32(0)), preference(0, i32(1)), 15, "SEARCH_MODE 1"),
    "implementations": Rule(preference(12, i64(-1)), preference(12, i64(0)), 15, "IMPL_MASK"),
    "averages": Rule(
        preference(lt.AVERAGE_K, i64(0)), preference(lt.AVERAGE_K, i64(96)), 15, "grouped averages"
    ),
    # What only cublasLtMatmul sees.
    "A": Rule(moved("a", 16), data("a", None), 7, "A is NULL", False),
    "B aligned": Rule(moved("b", 16), moved("b", 8), 7, "B (", False),
    "D aligned": Rule(moved("d", 16), moved("d", 8), 7, "C (", False),
    "promised": Rule(
        preference(lt.ALIGN_A, i32(256)),
        both(preference(lt.ALIGN_A, i32(256)), moved("a", 16)),
        7,
        "MIN_ALIGNMENT_A_BYTES",
        False,
    ),
    "default promise": Rule(
        nothing,
        both(lambda x: x.preference.pop(lt.ALIGN_B), moved("b", 16)),
        7,
        "is not aligned to 256 bytes, as the preference promised",
        False,
    ),
    "alpha": Rule(nothing, data("alpha", None), 7, "alpha or beta is NULL", False),
    "alpha aligned": Rule(
        data("alpha", buffer(4, offset=4)),
        data("alpha", buffer(4, offset=2)),
        7,
        "alpha or beta is not aligned to 4 bytes",
        False,
    ),
    "beta": Rule(nothing, data("beta", None), 7, "alpha or beta is NULL", False),
    "C": Rule(
        both(desc(lt.POINTER_MODE, 0), data("c", None)), data("c", None), 7, "C is NULL", False
    ),
    "C is D": Rule(
        both(layout("c", ld=144), apart, lambda x: x.data.update(c=buffer(4096))),
        layout("c", ld=144),
        7,
        "C is D, but their layouts differ",
        False,
    ),
    "D over A": Rule(
        nothing, lambda x: x.data.update(c=x.data["a"], d=x.data["a"]), 7, "D and A over", False
    ),
    "D over scales": Rule(
        nothing, lambda x: x.data.update(c=x.keep[1], d=x.keep[1]), 7, "D and B's scales", False
    ),
    "D over C": Rule(
        apart, lambda x: x.data.update(c=x.data["d"][16:]), 7, "D and C over", False  # type: ignore[index]
    ),
    "workspace over D": Rule(
        nothing,
        lambda x: x.data.update(c=x.data["workspace"][512:], d=x.data["workspace"][512:]),  # type: ignore[index]
        7,
        "the workspace and D overlap",
        False,
    ),
    "workspace size": Rule(
        data("workspace", buffer(65536)),
        data("workspace", buffer(65535)),
        7,
        "a workspace of 65535 bytes, the algorithm needs 65536",
        False,
    ),
    "workspace alignment": Rule(
        data("workspace", buffer(65536, offset=256)),
        data("workspace", buffer(65536, offset=128)),
        7,
        "is not aligned to 256 bytes",
        False,
    ),
    "workspace pointer": Rule(
        both(preference(lt.MAX_WORKSPACE, i64(0)), data("workspace", None)),
        both(data("workspace", None), lambda x: setattr(x, "workspace_bytes", 65536)),
        7,
        "the workspace is NULL, its size 65536",
        False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RULES)
def test_rule(fake: Lt, name: str) -> None:
    rule = RULES[name]
    good = lt_cases.small(fake)
    rule.good(good)
    assert good.run() == lt.OK, fake.reason()
    bad = lt_cases.small(fake)
    rule.bad(bad)
    asked = bad.heuristic()[0]
    status = bad.run()
    assert status == rule.status, fake.reason()
    assert rule.words in fake.reason()
    assert asked == (status if rule.heuristic else lt.OK)
    call = "cublasLtMatmulAlgoGetHeuristic" if rule.heuristic else "cublasLtMatmul"
    assert fake.reason().startswith(f"{call}: {status} ")


def test_alignment_whatever_was_promised(fake: Lt) -> None:
    """No algorithm means no promise: FP4 needs 16 bytes all the same."""
    for name in "abd":
        for offset, status in ((16, lt.OK), (8, lt.INVALID)):
            matmul = lt_cases.small(fake)
            moved(name, offset)(matmul)
            assert matmul.matmul(matmul.make(), None) == status, fake.reason()
    assert "is not aligned to 16 bytes" in fake.reason()


def test_m_of_4_for_fp32(fake: Lt) -> None:
    rng = cases.generator(1)
    rows = cases.exact_operand(rng, (2, 32))
    for m, d_type, status in ((12, lt.F32, 0), (12, lt.BF16, 15), (10, lt.F32, 15), (8, lt.F16, 0)):
        weight = cases.exact_operand(rng, (m, 32))
        assert lt_cases.nvfp4(fake, weight, rows, d_type=d_type).run() == status, fake.reason()


@pytest.mark.parametrize("n", [1, 2, 3, 7, 129])
def test_any_number_of_rows(fake: Lt, n: int) -> None:
    assert lt_cases.small(fake, n=n).run() == lt.OK


def test_plain_operands_take_no_scales(fake: Lt) -> None:
    weight, rows = torch.ones(8, 16).bfloat16(), torch.ones(3, 16).bfloat16()
    matmul = lt_cases.plain(fake, weight, rows)
    assert matmul.run() == lt.OK
    matmul.point(lt.A_SCALE, buffer(512))
    assert matmul.run() == lt.INVALID
    assert "A is not narrow and takes no scales" in fake.reason()
    other = lt_cases.plain(fake, weight, rows)
    other.desc[lt.B_MODE] = i32(1)
    assert other.run() == lt.INVALID


def test_odd_shapes_of_plain_operands(fake: Lt) -> None:
    """bf16 is bound to its elements only, given the alignment that the preference promises."""
    weight, rows = torch.ones(7, 5).bfloat16(), torch.ones(3, 5).bfloat16()
    matmul = lt_cases.plain(fake, weight, rows)
    moved("a", 2)(matmul)
    assert matmul.run() == lt.INVALID
    assert "as the preference promised" in fake.reason()
    matmul.preference[lt.ALIGN_A] = i32(2)
    assert matmul.run() == lt.OK
    matmul.preference[lt.ALIGN_A] = i32(1)
    assert matmul.run() == lt.UNSUPPORTED
