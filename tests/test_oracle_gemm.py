# SPDX-License-Identifier: Apache-2.0
"""The exact sums, the bounds and the mutations that every backend's test relies on."""

from __future__ import annotations

import dataclasses
import itertools
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fp4lt.testing import bounds, cases, mutations, oracle

GEMM = sorted((Path(__file__).parent / "data" / "vectors" / "gemm").glob("*.npz"))
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
INF, NAN = float("inf"), float("nan")


# ---- sums


@pytest.mark.parametrize("path", GEMM, ids=[p.stem for p in GEMM])
def test_gemm_vectors(path: Path) -> None:
    with np.load(path) as data:
        v = {key: data[key] for key in data.files}
    a, b = (
        oracle.Operand.from_quantized(
            oracle.Quantized(oracle.unpack(v["p" + s]), v["s" + s], v["g" + s])
        )
        for s in "AB"
    )
    bounds.assert_bitwise(oracle.exact_sum_int64(a.products, b.products), v["C_int64_2m20"])
    result = oracle.product(a, b)
    bounds.assert_bitwise(result.c, np.ldexp(v["C_int64_2m20"].astype(np.float64), -20))
    bounds.assert_bitwise(result.sum_abs, v["sum_abs"])
    # The vectors apply gA and gB exactly; the definition rounds their product to fp32.
    assert (np.abs(result.value - v["C_f64"]) <= np.abs(v["C_f64"]) * 2.0**-24 * 1.0001).all()
    forward, backward = (
        np.cumsum((a.products[:, None] * b.products)[..., ::step], axis=-1, dtype=np.float32)[
            ..., -1
        ]
        for step in (1, -1)
    )
    exact = (forward == result.c).all() and (backward == result.c).all()
    assert exact or not v["fp32_exact"]


def test_int64_sum_beyond_float64() -> None:
    k = 7168
    a = np.full((1, k), 2688.0)
    b = np.full((2, k), 2688.0)
    b[1, -1] = 2.0**-10
    a[0, -1] = 2.0**-10
    want = [(k - 1) * (2688 << 10) ** 2 + last for last in (2688 << 10, 1)]
    assert max(want) > 1 << 53
    assert oracle.exact_sum_int64(a, b).tolist() == [want]
    sums = oracle.exact_sum(a, b, nvfp4=True)
    assert (sums.residual > 0).all()
    for c, exact, residual in zip(sums.c[0], want, sums.residual[0], strict=True):
        assert abs(Fraction(c) - Fraction(exact, 1 << 20)) <= Fraction(residual)
    for wrong in (2.0**-11, 2689.0, np.nan):
        with pytest.raises(ValueError, match="not NVFP4 products"):
            oracle.exact_sum_int64(np.full((1, 16), wrong), b[:, :16])


@pytest.mark.parametrize("wide", [False, True])
def test_bf16_sum_against_fractions(wide: bool) -> None:
    rng = cases.generator(4)
    b = oracle.Operand.of(cases.random_operand(rng, (3, 512)).packed())
    a = bounds.to_float64(cases.random_matrix(rng, (2, 512)))
    if wide:
        a *= np.exp2(rng.integers(-60, 60, a.shape))
    sums = oracle.exact_sum(a, b.products, nvfp4=False)
    assert bool((sums.residual > 0).all()) == wide
    for m, n in np.ndindex(2, 3):
        pairs = list(zip(a[m].tolist(), b.products[n].tolist(), strict=True))
        exact = sum(Fraction(x) * Fraction(y) for x, y in pairs)
        assert abs(Fraction(sums.c[m, n]) - exact) <= Fraction(sums.residual[m, n])
        assert sums.sum_abs[m, n] == pytest.approx(sum(abs(x * y) for x, y in pairs), rel=1e-12)


def test_nan_and_infinity_stay_in_their_row() -> None:
    rng = cases.generator(5)
    b = oracle.Operand.of(cases.exact_operand(rng, (4, 64)).packed()).products
    b[0, 7], b[1, 7] = 0.0, 2.0
    a = np.ones((3, 64))
    clean = oracle.exact_sum(a, b, nvfp4=False).c
    a[1, 7], a[2, 0] = np.inf, np.nan
    c = oracle.exact_sum(a, b, nvfp4=False).c
    bounds.assert_bitwise(c[0], clean[0])
    assert np.isnan(c[1, 0])
    assert c[1, 1] == np.inf
    assert np.isnan(c[2]).all()


# ---- grouped products, cases, mutations


def fp32_backend(a: Any, b: Any, counts: tuple[int, ...], alpha: Any, dtype: torch.dtype) -> Any:
    """Multiply in fp32 in k's order: depth K."""
    left, right = oracle.Operand.of(a), oracle.Operand.of(b)
    rows = []
    for e, (stop, n) in enumerate(zip(itertools.accumulate(counts), counts, strict=True)):
        terms = left.products[stop - n : stop, None] * right.products[e]
        c = np.cumsum(terms, axis=-1, dtype=np.float32)[..., -1]
        g = left.global_scale * right.global_scale[e]
        rows.append(c * (g * np.float32(alpha[e])))
    return torch.from_numpy(np.concatenate(rows)).to(dtype)


@pytest.mark.parametrize("name", cases.GROUPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_mm_on_exact_inputs(name: str, dtype: torch.dtype) -> None:
    rng, counts = cases.generator(6), cases.GROUPS[name]
    a = cases.exact_operand(rng, (sum(counts), 160)).packed()
    b = cases.exact_operand(rng, (len(counts), 24, 160)).packed(transposed=True)
    alpha = torch.exp2(torch.arange(len(counts)) % 3).float()
    offs = cases.offsets(counts)
    want = oracle.grouped_mm(a, b, offs=offs, alpha=alpha)
    y = fp32_backend(a, b, counts, alpha, dtype)
    want.check_exact(y)
    want.check(y, depth=0)


def test_every_mutation_is_caught() -> None:
    rng, counts = cases.generator(7), (5, 3)
    alpha, offs = torch.ones(2), cases.offsets(counts)
    a = cases.exact_operand(rng, (8, 320)).packed()
    b = cases.exact_operand(rng, (2, 40, 320)).packed(transposed=True)
    want = oracle.grouped_mm(a, b, offs=offs)
    y = fp32_backend(a, b, counts, alpha, torch.float32)
    want.check_exact(y)

    operands = {
        "global": mutations.double_global(b, 1),
        "nibble": mutations.swap_nibble(b, 1, 39),
        "tile": mutations.shift_scale_tile(b, 0, 4),
        "gate_up": mutations.swap_gate_up(b, "interleaved"),
    }
    broken = {k: fp32_backend(a, m, counts, alpha, torch.float32) for k, m in operands.items()}
    broken["alpha"] = fp32_backend(a, b, counts, mutations.double_alpha(alpha, 0), torch.float32)
    broken["rows"] = mutations.double_rows(y, 5, 8)
    broken["column"] = mutations.zero_column(y, 39)
    for name, result in broken.items():
        with pytest.raises(AssertionError, match=r"y\[\d+, \d+\]: got"):
            want.check_exact(result, name="y")
        # One nibble is below the bound of a depth of K: that is what exact inputs are for.
        if name != "nibble":
            with pytest.raises(AssertionError, match="bound"):
                want.check(result, depth=320)
    with pytest.raises(ValueError, match="change nothing"):
        mutations.zero_column(torch.zeros(2, 2), 0)
    with pytest.raises(ValueError, match="transposed"):
        oracle.grouped_mm(a, dataclasses.replace(b, transposed=False), offs=offs)


def test_adversarial_inputs_lose_the_small_terms() -> None:
    for left, right, zeros in ((*cases.adversarial(), 15), (*cases.adversarial_bf16(), 0)):
        a = left.packed() if isinstance(left, cases.Linear) else left
        b = right.packed()
        b = oracle.PackedTensor(b.codes[None], b.scales[None], b.global_scale, True)
        want = oracle.grouped_mm(a, b, offs=[1], recipe="w4a16")
        assert want.value.tolist() == [[2688.0**2 + (7167 - zeros) * 0.21875]]
        sequential = torch.full((1, 1), 2688.0**2)
        want.check(sequential, depth=7168)
        with pytest.raises(AssertionError, match=f"error {(7167 - zeros) * 0.21875:.6g}"):
            want.check(sequential, depth=1)


@pytest.mark.parametrize("name", cases.ROUTERS)
def test_routing_cases_and_order(name: str) -> None:
    weights, ids = cases.ROUTERS[name](cases.generator(8), 40, 12, 4)
    assert (weights.dtype, ids.dtype) == (torch.float32, torch.int32)
    routes = oracle.route(ids, 3, 5)
    slots = [(int(e) - 3, i) for i, e in enumerate(ids.reshape(-1)) if 3 <= int(e) < 8]
    assert list(zip(routes.expert.tolist(), routes.slot.tolist(), strict=True)) == sorted(slots)
    assert routes.token.tolist() == [i // 4 for _, i in sorted(slots)]
    rows = {slot: row for row, (_, slot) in enumerate(sorted(slots))}
    assert routes.slot_row.reshape(-1).tolist() == [rows.get(i, -1) for i in range(160)]


# ---- bounds


def random_floats(rng: np.random.Generator, count: int) -> Any:
    x = rng.integers(0, 1 << 32, count, np.uint32).view(np.float32)
    return np.where(np.isnan(x), np.float32(NAN), x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_round_to_is_torchs_from_fp32(dtype: torch.dtype) -> None:
    x = random_floats(cases.generator(9), 20000)
    x[:6] = [65504, 65519.996, 65520, 2.0**-25, 3 * 2.0**-25, -0.0]
    bounds.assert_bitwise(bounds.round_to(x, dtype), torch.from_numpy(x).to(dtype))


def test_round_to_rounds_once() -> None:
    just_above_a_tie = 1 + 2.0**-8 + 2.0**-40
    assert bounds.round_to(just_above_a_tie, torch.bfloat16) == 1 + 2.0**-7
    assert torch.tensor(just_above_a_tie, dtype=torch.float64).to(torch.bfloat16) == 1
    with pytest.raises(TypeError, match="int32"):
        bounds.round_to(1.0, torch.int32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [0.0, -1.5])
def test_bound_is_the_formula(dtype: torch.dtype, bias: float) -> None:
    h = {torch.float32: 24, torch.bfloat16: 8, torch.float16: 11}[dtype]
    tiny = {torch.float32: 150, torch.bfloat16: 134, torch.float16: 25}[dtype]
    f, c, s = Fraction(3, 4), Fraction(5), Fraction(40)
    want = f * 6 * s / 2**23 + abs(f * c + Fraction(bias)) / 2**h
    want += (f * c + abs(Fraction(bias))) / 2**22 + Fraction(1, 2**tiny)
    assert bounds.bound(-0.75, -5.0, 40.0, bias, 6, dtype) == pytest.approx(float(want), rel=1e-15)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("side", [-1, 1])
def test_bound_fails_just_above_and_passes_just_below(dtype: torch.dtype, side: int) -> None:
    f, c, sums, bias, depth = 0.5, 96.0, 2.0**16, 2.0, 50
    want, limit = f * c + bias, float(bounds.bound(f, c, sums, bias, depth, dtype))
    edge = torch.tensor([[want + side * limit]], dtype=torch.float64).to(dtype)
    neighbours = [torch.nextafter(edge, torch.full_like(edge, to)) for to in (-INF, INF)]
    near = [edge, *neighbours]
    inside = [y for y in near if abs(float(y) - want) <= limit]
    outside = [y for y in near if abs(float(y) - want) > limit]
    assert inside
    assert outside
    for y in inside:
        bounds.assert_within(y, f, [[c]], sums, bias, depth)
    for y in outside:
        with pytest.raises(AssertionError, match=r"name\[0, 0\]: got .* want 50.0, error"):
            bounds.assert_within(y, f, [[c]], sums, bias, depth, name="name")
        own = abs(float(y) - want) - limit
        bounds.assert_within(y, f, [[c]], sums, bias, depth, residual=own * (1 + 1e-9))


@pytest.mark.parametrize(
    ("y", "c", "good"),
    [
        (65504.0, 65504.0, True),
        (INF, 65490.0, True),  # the bound of 32 passes 65504
        (INF, 65400.0, False),
        (-INF, 65504.0, False),
        (INF, 1e6, True),
        (65504.0, 1e6, False),
        (NAN, 1e6, False),
        (NAN, 1.0, False),
        (NAN, NAN, True),
        (1.0, NAN, False),
        (-INF, -INF, True),
        (INF, -INF, False),
        (65504.0, INF, False),
    ],
)
def test_infinity_and_nan_in_fp16(y: float, c: float, good: bool) -> None:
    got = torch.tensor([[1.0, y]], dtype=torch.float16)
    arguments = (1.0, [[1.0, c]], abs(np.array([[1.0, c]])), 0.0, 0)
    if good:
        bounds.assert_within(got, *arguments)
    else:
        with pytest.raises(AssertionError, match=r"y\[0, 1\].* 1 of 2 elements"):
            bounds.assert_within(got, *arguments)


def test_an_fp32_sum_may_overflow_on_its_way() -> None:
    for y, sum_abs, good in ((NAN, 1e39, True), (-INF, 1e39, True), (NAN, 1e38, False)):
        arguments = (torch.tensor([y]), 2.0**-100, [1.0], [sum_abs], 0.0, 16)
        if good:
            bounds.assert_within(*arguments)
        else:
            with pytest.raises(AssertionError, match="got nan"):
                bounds.assert_within(*arguments)


def test_the_worst_element_is_named() -> None:
    y = torch.tensor([[1.0, 2.1, 3.0], [4.0, 5.5, 6.0]])
    want = np.arange(1.0, 7.0).reshape(2, 3)
    with pytest.raises(AssertionError, match=r"y\[1, 1\]: got 5.5, want 5.0.* 2 of 6 elements"):
        bounds.assert_within(y, 1.0, want, want, 0.0, 3)
    with pytest.raises(AssertionError, match=r"shape \(2, 2\), want \(2, 3\)"):
        bounds.assert_within(y[:, :2], 1.0, want, want, 0.0, 3)


def test_bitwise_names_the_first_difference() -> None:
    a = torch.tensor([1.0, NAN, 0.0, 2.0])
    bounds.assert_bitwise(a, a.clone())
    b = torch.tensor([1.0, NAN, -0.0, 3.0])
    with pytest.raises(AssertionError, match=r"y\[2\]: got 0.0 .*want -0.0 .*2 of 4"):
        bounds.assert_bitwise(a, b)
    with pytest.raises(AssertionError, match=r"y\[3\]: got 2.0 .*want 3.0 .*1 of 4"):
        bounds.assert_bitwise(a, b, signed_zeros=False)
    with pytest.raises(AssertionError, match="dtype"):
        bounds.assert_bitwise(a, b.to(torch.bfloat16))
    with pytest.raises(AssertionError, match="shape"):
        bounds.assert_bitwise(a, a[None])
