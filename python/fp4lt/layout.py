# SPDX-License-Identifier: Apache-2.0
"""Order of block scales in memory.

Checkpoints store them row by row ("linear").  Tensor cores want tiles of 128 rows by 4 blocks
("tiled"), rows padded to 128 and blocks to 4 with zeros.  The byte order itself is stated once, in
``csrc/core/scale_layout.h``; these functions call it.
"""

from __future__ import annotations

import torch

from fp4lt import _C
from fp4lt._interop import address, cuda_launch, require_device_of_ours, require_dtype
from fp4lt.errors import ShapeError
from fp4lt.formats import BLOCK, TILE_BLOCKS, TILE_ROWS

_SCALE_DTYPES = (torch.float8_e4m3fn, torch.uint8)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def padded_scale_shape(rows: int, k: int) -> tuple[int, int]:
    """Extents of the tiled scales of a (rows, k) matrix: rows to 128, blocks of 16 to 4."""
    return _round_up(rows, TILE_ROWS), _round_up(k // BLOCK, TILE_BLOCKS)


def tile_scales(linear: torch.Tensor) -> torch.Tensor:
    """Block scales from row-major order to 128x4 tiles.

    Parameters
    ----------
    linear : (..., rows, K/16) float8_e4m3fn or uint8
        At most three dimensions.

    Returns
    -------
    (..., round_up(rows, 128), round_up(K/16, 4)), same dtype
        The padding is zero.
    """
    require_dtype("tile_scales: scales", linear, _SCALE_DTYPES)
    require_device_of_ours("tile_scales", linear)
    if linear.ndim not in (2, 3):
        raise ShapeError(f"tile_scales: scales have shape {tuple(linear.shape)}; 2-D or 3-D needed")
    rows, blocks = linear.shape[-2:]
    source = linear.contiguous()
    tiled = source.new_empty(*linear.shape[:-2], *padded_scale_shape(rows, blocks * BLOCK))
    on_cuda = source.device.type == "cuda"
    launch = cuda_launch(source.device) if on_cuda else {}
    run = _C.cuda_tile_scales if on_cuda else _C.tile_scales
    run(
        linear=address(source),
        experts=linear.shape[0] if linear.ndim == 3 else 1,
        rows=rows,
        blocks=blocks,
        tiled=address(tiled),
        **launch,
    )
    return tiled


def untile_scales(tiled: torch.Tensor, rows: int, blocks: int) -> torch.Tensor:
    """Block scales from 128x4 tiles to row-major order; the padding is dropped unread.

    Parameters
    ----------
    tiled : (..., round_up(rows, 128), round_up(blocks, 4)) float8_e4m3fn or uint8
        At most three dimensions.
    rows, blocks : int
        Extents without padding.

    Returns
    -------
    (..., rows, blocks), same dtype
    """
    require_dtype("untile_scales: scales", tiled, _SCALE_DTYPES)
    require_device_of_ours("untile_scales", tiled)
    want = padded_scale_shape(rows, blocks * BLOCK)
    if tiled.ndim not in (2, 3) or tuple(tiled.shape[-2:]) != want:
        raise ShapeError(
            f"untile_scales: scales have shape {tuple(tiled.shape)}; "
            f"{rows} rows of {blocks} blocks need (..., {want[0]}, {want[1]})"
        )
    source = tiled.contiguous()
    linear = source.new_empty(*tiled.shape[:-2], rows, blocks)
    on_cuda = source.device.type == "cuda"
    launch = cuda_launch(source.device) if on_cuda else {}
    run = _C.cuda_untile_scales if on_cuda else _C.untile_scales
    run(
        tiled=address(source),
        experts=tiled.shape[0] if tiled.ndim == 3 else 1,
        rows=rows,
        blocks=blocks,
        linear=address(linear),
        **launch,
    )
    return linear
