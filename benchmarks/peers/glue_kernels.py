# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels behind glue.py; imported on CUDA only."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _silu_mul(x, y, inter, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < inter
    gate = tl.load(x + row * 2 * inter + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * inter + inter + column, mask=inside, other=0.0).to(tl.float32)
    u = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(y + row * inter + column, u.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _weighted_sum(
    z, rows, weights, y, hidden, TOP_K: tl.constexpr, HAS_ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < hidden
    total = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(TOP_K):
        slot = token * TOP_K + j
        if HAS_ROWS:  # noqa: SIM108 - compiled, not run by Python
            row = tl.load(rows + slot).to(tl.int64)
        else:
            row = slot
        term = tl.load(z + row * hidden + column, mask=inside, other=0.0).to(tl.float32)
        total += term * tl.load(weights + slot)
    tl.store(y + token * hidden + column, total.to(y.dtype.element_ty), mask=inside)


def silu_mul(x: torch.Tensor, y: torch.Tensor) -> None:
    """``y`` (R, I) from ``x`` (R, 2I), both contiguous."""
    rows, inter = y.shape
    block = min(1024, triton.next_power_of_2(inter))
    _silu_mul[(rows, triton.cdiv(inter, block))](x, y, inter, BLOCK=block)


def weighted_sum(
    z: torch.Tensor, weights: torch.Tensor, rows: torch.Tensor | None, y: torch.Tensor
) -> None:
    """``y`` (T, H) from ``z`` (T * k, H), all contiguous."""
    (tokens, top_k), hidden = weights.shape, y.shape[1]
    index = weights if rows is None else rows
    _weighted_sum[(tokens, triton.cdiv(hidden, 1024))](
        z, index, weights, y, hidden, TOP_K=top_k, HAS_ROWS=rows is not None, BLOCK=1024
    )
