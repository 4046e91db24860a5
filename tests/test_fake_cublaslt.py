# SPDX-License-Identifier: Apache-2.0
"""The fake libcublasLt computes what the numbers say, and reports bad data."""

from __future__ import annotations

import ctypes
import itertools
import subprocess
from pathlib import Path

import lt_cases
import lt_driver as lt
import native_libraries
import numpy as np
import pytest
import torch
from lt_driver import Lt, i32, i64, placed

from fp4lt.testing import bounds, cases, oracle

if native_libraries.cxx() is None:
    pytest.skip("no C++ compiler on this machine", allow_module_level=True)


@pytest.fixture(scope="module")
def fake() -> Lt:
    return Lt(native_libraries.fake_cublaslt())


@pytest.fixture(autouse=True)
def clean(fake: Lt) -> None:
    fake.check()
    fake.lib.fake_forget_reason()


@pytest.mark.parametrize("d_type", [lt.BF16, lt.F16, lt.F32])
@pytest.mark.parametrize(
    ("m", "n", "k"), [(8, 1, 32), (136, 3, 96), (128, 128, 64), (264, 130, 160), (8, 2, 7168)]
)
def test_exact_products(fake: Lt, m: int, n: int, k: int, d_type: int) -> None:
    rng = cases.generator(m * n * k)
    weight, rows = cases.exact_operand(rng, (m, k)), cases.exact_operand(rng, (n, k))
    matmul = lt_cases.nvfp4(fake, weight, rows, d_type=d_type, alpha=0.5)
    assert matmul.run() == lt.OK, fake.reason()
    expected = oracle.product(
        oracle.Operand(lt_cases.products(rows), np.float32(1), nvfp4=True),
        oracle.Operand(lt_cases.products(weight), np.float32(1), nvfp4=True),
        alpha=0.5,
    )
    got = torch.from_numpy(lt_cases.result(matmul)).to(lt_cases.DTYPES[d_type])
    expected.check_exact(got)
    assert fake.check() == lt.OK


@pytest.mark.parametrize("d_type", [lt.BF16, lt.F16, lt.F32])
def test_any_scale_rounded_once(fake: Lt, d_type: int) -> None:
    """The exact sum of any codes and scales, rounded once to the type."""
    rng = cases.generator(5)
    weight, rows = cases.random_operand(rng, (40, 256)), cases.random_operand(rng, (7, 256))
    matmul = lt_cases.nvfp4(fake, weight, rows, d_type=d_type, alpha=2.0**-9)
    assert matmul.run() == lt.OK, fake.reason()
    exact = oracle.exact_sum(lt_cases.products(rows), lt_cases.products(weight), nvfp4=True)
    want = bounds.round_to(exact.c * 2.0**-9, lt_cases.DTYPES[d_type])
    bounds.assert_bitwise(lt_cases.result(matmul), want, signed_zeros=False)


@pytest.mark.parametrize(
    ("d_type", "small_code", "want"), [(lt.BF16, (4, 2), 516.0), (lt.F16, (1, 1), 512.5)]
)
def test_not_rounded_to_fp32_first(
    fake: Lt, d_type: int, small_code: tuple[int, int], want: float
) -> None:
    """2^-20 above a tie of the type, and below the last bit of fp32."""
    sides = []
    for codes, scales in (
        ((1, 6, small_code[0]), (0x01, 0x68, 0x38)),  # 0.5 2^-9, 4 64 and 2 or 0.5
        ((1, 4, small_code[1]), (0x01, 0x38, 0x38)),  # 0.5 2^-9, 2 and 1 or 0.5
    ):
        code = np.zeros((8, 64), np.uint8)
        code[:, [0, 16, 32]] = codes
        scale = np.tile(np.array([*scales, 0], np.uint8), (8, 1))
        linear = torch.from_numpy(scale).view(torch.float8_e4m3fn)
        sides.append(cases.Linear(torch.from_numpy(oracle.pack(code)), linear, torch.ones(())))
    matmul = lt_cases.nvfp4(fake, *sides, d_type=d_type)
    assert matmul.run() == lt.OK, fake.reason()
    assert (lt_cases.result(matmul) == want).all()


def test_every_code_and_scale(fake: Lt) -> None:
    """All 16 codes under all 127 scales, against rows of a single one."""
    table = cases.all_products_operand()
    codes = np.pad(table.codes.numpy(), ((0, 1), (0, 8)))
    scales = np.pad(table.scales.view(torch.uint8).numpy(), ((0, 1), (0, 1)))
    scale_bytes = torch.from_numpy(scales).view(torch.float8_e4m3fn)
    weight = cases.Linear(torch.from_numpy(codes), scale_bytes, torch.ones(()))
    one = oracle.pack(2 * np.eye(16, 32, dtype=np.uint8))
    ones = torch.from_numpy(np.full((16, 2), 0x38, np.uint8)).view(torch.float8_e4m3fn)
    rows = cases.Linear(torch.from_numpy(one), ones, torch.ones(()))
    matmul = lt_cases.nvfp4(fake, weight, rows, d_type=lt.F32)
    assert matmul.run() == lt.OK, fake.reason()
    want = oracle.E2M1_TABLE[:, None] * oracle.E4M3_TABLE[:127]
    bounds.assert_bitwise(lt_cases.result(matmul)[:, :127], want, signed_zeros=False)


def test_nan_scale_stays_in_its_row(fake: Lt) -> None:
    matmul = lt_cases.small(fake)
    scales = matmul.keep[1]
    scales[oracle.tile_offset(1, 2, 8)] = 0x7F
    assert matmul.run() == lt.OK, fake.reason()
    y = lt_cases.result(matmul)
    assert np.isnan(y[1]).all()
    assert np.isfinite(y[[0, 2]]).all()
    assert fake.check() == lt.OK


@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("choice", [0, 1, 2])
@pytest.mark.parametrize("pad", [0, 1])
def test_c_bias_and_ld(fake: Lt, mode: int, choice: int, pad: int) -> None:
    """beta, a bias and rows with gaps, by each algorithm, scalars on the host or on the device."""
    rng = cases.generator(11)
    weight, rows = cases.exact_operand(rng, (32, 96)), cases.exact_operand(rng, (5, 96))
    c = rng.integers(-64, 64, (5, 32)).astype(np.float64)
    bias = rng.integers(-9, 9, 32).astype(np.float32)
    matmul = lt_cases.nvfp4(fake, weight, rows, d_type=lt.F32, alpha=0.25, beta=2.0, c=c, pad=pad)
    matmul.desc |= {lt.POINTER_MODE: i32(mode), lt.EPILOGUE: i32(4), lt.BIAS_TYPE: i32(lt.BF16)}
    matmul.point(lt.BIAS, placed(torch.from_numpy(bias).bfloat16().view(torch.uint8).numpy()))
    matmul.choice = choice
    assert matmul.run() == lt.OK, fake.reason()
    want = 0.25 * (lt_cases.products(rows) @ lt_cases.products(weight).T) + 2 * c + bias
    bounds.assert_bitwise(lt_cases.result(matmul), want, signed_zeros=False)
    matmul.desc[lt.EPILOGUE] = i32(6)  # RELU_BIAS, on top of what D now holds
    assert matmul.run() == lt.OK, fake.reason()
    again = np.maximum(0.0, want + 2 * want - 2 * c)
    bounds.assert_bitwise(lt_cases.result(matmul), again, signed_zeros=False)


def test_c_is_not_read_when_beta_is_zero(fake: Lt) -> None:
    matmul = lt_cases.small(fake)  # D, which is C, is full of NaN
    assert matmul.run() == lt.OK
    assert np.isfinite(lt_cases.result(matmul)).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("ops", list(itertools.product([0, 1], [0, 1])))
def test_plain_operands(fake: Lt, dtype: torch.dtype, ops: tuple[int, int]) -> None:
    rng = cases.generator(3)
    weight = cases.exact_matrix(rng, (24, 40), dtype)
    rows = cases.exact_matrix(rng, (5, 40), dtype)
    matmul = lt_cases.plain(fake, weight, rows, d_type=lt.F32)
    if ops[0] == 0:
        matmul.a = lt.Layout(matmul.a.type, 24, 40, 24)
        matmul.data["a"] = placed(weight.T.contiguous().view(torch.uint8).numpy())
    if ops[1] == 1:
        matmul.b = lt.Layout(matmul.b.type, 5, 40, 5)
        matmul.data["b"] = placed(rows.T.contiguous().view(torch.uint8).numpy())
    matmul.desc |= {lt.TRANSA: i32(ops[0]), lt.TRANSB: i32(ops[1])}
    assert matmul.run() == lt.OK, fake.reason()
    want = bounds.to_float64(rows) @ bounds.to_float64(weight).T
    bounds.assert_bitwise(lt_cases.result(matmul), want, signed_zeros=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [float("inf"), float("nan"), 2.0**-14, -3 * 2.0**-24])
def test_special_values(fake: Lt, dtype: torch.dtype, value: float) -> None:
    weight, rows = torch.zeros(8, 16, dtype=dtype), torch.ones(2, 16, dtype=dtype)
    weight[3, 5] = value
    for d_type, out in ((lt.F32, torch.float32), (matmul_type(dtype), dtype)):
        matmul = lt_cases.plain(fake, weight, rows, d_type=d_type)
        assert matmul.run() == lt.OK, fake.reason()
        want = np.zeros((2, 8))
        want[:, 3] = bounds.round_to(bounds.to_float64(weight[3, 5]), out)
        bounds.assert_bitwise(lt_cases.result(matmul), want)


def matmul_type(dtype: torch.dtype) -> int:
    return lt.BF16 if dtype == torch.bfloat16 else lt.F16


@pytest.mark.parametrize("counts", list(cases.GROUPS.values()), ids=list(cases.GROUPS))
@pytest.mark.parametrize("wide", [False, True])
def test_groups(fake: Lt, counts: tuple[int, ...], wide: bool) -> None:
    """Empty and ragged groups, sizes of either width, an alpha for each."""
    matmul, experts = lt_cases.grouped(fake, counts, wide=wide)
    assert matmul.run() == lt.OK, fake.reason()
    assert fake.check() == lt.OK, fake.reason()
    for group in experts:
        exact = lt_cases.products(group.rows) @ lt_cases.products(group.weight).T
        want = bounds.round_to(group.alpha * exact, torch.bfloat16)
        bounds.assert_bitwise(lt_cases.group_result(group, 64), want, signed_zeros=False)


@pytest.mark.parametrize("shared", [False, True])
def test_groups_of_depth_zero_and_shared_alpha(fake: Lt, shared: bool) -> None:
    """k = 0 gives beta C and the bias; alpha may be one for all."""
    matmul, experts = lt_cases.grouped(fake, (2, 3), d_type=lt.F32)
    for group in experts:
        group.out.view(np.float32)[:] = 1.5
    biases = [placed(np.full(64, 0x4000 + 128 * i, np.uint16)) for i in range(2)]  # 2 and 4
    matmul.point(lt.BIAS, placed(np.array([b.ctypes.data for b in biases], np.uint64)))
    matmul.desc |= {
        lt.EPILOGUE: i32(4), lt.BIAS_STRIDE: i64(1), lt.BIAS_TYPE: i32(lt.BF16)
    }  # fmt: skip
    matmul.data["beta"] = lt_cases.scalar(2.0)
    if shared:
        matmul.desc[lt.ALPHA_STRIDE] = i64(0)
        matmul.data["alpha"] = lt_cases.scalar(4.0)
    assert matmul.a.arrays is not None
    matmul.a.arrays[0].view(np.int32)[1] = 0  # k of the second, for A and B and their ld
    assert matmul.run() == lt.OK, fake.reason()
    assert fake.check() == lt.OK, fake.reason()
    first = lt_cases.products(experts[0].rows) @ lt_cases.products(experts[0].weight).T
    want = (4.0 if shared else 1.0) * first + 3.0 + 2.0
    bounds.assert_bitwise(lt_cases.group_result(experts[0], 64, lt.F32), want, signed_zeros=False)
    assert (lt_cases.group_result(experts[1], 64, lt.F32) == 3.0 + 4.0).all()


# Data that only a kernel can see.


@pytest.mark.parametrize(
    ("operand", "place", "byte", "words"),
    [
        (0, (136, 0), 0x38, "1 bytes of A's scale padding"),
        (0, (0, 6), 0x38, "1 bytes of A's scale padding"),
        (1, (3, 0), 0x01, "1 bytes of B's scale padding"),
        (1, (127, 7), 0x80, "1 bytes of B's scale padding"),
        (0, (135, 5), 0x80, "1 signed scale bytes .* of A"),
        (1, (2, 5), 0xFF, "1 signed scale bytes .* of B"),
    ],
)
def test_bad_scale_bytes_are_told(
    fake: Lt, operand: int, place: tuple[int, int], byte: int, words: str
) -> None:
    matmul = lt_cases.small(fake)
    matmul.keep[operand][oracle.tile_offset(*place, 8)] = byte
    assert matmul.run() == lt.OK
    assert fake.check() == lt.FAILED
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(fake.reason())
    assert fake.check() == lt.OK  # told once


def test_the_next_matmul_tells_too(fake: Lt) -> None:
    matmul = lt_cases.small(fake)
    matmul.keep[0][oracle.tile_offset(200, 0, 8)] = 1
    assert matmul.run() == lt.OK
    assert lt_cases.small(fake).run() == lt.FAILED
    assert "A's scale padding" in fake.reason()


@pytest.mark.parametrize("what", ["k", "n", "ld", "negative", "odd m", "pointer", "null"])
def test_bad_groups_are_told_and_not_computed(fake: Lt, what: str) -> None:
    matmul, experts = lt_cases.grouped(fake, (2, 0, 3))
    arrays = {name: getattr(matmul, name).arrays for name in "abd"}
    if what == "k":
        matmul.b.arrays = (placed(np.array([96, 96, 64], np.int32)), *arrays["b"][1:])
    elif what == "n":
        matmul.d.arrays = (arrays["d"][0], placed(np.array([2, 0, 4], np.int32)), arrays["d"][2])
    elif what == "ld":
        matmul.a.arrays = (*arrays["a"][:2], placed(np.array([96, 96, 80], np.int32)))
    elif what == "negative":
        arrays["b"][1].view(np.int32)[2] = -1
    elif what == "odd m":
        matmul.d.arrays = (*arrays["d"][:2], arrays["d"][2].copy())
        arrays["d"][0].view(np.int32)[2] = 60  # columns of A too, ld of D no more
    else:
        pointers = matmul.data["b"]
        assert pointers is not None
        pointers.view(np.uint64)[2] = 0 if what == "null" else pointers.view(np.uint64)[2] + 8
    assert matmul.run() == lt.OK, fake.reason()
    assert fake.check() == lt.FAILED
    word = "pointer" if what in ("pointer", "null") else "sizes disagree"
    assert f"1 groups {'with a' if word == 'pointer' else 'whose'} {word}" in fake.reason()
    assert (experts[2].out == 0xFF).all()
    assert not (experts[0].out == 0xFF).all()


# What it is.


def test_declarations_match_the_real_header(tmp_path: Path) -> None:
    includes = native_libraries.cublas_includes()
    if not includes:
        pytest.skip("no cublasLt.h here: install nvidia-cublas-cu12 or nvidia-cublas")
    source = native_libraries.TESTS / "fake_cublaslt" / "abi_check.cpp"
    command = [str(native_libraries.cxx()), "-std=c++17", "-fsyntax-only", str(source)]
    for folders in includes:
        flags = [f"-I{folder}" for folder in folders]
        done = subprocess.run([*command, *flags], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


def test_version_is_what_it_poses_as(fake: Lt, monkeypatch: pytest.MonkeyPatch) -> None:
    assert fake.version() == 130602
    monkeypatch.setenv("FAKE_CUBLASLT_VERSION", "120804")
    assert fake.version() == 120804
    value = ctypes.c_int()
    parts = [fake.call("GetProperty", i, ctypes.byref(value)) or value.value for i in range(3)]
    assert parts == [12, 8, 4]
    assert fake.lib.cublasLtGetStatusName(15) == b"CUBLAS_STATUS_NOT_SUPPORTED"


def test_log(fake: Lt, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    log = tmp_path / "log"
    monkeypatch.setenv("FAKE_CUBLASLT_LOG", str(log))
    assert fake.reason() == ""
    matmul = lt_cases.small(fake)
    assert matmul.run() == lt.OK
    assert not log.exists()
    matmul.desc[lt.TRANSA] = i32(0)
    assert matmul.run() == lt.UNSUPPORTED
    line = log.read_text()
    assert line.startswith("cublasLtMatmulAlgoGetHeuristic: 15 CUBLAS_STATUS_NOT_SUPPORTED: FP4")
    assert line == fake.reason() + "\n"


def test_symbols_of_older_libraries() -> None:
    old = ctypes.CDLL(str(native_libraries.fake_cublaslt(grouped=False)))
    assert not hasattr(old, "cublasLtGroupedMatrixLayoutCreate")
    assert hasattr(old, "cublasLtMatmul")


@pytest.mark.slow
def test_cuda_build_compiles() -> None:
    if native_libraries.nvcc() is None:
        pytest.skip("no nvcc on this machine")
    library = ctypes.CDLL(str(native_libraries.fake_cublaslt(cuda=True)))
    assert library.fake_matmuls() == 0
