# SPDX-License-Identifier: Apache-2.0
"""Ways to be wrong that a check has to notice.

Each function takes a correct operand or result and returns a broken copy.  One that would change
nothing raises, so that no test passes because the damage missed.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch

from fp4lt.testing.oracle_codec import from_packed, tile
from fp4lt.testing.oracle_moe import PlainWeights, gate_up_columns


def _differs(changed: bool, what: str) -> None:
    if not changed:
        raise ValueError(f"{what} would change nothing; choose another place")


def _experts(t: torch.Tensor) -> torch.Tensor:
    """View a matrix as a stack of one."""
    return t if t.ndim == 3 else t[None]


def double_alpha(alpha: torch.Tensor, expert: int) -> torch.Tensor:
    """Double one expert's alpha (E,)."""
    _differs(bool(alpha[expert] != 0), "doubling zero")
    broken = alpha.clone()
    broken[expert] *= 2
    return broken


def double_global(t: Any, expert: int) -> Any:
    """Double one entry of an NVFP4 tensor's global scale: an expert's, or the only one."""
    g = t.global_scale.clone()
    g.view(-1)[expert] *= 2
    return dataclasses.replace(t, global_scale=g)


def double_rows(y: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Double a group's rows of a result: its alpha taken twice."""
    _differs(bool((y[start:stop] != 0).any()), "doubling zeros")
    broken = y.clone()
    broken[start:stop] *= 2
    return broken


def swap_nibble(t: Any, expert: int = 0, row: int = 0) -> Any:
    """Swap the nibbles of the first byte of a row that holds two different values under a scale."""
    codes = t.codes.clone()
    packed = _experts(codes)[expert, row]
    low, high = packed & 15, packed >> 4
    q = from_packed(t)
    scales = q.scales.reshape(-1, *q.scales.shape[-2:])[expert, row]
    alive = torch.from_numpy(np.repeat(scales != 0, 8)).to(packed.device)
    # -0 and +0 are codes 8 and 0 of one value.
    places = ((low != high) & ((low | high) & 7 != 0) & alive).nonzero()
    _differs(len(places) > 0, f"swapping nibbles in row {row}")
    byte = int(places[0])
    packed[byte] = (low[byte] << 4) | high[byte]
    return dataclasses.replace(t, codes=codes)


def shift_scale_tile(t: Any, expert: int = 0, index: int = 0) -> Any:
    """Shift one 512-byte scale tile by a row: each scale lands at its neighbour's place."""
    scales = t.scales.clone(memory_format=torch.contiguous_format)
    flat = _experts(scales)[expert].view(torch.uint8).view(-1)
    part = slice(512 * index, 512 * (index + 1))
    flat[part] = flat[part].roll(16)
    broken = dataclasses.replace(t, scales=scales)
    same = np.array_equal(from_packed(t).scales, from_packed(broken).scales)
    _differs(not same, f"shifting tile {index}")
    return broken


def swap_gate_up(w13: Any, order: str) -> Any:
    """Exchange gate and up rows of w13, codes and scales alike; bias and scales stay.

    ``w13`` is (E, 2I, H), an NVFP4 tensor or a plain one; ``order`` as in ``MoEWeights``.
    """
    stored = w13.codes if hasattr(w13, "codes") else w13
    rows = stored.shape[1]
    gate, up = gate_up_columns(PlainWeights(w13, None, order), rows)
    source = np.empty(rows, np.int64)
    source[gate], source[up] = up, gate
    index = torch.from_numpy(source).to(stored.device)
    if stored is w13:
        return w13[:, index]
    scales = torch.from_numpy(tile(from_packed(w13).scales[:, source]))
    return dataclasses.replace(
        w13,
        codes=w13.codes[:, index].contiguous(),
        scales=scales.view(torch.float8_e4m3fn).to(stored.device),
    )


def zero_column(y: torch.Tensor, column: int) -> torch.Tensor:
    """Zero one column of a result."""
    _differs(bool((y[:, column] != 0).any()), f"zeroing column {column}")
    broken = y.clone()
    broken[:, column] = 0
    return broken
