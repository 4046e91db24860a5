# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that keep a layer's experts in two stacked tensors, gate_up_proj and down_proj.

A matrix may be stored (E, N, K) or, as models do that multiply from the other side, (E, K, N).
Which of the two is never guessed: block scales have K/16 where codes have K/2, and without scales
only one of the two fits gate_up and down together (2I by H, and H by I).
"""

from __future__ import annotations

from typing import Final

import torch

from fp4lt.checkpoint.files import TensorSource
from fp4lt.checkpoint.names import Convention, ExpertLayer
from fp4lt.checkpoint.reader import ExpertReader
from fp4lt.formats import BLOCK

_ALL: Final = -1
"""In place of an expert: the fault is one of the whole stack."""


class StackReader(ExpertReader):
    """One tensor for each projection (``gate_up`` and ``down``) and parameter."""

    def __init__(
        self, source: TensorSource, layer: ExpertLayer, convention: Convention | None
    ) -> None:
        # Whether a projection's tensors are (E, K, N).
        self._swapped: dict[str, bool] = {}
        super().__init__(source, layer, convention, range(_ALL, 0))

    def _shapes(self, expert: int) -> None:
        stored = {name: self._stack(name, self.codes) for name in ("gate_up", "down")}
        self.count = stored["gate_up"][0]
        if self.convention is None:
            self._orient_plain(stored)
        else:
            self._orient_packed(stored, self.convention.scales)
        rows, hidden = self.shapes["gate_up"]
        if (
            self.shapes["down"] != (hidden, rows // 2)
            or rows % 2
            or stored["down"][0] != self.count
        ):
            raise self.error(_ALL, "down", self.codes, self._misfit(stored))
        for name, (_, k) in self.shapes.items():
            if k % BLOCK:
                fault = f"has K={k} ({stored[name]} as stored); K must be a multiple of {BLOCK}"
                raise self.error(_ALL, name, self.codes, fault)

    def _stack(self, projection: str, parameter: str) -> tuple[int, int, int]:
        shape = self.spec(_ALL, projection, parameter)[1]
        if len(shape) != 3 or 0 in shape:
            fault = f"has shape {shape}; need one matrix per expert, three extents"
            raise self.error(_ALL, projection, parameter, fault)
        return shape[0], shape[1], shape[2]

    def _orient_packed(self, stored: dict[str, tuple[int, int, int]], scales: str) -> None:
        self.shapes = {}
        for name, (count, first, last) in stored.items():
            blocks = self._stack(name, scales)
            # Two codes a byte, and sixteen to a scale: eight bytes, along one axis only.
            if blocks == (count, first, last // 8) and last % 8 == 0:
                self._swapped[name], self.shapes[name] = False, (first, 2 * last)
            elif blocks == (count, first // 8, last) and first % 8 == 0:
                self._swapped[name], self.shapes[name] = True, (last, 2 * first)
            else:
                raise self.error(
                    _ALL,
                    name,
                    scales,
                    f"has shape {blocks}; codes of shape {stored[name]} need "
                    f"({count}, {first}, {last / 8:g}), or ({count}, {first / 8:g}, {last}) where "
                    "K comes first",
                )

    def _orient_plain(self, stored: dict[str, tuple[int, int, int]]) -> None:
        _, *gate_up = stored["gate_up"]
        _, *down = stored["down"]
        # (2I, H) with (H, I), or (H, 2I) with (I, H): never both.
        swapped = gate_up == [down[1], 2 * down[0]]
        self._swapped = dict.fromkeys(stored, swapped)
        self.shapes = {
            name: (last, first) if swapped else (first, last)
            for name, (_, first, last) in stored.items()
        }

    def _misfit(self, stored: dict[str, tuple[int, int, int]]) -> str:
        return (
            f"has shape {stored['down']}, which does not fit "
            f"{self.layer.name(_ALL, 'gate_up', self.codes)} of shape {stored['gate_up']}: need "
            "(E, 2I, H) and (E, H, I), or (E, H, 2I) and (E, I, H), with blocks of codes along H "
            "and I"
        )

    def check(self, experts: range, projections: tuple[str, ...]) -> None:
        """Compare the types, once for all experts, and the biases' shapes."""
        super().check(range(_ALL, 0), projections)

    def _check_weight(self, expert: int, projection: str) -> None:
        self.require_weights(expert, projection)
        if self.convention is not None:
            self.require_dtype(expert, projection, self.convention.scales, "F8_E4M3")
        else:
            self.require_dtype(expert, projection, "weight", self.spec(_ALL, "down", "weight")[0])

    def _bias_shape(self, projection: str) -> tuple[int, ...]:
        return self.count, self.shapes[projection][0]

    def _read(
        self, expert: int, projection: str, parameter: str, rows: slice, columns: slice
    ) -> torch.Tensor:
        name = self.layer.name(expert, projection, parameter)
        if self._swapped[projection]:
            part = self.source.read(name, expert, columns, rows).mT
            # Single bytes can be viewed in any order.
            return part if part.element_size() == 1 else part.contiguous()
        return self.source.read(name, expert, rows, columns)

    def bias(self, expert: int, projection: str, rows: range) -> torch.Tensor:
        """Part of one expert's bias, in its own type."""
        name = self.layer.name(expert, projection, "bias")
        return self.source.read(name, expert, slice(rows.start, rows.stop))

    def multipliers(
        self, experts: range, projections: tuple[str, ...], parameter: str
    ) -> torch.Tensor:
        """Global scales as multipliers, (len(experts), 1), or with gate's and up's (.., 2)."""
        (projection,) = projections
        dtype, shape = self.spec(_ALL, projection, parameter)
        shared = shape in ((), (1,))
        fitting = [(), (1,), (self.count,), (self.count, 1)]
        if projection == "gate_up":
            fitting.append((self.count, 2))
        if dtype != "F32" or shape not in fitting:
            fault = f"is {dtype} {shape}; need F32 of shape {', '.join(map(str, fitting))}"
            raise self.error(_ALL, projection, parameter, fault)
        # A copy, since what is read is a view of the file.
        stored = self.source.read(self.layer.name(_ALL, projection, parameter)).clone()
        if shared:
            stored = self._positive(stored.reshape(1, 1), [_ALL], projections, parameter)
            return stored.expand(len(experts), 1)
        stored = stored.reshape(self.count, -1)[experts.start : experts.stop]
        return self._positive(stored, experts, projections, parameter)

    def whose(self, expert: int) -> str:
        """The experts that a fault is about, as messages call them."""
        return "all experts" if expert == _ALL else f"expert {expert}"
