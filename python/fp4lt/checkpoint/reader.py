# SPDX-License-Identifier: Apache-2.0
"""Experts' matrices, scalars and biases, checked by their headers and read in parts.

:class:`ExpertReader` reads one tensor per expert and projection; :class:`StackReader` one per
projection, with gate and up in it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from fp4lt.checkpoint.files import TensorSource
from fp4lt.checkpoint.names import BIAS, Convention, ExpertLayer
from fp4lt.errors import CheckpointError, UnsupportedError
from fp4lt.formats import BLOCK

Bytes = npt.NDArray[np.uint8]

PLAIN: Final = {"BF16": torch.bfloat16, "F16": torch.float16}
_BIASES: Final = ("BF16", "F16", "F32")
_NAN_BYTE: Final = 0x7F


class ExpertReader:
    """One tensor for each expert, projection and parameter.

    Attributes
    ----------
    count : int
        Experts in the checkpoint.
    shapes : dict
        Rows and logical columns of each projection.
    """

    def __init__(
        self,
        source: TensorSource,
        layer: ExpertLayer,
        convention: Convention | None,
        experts: range,
    ) -> None:
        self.source = source
        self.layer = layer
        self.convention = convention
        self.codes = convention.codes if convention else "weight"
        self.count = len(layer.experts)
        self.first = experts[0]
        self._shapes(experts[0])

    def _shapes(self, expert: int) -> None:
        gate_or_up = "gate" if "gate" in self.layer.projections else "up"
        rows, columns = self._weight_shape(expert, gate_or_up)
        self.shapes = {
            "gate": (rows, columns),
            "up": (rows, columns),
            "down": (columns, rows),
        }

    @property
    def intermediate(self) -> int:
        """I."""
        return self.shapes["down"][1]

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights as stored: uint8 for codes, else bf16 or fp16."""
        return PLAIN.get(self.spec(self.first, "down", self.codes)[0], torch.uint8)

    def check(self, experts: range, projections: tuple[str, ...]) -> None:
        """Compare types and shapes by the headers, before the first weight is read."""
        biased = [group for group in (projections, ("down",)) if self.layer.has(group, BIAS)]
        for expert in experts:
            for projection in (*projections, "down"):
                self._check_weight(expert, projection)
            for projection in (name for group in biased for name in group):
                self._check_bias(expert, projection)

    def block(
        self, expert: int, projection: str, parameter: str, rows: range, columns: range
    ) -> Bytes:
        """Bytes of a part of a matrix, one row after the other.

        Parameters
        ----------
        parameter : str
            Codes or plain weights, or block scales.
        rows, columns : range
            Within this projection; columns count weights, whole blocks of them.

        Returns
        -------
        (len(rows), n) uint8
        """
        scales = self.convention is not None and parameter == self.convention.scales
        per = BLOCK if scales else 2 if self.convention else 1
        part = self._read(
            expert,
            projection,
            parameter,
            slice(rows.start, rows.stop),
            slice(columns.start // per, columns.stop // per),
        )
        stored: Bytes = part.view(torch.uint8).numpy()
        if scales:
            self._check_blocks(expert, projection, stored, (rows.start, columns.start // per))
        return stored

    def _read(
        self, expert: int, projection: str, parameter: str, rows: slice, columns: slice
    ) -> torch.Tensor:
        return self.source.read(self.layer.name(expert, projection, parameter), rows, columns)

    def bias(self, expert: int, projection: str, rows: range) -> torch.Tensor:
        """Part of a projection's bias, in its own type."""
        name = self.layer.name(expert, projection, BIAS)
        return self.source.read(name, slice(rows.start, rows.stop))

    def multipliers(
        self, experts: range, projections: tuple[str, ...], parameter: str
    ) -> torch.Tensor:
        """Global scales as multipliers, (len(experts), len(projections)) float32."""
        stored = torch.empty((len(experts), len(projections)), dtype=torch.float32, device="cpu")
        for place, expert in enumerate(experts):
            for column, projection in enumerate(projections):
                dtype, shape = self.spec(expert, projection, parameter)
                if dtype != "F32" or shape not in ((), (1,)):
                    fault = f"is {dtype} {shape}; need one F32 scalar"
                    raise self.error(expert, projection, parameter, fault)
                name = self.layer.name(expert, projection, parameter)
                stored[place, column] = self.source.read(name).reshape(())
        return self._positive(stored, experts, projections, parameter)

    def _positive(
        self,
        stored: torch.Tensor,
        experts: Iterable[int],
        projections: tuple[str, ...],
        parameter: str,
    ) -> torch.Tensor:
        """Turn divisors into multipliers, and refuse those that scale nothing."""
        reciprocal = self.convention is not None and self.convention.reciprocal
        # The format's own inverse, rounded once: amax/2688 may differ from it in the last bit.
        scales = stored.reciprocal() if reciprocal else stored
        good = torch.isfinite(scales) & (scales > 0)
        if bool(good.all()):
            return scales
        place, column = (int(index) for index in torch.nonzero(~good)[0])
        # Gate and up of a stack are two columns of one tensor.
        projection = projections[min(column, len(projections) - 1)]
        raise self.error(
            list(experts)[place],
            projection,
            parameter,
            f"holds {stored[place, column].item()!r}{' (a divisor)' if reciprocal else ''}; "
            "a global scale must be finite and positive",
        )

    def _check_weight(self, expert: int, projection: str) -> None:
        rows, columns = self.shapes[projection]
        shape = self._weight_shape(expert, projection)
        if shape != (rows, columns):
            raise self.error(
                expert,
                projection,
                self.codes,
                f"holds {shape[0]} x {shape[1]} weights; need {rows} x {columns}, as follows from "
                f"expert {self.first}'s first projection",
            )
        if self.convention is None:
            self.require_dtype(
                expert, projection, "weight", self.spec(self.first, "down", "weight")[0]
            )
            return
        self.require_dtype(expert, projection, self.convention.scales, "F8_E4M3")
        blocks = self.spec(expert, projection, self.convention.scales)[1]
        if blocks != (rows, columns // BLOCK):
            raise self.error(
                expert,
                projection,
                self.convention.scales,
                f"has shape {blocks}; its codes hold {rows} x {columns} weights, which need "
                f"({rows}, {columns // BLOCK})",
            )

    def _check_bias(self, expert: int, projection: str) -> None:
        dtype, shape = self.spec(expert, projection, BIAS)
        need = self._bias_shape(projection)
        if dtype not in _BIASES or shape != need:
            fault = f"is {dtype} {shape}; need {need} in {', '.join(_BIASES)}"
            raise self.error(expert, projection, BIAS, fault)

    def _bias_shape(self, projection: str) -> tuple[int, ...]:
        return (self.shapes[projection][0],)

    def _weight_shape(self, expert: int, projection: str) -> tuple[int, int]:
        """Rows and logical columns of a projection, after checking type and rank."""
        self.require_weights(expert, projection)
        shape = self.spec(expert, projection, self.codes)[1]
        packed = 2 if self.convention else 1
        if len(shape) != 2 or 0 in shape or shape[1] * packed % BLOCK:
            raise self.error(
                expert,
                projection,
                self.codes,
                f"has shape {shape}; need (N, {'K/2' if packed == 2 else 'K'}) with K a multiple "
                f"of {BLOCK}",
            )
        return shape[0], shape[1] * packed

    def require_weights(self, expert: int, projection: str) -> None:
        """Refuse weights of another type than the format's."""
        if self.convention is not None:
            self.require_dtype(expert, projection, self.codes, "U8")
            return
        dtype = self.spec(expert, projection, self.codes)[0]
        if dtype not in PLAIN:
            raise UnsupportedError(
                f"load_moe: {self.where(expert, projection, self.codes)} is {dtype} without "
                "scales; NVFP4 (U8 codes with block scales), BF16 and F16 experts are read"
            )

    def require_dtype(self, expert: int, projection: str, parameter: str, needed: str) -> None:
        """Refuse another type than ``needed``, a safetensors name."""
        dtype, _ = self.spec(expert, projection, parameter)
        if dtype != needed:
            raise self.error(expert, projection, parameter, f"is {dtype}; need {needed}")

    def spec(self, expert: int, projection: str, parameter: str) -> tuple[str, tuple[int, ...]]:
        """Type and shape of a tensor, which must exist."""
        name = self.layer.name(expert, projection, parameter)
        if name not in self.source.where:
            raise CheckpointError(
                f"load_moe: tensor {name} ({self.whose(expert)}) is missing in "
                f"{self.source.title}; need every parameter for every expert"
            )
        return self.source.spec(name)

    def whose(self, expert: int) -> str:
        """The experts that a fault is about, as messages call them."""
        return f"expert {expert}"

    def where(self, expert: int, projection: str, parameter: str) -> str:
        """A tensor as messages call it."""
        name = self.layer.name(expert, projection, parameter)
        return f"tensor {name} ({self.whose(expert)}, in {self.source.where[name]})"

    def error(self, expert: int, projection: str, parameter: str, fault: str) -> CheckpointError:
        """Say what is wrong with a tensor."""
        return CheckpointError(f"load_moe: {self.where(expert, projection, parameter)} {fault}")

    def _check_blocks(
        self, expert: int, projection: str, scales: Bytes, start: tuple[int, int]
    ) -> None:
        """Refuse bytes past 0x7E: block scales are unsigned and finite."""
        if scales.max() < _NAN_BYTE:
            return
        assert self.convention is not None
        bad = np.argwhere(scales >= _NAN_BYTE)
        row, block = bad[0]
        byte = int(scales[row, block])
        fault = "NaN" if byte & 0x7F == _NAN_BYTE else "sign bit set"
        raise self.error(
            expert,
            projection,
            self.convention.scales,
            f"has scale byte 0x{byte:02X} ({fault}) at row {row + start[0]}, block "
            f"{block + start[1]}, the first of {len(bad)}; need 0x00 to 0x7E. Export the "
            "checkpoint again",
        )
