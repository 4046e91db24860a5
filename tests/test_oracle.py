# SPDX-License-Identifier: Apache-2.0
"""The oracle that judges every backend is judged here: by fractions, torch and published bits."""

from __future__ import annotations

import itertools
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fp4lt.testing import bounds, cases, oracle

VECTORS = Path(__file__).parent / "data" / "vectors"
QUANTIZE = sorted((VECTORS / "quantize").glob("*.npz"))
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
FLT_MAX = np.finfo(np.float32).max


# ---- tables and roundings


def test_e2m1_table() -> None:
    bounds.assert_bitwise(oracle.E2M1_TABLE, E2M1 + [-v for v in E2M1])


def test_e4m3_table_is_torchs() -> None:
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float32)
    bounds.assert_bitwise(oracle.E4M3_TABLE, every)
    assert np.isnan(oracle.E4M3_TABLE).sum() == 2


def nearest(x: np.float32, values: list[float]) -> int:
    """Index of the nearest value, in exact integers; of two, the even index."""
    unit = Fraction(1, 1 << 160)
    exact = int(Fraction(float(x)) / unit)
    distance = [abs(exact - int(Fraction(v) / unit)) for v in values]
    best = [i for i, d in enumerate(distance) if d == min(distance)]
    return next(i for i in best if i % 2 == 0) if len(best) == 2 else best[0]


def probes(values: list[float], rng: np.random.Generator) -> Any:
    """Every value, every tie, their fp32 neighbours, and random numbers in and past the range."""
    ties = [(a + b) / 2 for a, b in itertools.pairwise(values)]
    centres = np.array([*values, *ties, values[-1] * 1.04, values[-1] * 2], np.float32)
    around = [np.nextafter(centres, np.float32(s), dtype=np.float32) for s in (-1, np.inf)]
    spread = np.exp2(rng.uniform(np.log2(values[1]) - 3, np.log2(values[-1]) + 1, 300))
    return np.abs(np.concatenate([centres, *around, spread.astype(np.float32)]))


@pytest.mark.parametrize(
    ("encode", "values"),
    [
        (oracle.encode_e2m1, E2M1),
        (oracle.encode_e4m3, oracle.E4M3_TABLE[:0x7F].tolist()),
    ],
    ids=["e2m1", "e4m3"],
)
def test_rounding_is_to_the_nearest_and_ties_to_even(encode: Any, values: list[float]) -> None:
    x = probes(values, cases.generator(1))
    want = np.array([nearest(v, values) for v in x], np.uint8)
    bounds.assert_bitwise(encode(x), want)
    sign = 8 if len(values) == 8 else 0x80
    bounds.assert_bitwise(encode(-x), want | sign)
    top = len(values) - 1
    assert encode([np.inf, -np.inf, FLT_MAX]).tolist() == [top, top | sign, top]


def test_nan_has_a_scale_but_no_code() -> None:
    assert oracle.encode_e4m3([np.nan, -np.nan]).tolist() == [0x7F, 0x7F]
    with pytest.raises(ValueError, match="no code for NaN"):
        oracle.encode_e2m1([1.0, np.nan])
    with pytest.raises(ValueError, match="0x80"):
        oracle.decode_e4m3([0x38, 0x80])


# ---- quantizing: published bits


def widen(bits: Any, kind: str) -> Any:
    if kind == "bf16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return bits.view(np.float16).astype(np.float32) if kind == "fp16" else bits.view(np.float32)


def quantize_cases(needs: str = "libs") -> list[Any]:
    """Files and shape keys; with "exact" or "dequant0", where that is stated for a usable g."""
    found = []
    for path in QUANTIZE:
        with np.load(path) as data:
            for shape in sorted({key.split(".")[0] for key in data.files}):
                libs = str(data[f"{shape}.libs"]).split(",")
                lib = needs if needs == "exact" else libs[0]
                g = data[f"{shape}.gdec"][libs.index(lib)] if lib in libs else 0.0
                if needs == "libs" or (np.isfinite(g) and g > 0):
                    found.append(pytest.param(path, shape, id=f"{path.stem}-{shape}"))
    return found


def load(path: Path, shape: str) -> tuple[Any, list[str], dict[str, Any]]:
    with np.load(path) as data:
        fields = {k.split(".")[1]: data[k] for k in data.files if k.startswith(shape + ".")}
    x = widen(fields["input_bits"], path.stem.rsplit("_", 1)[1])
    return x, str(fields["libs"]).split(","), fields


@pytest.mark.parametrize(("path", "shape"), quantize_cases())
def test_quantize_agrees_with_public_libraries(path: Path, shape: str) -> None:
    x, libs, fields = load(path, shape)
    compared = 0
    for i, lib in enumerate(libs):
        g = fields["gdec"][i]
        if not (np.isfinite(g) and g > 0):
            continue  # a library's 0, inf or NaN for degenerate tensors
        compared += 1
        got = oracle.quantize(x, g)
        codes = oracle.unpack(fields["packed"][i])
        same_scale = (got.scales == fields["scales"][i]) | ~fields["agree_scales"]
        same_code = (got.codes == codes) | ~fields["agree_codes"]
        assert same_scale.all(), lib
        assert same_code.all(), lib
    degenerate = path.stem.startswith(("nan", "inf", "all_zero", "subnormal", "tiny_fp16"))
    assert compared == len(libs) or degenerate


# (row, column, rational code, fp32 code): x / (s g) lies just below a tie of e2m1, and its fp32
# quotient on it, from where it goes to the even code.
FP32_QUOTIENT_TIES = {("neg_zero_fp16", "4x64"): [(3, 41, 5, 6)]}


@pytest.mark.parametrize(("path", "shape"), quantize_cases("exact"))
def test_quantize_is_the_rational_definition(path: Path, shape: str) -> None:
    """Same bits as exact arithmetic, but where an fp32 quotient rounds onto a tie."""
    x, libs, fields = load(path, shape)
    g = fields["gdec"][libs.index("exact")]
    derived = oracle.derive_global(x)
    assert derived == max(g, np.float32(2.0**-126))
    got = oracle.quantize(x, g)
    exact = oracle.unpack(fields["packed"][libs.index("exact")])
    bounds.assert_bitwise(got.scales, fields["scales"][libs.index("exact")])
    flips = [tuple(map(int, place)) for place in np.argwhere(got.codes != exact)]
    found = [(*place, int(exact[place]), int(got.codes[place])) for place in flips]
    assert found == FP32_QUOTIENT_TIES.get((path.stem, shape), [])
    for row, column in flips:
        step = np.float32(oracle.E4M3_TABLE[got.scales[row, column // 16]]) * g
        quotient = x[row, column] / step
        assert float(quotient) * 4 % 1 == 0
        assert Fraction(float(quotient)) != Fraction(float(x[row, column])) / Fraction(float(step))
    if libs[0] == "modelopt" and fields["agree_scales"].all():
        bounds.assert_bitwise(oracle.tile(got.scales).reshape(-1), fields["swizzled0"])


@pytest.mark.parametrize(("path", "shape"), quantize_cases("dequant0"))
def test_dequantize_is_within_its_two_roundings(path: Path, shape: str) -> None:
    _, _, fields = load(path, shape)
    g = fields["gdec"][0]
    q = oracle.Quantized(oracle.unpack(fields["packed"][0]), fields["scales"][0], g)
    exact = oracle.Operand.from_quantized(q).products * np.float64(g)
    # scale * g may be subnormal: half a unit of 2^-149, times a code of up to 6.
    limit = np.abs(exact) * 2.0**-23 * (1 + 2.0**-20) + 2.0**-147
    assert (np.abs(oracle.dequantize(q) - exact) <= limit).all()
    assert (np.abs(fields["dequant0"] - exact) <= limit).all()


# ---- quantizing: the rules where libraries differ


def test_derived_global_scale() -> None:
    x = np.array([[0.0, -5376.0], [np.nan, np.inf], [1e-40, 0.0], [FLT_MAX, -np.inf]], np.float32)
    smallest, largest = np.float32(2.0**-126), FLT_MAX / np.float32(2688)
    assert oracle.derive_global(x, per="row").tolist() == [2.0, 1.0, smallest, largest]
    assert oracle.derive_global(x).tolist() == largest
    experts = oracle.derive_global(x.reshape(2, 1, 2, 2)[:, 0], per="expert")
    assert experts.tolist() == [2.0, largest]


def test_special_blocks() -> None:
    x = np.ones((4, 48), np.float32)
    x[0, 3] = np.nan
    x[1, 16:18] = [np.inf, -np.inf]
    x[2, 32:] = -0.0
    x[3] = 0.0
    q = oracle.quantize(x, oracle.derive_global(x, per="row"))
    assert q.scales.tolist() == [[0x7F, 0x7E, 0x7E], [0x7E] * 3, [0x7E, 0x7E, 0], [0, 0, 0]]
    assert q.global_scale.tolist() == [np.float32(1) / np.float32(2688)] * 3 + [1.0]
    assert (q.codes[0, :16] == 0).all()
    assert (q.codes[0, 16:] == 7).all()
    assert q.codes[1, 16:19].tolist() == [7, 15, 7]
    assert (q.codes[2, 32:] == 8).all()
    assert (q.codes[3] == 0).all()
    values = oracle.dequantize(q)
    assert np.isnan(values[0, :16]).all()
    assert np.isfinite(values[0, 16:]).all()
    assert np.isfinite(values[1:]).all()


def test_given_global_scales() -> None:
    x = np.full((2, 16), 100.0, np.float32)
    q = oracle.quantize(x, np.array([1 / 64, 2.0], np.float32))
    assert q.scales[:, 0].tolist() == [0x7E, oracle.encode_e4m3(100 / 12)[()]]
    assert (oracle.dequantize(q)[0] == 2688 / 64).all()
    small = oracle.quantize(np.full((1, 16), -(2.0**-10) * 6, np.float32), 1.0)
    assert small.scales.tolist() == [[0]], "a tie at 2^-10 goes to the even byte 0"
    assert (small.codes == 8).all()
    for g in (0.0, -1.0, np.inf, np.nan):
        with pytest.raises(ValueError, match="finite and positive"):
            oracle.quantize(x, g)
    with pytest.raises(ValueError, match="multiple of 16"):
        oracle.quantize(x[:, :15], 1.0)


@pytest.mark.parametrize(("rows", "blocks"), [(1, 1), (128, 4), (129, 5), (300, 9)])
def test_tiles_are_a_permutation(rows: int, blocks: int) -> None:
    linear = cases.generator(2).integers(1, 127, (2, rows, blocks), np.uint8)
    tiled = oracle.tile(linear)
    bounds.assert_bitwise(oracle.untile(tiled, rows, blocks), linear)
    R, B = tiled.shape[-2:]
    assert (R % 128, B % 4) == (0, 0)
    padded = np.zeros((2, R, B), np.uint8)
    padded[:, :rows, :blocks] = linear
    # PyTorch's way of writing the same order.
    blocked = padded.reshape(2, R // 128, 4, 32, B // 4, 4).transpose(0, 1, 4, 3, 2, 5)
    bounds.assert_bitwise(tiled, blocked.reshape(2, R, B))
    places = oracle.tile_offset(np.arange(R)[:, None], np.arange(B), B)
    assert sorted(places.reshape(-1).tolist()) == list(range(R * B))


def test_packing() -> None:
    codes = np.arange(32, dtype=np.uint8).reshape(2, 16) % 16
    packed = oracle.pack(codes)
    assert packed[0, :2].tolist() == [0x10, 0x32]
    bounds.assert_bitwise(oracle.unpack(packed), codes)
    stored = cases.random_operand(cases.generator(3), (3, 130, 80))
    back = oracle.from_packed(stored.packed())
    for got, want in zip(back, stored.quantized(), strict=True):
        bounds.assert_bitwise(got, want)
    assert oracle.from_packed(stored.packed(), expert=1).codes.tolist() == back.codes[1].tolist()
