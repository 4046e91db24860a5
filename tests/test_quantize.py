# SPDX-License-Identifier: Apache-2.0
"""The codec against public libraries' bytes, against the oracle, and against its own definition."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import DATA
from hypothesis import given, strategies as st

import fp4lt
from fp4lt import errors
from fp4lt.layout import padded_scale_shape, untile_scales
from fp4lt.testing import oracle_codec as oracle

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
VECTORS = sorted((DATA / "vectors" / "quantize").glob("*.npz"))
SHAPES = [(1, 16), (3, 80), (127, 32), (128, 64), (129, 48), (5, 1040)]


def codes_of(t: fp4lt.NVFP4Tensor) -> np.ndarray[Any, Any]:
    return oracle.unpack(t.codes.numpy())


def scales_of(t: fp4lt.NVFP4Tensor) -> np.ndarray[Any, Any]:
    rows, blocks = t.codes.shape[-2], t.codes.shape[-1] // 8
    return np.asarray(untile_scales(t.scales.view(torch.uint8), rows, blocks).numpy())


def check(t: fp4lt.NVFP4Tensor, want: oracle.Quantized) -> None:
    np.testing.assert_array_equal(scales_of(t), want.scales)
    np.testing.assert_array_equal(codes_of(t), want.codes)
    np.testing.assert_array_equal(t.global_scale.numpy(), want.global_scale)


def vector_cases(path: Path) -> Iterator[tuple[str, torch.Tensor, dict[str, Any]]]:
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    dtype = DTYPES[path.stem.rsplit("_", 1)[1]]
    for key in sorted({name.split(".")[0] for name in arrays}):
        parts = {n.split(".")[1]: a for n, a in arrays.items() if n.startswith(key + ".")}
        yield key, torch.from_numpy(parts["input_bits"].copy()).view(dtype), parts


@pytest.mark.parametrize("path", VECTORS, ids=lambda p: p.stem)
def test_bytes_of_public_libraries(path: Path, kernel_table: str) -> None:
    """Identical wherever the libraries agree, given the global scale each of them used."""
    compared = 0
    for key, x, parts in vector_cases(path):
        for i, library in enumerate(str(parts["libs"]).split(",")):
            g = float(parts["gdec"][i])
            if not (np.isfinite(g) and g > 0):
                continue  # a library's own zero, infinite or NaN scale; ours is never one
            t = fp4lt.quantize(x, global_scale=g)
            where = f"{key} {library}"
            mask = parts["agree_scales"]
            want = parts["scales"][i][mask]
            np.testing.assert_array_equal(scales_of(t)[mask], want, where)
            mask = parts["agree_codes"]
            want = oracle.unpack(parts["packed"][i])[mask]
            np.testing.assert_array_equal(codes_of(t)[mask], want, where)
            compared += 1
    # An all-zero input leaves only the libraries that do not divide by zero.
    assert compared > 0


@pytest.mark.parametrize("path", VECTORS, ids=lambda p: p.stem)
def test_bytes_where_libraries_differ(path: Path, kernel_table: str) -> None:
    """The definition decides; the oracle is its independent statement."""
    for _, x, _ in vector_cases(path):
        wide = x.float().numpy()
        check(fp4lt.quantize(x), oracle.quantize(wide, oracle.derive_global(wide)))
        rows = oracle.derive_global(wide, per="row")
        check(fp4lt.quantize(x, global_scale="row"), oracle.quantize(wide, rows))


@pytest.mark.parametrize("name", ["normal_fp32", "normal_bf16", "normal_fp16"])
def test_tiles_and_values_of_public_libraries(name: str, kernel_table: str) -> None:
    for _, x, parts in vector_cases(DATA / "vectors" / "quantize" / f"{name}.npz"):
        if not (parts["agree_scales"].all() and parts["agree_codes"].all()):
            continue
        t = fp4lt.quantize(x, global_scale=float(parts["gdec"][0]))
        tiled = t.scales.view(torch.uint8).numpy().reshape(-1)
        np.testing.assert_array_equal(tiled, parts["swizzled0"].reshape(-1))
        np.testing.assert_array_equal(t.dequantize().numpy(), parts["dequant0"])


def special_values(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray[Any, Any]:
    """Random bit patterns: every exponent, denormals, infinities and NaNs; and tidy blocks."""
    bits = rng.integers(0, 2**32, shape, np.uint64).astype(np.uint32)
    x: np.ndarray[Any, Any] = bits.view(np.float32).copy()
    ties = rng.choice([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, -0.0, 0.0], shape)
    x[::3] = ties[::3].astype(np.float32)
    return x


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
@pytest.mark.parametrize("g", [None, "row", 1.0, 2.0**-130, 1e-3, 3e38], ids=str)
def test_any_bits(
    shape: tuple[int, int], dtype: torch.dtype, g: float | str | None, kernel_table: str
) -> None:
    x = torch.from_numpy(special_values(np.random.default_rng(shape[1]), shape)).to(dtype)
    wide = x.float().numpy()
    t = fp4lt.quantize(x, global_scale=g)  # type: ignore[arg-type]
    if g is None or g == "row":
        scale = oracle.derive_global(wide, per="row" if g else "tensor")
    else:
        scale = np.asarray(g, np.float32)
    check(t, oracle.quantize(wide, scale))
    with np.errstate(invalid="ignore"):
        want = oracle.dequantize(oracle.quantize(wide, scale))
    np.testing.assert_array_equal(t.dequantize().numpy(), want)


def test_every_e2m1_boundary(kernel_table: str) -> None:
    """Each midpoint between codes, and the floats next to it, in a block whose scale is 1."""
    mids = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], np.float32)
    around = np.concatenate([np.nextafter(mids, 0), mids, np.nextafter(mids, np.float32(9))])
    for sign in (1, -1):
        for value in around * sign:
            x = np.full((1, 16), 6.0, np.float32)
            x[0, 5] = value
            t = fp4lt.quantize(torch.from_numpy(x), global_scale=1.0)
            assert int(codes_of(t)[0, 5]) == int(oracle.encode_e2m1(value))


def test_every_e4m3_boundary(kernel_table: str) -> None:
    """Each midpoint between neighbouring scales, and the floats next to it."""
    values = oracle.decode_e4m3(np.arange(0x7F, dtype=np.uint8))
    mids = ((values[1:] + values[:-1]) / 2).astype(np.float32)
    targets = np.concatenate([mids, np.nextafter(mids, 0), np.nextafter(mids, np.float32(1e9))])
    # The block's amax is six times the wanted scale; times 6 and over 6 are both exact or rounded
    # alike in the oracle, which follows the same operations.
    x = np.zeros((len(targets), 16), np.float32)
    x[:, 3] = targets * np.float32(6)
    t = fp4lt.quantize(torch.from_numpy(x), global_scale=1.0)
    check(t, oracle.quantize(x, np.float32(1)))
    assert len(np.unique(scales_of(t))) == 0x7F


def test_stack_derives_one_scale_per_expert(kernel_table: str) -> None:
    x = torch.randn(5, 40, 96) * torch.tensor([1.0, 1e-3, 0.0, 50.0, 1e6]).reshape(5, 1, 1)
    t = fp4lt.quantize(x)
    assert t.shape == (5, 40, 96)
    assert t.global_scale.shape == (5,)
    assert t.global_scale[2] == 1.0
    for e in range(5):
        alone = fp4lt.quantize(x[e])
        assert torch.equal(t[e].codes, alone.codes)
        assert torch.equal(t[e].scales.view(torch.uint8), alone.scales.view(torch.uint8))
        assert t.global_scale[e] == alone.global_scale
    given_scale = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    t = fp4lt.quantize(x, global_scale=given_scale)
    for e in range(5):
        check(t[e], oracle.quantize(x[e].numpy(), given_scale[e].numpy()))


def test_padding_is_zero(kernel_table: str) -> None:
    for rows, k in [(1, 16), (100, 80), (129, 144)]:
        t = fp4lt.quantize(torch.full((rows, k), 5.0))
        shape = padded_scale_shape(rows, k)
        assert tuple(t.scales.shape) == shape
        real = np.zeros(shape[0] * shape[1], bool)
        row, block = np.meshgrid(np.arange(rows), np.arange(k // 16), indexing="ij")
        real[oracle.tile_offset(row, block, k // 16).reshape(-1)] = True
        flat = t.scales.view(torch.uint8).numpy().reshape(-1)
        assert (flat[real] != 0).all()
        assert (flat[~real] == 0).all()


def test_nan_and_infinity_stay_in_their_block(kernel_table: str) -> None:
    x = torch.randn(4, 64)
    clean = fp4lt.quantize(x, global_scale="row")
    x[1, 20] = float("nan")
    x[2, 40] = float("-inf")
    t = fp4lt.quantize(x, global_scale="row")
    assert torch.equal(t.codes[[0, 3]], clean.codes[[0, 3]])
    scales = scales_of(t)
    assert scales[1, 1] == 0x7F
    assert scales[2, 2] == 0x7E
    assert codes_of(t)[2, 40] == 15
    assert (scales != 0x7F).sum() == scales.size - 1
    values = t.dequantize()
    assert bool(values[1, 16:32].isnan().all())
    assert int(values.isnan().sum()) == 16


def test_zeros_stay_zero(kernel_table: str) -> None:
    x = torch.zeros(2, 32)
    x[0, 1] = -0.0
    t = fp4lt.quantize(x)
    assert t.global_scale == 1
    assert not scales_of(t).any()
    assert codes_of(t)[0, 1] == 8
    assert torch.equal(t.dequantize(), torch.zeros(2, 32))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_dequantize_rounds_once(dtype: torch.dtype, kernel_table: str) -> None:
    x = torch.randn(130, 272)
    t = fp4lt.quantize(x, global_scale="row")
    wide = t.dequantize()
    assert torch.equal(t.dequantize(dtype), wide.to(dtype))
    assert torch.equal(fp4lt.dequantize(t.mT, dtype), wide.to(dtype).mT)


def test_denormals_count_although_the_thread_flushes_them(kernel_table: str) -> None:
    x = torch.randn(4, 64) * 1e-37
    want = fp4lt.quantize(x, global_scale=2.0**-126)
    assert want.dequantize().count_nonzero() > 0
    if not torch.set_flush_denormal(True):
        pytest.skip("torch cannot flush denormals on this processor")
    try:
        t = fp4lt.quantize(x, global_scale=2.0**-126)
        values = t.dequantize()
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(t.codes, want.codes)
    assert torch.equal(values, want.dequantize())


@pytest.mark.usefixtures("two_threads")
def test_bytes_do_not_depend_on_threads(kernel_table: str) -> None:
    x = torch.randn(3, 300, 256, dtype=torch.bfloat16)
    many = fp4lt.quantize(x)
    torch.set_num_threads(1)
    one = fp4lt.quantize(x)
    assert torch.equal(many.codes, one.codes)
    assert torch.equal(many.scales.view(torch.uint8), one.scales.view(torch.uint8))
    assert torch.equal(many.global_scale, one.global_scale)


def test_strided_rows_are_honoured() -> None:
    x = torch.randn(6, 20, 64)
    for view in (x[::2], x[:, 3:17:2], x[:, :, 16:48], x[1, ::3]):
        t, want = fp4lt.quantize(view), fp4lt.quantize(view.contiguous())
        assert torch.equal(t.codes, want.codes)
        assert torch.equal(t.scales.view(torch.uint8), want.scales.view(torch.uint8))


@given(rows=st.integers(0, 140), blocks=st.integers(1, 9), seed=st.integers(0, 2**16))
def test_any_shape(rows: int, blocks: int, seed: int) -> None:
    x = special_values(np.random.default_rng(seed), (rows, blocks * 16))
    check(fp4lt.quantize(torch.from_numpy(x)), oracle.quantize(x, oracle.derive_global(x)))


@pytest.mark.parametrize(
    ("x", "g", "error", "words"),
    [
        (torch.randn(4, 24), None, errors.ShapeError, "K=24"),
        (torch.randn(4, 0), None, errors.ShapeError, "K=0"),
        (torch.randn(16), None, errors.ShapeError, r"\(16,\)"),
        (torch.randn(4, 16).double(), None, errors.DTypeError, "float64"),
        (torch.randn(16, 4).T, None, errors.LayoutError, r"strides \(1, 4\)"),
        (torch.randn(4, 16), 0.0, errors.ArgumentError, "is 0.0"),
        (torch.randn(4, 16), float("nan"), errors.ArgumentError, "nan"),
        (torch.randn(4, 16), torch.ones(3), errors.ShapeError, r"\(3,\)"),
        (torch.randn(2, 4, 16), torch.ones(4), errors.ShapeError, r"\(4,\)"),
        (torch.randn(4, 16), torch.tensor([1.0, -1, 1, 1]), errors.ArgumentError, r"\[1\] is -1"),
        (torch.randn(4, 16), torch.ones(4).double(), errors.DTypeError, "float64"),
        (torch.randn(2, 4, 16), "row", errors.ShapeError, "2-D"),
        (torch.randn(4, 16), "tensor", errors.ArgumentError, "'tensor'"),
        (torch.randn(4, 16, requires_grad=True), None, errors.ArgumentError, "requires grad"),
        (torch.empty(4, 16, device="meta"), None, errors.DeviceError, "meta"),
    ],
)
def test_bad_input(x: torch.Tensor, g: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        fp4lt.quantize(x, global_scale=g)


def test_dequantize_refuses_other_dtypes() -> None:
    with pytest.raises(errors.ArgumentError, match="float64"):
        fp4lt.quantize(torch.randn(4, 16)).dequantize(torch.float64)


def test_zeros_keep_their_sign_where_scale_times_global_underflows(kernel_table: str) -> None:
    """0 / 0 is a NaN whose sign is the processor's; the code's sign is the value's."""
    x = torch.zeros(1, 16)
    x[0, 0], x[0, 1] = 3 * 2.0**-149, -0.0
    t = fp4lt.quantize(x, global_scale=2.0**-149)
    assert codes_of(t)[0].tolist() == [7, 8, *[0] * 14]


@pytest.mark.parametrize("x", [[1.0], None, np.zeros((2, 16))], ids=["list", "none", "array"])
def test_what_is_no_tensor(x: Any) -> None:
    with pytest.raises(errors.ArgumentError, match=r"torch\.Tensor is needed"):
        fp4lt.quantize(x)
    with pytest.raises(errors.ArgumentError, match="NVFP4Tensor is needed"):
        fp4lt.dequantize(x)
