# SPDX-License-Identifier: Apache-2.0
"""Bytes, operations and the time floor of one call, from the routing that was really drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

WeightFormat = Literal["nvfp4", "mxfp4", "bf16", "fp32"]
BITS: dict[WeightFormat, float] = {"nvfp4": 4.5, "mxfp4": 4.25, "bf16": 16, "fp32": 32}
"""Bits of a weight, its share of the block scales included."""
ACTIVATION_BYTES = 2  # hidden states and outputs are bf16 for every contender


def weight_bytes(elements: int, weight_format: WeightFormat) -> int:
    """Bytes of ``elements`` weights: 4-bit codes plus a byte for 16 (MXFP4: 32), or plain numbers.

    Tile padding of the scales and the few global scales are not counted: no multiplication needs
    the padding, and the globals are 12 bytes an expert at most.
    """
    if weight_format == "nvfp4":
        return elements // 2 + elements // 16
    if weight_format == "mxfp4":
        return elements // 2 + elements // 32
    return elements * (2 if weight_format == "bf16" else 4)


@dataclass(frozen=True)
class Work:
    """What one call, or the mean of several, must do at least.

    ``active`` experts hold ``weights`` elements and meet ``rows`` routed rows.  The floats are
    means when the call's routing varies.
    """

    active: float
    rows: float
    weights: float
    activation_bytes: float
    flops: float

    @property
    def rows_per_active(self) -> float:
        """Routed rows per active expert."""
        return self.rows / self.active if self.active else 0.0

    def bytes(self, weight_format: WeightFormat) -> float:
        """Weights of the active experts, input and output, each moved once."""
        return weight_bytes(round(self.weights), weight_format) + self.activation_bytes


def count(
    gemms: Sequence[tuple[int, int]],
    rows_per_expert: np.ndarray,
    *,
    inputs: int,
    outputs: int,
) -> Work:
    """Count one call.

    Parameters
    ----------
    gemms : sequence of (N, K)
        The matrices of one expert; every routed row meets each once.
    rows_per_expert : (E,) int
    inputs, outputs : int
        Activation elements read and written, in bf16.

    Notes
    -----
    Intermediate activations are left out: they are small and written just before they are read.
    """
    elements = sum(n * k for n, k in gemms)
    active = int(np.count_nonzero(rows_per_expert))
    rows = int(rows_per_expert.sum())
    return Work(
        active=active,
        rows=rows,
        weights=active * elements,
        activation_bytes=ACTIVATION_BYTES * (inputs + outputs),
        flops=2 * rows * elements,
    )


def mean(works: Sequence[Work]) -> Work:
    """Average over calls."""
    if not works:
        raise ValueError("no calls to average over")
    n = len(works)
    return Work(
        active=sum(w.active for w in works) / n,
        rows=sum(w.rows for w in works) / n,
        weights=sum(w.weights for w in works) / n,
        activation_bytes=sum(w.activation_bytes for w in works) / n,
        flops=sum(w.flops for w in works) / n,
    )


@dataclass(frozen=True)
class Floor:
    """The roofline's time for the NVFP4 layer, whatever format a contender keeps."""

    us: float
    bound: Literal["memory", "compute"]


def floor(work: Work, *, read_bytes_per_s: float, flops_per_s: float) -> Floor:
    """Return the larger of reading time and arithmetic time, in microseconds."""
    memory = work.bytes("nvfp4") / read_bytes_per_s * 1e6
    compute = work.flops / flops_per_s * 1e6
    return Floor(memory, "memory") if memory >= compute else Floor(compute, "compute")
