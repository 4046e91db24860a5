# SPDX-License-Identifier: Apache-2.0
"""Inputs shared by tests and benchmarks; the same seed gives the same bits on every machine.

Operands come as raw codes and linear scale bytes, so that making them needs none of the code
under test: ``NVFP4Tensor.from_linear_scales(*operand)`` stores them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from fp4lt.testing.oracle_codec import PackedTensor, Quantized, pack, to_packed, unpack

EXACT_K: Final = 7168
"""Largest K up to which :func:`exact_operand` sums are exact in fp32 in any order: terms are
multiples of 1/4 and at most 576, and 7168 * 576 * 4 < 2^24."""

POWER_SCALES: Final = (0x38, 0x40, 0x48)
"""e4m3 bytes of 1, 2 and 4."""

GROUPS: Final[dict[str, tuple[int, ...]]] = {
    "one": (1,),
    "empty": (0, 0, 0),
    "ones": (1, 1, 1, 1),
    "gaps": (0, 3, 0, 0, 5, 0),
    "primes": (2, 3, 5, 7, 11, 13, 17),
    "tile_edges": (127, 128, 129, 0, 1),
    "skewed": (257, 1, 0, 2),
}
"""Rows per expert: empty ones at both ends and in the middle, and both sides of a 128-row tile."""


class Linear(NamedTuple):
    """A raw NVFP4 operand, in the order of ``NVFP4Tensor.from_linear_scales``' arguments.

    Attributes
    ----------
    codes : (..., N, K/2) uint8
        Even k in the low nibble.
    scales : (..., N, K/16) float8_e4m3fn
        Not tiled.
    global_scale : () or (E,) float32
    """

    codes: torch.Tensor
    scales: torch.Tensor
    global_scale: torch.Tensor

    def quantized(self) -> Quantized:
        """Convert to the oracle's form."""
        scales = self.scales.view(torch.uint8).numpy()
        return Quantized(unpack(self.codes.numpy()), scales, self.global_scale.numpy())

    def packed(self, *, transposed: bool = False) -> PackedTensor:
        """Store with tiled scales, unchecked."""
        return to_packed(self.quantized(), transposed=transposed)


def generator(seed: int) -> np.random.Generator:
    """Make the generator that the functions below draw from."""
    return np.random.Generator(np.random.PCG64(seed))


def _linear(
    codes: npt.NDArray[np.uint8], scales: npt.NDArray[np.uint8], g: npt.ArrayLike
) -> Linear:
    return Linear(
        torch.from_numpy(pack(codes)),
        torch.from_numpy(np.ascontiguousarray(scales)).view(torch.float8_e4m3fn),
        torch.from_numpy(np.array(g, np.float32)),
    )


def _power_of_two(rng: np.random.Generator, shape: Sequence[int]) -> npt.NDArray[np.float32]:
    return np.asarray(np.ldexp(1.0, rng.integers(-6, 1, tuple(shape[:-2]))), np.float32)


def exact_operand(rng: np.random.Generator, shape: Sequence[int]) -> Linear:
    """Random codes under scales of 1, 2 and 4: fp32 sums are exact in any order.

    Parameters
    ----------
    rng : numpy Generator
    shape : (N, K) or (E, N, K)
        K up to 7168, both operands made here.

    Returns
    -------
    Linear
        The global scale is a power of two, one for each expert.
    """
    *lead, k = shape
    if k > EXACT_K:
        raise ValueError(f"fp32 sums are exact only up to K = {EXACT_K}, got {k}")
    codes = rng.integers(0, 16, shape, np.uint8)
    scales = rng.choice(np.array(POWER_SCALES, np.uint8), (*lead, k // 16))
    return _linear(codes, scales, _power_of_two(rng, shape))


def random_operand(rng: np.random.Generator, shape: Sequence[int]) -> Linear:
    """Random codes under every finite scale byte, 0 and subnormals too; any global scale.

    ``shape`` is (N, K) or (E, N, K).
    """
    *lead, k = shape
    codes = rng.integers(0, 16, shape, np.uint8)
    scales = rng.integers(0, 0x7F, (*lead, k // 16), np.uint8)
    return _linear(codes, scales, np.exp2(rng.uniform(-12, 0, tuple(shape[:-2]))))


def selection_operand(rng: np.random.Generator, shape: Sequence[int]) -> Linear:
    """Rows with a single 1 or -1: a product copies one input, so no sum rounds whatever K is.

    ``shape`` is (N, K) or (E, N, K); global scales are powers of two.
    """
    *lead, k = shape
    codes = np.zeros(shape, np.uint8)
    where = rng.integers(0, k, (*lead, 1))
    np.put_along_axis(codes, where, rng.choice(np.array([2, 10], np.uint8), (*lead, 1)), axis=-1)
    return _linear(codes, np.full((*lead, k // 16), 0x38, np.uint8), _power_of_two(rng, shape))


def all_products_operand() -> Linear:
    """Every code under every finite scale byte: (127, 16), row s holding codes 0 to 15."""
    codes = np.broadcast_to(np.arange(16, dtype=np.uint8), (127, 16))
    return _linear(codes, np.arange(127, dtype=np.uint8)[:, None], 1.0)


def random_matrix(
    rng: np.random.Generator, shape: Sequence[int], dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """Draw normal values, rows differing in size by up to 2^8: a shared scale would show."""
    rows = np.exp2(rng.uniform(-4, 4, (*shape[:-1], 1)))
    values = rng.standard_normal(tuple(shape)) * rows
    return torch.from_numpy(values.astype(np.float32)).to(dtype)


def exact_matrix(
    rng: np.random.Generator, shape: Sequence[int], dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """Integers from -8 to 8: against :func:`exact_operand` fp32 sums are exact in any order."""
    return torch.from_numpy(rng.integers(-8, 9, tuple(shape)).astype(np.float32)).to(dtype)


def adversarial(k: int = 7168) -> tuple[Linear, Linear]:
    """One product of 2688 * 2688 beside k - 16 of 0.21875, (1, k) each.

    The small ones vanish one by one in a sequential fp32 sum that starts with the large one.  The
    large one's 15 neighbours share its scale of 448 and cannot be small, so they are zero.
    """
    sides = []
    for scale in (0x3E, 0x20):  # 1.75 and 0.125
        codes = np.full((1, k), 2, np.uint8)
        codes[0, :16] = [7] + 15 * [0]
        scales = np.full((1, k // 16), scale, np.uint8)
        scales[0, 0] = 0x7E
        sides.append(_linear(codes, scales, 1.0))
    return sides[0], sides[1]


def adversarial_bf16(k: int = 7168) -> tuple[torch.Tensor, Linear]:
    """Pair a bf16 row and a weight row: 2688 * 2688 beside k - 1 products of 0.21875."""
    a = torch.full((1, k), 1.75)
    a[0, 0] = 2688.0
    a[0, 1:16] = 2.0**-10  # times 0.5 * 448
    codes = np.full((1, k), 2, np.uint8)
    codes[0, :16] = [7] + 15 * [1]
    scales = np.full((1, k // 16), 0x20, np.uint8)
    scales[0, 0] = 0x7E
    return a.to(torch.bfloat16), _linear(codes, scales, 1.0)


def offsets(counts: Sequence[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """End offsets (E,) of groups of the given sizes."""
    return torch.tensor(list(itertools.accumulate(counts)), dtype=dtype)


class Routing(NamedTuple):
    """``topk_weights`` (T, k) float32, none of them 1, and ``topk_ids`` (T, k) int32."""

    topk_weights: torch.Tensor
    topk_ids: torch.Tensor


def _routing(rng: np.random.Generator, ids: npt.NDArray[np.int64]) -> Routing:
    weights = rng.uniform(0.1, 1.0, ids.shape)
    # Rows sum to no round number, so that a weight which is not applied shows also for top-1.
    weights *= rng.uniform(0.4, 0.9, (len(ids), 1)) / weights.sum(axis=1, keepdims=True)
    return Routing(
        torch.from_numpy(weights.astype(np.float32)), torch.from_numpy(ids.astype(np.int32))
    )


def _uniform_ids(
    rng: np.random.Generator, tokens: int, experts: int, k: int
) -> npt.NDArray[np.int64]:
    return np.argsort(rng.random((tokens, experts)), axis=1)[:, :k]


def route_uniform(rng: np.random.Generator, tokens: int, experts: int, k: int) -> Routing:
    """Draw k different experts for every token."""
    return _routing(rng, _uniform_ids(rng, tokens, experts, k))


def route_missing(rng: np.random.Generator, tokens: int, experts: int, k: int) -> Routing:
    """Replace a third of the slots, and the whole of token 0, by -1."""
    ids = _uniform_ids(rng, tokens, experts, k)
    ids[rng.random(ids.shape) < 1 / 3] = -1
    ids[:1] = -1
    return _routing(rng, ids)


def route_duplicates(rng: np.random.Generator, tokens: int, experts: int, k: int) -> Routing:
    """Draw with replacement; token 0 names one expert in every slot."""
    ids = rng.integers(0, experts, (tokens, k))
    ids[:1] = ids[:1, :1]
    return _routing(rng, ids)


def route_out_of_range(rng: np.random.Generator, tokens: int, experts: int, k: int) -> Routing:
    """Mix in ids of other ranks, from ``experts`` on, and int32's extremes."""
    ids = _uniform_ids(rng, tokens, experts, k)
    wrong = np.array([experts, experts + 7, 2**31 - 1, -(2**31), -2])
    return _routing(rng, np.where(rng.random(ids.shape) < 0.4, rng.choice(wrong, ids.shape), ids))


def route_one_hot(rng: np.random.Generator, tokens: int, experts: int, k: int) -> Routing:
    """Send every token's first slot to one expert and nothing anywhere else."""
    ids = np.full((tokens, k), -1, np.int64)
    ids[:, :1] = rng.integers(0, experts)
    return _routing(rng, ids)


ROUTERS: Final = {
    "uniform": route_uniform,
    "missing": route_missing,
    "duplicates": route_duplicates,
    "out_of_range": route_out_of_range,
    "one_hot": route_one_hot,
}
"""Every router by name, for parametrized tests: ``ROUTERS[name](rng, tokens, experts, k)``."""
