# SPDX-License-Identifier: Apache-2.0
"""The format, its quantizer and its scale tiles in plain NumPy: what every codec is judged by.

Nothing here shares code with the package or with torch's casts: the tables come from the bit
fields, the roundings from ``rint`` on a grid, the tile order from its formula.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

U8 = npt.NDArray[np.uint8]
F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

NAN_SCALE: Final = 0x7F
LARGEST_SCALE: Final = 0x7E
FLT_MAX: Final = np.float32(np.finfo(np.float32).max)


def _minifloat_table(exponent_bits: int, mantissa_bits: int, bias: int) -> F64:
    """Value of every code of a sign-exponent-mantissa format that has no specials."""
    codes = np.arange(1 << (1 + exponent_bits + mantissa_bits))
    mantissa = codes & ((1 << mantissa_bits) - 1)
    exponent = (codes >> mantissa_bits) & ((1 << exponent_bits) - 1)
    negative = codes >> (mantissa_bits + exponent_bits)
    significand = np.where(exponent == 0, mantissa, mantissa + (1 << mantissa_bits))
    shift = np.maximum(exponent, 1) - bias - mantissa_bits
    magnitude = np.ldexp(significand.astype(np.float64), shift)
    return np.asarray(np.copysign(magnitude, np.where(negative == 1, -1.0, 1.0)))


def _e4m3_table() -> F64:
    table = _minifloat_table(4, 3, 7)
    table[[0x7F, 0xFF]] = np.nan
    return table


E2M1_TABLE: Final[F64] = _minifloat_table(2, 1, 1)
"""(16,) value of each e2m1 code."""

E4M3_TABLE: Final[F64] = _e4m3_table()
"""(256,) value of each e4m3fn byte; 0x7F and 0xFF are NaN."""


class Quantized(NamedTuple):
    """A quantized tensor, one code a byte and scales in plain order.

    Attributes
    ----------
    codes : (..., K) uint8
        0 to 15.
    scales : (..., K/16) uint8
        e4m3 bytes.
    global_scale : float32
        The multiplier: ``()``, or one for each entry of the leading axes.
    """

    codes: U8
    scales: U8
    global_scale: F32


@dataclass(frozen=True)
class PackedTensor:
    """The fields of an ``NVFP4Tensor`` without its checks, for tests of the checks themselves."""

    codes: torch.Tensor
    scales: torch.Tensor
    global_scale: torch.Tensor
    transposed: bool = False


def _grid(magnitude: F64, smallest: int, largest: int, mantissa_bits: int) -> tuple[I64, I64]:
    """Exponent, clamped, and nearest-even multiple of that binade's step."""
    binade = np.frexp(magnitude)[1].astype(np.int64) - 1
    exponent = np.where(magnitude == 0, smallest, np.clip(binade, smallest, largest))
    steps = np.rint(np.ldexp(magnitude, mantissa_bits - exponent))
    return exponent, steps.astype(np.int64)


def encode_e4m3(x: npt.ArrayLike) -> U8:
    """Round fp32 values to e4m3fn bytes: nearest even, saturating at 448, the sign kept.

    Parameters
    ----------
    x : (...) float32
        NaN gives 0x7F.

    Returns
    -------
    (...) uint8
    """
    value = np.asarray(x, np.float32).astype(np.float64)
    nan = np.isnan(value)
    # Anything from 464 on saturates, so 512 stands for it and for infinity.
    magnitude = np.minimum(np.abs(np.where(nan, 0.0, value)), 512.0)
    exponent, steps = _grid(magnitude, -6, 9, 3)
    byte = np.minimum((exponent + 7) * 8 + steps - 8, LARGEST_SCALE)
    byte = np.where(np.signbit(value), byte | 0x80, byte)
    return np.where(nan, NAN_SCALE, byte).astype(np.uint8)


def encode_e2m1(x: npt.ArrayLike) -> U8:
    """Round fp32 values to e2m1 codes: nearest, ties to the even code, saturating at 6.

    Parameters
    ----------
    x : (...) float32
        Infinities saturate; the sign is kept, of zero too.

    Returns
    -------
    (...) uint8
        0 to 15.

    Raises
    ------
    ValueError
        For a NaN, which has no code: it is told by its block's scale.
    """
    value = np.asarray(x, np.float32).astype(np.float64)
    if np.isnan(value).any():
        raise ValueError("e2m1 has no code for NaN; mark the block by scale 0x7F instead")
    exponent, steps = _grid(np.minimum(np.abs(value), 8.0), 0, 2, 1)
    code = np.minimum(2 * exponent + steps, 7)
    return np.asarray(np.where(np.signbit(value), code | 8, code), np.uint8)


def decode_e2m1(codes: npt.ArrayLike) -> F64:
    """Values of e2m1 codes, exactly."""
    return np.asarray(E2M1_TABLE[np.asarray(codes)])


def decode_e4m3(scales: npt.ArrayLike) -> F64:
    """Values of e4m3 scale bytes, exactly.

    Raises
    ------
    ValueError
        For a byte from 0x80 on: block scales are unsigned.
    """
    byte = np.asarray(scales)
    if byte.size and byte.max() >= 0x80:
        raise ValueError(f"block scales are unsigned, found byte 0x{int(byte.max()):02x}")
    return np.asarray(E4M3_TABLE[byte])


def derive_global(x: npt.ArrayLike, *, per: Literal["tensor", "expert", "row"] = "tensor") -> F32:
    """Derive the global scale: ``max(amax / 2688, 2^-126)`` over the finite values, 1 for zeros.

    Parameters
    ----------
    x : (..., K) float32, or float16 which is widened
    per : {"tensor", "expert", "row"}
        One for everything, for each entry of the first axis, or for each of all but the last.

    Returns
    -------
    float32 of shape (), (E,) or (...)
    """
    value = np.asarray(x, np.float32)
    axes = {
        "tensor": tuple(range(value.ndim)),
        "expert": tuple(range(1, value.ndim)),
        "row": (value.ndim - 1,),
    }[per]
    magnitude = np.where(np.isfinite(value), np.abs(value), np.float32(0))
    amax = magnitude.max(axis=axes, initial=np.float32(0))
    derived = np.maximum(amax / np.float32(2688), np.float32(2.0**-126))
    return np.asarray(np.where(amax == 0, np.float32(1), derived), np.float32)


def quantize(x: npt.ArrayLike, g: npt.ArrayLike) -> Quantized:
    """Quantize with a given global scale, every operation in fp32 and rounded by itself.

    Parameters
    ----------
    x : (..., K) float32, or float16 which is widened
        ``K`` a multiple of 16.
    g : float32
        Multiplier, of the shape of the leading axes it distinguishes: (), (E,) or (M,).

    Returns
    -------
    Quantized

    Raises
    ------
    ValueError
        When K is no multiple of 16, or a global scale is not finite and positive.
    """
    value = np.asarray(x, np.float32)
    scale = np.asarray(g, np.float32)
    if value.ndim == 0 or value.shape[-1] % 16 != 0:
        raise ValueError(f"K must be a multiple of 16, got shape {value.shape}")
    if not (np.isfinite(scale) & (scale > 0)).all():
        raise ValueError(f"global scales must be finite and positive, got {scale}")
    blocks = value.reshape(*value.shape[:-1], value.shape[-1] // 16, 16)
    # (..., blocks): g seen from a block.
    spread = scale.reshape(scale.shape + (1,) * (blocks.ndim - 1 - scale.ndim))
    nan = np.asarray(np.isnan(blocks).any(axis=-1))
    clean = np.where(nan[..., None], np.float32(0), blocks)
    amax = np.minimum(np.abs(clean), FLT_MAX).max(axis=-1, initial=np.float32(0))
    with np.errstate(over="ignore", under="ignore"):
        byte = encode_e4m3(amax / (np.float32(6) * spread))
    codes = encode_with(clean, byte, np.broadcast_to(spread, byte.shape))
    return Quantized(
        np.where(nan[..., None], np.uint8(0), codes).reshape(value.shape),
        np.where(nan, np.uint8(NAN_SCALE), byte),
        scale,
    )


def encode_with(x: F32, scales: U8, g: F32) -> U8:
    """Codes of blocks whose scales are chosen already: ``e2m1(x / (scale g))``.

    Parameters
    ----------
    x : (..., 16) float32, no NaN
    scales : (...) uint8, no NaN byte
    g : (...) float32

    Returns
    -------
    (..., 16) uint8
    """
    with np.errstate(over="ignore", under="ignore", divide="ignore", invalid="ignore"):
        step = (E4M3_TABLE[scales].astype(np.float32) * g)[..., None]
        ratio = (x / step).astype(np.float32)
    # A zero keeps its sign even where scale * g underflowed, and scale 0 leaves no magnitude.
    zero = np.copysign(np.float32(0), x)
    return encode_e2m1(np.where((x == 0) | (scales == 0)[..., None], zero, ratio))


def dequantize(q: Quantized) -> F32:
    """Values in fp32: ``code * (scale * g)``, each product rounded once.

    Returns
    -------
    (..., K) float32
        NaN for the blocks whose scale is NaN.
    """
    g = q.global_scale.reshape(q.global_scale.shape + (1,) * (q.scales.ndim - q.global_scale.ndim))
    with np.errstate(over="ignore", under="ignore"):
        step = decode_e4m3(q.scales).astype(np.float32) * g
        value = decode_e2m1(q.codes).astype(np.float32) * np.repeat(step, 16, axis=-1)
    return np.asarray(value, np.float32)


def pack(codes: npt.ArrayLike) -> U8:
    """Two codes a byte, the even k in the low nibble: (..., K) to (..., K/2)."""
    array = np.asarray(codes, np.uint8)
    return np.asarray(array[..., 0::2] | (array[..., 1::2] << 4), np.uint8)


def unpack(packed: npt.ArrayLike) -> U8:
    """Undo :func:`pack`: (..., K/2) to (..., K)."""
    array = np.asarray(packed, np.uint8)
    both = np.stack([array & 15, array >> 4], axis=-1)
    return both.reshape(*array.shape[:-1], 2 * array.shape[-1])


def tile_offset(row: npt.ArrayLike, block: npt.ArrayLike, blocks: int) -> I64:
    """Byte offset of a scale in tile order.

    Parameters
    ----------
    row, block : int
        Broadcast against each other.
    blocks : int
        Blocks of a row, K/16, before padding.

    Returns
    -------
    int64
    """
    o, b = np.asarray(row, np.int64), np.asarray(block, np.int64)
    padded = -(-blocks // 4) * 4
    tile = (o // 128) * padded + b // 4 * 4
    return tile * 128 + (o % 32) * 16 + (o % 128) // 32 * 4 + b % 4


def tile(linear: npt.ArrayLike) -> U8:
    """Scales in tile order, padding zero: (..., rows, K/16) to (..., 128 R, 4 B)."""
    array = np.asarray(linear, np.uint8)
    *lead, rows, blocks = array.shape
    shape = (*lead, -(-rows // 128) * 128, -(-blocks // 4) * 4)
    flat = np.zeros((*lead, shape[-2] * shape[-1]), np.uint8)
    flat[..., tile_offset(np.arange(rows)[:, None], np.arange(blocks), blocks)] = array
    return flat.reshape(shape)


def untile(tiled: npt.ArrayLike, rows: int, blocks: int) -> U8:
    """Undo :func:`tile`; the padding is ignored, whatever it holds."""
    array = np.asarray(tiled, np.uint8)
    flat = array.reshape(*array.shape[:-2], -1)
    return flat[..., tile_offset(np.arange(rows)[:, None], np.arange(blocks), blocks)]


def to_packed(q: Quantized, *, transposed: bool = False) -> PackedTensor:
    """Store as torch tensors: packed codes, tiled float8_e4m3fn scales, the global scale."""
    return PackedTensor(
        torch.from_numpy(pack(q.codes)),
        torch.from_numpy(tile(q.scales)).view(torch.float8_e4m3fn),
        torch.from_numpy(np.array(q.global_scale, np.float32)),
        transposed,
    )


def from_packed(t: Any, *, expert: int | None = None) -> Quantized:
    """Read any object with the fields of an ``NVFP4Tensor``, transposed or not, as stored.

    Parameters
    ----------
    t : NVFP4Tensor, PackedTensor or alike
    expert : int, optional
        Read only this matrix of a stack.

    Raises
    ------
    ValueError
        When the scales' extents are not those of the codes' rows and blocks, padded.
    """
    codes, scales, g = t.codes, t.scales, t.global_scale
    if expert is not None:
        codes, scales, g = codes[expert], scales[expert], g[expert] if g.ndim else g
    packed = codes.detach().cpu().numpy()
    tiled = scales.detach().cpu().contiguous().view(torch.uint8).numpy()
    rows, blocks = packed.shape[-2], packed.shape[-1] // 8
    need = (*packed.shape[:-2], -(-rows // 128) * 128, -(-blocks // 4) * 4)
    if tiled.shape != need:
        raise ValueError(f"scales of shape {tiled.shape} for codes {packed.shape}; need {need}")
    multiplier = g.detach().cpu().to(torch.float32).numpy()
    return Quantized(unpack(packed), untile(tiled, rows, blocks), multiplier)
