# SPDX-License-Identifier: Apache-2.0
"""grouped_mm on inputs whose result has one possible value: every bit is compared."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from conftest import DATA

import fp4lt
from fp4lt.problem import Operand, Recipe
from fp4lt.testing import bounds, cases, oracle

OUT_TYPES = (torch.float32, torch.bfloat16, torch.float16)
VECTORS = sorted((DATA / "vectors" / "gemm").glob("*.npz"))

KINDS: dict[str, tuple[str, torch.dtype | None, Recipe]] = {
    "nvfp4": ("nvfp4", None, "w4a4"),
    "nvfp4-rows": ("nvfp4", None, "w4a4"),
    "w4a4-bf16": ("nvfp4", torch.bfloat16, "w4a4"),
    "w4a4-fp16": ("nvfp4", torch.float16, "w4a4"),
    "w4a4-fp32": ("nvfp4", torch.float32, "w4a4"),
    "w4a16-bf16": ("nvfp4", torch.bfloat16, "w4a16"),
    "w4a16-fp16": ("nvfp4", torch.float16, "w4a16"),
    "plain-bf16": ("dense", torch.bfloat16, "w4a4"),
    "plain-fp16": ("dense", torch.float16, "w4a16"),
}
"""Weights' format, dense activations' type (None: NVFP4), recipe."""


class Case(NamedTuple):
    """Operands of one call, `b` transposed already."""

    a: Operand
    b: Operand
    recipe: Recipe
    sums: str
    """What the CPU backend's depth goes by: "w4a4" where both sides are NVFP4 in the end."""

    def run(self, counts: Sequence[int], **options: Any) -> torch.Tensor:
        options.setdefault("offs", cases.offsets(counts))
        return fp4lt.grouped_mm(self.a, self.b, recipe=self.recipe, **options)

    def want(self, counts: Sequence[int], **options: Any) -> oracle.Expected:
        offs = cases.offsets(counts)
        return oracle.grouped_mm(self.a, self.b, offs=offs, recipe=self.recipe, **options)


def nvfp4(operand: cases.Linear) -> fp4lt.NVFP4Tensor:
    return fp4lt.NVFP4Tensor.from_linear_scales(*operand)


def lossless_rows(rng: np.random.Generator, rows: int, k: int, dtype: torch.dtype) -> torch.Tensor:
    """Dense rows that NVFP4 represents exactly under scales that are derived from them.

    One block of each row has the scale 448, so that the row's own global scale is a power of two;
    a 6 in each block makes that block's scale exact.  The other scales are 1 and 2, which keeps
    any fp32 sum against `exact_operand` exact: 4 (16 * 2688 * 24 + 7152 * 288) < 2^24.
    """
    codes = rng.integers(0, 16, (rows, k // 16, 16))
    codes[:, :, 5] |= 7
    scales = rng.choice([1.0, 2.0], (rows, k // 16))
    loud = rng.integers(0, k // 16, rows)
    scales[np.arange(rows), loud] = 448.0
    g = np.exp2(rng.integers(-6, 1, (rows, 1)))
    values = (oracle.decode_e2m1(codes) * scales[..., None]).reshape(rows, k) * g
    values[1:2] = 0.0
    x = torch.from_numpy(values).to(dtype)
    quantized = oracle.quantize_rows(x.float().numpy(), None)
    np.testing.assert_array_equal(oracle.dequantize(quantized), values)
    return x


def make(kind: str, seed: int, rows: int, experts: int, n: int, k: int, exact: bool = True) -> Case:
    """Operands of a kind: such that fp32 sums are exact in any order, or random ones."""
    rng = cases.generator(seed)
    weights, dtype, recipe = KINDS[kind]
    operand = cases.exact_operand if exact else cases.random_operand
    matrix = cases.exact_matrix if exact else cases.random_matrix
    b: Operand
    if weights == "nvfp4":
        b = nvfp4(operand(rng, (experts, n, k)))
    else:
        assert dtype is not None
        b = matrix(rng, (experts, n, k), dtype)
    a: Operand
    if dtype is None:
        linear = operand(rng, (rows, k))
        if kind == "nvfp4-rows":
            g = torch.from_numpy(rng.uniform(0.01, 2.0, rows).astype(np.float32))
            linear = linear._replace(global_scale=g)
        a = nvfp4(linear)
    elif weights == "nvfp4" and recipe == "w4a4" and exact:
        a = lossless_rows(rng, rows, k, dtype)
    else:
        a = matrix(rng, (rows, k), dtype)
    quantized = weights == "nvfp4" and recipe == "w4a4"
    return Case(a, b.mT, recipe, "w4a4" if quantized else "w4a16")


def extras(seed: int, experts: int, n: int) -> dict[str, torch.Tensor]:
    """Factors and biases that are no round numbers."""
    rng = cases.generator(seed)
    alpha = torch.from_numpy(rng.uniform(-2, 2, experts).astype(np.float32))
    return {"alpha": alpha, "bias": cases.random_matrix(rng, (experts, n), torch.float32)}


def check_exact(case: Case, counts: Sequence[int], **options: Any) -> None:
    """Every output type, bit by bit."""
    want = case.want(counts, **options)
    for dtype in OUT_TYPES:
        y = case.run(counts, out_dtype=dtype, **options)
        assert y.dtype == dtype
        want.check_exact(y[: sum(counts)], name=str(dtype))


# ---- shapes


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("groups", cases.GROUPS)
def test_ragged_groups(groups: str, kind: str, kernel_table: str) -> None:
    counts = cases.GROUPS[groups]
    case = make(kind, 1, sum(counts), len(counts), 24, 160)
    check_exact(case, counts, **extras(2, len(counts), 24))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [1, 3, 5, 15, 16, 17, 33, 40, 100, 128, 129, 259])
def test_any_n(n: int, kind: str, kernel_table: str) -> None:
    counts = (3, 0, 66)
    check_exact(make(kind, n, 69, 3, n, 80), counts, **extras(3, 3, n))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [16, 32, 48, 80, 176, 256, 272, 512, 4096 + 16, 7168])
def test_any_k(k: int, kind: str, kernel_table: str) -> None:
    check_exact(make(kind, k, 5, 2, 19, k), (3, 2))


@pytest.mark.parametrize("kind", ["w4a4-bf16", "w4a16-bf16", "plain-bf16"])
def test_many_rows_and_columns(kind: str, kernel_table: str, two_threads: None) -> None:
    """More than the backend unpacks at once, with an expert on both sides of the cut."""
    counts = (500, 0, 30, 600)
    check_exact(make(kind, 4, 1130, 4, 639, 32), counts, **extras(5, 4, 639))


@pytest.mark.parametrize("kind", KINDS)
def test_no_rows(kind: str) -> None:
    case = make(kind, 6, 0, 3, 5, 32)
    assert tuple(case.run((0, 0, 0)).shape) == (0, 5)
    assert tuple(case.run((0, 0, 0), out_dtype=torch.float32).shape) == (0, 5)
    with_rows = make(kind, 6, 4, 3, 5, 32)
    out = torch.full((4, 5), float("nan"))
    with_rows.run((0, 0, 0), out=out)
    assert bool(out.isnan().all())


# ---- arguments


@pytest.mark.parametrize("kind", KINDS)
def test_rows_past_the_end_are_allowed(kind: str, kernel_table: str) -> None:
    case = make(kind, 7, 12, 3, 8, 64)
    for dtype in (torch.int32, torch.int64):
        y = case.run((2, 0, 5), offs=cases.offsets((2, 0, 5), dtype), out_dtype=torch.float32)
        assert tuple(y.shape) == (12, 8)
        case.want((2, 0, 5)).check_exact(y[:7])


@pytest.mark.parametrize("kind", KINDS)
def test_alpha_in_every_form(kind: str) -> None:
    counts = (2, 3)
    case = make(kind, 8, 5, 2, 9, 48)
    for alpha in (0.3, 2, torch.tensor(-0.7), torch.tensor([1.1, 0.0]), torch.rand(4)[::2]):
        y = case.run(counts, alpha=alpha, out_dtype=torch.float32)
        case.want(counts, alpha=torch.as_tensor(alpha)).check_exact(y)
    plain = case.run(counts, out_dtype=torch.float32)
    assert torch.equal(case.run(counts, alpha=1.0, out_dtype=torch.float32), plain)


@pytest.mark.parametrize("dtype", OUT_TYPES)
def test_bias_in_every_type(dtype: torch.dtype, kernel_table: str) -> None:
    case = make("w4a4-bf16", 9, 5, 2, 17, 48)
    bias = cases.random_matrix(cases.generator(9), (2, 17), dtype)
    for given in (bias, bias.T.contiguous().T, torch.stack([bias, bias], -1)[..., 1]):
        check_exact(case, (2, 3), bias=given)
    y = case.run((2, 3), alpha=0.0, bias=bias, out_dtype=torch.float32)
    assert torch.equal(y, bias.float()[[0, 0, 1, 1, 1]])


@pytest.mark.parametrize("kind", ["w4a4-bf16", "w4a4-fp16", "w4a4-fp32"])
@pytest.mark.parametrize(
    "a_scale",
    [2.0**-4, torch.tensor(0.5), torch.tensor([0.25, 2.0, 2.0**-5]), torch.ones(6)[::2] / 8],
    ids=["float", "shared", "each", "strided"],
)
def test_static_activation_scale(
    a_scale: torch.Tensor | float, kind: str, kernel_table: str
) -> None:
    """Rows too large for the scale saturate; the others are exact."""
    counts = (4, 0, 9)
    case = make(kind, 10, 13, 3, 17, 64)
    want = case.want(counts, a_scale=torch.as_tensor(a_scale), **extras(11, 3, 17))
    y = case.run(counts, a_scale=a_scale, out_dtype=torch.float32, **extras(11, 3, 17))
    want.check_exact(y)
    derived = case.run(counts, out_dtype=torch.float32, **extras(11, 3, 17))
    assert not torch.equal(y, derived), "some row has to saturate"


def test_output_type_follows_the_arguments() -> None:
    for kind, (_, dtype, _) in KINDS.items():
        case = make(kind, 12, 3, 1, 8, 32)
        assert case.run((3,)).dtype == (dtype or torch.bfloat16)
        for other in OUT_TYPES:
            assert case.run((3,), out_dtype=other).dtype == other
            out = torch.empty(3, 8, dtype=other)
            assert case.run((3,), out=out) is out
            assert torch.equal(out, case.run((3,), out_dtype=other))


def test_cpu_backend_by_name() -> None:
    case = make("nvfp4", 13, 3, 1, 8, 32)
    assert torch.equal(case.run((3,), backend="cpu"), case.run((3,)))


# ---- other people's vectors, and every value there is


@pytest.mark.parametrize("path", VECTORS, ids=[p.stem for p in VECTORS])
def test_vectors(path: Path, kernel_table: str) -> None:
    with np.load(path) as data:
        v = {key: data[key] for key in data.files}
    a, b = (
        fp4lt.NVFP4Tensor.from_linear_scales(
            *(torch.from_numpy(v[part + side]) for part in ("p", "s", "g"))
        )
        for side in "AB"
    )
    rows, k = a.shape
    one = torch.ones(())
    weights = fp4lt.NVFP4Tensor(b.codes[None], b.scales[None], b.global_scale).mT
    plain = fp4lt.NVFP4Tensor(b.codes[None], b.scales[None], one).mT
    offs = torch.tensor([rows])
    y = fp4lt.grouped_mm(
        fp4lt.NVFP4Tensor(a.codes, a.scales, one), plain, offs=offs, out_dtype=torch.float32
    )
    exact = np.ldexp(v["C_int64_2m20"].astype(np.float64), -20)
    depth = fp4lt.backends.cpu.depth(k, "w4a4")
    if v["fp32_exact"]:
        bounds.assert_bitwise(y, exact, signed_zeros=False)
    else:
        bounds.assert_within(y, 1.0, exact, v["sum_abs"], 0.0, depth)
    y = fp4lt.grouped_mm(a, weights, offs=offs, out_dtype=torch.float32)
    f = np.float64(v["gA"] * v["gB"])
    bounds.assert_within(y, f, v["C_f64"] / f, v["sum_abs"], 0.0, depth)


@pytest.mark.parametrize("side", ["weights", "activations", "both"])
def test_every_code_under_every_scale(side: str, kernel_table: str) -> None:
    """All 16 codes under the 127 finite scale bytes, against the identity and each other."""
    everything = cases.all_products_operand()
    values = oracle.decode_e2m1(np.arange(16)) * oracle.decode_e4m3(np.arange(127))[:, None]
    identity = nvfp4(
        cases.Linear(
            torch.from_numpy(oracle.pack(np.eye(16, dtype=np.uint8) * 2)),
            torch.full((16, 1), 0x38, dtype=torch.uint8).view(torch.float8_e4m3fn),
            torch.ones(()),
        )
    )
    stacked, selecting = (
        fp4lt.NVFP4Tensor(t.codes[None], t.scales[None], t.global_scale).mT
        for t in (nvfp4(everything), identity)
    )
    if side == "weights":
        recipes: tuple[tuple[Operand, Recipe], ...] = (
            (identity, "w4a4"),
            (torch.eye(16).bfloat16(), "w4a16"),
            (torch.eye(16).half(), "w4a16"),
        )
        for a, recipe in recipes:
            y = Case(a, stacked, recipe, recipe).run((16,), out_dtype=torch.float32)
            bounds.assert_bitwise(y, values.T, signed_zeros=False)
    elif side == "activations":
        case = Case(nvfp4(everything), selecting, "w4a4", "w4a4")
        y = case.run((127,), out_dtype=torch.float32)
        bounds.assert_bitwise(y, values, signed_zeros=False)
    else:
        turned = everything._replace(codes=everything.codes.roll(3, -1))
        case = Case(nvfp4(turned), stacked, "w4a4", "w4a4")
        y = case.run((127,), out_dtype=torch.float32)
        bounds.assert_bitwise(y, np.roll(values, 6, -1) @ values.T, signed_zeros=False)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_16_bit_value(dtype: torch.dtype, kernel_table: str) -> None:
    """Through the identity and into each output type, subnormal numbers and overflows too."""
    bits = torch.arange(1 << 16).to(torch.int32).to(torch.int16)
    a = bits.view(dtype)
    a = a[a.isfinite()]
    a = torch.cat([a, a.new_zeros(-len(a) % 16)]).reshape(-1, 16)
    for b in (
        fp4lt.quantize(torch.eye(16)[None], global_scale=1.0),
        torch.eye(16, dtype=dtype)[None],
    ):
        case = Case(a, b.mT, "w4a16", "w4a16")
        check_exact(case, (len(a),))
        check_exact(case, (len(a),), alpha=torch.tensor(1.7))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.startswith("plain")])
@pytest.mark.parametrize("k", [16, 272, 7168])
def test_weights_that_select(kind: str, k: int, kernel_table: str) -> None:
    """A single 1 in each weight row copies one input of any value: no sum to round."""
    a = make(kind, 14, 9, 2, 1, k, exact=False).a
    b = nvfp4(cases.selection_operand(cases.generator(15), (2, 18, k)))
    recipe = KINDS[kind][2]
    check_exact(Case(a, b.mT, recipe, recipe), (4, 5), **extras(16, 2, 18))


def test_nan_scale_of_a_weight_row_stays_there(kernel_table: str) -> None:
    linear = cases.exact_operand(cases.generator(17), (2, 20, 96))
    scales = linear.scales.view(torch.uint8).clone()
    scales[1, 18, 4] = 0x7F
    b = nvfp4(linear._replace(scales=scales.view(torch.float8_e4m3fn))).mT
    for kind in ("nvfp4", "w4a16-bf16"):
        case = make(kind, 18, 7, 2, 20, 96)._replace(b=b)
        check_exact(case, (3, 4))
        nan = case.run((3, 4)).isnan()
        assert nan.nonzero().tolist() == [[row, 18] for row in range(3, 7)]


def test_zeros_give_exact_zeros(kernel_table: str) -> None:
    for (kind, (_, dtype, _)), zero in itertools.product(KINDS.items(), ("a", "b")):
        case = make(kind, 19, 5, 2, 17, 48)
        if zero == "b":
            case = case._replace(b=zeros_like(case.b))
        elif dtype is None:
            case = case._replace(a=zeros_like(case.a))
        else:
            case = case._replace(a=torch.zeros_like(case.a))  # type: ignore[arg-type]
        assert torch.equal(case.run((2, 3)), torch.zeros(5, 17, dtype=dtype or torch.bfloat16))


def zeros_like(t: Operand) -> Operand:
    if isinstance(t, torch.Tensor):
        return torch.zeros_like(t)
    zeros = fp4lt.quantize(torch.zeros(t.mT.shape if t.transposed else t.shape))
    return zeros.mT if t.transposed else zeros
