# SPDX-License-Identifier: Apache-2.0
"""Checks of a backend's grouped product on shapes that have been trouble elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import torch

from fp4lt.problem import Operand, Recipe
from fp4lt.tensor import NVFP4Tensor
from fp4lt.testing import bounds, cases, oracle
from fp4lt.testing.targets import Check, Product, RefusedError, Target, store

KINDS: Final[dict[str, tuple[bool, torch.dtype | None, Recipe]]] = {
    "nvfp4 x nvfp4": (True, None, "w4a4"),
    "bf16 x nvfp4, w4a4": (True, torch.bfloat16, "w4a4"),
    "fp16 x nvfp4, w4a4": (True, torch.float16, "w4a4"),
    "fp32 x nvfp4, w4a4": (True, torch.float32, "w4a4"),
    "bf16 x nvfp4, w4a16": (True, torch.bfloat16, "w4a16"),
    "fp16 x nvfp4, w4a16": (True, torch.float16, "w4a16"),
    "bf16 x bf16": (False, torch.bfloat16, "w4a16"),
    "fp16 x fp16": (False, torch.float16, "w4a16"),
}
"""NVFP4 weights or plain ones; dense activations' type, None for NVFP4; recipe."""

EXACT_K: Final = (16, 48, 80, 272, 720, 1504, 2880, 7168)
"""One block; odd numbers of them, 45 too, that leave a part of a scale tile; models' sizes."""

EXACT_N: Final = (1, 7, 63, 64, 65, 100, 129, 191)

GROUPS: Final[dict[str, tuple[int, ...]]] = {
    **cases.GROUPS,
    "one_row": (0, 0, 1, 0),
    "sixties": (63, 64, 65, 0, 100),
}


def _exact_activations(rng: np.random.Generator, rows: int, k: int) -> torch.Tensor:
    """Rows that NVFP4 holds exactly under a global scale of 1: a 6 fixes each block's scale."""
    codes = rng.integers(0, 16, (rows, k // 16, 16))
    codes[:, :, 5] |= 7
    scales = rng.choice([1.0, 2.0, 4.0], (rows, k // 16, 1))
    values = (oracle.decode_e2m1(codes) * scales).reshape(rows, k)
    return torch.from_numpy(values.astype(np.float32))


def make(kind: str, seed: int, counts: Sequence[int], n: int, k: int, *, exact: bool) -> Product:
    """Operands whose fp32 sums are exact in any order, or random ones with bias and factors."""
    rng = cases.generator(seed)
    nvfp4_weights, dtype, recipe = KINDS[kind]
    rows, experts = sum(counts), len(counts)
    operand = cases.exact_operand if exact else cases.random_operand
    matrix = cases.exact_matrix if exact else cases.random_matrix
    options: dict[str, Any] = {}
    b: Operand
    if nvfp4_weights:
        b = store(operand(rng, (experts, n, k)))
    else:
        b = matrix(rng, (experts, n, k), dtype or torch.bfloat16)
    a: Operand
    if dtype is None:
        a = store(operand(rng, (rows, k)))
    elif nvfp4_weights and recipe == "w4a4" and exact:
        a, options["a_scale"] = _exact_activations(rng, rows, k).to(dtype), torch.tensor(1.0)
    else:
        a = matrix(rng, (rows, k), dtype)
    if exact:
        # Powers of two: a fused multiply-add with the bias cannot show.
        options["alpha"] = torch.from_numpy(np.exp2(rng.integers(-3, 2, experts)).astype("f4"))
    else:
        options["alpha"] = torch.from_numpy(rng.uniform(-2, 2, experts).astype(np.float32))
        options["bias"] = cases.random_matrix(rng, (experts, n), torch.float32)
    return Product(kind, a, b.mT, recipe, options)


def check_kinds(target: Target, counts: Sequence[int], n: int, k: int, *, exact: bool) -> int:
    """Every kind of operands on one shape."""
    return sum(
        make(kind, n + k, counts, n, k, exact=exact).check(target, counts, exact=exact)
        for kind in KINDS
    )


def static_scales(target: Target) -> int:
    """Given activation scales, shared and one per expert, on random values that saturate too."""
    counts, compared = (3, 0, 6), 0
    for scale in (torch.tensor(0.02), torch.tensor([0.001, 1.0, 3e-3])):
        for kind in ("bf16 x nvfp4, w4a4", "fp32 x nvfp4, w4a4"):
            product = make(kind, 3, counts, 37, 320, exact=False)
            product.options["a_scale"] = scale
            compared += product.check(target, counts, exact=False)
    return compared


def all_products(target: Target) -> int:
    """Identity times every code under every scale, on either side: each product comes out as is."""
    every = cases.all_products_operand()
    codes = oracle.pack(np.eye(16, dtype=np.uint8) * 2)
    ones = torch.full((16, 1), 0x38, dtype=torch.uint8).view(torch.float8_e4m3fn)
    identity = store(cases.Linear(torch.from_numpy(codes), ones, torch.tensor(1.0)))

    def stack(t: NVFP4Tensor) -> NVFP4Tensor:
        return NVFP4Tensor(t.codes[None], t.scales[None], t.global_scale)

    table = store(every)
    compared = 0
    pairs: list[tuple[str, Operand, NVFP4Tensor, Recipe]] = [
        ("identity x all products", identity, stack(table), "w4a4"),
        ("all products x identity", table, stack(identity), "w4a4"),
        ("bf16 identity x all products", torch.eye(16).bfloat16(), stack(table), "w4a16"),
    ]
    for name, a, b, recipe in pairs:
        product = Product(name, a, b.mT, recipe, {})
        compared += product.check(target, (a.shape[0],), exact=True)
    return compared


def selection(target: Target, sizes: Sequence[int]) -> int:
    """Weights with a single 1 or -1 in each row, so that outputs are copies of activations."""
    compared = 0
    for k in sizes:
        counts = (2, 0, 130)
        rng = cases.generator(k)
        b = store(cases.selection_operand(rng, (3, 77, k)))
        a = store(cases.random_operand(rng, (132, k))._replace(global_scale=torch.tensor(0.5)))
        x = cases.random_matrix(rng, (132, k), torch.float16)
        compared += Product("nvfp4 copied", a, b.mT, "w4a4", {}).check(target, counts, exact=True)
        compared += Product("fp16 copied", x, b.mT, "w4a16", {}).check(target, counts, exact=True)
    return compared


def small_beside_large(target: Target) -> int:
    """One large product among small ones that a sequential fp32 sum loses."""
    compared = 0
    for k in (720, 2880, 7168):
        a, b = cases.adversarial(k)
        x, w = cases.adversarial_bf16(k)
        pairs: tuple[tuple[Operand, cases.Linear, Recipe], ...]
        pairs = (store(a), b, "w4a4"), (x, w, "w4a16")
        for left, linear, recipe in pairs:
            stack = linear._replace(codes=linear.codes[None], scales=linear.scales[None])
            product = Product(f"{recipe}, K = {k}", left, store(stack).mT, recipe, {})
            compared += product.check(target, (1,), exact=False)
    return compared


def _poisoned(t: NVFP4Tensor, byte: int) -> NVFP4Tensor:
    """A copy with `byte` wherever no scale of the matrix lies."""
    rows, blocks = t.codes.shape[-2], t.codes.shape[-1] // 8
    tiled = t.scales.view(torch.uint8).clone()
    used = oracle.tile_offset(np.arange(rows)[:, None], np.arange(blocks), blocks)
    free = torch.ones(tiled.shape[-2] * tiled.shape[-1], dtype=torch.bool)
    free[torch.from_numpy(used.reshape(-1))] = False
    tiled.flatten(-2)[..., free] = byte
    poisoned = NVFP4Tensor.from_tiled_scales(t.codes, tiled, t.global_scale)
    return poisoned.mT if t.transposed else poisoned


def padding(target: Target) -> int:
    """Bytes of NaN, of a sign, of 448 where the scale tiles have no block."""
    counts, compared = (4, 0, 129), 0
    for kind in ("nvfp4 x nvfp4", "bf16 x nvfp4, w4a4", "bf16 x nvfp4, w4a16"):
        for byte in (0x7F, 0xFF, 0x7E):
            product = make(kind, 50, counts, 35, 80, exact=True)
            a, b = product.a, product.b
            if isinstance(a, NVFP4Tensor):
                product = product._replace(a=_poisoned(a, byte))
            if isinstance(b, NVFP4Tensor):
                product = product._replace(b=_poisoned(b, byte))
            compared += product.check(target, counts, exact=True)
    return compared


def tail(target: Target) -> int:
    """Rows past the last group hold NaN and stay as they were; so do strided rows' gaps."""
    counts, compared = (70, 0, 7), 0
    for kind, (_, dtype, _) in KINDS.items():
        product = make(kind, 51, counts, 35, 80, exact=True)
        if dtype is None:
            continue
        assert isinstance(product.a, torch.Tensor)
        # Rows of 96 values, of which the matrix is the first 80.
        wide = torch.full((133, 96), float("nan"), dtype=dtype, device=target.device)
        wide[:77, :80] = product.a
        product = product._replace(a=wide[:, :80])
        out = torch.full((133, 40), -7.0, device=target.device)
        try:
            y = product.run(target, counts, out=out[:, :35], out_dtype=torch.float32)
        except RefusedError as reason:
            target.skipped.append(str(reason))
            continue
        product.want(counts).check_exact(y[:77], name=f"{kind}, y")
        bounds.assert_bitwise(y[77:], np.full((56, 35), -7.0), name=f"{kind}, rows past the end")
        bounds.assert_bitwise(out[:, 35:], np.full((133, 5), -7.0), name=f"{kind}, between rows")
        compared += out.numel()
    return compared


def nan_row(target: Target) -> int:
    """A NaN makes its own row NaN and touches no other; infinities only their own."""
    counts, compared = (3, 0, 6), 0
    for kind, (_, dtype, _) in KINDS.items():
        if dtype is None:
            continue
        product = make(kind, 52, counts, 35, 80, exact=False)
        assert isinstance(product.a, torch.Tensor)
        try:
            clean = product.run(target, counts, out_dtype=torch.float32)
            broken = product.a.clone()
            broken[4, 37], broken[7, 3] = float("nan"), float("inf")
            product = product._replace(a=broken)
            y = product.run(target, counts, out_dtype=torch.float32)
        except RefusedError as reason:
            target.skipped.append(str(reason))
            continue
        others = [row for row in range(9) if row not in (4, 7)]
        product.want(counts).check(y, target.depth(80, product.sums), name=f"{kind}, y")
        bounds.assert_bitwise(y[others], clean[others], name=f"{kind}, rows beside NaN and inf")
        compared += y.numel()
    return compared


def repeatable(target: Target, *, alone: bool) -> int:
    """The same call gives the same bits again; and, if `alone`, so does each row by itself."""
    counts, compared = (5, 0, 131), 0
    for kind in KINDS:
        product = make(kind, 53, counts, 67, 1504, exact=False)
        try:
            y = product.run(target, counts, out_dtype=torch.float32)
            again = product.run(target, counts, out_dtype=torch.float32)
        except RefusedError as reason:
            target.skipped.append(str(reason))
            continue
        bounds.assert_bitwise(again, y, name=f"{kind}, second run")
        compared += y.numel()
        for row in (0, 3, 5, 68, 135) if alone else ():
            a = product.a
            if isinstance(a, NVFP4Tensor):
                q = oracle.from_packed(a)
                one = oracle.Quantized(
                    q.codes[row : row + 1], q.scales[row : row + 1], q.global_scale
                )
                packed = oracle.to_packed(one)
                a = NVFP4Tensor.from_tiled_scales(packed.codes, packed.scales, packed.global_scale)
            else:
                a = a[row : row + 1]
            lone = (1, 0, 0) if row < counts[0] else (0, 0, 1)
            got = product._replace(a=a).run(target, lone, out_dtype=torch.float32)
            name = f"{kind}, row {row} alone"
            bounds.assert_bitwise(got, y[row : row + 1], name=name)
            compared += got.numel()
    return compared


def checks(target: Target, *, quick: bool, alone: bool) -> list[Check]:
    """Checks of the grouped product.

    Parameters
    ----------
    target : Target
    quick : bool
        Leave out the larger shapes.
    alone : bool
        Whether the backend promises that a row's bits do not depend on its batch.
    """

    def shape(counts: Sequence[int], n: int, k: int, *, exact: bool = True) -> Callable[[], int]:
        return lambda: check_kinds(target, counts, n, k, exact=exact)

    found = [
        Check(f"exact sums, K = {k}", shape((3, 0, 5), 37, k))
        for k in EXACT_K[: 6 if quick else None]
    ]
    found.append(Check("exact sums, K = 720, N = 1", shape((3, 0, 5), 1, 720)))
    found += [Check(f"exact sums, N = {n}", shape((3, 0, 66), n, 80)) for n in EXACT_N]
    found += [
        Check(f"exact sums, groups {' '.join(str(c) for c in counts)}", shape(counts, 33, 80))
        for counts in GROUPS.values()
    ]
    found.append(
        Check("exact sums, 256 experts, 11 rows", shape(11 * (0, 0, 1) + 223 * (0,), 65, 48))
    )
    if not quick:
        found.append(
            Check("exact sums, 500 rows, N = 517, K = 1504", shape((0, 300, 1, 129, 70), 517, 1504))
        )
    found += [
        Check(f"random values within the bound, K = {k}", shape((3, 0, 66), 37, k, exact=False))
        for k in ((16, 272) if quick else (16, 272, 2880))
    ]
    found += [
        Check("static activation scales", lambda: static_scales(target)),
        Check("16 codes x 127 scales, each product as is", lambda: all_products(target)),
        Check(
            "copies through weights of one 1",
            lambda: selection(target, (720,) if quick else (720, 7168)),
        ),
        Check("small terms beside a large one", lambda: small_beside_large(target)),
        Check("scale padding is not read", lambda: padding(target)),
        Check("strided rows; rows past the end are left alone", lambda: tail(target)),
        Check("NaN and inf stay in their rows", lambda: nan_row(target)),
        Check(
            "the same bits again, and for a row alone" if alone else "the same bits again",
            lambda: repeatable(target, alone=alone),
        ),
    ]
    return found
