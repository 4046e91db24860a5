# SPDX-License-Identifier: Apache-2.0
"""Which experts and which part of I one rank takes."""

from __future__ import annotations

from dataclasses import dataclass

from fp4lt.errors import ArgumentError
from fp4lt.formats import BLOCK


@dataclass(frozen=True)
class Shard:
    """A rank's place among ``tp_size`` slices of I and ``ep_size`` runs of experts.

    Raises
    ------
    ArgumentError
        Sizes below 1, or ranks outside of them.
    """

    tp_rank: int = 0
    tp_size: int = 1
    ep_rank: int = 0
    ep_size: int = 1

    def __post_init__(self) -> None:
        for kind in ("tp", "ep"):
            rank, size = getattr(self, f"{kind}_rank"), getattr(self, f"{kind}_size")
            for name, value in ((f"{kind}_rank", rank), (f"{kind}_size", size)):
                if isinstance(value, bool) or not isinstance(value, int):
                    raise ArgumentError(
                        f"load_moe: {name} must be an int, got {type(value).__name__} {value!r}"
                    )
            if size < 1 or not 0 <= rank < size:
                raise ArgumentError(
                    f"load_moe: {kind}_rank={rank} with {kind}_size={size}; need "
                    f"0 <= {kind}_rank < {kind}_size"
                )

    def experts(self, count: int) -> range:
        """Global numbers of the rank's experts, consecutive ones, out of ``count``."""
        if count % self.ep_size:
            fitting = [size for size in range(1, count + 1) if count % size == 0]
            raise ArgumentError(
                f"load_moe: ep_size={self.ep_size} does not divide the E={count} experts; each "
                f"rank needs the same number, so ep_size must be one of {fitting}"
            )
        own = count // self.ep_size
        return range(self.ep_rank * own, (self.ep_rank + 1) * own)

    def columns(self, intermediate: int) -> range:
        """The rank's part of I: rows of gate and up, columns of w2."""
        own, left = divmod(intermediate, self.tp_size)
        if left or own % BLOCK:
            blocks = intermediate // BLOCK
            fitting = [size for size in range(1, blocks + 1) if blocks % size == 0]
            what = (
                f"does not divide I={intermediate}"
                if left
                else f"gives each rank I/tp = {intermediate}/{self.tp_size} = {own} of I, which "
                f"cuts a block of {BLOCK} weights that share a scale"
            )
            raise ArgumentError(
                f"load_moe: tp_size={self.tp_size} {what}; I/tp must be a multiple of {BLOCK}, so "
                f"tp_size must be one of {fitting}. To spread over more ranks, give each some of "
                "the experts with ep_size"
            )
        return range(self.tp_rank * own, (self.tp_rank + 1) * own)
