# SPDX-License-Identifier: Apache-2.0
"""grouped_mm on any input: the bound, the documented order of the sum, damage that must show."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from test_grouped_mm import KINDS, OUT_TYPES, Case, extras, make, nvfp4

import fp4lt
from fp4lt import _C
from fp4lt.backends.cpu import depth
from fp4lt.testing import bounds, cases, mutations, oracle
from fp4lt.testing.bounds import F64

# ---- the bound


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [16, 32, 272, 1040, 7168])
def test_random_values_within_the_bound(k: int, kind: str, kernel_table: str) -> None:
    counts = (2, 0, 3)
    case = make(kind, 20, 5, 3, 19, k, exact=False)
    options = extras(21, 3, 19)
    want = case.want(counts, **options)
    for dtype in OUT_TYPES:
        y = case.run(counts, out_dtype=dtype, **options)
        want.check(y, depth(k, case.sums), name=f"{dtype}")
    plain = case.run(counts, out_dtype=torch.float32)
    case.want(counts).check(plain, depth(k, case.sums))


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("a_scale", [0.02, [0.001, 1.0, 3e-3]], ids=["shared", "each"])
def test_static_scale_within_the_bound(dtype: str, a_scale: Any, kernel_table: str) -> None:
    counts, scale = (3, 0, 6), torch.tensor(a_scale)
    case = make(f"w4a4-{dtype}", 22, 9, 3, 37, 320, exact=False)
    want = case.want(counts, a_scale=scale)
    want.check(case.run(counts, a_scale=scale, out_dtype=torch.float32), depth(320, "w4a4"))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.endswith(("bf16", "fp32"))])
def test_rows_of_any_magnitude_within_the_bound(kind: str, kernel_table: str) -> None:
    """From fp32's largest numbers, whose sums overflow, down to where f would be subnormal."""
    case = make(kind, 27, 12, 1, 33, 320, exact=False)
    assert isinstance(case.a, torch.Tensor)
    powers = torch.tensor([2.0**e for e in (119, 116, 110, 90, 60, 30, 0, -30, -60, -90, -95, -99)])
    case = case._replace(a=(case.a.float() * powers[:, None]).to(case.a.dtype))
    want = case.want((12,))
    for dtype in OUT_TYPES:
        y = case.run((12,), out_dtype=dtype)
        want.check(y, depth(320, case.sums), name=f"{dtype}")
    y = case.run((12,), out_dtype=torch.float32)
    assert bool(y[-4:].count_nonzero())
    assert bool(y[4:].isfinite().all())


def adversaries() -> list[tuple[Case, int]]:
    """Cases of one large product and many small ones, and how many the large row's block lacks."""
    result = []
    for (a, b), recipe, zeros in (
        (cases.adversarial(), "w4a4", 15),
        (cases.adversarial_bf16(), "w4a16", 0),
    ):
        linear = b._replace(codes=b.codes[None], scales=b.scales[None])
        left = a if isinstance(a, torch.Tensor) else nvfp4(a)
        result.append((Case(left, nvfp4(linear).mT, recipe, recipe), zeros))  # type: ignore[arg-type]
    return result


def test_small_terms_beside_a_large_one_survive(kernel_table: str) -> None:
    for case, zeros in adversaries():
        want = case.want((1,))
        assert want.value.tolist() == [[2688.0**2 + (7167 - zeros) * 0.21875]]
        want.check(case.run((1,), out_dtype=torch.float32), depth(7168, case.sums))


def test_the_bound_is_tighter_than_a_sequential_sum() -> None:
    """Adding the same terms one after the other in fp32 loses them all, and has to fail."""
    for case, zeros in adversaries():
        left, right = oracle.Operand.of(case.a), oracle.Operand.of(case.b, expert=0)
        terms = (left.products * right.products).astype(np.float32)
        sequential = torch.from_numpy(np.cumsum(terms, axis=1, dtype=np.float32)[:, -1:])
        with pytest.raises(AssertionError, match=f"error {(7167 - zeros) * 0.21875:.6g} > bound"):
            case.want((1,)).check(sequential, depth(7168, case.sums))
        case.want((1,)).check(sequential, depth=7168)


# ---- the order of the sum, which is what the depth is counted from


class Counted:
    """A partial sum in fp32 and the most roundings that a term of it has met."""

    def __init__(self, value: F64, roundings: int) -> None:
        self.value, self.roundings = value, roundings

    def __add__(self, other: Counted) -> Counted:
        return Counted(
            bounds.round_to(self.value + other.value, torch.float32),
            max(self.roundings, other.roundings) + 1,
        )


def chain(parts: list[Counted]) -> Counted:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


ORDER = (4, 0, 5, 1, 6, 2, 7, 3)
"""Of the products of eight neighbours, as they are added."""


def rounded_block(terms: F64) -> Counted:
    """Two chains of eight fused multiply-adds, and their sum."""
    lower, upper = (chain([Counted(terms[..., at + i], 0) for i in ORDER]) for at in (0, 8))
    return lower + upper


def fused_chain(blocks: list[Counted], scales: list[F64]) -> Counted:
    """Each block's sum times its scale, added to those before with one rounding."""
    total, roundings = np.zeros_like(blocks[0].value), 0
    for block, scale in zip(blocks, scales, strict=True):
        total = bounds.round_to(total + block.value * scale, torch.float32)
        roundings = max(roundings, block.roundings) + 1
    return Counted(total, roundings)


def documented_order(chains: list[Counted]) -> Counted:
    """Pairs of chains, pairs of pairs, ...: full subtrees, one for each set bit of their number.

    They are added from the right.
    """
    trees, at = [], 0
    for level in reversed(range(len(chains).bit_length())):
        if len(chains) >> level & 1:
            part = chains[at : at + (1 << level)]
            while len(part) > 1:
                part = [x + y for x, y in zip(part[::2], part[1::2], strict=True)]
            trees.append(part[0])
            at += 1 << level
    return chain(trees[::-1])


def groups(k: int) -> list[range]:
    """Where the blocks of each chain begin."""
    return [range(at, min(at + 256, k), 16) for at in range(0, k, 256)]


@pytest.mark.parametrize("k", [16, 48, 256, 272, 512, 784, 1808, 7168])
@pytest.mark.parametrize("kind", ["nvfp4", "w4a16-bf16", "w4a16-fp16", "plain-bf16"])
def test_the_sum_follows_the_documented_order(kind: str, k: int, kernel_table: str) -> None:
    """On values whose products and sums float64 adds exactly in any order."""
    case = make(kind, 23, 3, 1, 5, k, exact=False)
    if isinstance(case.a, torch.Tensor):
        grid = (case.a.float() * 64).round().clamp(-255, 255) / 64
        case = case._replace(a=grid.to(case.a.dtype))
    if isinstance(case.b, torch.Tensor):
        grid = (case.b.float() * 64).round().clamp(-255, 255) / 64
        case = case._replace(b=grid.bfloat16())
    left = oracle.Operand.of(case.a).products[:, None]
    right = oracle.Operand.of(case.b if kind != "plain-bf16" else case.b.mT, expert=0).products
    roundings = depth(k, case.sums)
    if kind == "nvfp4":
        terms = left * right
        chains = [
            chain([Counted(terms[..., i : i + 16].sum(-1), 0) for i in at]) for at in groups(k)
        ]
    else:
        scales = np.ones((5, k // 16))
        if kind != "plain-bf16":
            stored = oracle.from_packed(case.b, expert=0)
            right, scales = oracle.decode_e2m1(stored.codes), oracle.E4M3_TABLE[stored.scales]
        terms = left * right
        chains = [
            fused_chain(
                [rounded_block(terms[..., i : i + 16]) for i in at],
                [scales[:, i // 16] for i in at],
            )
            for at in groups(k)
        ]
    total = documented_order(chains)
    f = case.want((3,)).f
    y = case.run((3,), out_dtype=torch.float32)
    bounds.assert_bitwise(y, bounds.round_to(f * total.value, torch.float32), signed_zeros=False)
    assert total.roundings <= roundings
    if k >= 256:
        assert total.roundings == roundings


def test_depth_grows_with_the_logarithm_of_k() -> None:
    for k in range(16, 8192, 16):
        chains = -(-k // 256)
        assert depth(k, "w4a4") == 15 + math.ceil(math.log2(chains))
        assert depth(k, "w4a16") == 24 + math.ceil(math.log2(chains))


# ---- damage


def results(case: Case, y: torch.Tensor, name: str, alpha: torch.Tensor) -> torch.Tensor:
    """What the backend gives after one mutation of an operand or of its result."""
    operands: dict[str, Callable[[], Any]] = {
        "weights' global": lambda: mutations.double_global(case.b, 1),
        "first nibble": lambda: mutations.swap_nibble(case.b, 0, 0),
        "last nibble": lambda: mutations.swap_nibble(case.b, 1, 39),
        "first tile": lambda: mutations.shift_scale_tile(case.b, 0, 0),
        "last tile": lambda: mutations.shift_scale_tile(case.b, 1, 4),
        "gate and up": lambda: mutations.swap_gate_up(case.b, "gate_up"),
        "gate and up, interleaved": lambda: mutations.swap_gate_up(case.b, "interleaved"),
    }
    activations: dict[str, Callable[[], Any]] = {
        "activations' global": lambda: mutations.double_global(case.a, 0),
        "activations' nibble": lambda: mutations.swap_nibble(case.a, 0, 7),
        "activations' tile": lambda: mutations.shift_scale_tile(case.a, 0, 4),
    }
    outputs: dict[str, Callable[[], torch.Tensor]] = {
        "rows": lambda: mutations.double_rows(y, 5, 8),
        "first column": lambda: mutations.zero_column(y, 0),
        "last column": lambda: mutations.zero_column(y, 39),
    }
    if name in outputs:
        return outputs[name]()
    if name == "alpha":
        alpha = mutations.double_alpha(alpha, 1)
    elif name in operands:
        case = case._replace(b=operands[name]())
    else:
        case = case._replace(a=activations[name]())
    return case.run((5, 3), out_dtype=torch.float32, alpha=alpha)


DAMAGE = ["weights' global", "first nibble", "last nibble", "first tile", "last tile",
          "gate and up", "gate and up, interleaved", "activations' global",
          "activations' nibble", "activations' tile", "rows", "first column", "last column",
          "alpha"]  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_caught(name: str) -> None:
    """By comparing bits, and by the bound."""
    alpha = torch.tensor([1.0, 0.5])
    case = make("nvfp4", 24, 8, 2, 40, 320)
    want = case.want((5, 3), alpha=alpha)
    y = case.run((5, 3), out_dtype=torch.float32, alpha=alpha)
    want.check_exact(y)
    broken = results(case, y, name, alpha)
    with pytest.raises(AssertionError, match="elements differ"):
        want.check_exact(broken)
    with pytest.raises(AssertionError, match="out of bounds"):
        want.check(broken, depth(320, "w4a4"))


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_to_random_inputs_is_caught_by_the_bound(name: str) -> None:
    """One nibble may drown in the bound of a long sum, so it is swapped where K is 16."""
    k = 16 if "nibble" in name else 320
    alpha = torch.tensor([1.0, 0.5])
    case = make("nvfp4", 25, 8, 2, 40, k, exact=False)
    want = case.want((5, 3), alpha=alpha)
    y = case.run((5, 3), out_dtype=torch.float32, alpha=alpha)
    want.check(y, depth(k, "w4a4"))
    with pytest.raises(AssertionError, match="out of bounds"):
        want.check(results(case, y, name, alpha), depth(k, "w4a4"))


# ---- anything


@settings(max_examples=120)
@given(
    kind=st.sampled_from(sorted(KINDS)),
    counts=st.lists(st.integers(0, 9) | st.just(0) | st.just(70), min_size=1, max_size=5),
    n=st.integers(1, 40),
    blocks=st.integers(1, 20),
    spare=st.integers(0, 3),
    dtype=st.sampled_from(OUT_TYPES),
    full=st.booleans(),
    table=st.sampled_from(_C.cpu_kernels()),
    seed=st.integers(0, 2**20),
)
def test_any_exact_call(
    kind: str,
    counts: list[int],
    n: int,
    blocks: int,
    spare: int,
    dtype: torch.dtype,
    full: bool,
    table: str,
    seed: int,
) -> None:
    rows, experts = sum(counts), len(counts)
    case = make(kind, seed, rows + spare, experts, n, 16 * blocks)
    options = extras(seed, experts, n) if full else {}
    _C.select_cpu_kernels(table)
    try:
        y = case.run(counts, out_dtype=dtype, **options)
    finally:
        _C.select_cpu_kernels("")
    assert tuple(y.shape) == (rows + spare, n)
    case.want(counts, **options).check_exact(y[:rows])


# ---- torch


@pytest.mark.skipif(
    not hasattr(torch.nn.functional, "grouped_mm"),
    reason="this torch has no torch.nn.functional.grouped_mm",
)
@pytest.mark.parametrize("counts", [(3, 4, 9), (0, 5, 11), (16, 0, 0)], ids=str)
def test_same_call_as_torch(counts: tuple[int, ...]) -> None:
    case = make("plain-bf16", 26, 16, 3, 24, 64, exact=False)
    want = case.want(counts)
    assert isinstance(case.a, torch.Tensor)
    assert isinstance(case.b, torch.Tensor)
    theirs = torch.nn.functional.grouped_mm(case.a, case.b, offs=cases.offsets(counts))
    ours = fp4lt.grouped_mm(case.a, case.b, offs=cases.offsets(counts))
    assert ours.shape == theirs.shape
    assert ours.dtype == theirs.dtype
    want.check(theirs, depth=64, name="torch")
    want.check(ours, depth(64, "w4a16"))
