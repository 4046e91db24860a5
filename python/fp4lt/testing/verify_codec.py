# SPDX-License-Identifier: Apache-2.0
"""Checks of the codec on a device: every byte against the oracle's."""

from __future__ import annotations

from functools import partial
from typing import Final

import numpy as np
import torch

from fp4lt.rounding import quantize
from fp4lt.tensor import NVFP4Tensor
from fp4lt.testing import bounds, cases, oracle
from fp4lt.testing.oracle import Quantized
from fp4lt.testing.targets import OUT_TYPES, Check, store

TIES: Final = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""Midpoints of e2m1's values."""

SHAPES: Final = ((1, 16), (3, 80), (127, 48), (128, 64), (129, 80))
LARGE: Final = ((129, 720), (2, 7168))


def compare(t: NVFP4Tensor, want: Quantized, name: str) -> int:
    """Require the same codes and global scales, and the same tiles with zeros in the padding."""
    scales, tiles = t.scales.cpu().view(torch.uint8), oracle.tile(want.scales)
    bounds.assert_bitwise(t.global_scale.cpu(), want.global_scale, name=f"{name}: global_scale")
    bounds.assert_bitwise(scales, tiles, name=f"{name}: tiled scales")
    bounds.assert_bitwise(t.codes.cpu(), oracle.pack(want.codes), name=f"{name}: codes, packed")
    return want.codes.size + want.scales.size


def check_quantize(x: torch.Tensor, device: torch.device, name: str) -> int:
    """A matrix under derived scales, one or one per row, and under given ones; and as a stack."""
    wide, given = x.float().numpy(), x.to(device)
    compared = compare(
        quantize(given), oracle.quantize(wide, oracle.derive_global(wide)), f"{name}, derived"
    )
    rows = oracle.derive_global(wide, per="row")
    compared += compare(
        quantize(given, global_scale="row"), oracle.quantize(wide, rows), f"{name}, by row"
    )
    for g in (1.0, 1e-3, 2.0**-130, 3e38):
        want = oracle.quantize(wide, np.float32(g))
        compared += compare(quantize(given, global_scale=g), want, f"{name}, given {g}")
    per = np.exp2(np.linspace(-9, 3, len(wide))).astype(np.float32)
    scale = torch.from_numpy(per).to(device)
    want = oracle.quantize(wide, per)
    compared += compare(quantize(given, global_scale=scale), want, f"{name}, given by row")
    stack = np.stack([wide, wide[::-1]])
    want = oracle.quantize(stack, oracle.derive_global(stack, per="expert"))
    both = torch.stack([x, x.flip(0)]).to(device)
    return compared + compare(quantize(both), want, f"{name}, stack")


def every_pattern(dtype: torch.dtype, device: torch.device) -> int:
    """All 65536 values of a 16-bit type: like ones in a block, and a block across the binades."""
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    compared = 0
    for order in (bits.view(256, 256), bits.view(256, 256).mT.contiguous()):
        compared += check_quantize(order.contiguous().view(dtype), device, f"{dtype} patterns")
    return compared


def specials(device: torch.device) -> int:
    """Ties, NaN, infinities, zeros of both signs, denormals: in blocks of their own."""
    inf, nan, tiny = float("inf"), float("nan"), 2.0**-149
    rows = [
        [6.0, *TIES, *(-v for v in TIES), -0.0],
        [0.0] * 16,
        [-0.0] * 16,
        [1.0] * 15 + [nan],
        [nan] + [inf] * 15,
        [inf, -inf, 1.0, -2688.0] * 4,
        [tiny, -tiny, 3 * tiny, 2.0**-126] * 4,
        [2.0**-10 * 6, 2.0**-10, 2.0**-11, 0.0] * 4,  # a scale that rounds to 0, or just not
        [448.0 * 6, 449.0 * 6, 464.0 * 6, 465.0 * 6] * 4,
        [3.4028234663852886e38, -3.4028234663852886e38, 1.0, 0.0] * 4,
    ]
    blocks = torch.tensor(rows, dtype=torch.float32)
    compared = 0
    for dtype in OUT_TYPES:
        # Each alone in its row, and all of them in one row.
        for x, name in ((blocks, "alone"), (blocks.view(1, -1), "together")):
            compared += check_quantize(x.to(dtype), device, f"{dtype} specials, {name}")
    return compared


def scale_ties(device: torch.device) -> int:
    """Blocks whose scale lies on, just below and just above each midpoint of e4m3."""
    table = oracle.E4M3_TABLE[:127]
    middle = (6 * (table[:-1] + table[1:]) / 2).astype(np.float32)
    amax = np.concatenate([np.nextafter(middle, np.float32(0)), middle, np.nextafter(middle, 4e3)])
    x = np.zeros((amax.size, 16), np.float32)
    x[:, 0], x[:, 1], x[:, 2] = amax, -amax / 2, amax / 3
    want = oracle.quantize(x, np.float32(1))
    t = quantize(torch.from_numpy(x).to(device), global_scale=1.0)
    return compare(t, want, "scale midpoints")


def shapes(device: torch.device, sizes: tuple[tuple[int, int], ...]) -> int:
    """Random matrices: one row, both sides of a 128-row tile, odd numbers of blocks."""
    rng = cases.generator(1)
    return sum(
        check_quantize(cases.random_matrix(rng, shape, dtype), device, f"{dtype} {shape}")
        for shape in sizes
        for dtype in OUT_TYPES
    )


def products(device: torch.device) -> int:
    """All 16 codes under all 127 finite scales, and the NaN scale, to each type."""
    compared = 0
    linear = cases.all_products_operand()
    operands = [linear._replace(global_scale=torch.tensor(g)) for g in (1.0, 2.0**-120, 0.3, 1e30)]
    nan = linear.scales.clone()
    nan.view(torch.uint8)[5] = 0x7F
    for operand in (*operands, linear._replace(scales=nan)):
        want = oracle.dequantize(operand.quantized())
        for dtype in OUT_TYPES:
            got = store(operand).to(device).dequantize(dtype).cpu()
            g = float(operand.global_scale)
            bounds.assert_bitwise(got, bounds.round_to(want, dtype), name=f"{dtype}, g {g}, value")
            compared += got.numel()
    return compared


def checks(device: torch.device, *, quick: bool) -> list[Check]:
    """Checks of the codec on a device, those of the 16-bit types' every value last."""
    found = [
        Check("specials: ties, NaN, inf, zero blocks, denormals", lambda: specials(device)),
        Check("block scales at the midpoints of e4m3", lambda: scale_ties(device)),
        Check("shapes: 1 to 129 rows, 1 to 5 blocks", lambda: shapes(device, SHAPES)),
        Check("dequantize: 16 codes x 127 scales", lambda: products(device)),
    ]
    if not quick:
        found.append(Check("shapes: 45 and 448 blocks", lambda: shapes(device, LARGE)))
    for dtype in (torch.bfloat16,) if quick else (torch.bfloat16, torch.float16):
        name = f"every {str(dtype).removeprefix('torch.')} value"
        found.append(Check(name, partial(every_pattern, dtype, device)))
    return found
