# SPDX-License-Identifier: Apache-2.0
"""One MoE layer of a checkpoint as MoEWeights."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from fp4lt.checkpoint.config import ModelConfig
from fp4lt.checkpoint.files import TensorSource
from fp4lt.checkpoint.names import Convention, ExpertLayer, find_layers, select_layer
from fp4lt.errors import CheckpointError, DeviceError, UnsupportedError
from fp4lt.experts import MoEWeights
from fp4lt.formats import BLOCK
from fp4lt.tensor import NVFP4Tensor

_NAN_BYTE: Final = 0x7F
_PLAIN: Final = {"BF16": torch.bfloat16, "F16": torch.float16}


def load_moe(
    path: str | os.PathLike[str],
    *,
    layer: int | None = None,
    device: torch.device | str | None = None,
) -> MoEWeights:
    """Read the experts of one MoE layer from a ModelOpt or compressed-tensors checkpoint.

    Parameters
    ----------
    path : str or path-like
        A checkpoint folder (``model.safetensors``, or shards with or without
        ``model.safetensors.index.json``) or one ``.safetensors`` file.  ``config.json`` and
        ``hf_quant_config.json`` beside it are read where they exist.
    layer : int, optional
        The layer's number, as in ``model.layers.3``.  May be left out where there is one MoE layer.
    device : torch.device or str, optional
        Where the weights go; the CPU by default.

    Returns
    -------
    MoEWeights
        ``w13`` (E, 2I, H), gate rows above up rows (``order="gate_up"``), and ``w2`` (E, H, I);
        NVFP4 codes and scales as stored, or bf16/fp16 tensors where the experts are not quantized.
        Global scales are multipliers whatever the checkpoint stores.  Where gate and up of any
        expert differ, ``gate_up_scales`` (E, 2) float32 has both and ``w13.global_scale`` is one.
        ``a1_scale`` and ``a2_scale`` (E,) float32 are each expert's own input scales, the larger
        of gate's and up's for the first; None in a weight-only checkpoint.

    Raises
    ------
    CheckpointError
        A tensor is missing, damaged or contradicts another or the config; the message names the
        tensor, its expert and its file.
    UnsupportedError
        Another quantization, stacked experts, an unknown activation, or no safetensors package.
    ArgumentError, DeviceError
        ``layer`` or ``device`` is no such thing.

    Notes
    -----
    Reads the bytes of this layer and the headers of its files.  See docs/checkpoints.md.
    """
    target = _device(device)
    with TensorSource(Path(path)) as source:
        experts = select_layer(find_layers(source.where), layer, source.title)
        convention = experts.convention()
        config = ModelConfig.read(source.folder)
        if convention is not None:
            config.check_quantization(convention, experts)
        experts.require_contiguous()
        config.check_expert_count(experts)
        activation = config.activation()
        alpha, limit = config.swiglu()
        # Experts without a gate exist only with relu2; elsewhere the gate has been lost.
        gated = "gate" in experts.projections or activation != "relu2"
        first = ("gate", "up") if gated else ("up",)
        source.settle(experts.names)
        stacker = _Stacker(source, experts, convention)
        stacker.check((*first, "down"))
        w13, gate_up_scales = stacker.weights(first)
        w2, _ = stacker.weights(("down",))
        a1_scale, a2_scale = stacker.input_scales(first)
    return MoEWeights(
        w13.to(target),
        w2.to(target),
        order="gate_up" if gated else None,
        activation=activation or "silu",
        gate_up_scales=_to(gate_up_scales, target),
        a1_scale=_to(a1_scale, target),
        a2_scale=_to(a2_scale, target),
        swiglu_alpha=alpha,
        swiglu_limit=limit,
    )


def _device(device: torch.device | str | None) -> torch.device:
    try:
        return torch.device("cpu" if device is None else device)
    except (RuntimeError, TypeError) as error:
        raise DeviceError(f"load_moe: device {device!r} is none that torch knows") from error


def _bytes(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    """View the memory of a tensor on the CPU; its last extent counts bytes."""
    view: npt.NDArray[np.uint8] = tensor.view(torch.uint8).numpy()
    return view


def _to(tensor: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
    return None if tensor is None else tensor.to(device)


class _Stacker:
    """Checks each expert's tensors and copies them into stacks that are allocated once."""

    def __init__(
        self, source: TensorSource, layer: ExpertLayer, convention: Convention | None
    ) -> None:
        self._source = source
        self._layer = layer
        self._convention = convention
        self._count = len(layer.experts)
        gate_or_up = "gate" if "gate" in layer.projections else "up"
        rows, columns = self._weight_shape(0, gate_or_up)
        self._shapes = {
            "gate": (rows, columns),
            "up": (rows, columns),
            "down": (columns, rows),
        }

    def check(self, projections: tuple[str, ...]) -> None:
        """Compare types and shapes by the headers, before the first weight is read."""
        for expert in range(self._count):
            for projection in projections:
                self._check_weight(expert, projection)

    def weights(
        self, projections: tuple[str, ...]
    ) -> tuple[NVFP4Tensor | torch.Tensor, torch.Tensor | None]:
        """Stack projections row-wise; also (E, 2) scales if their globals differ."""
        convention = self._convention
        if convention is None:
            return self._stack(projections, "weight"), None
        scales = self._globals(projections, convention, convention.weight_global)
        codes = self._stack(projections, convention.codes)
        blocks = self._stack(projections, convention.scales)
        shared = scales[:, 0].contiguous()
        if bool((scales == shared[:, None]).all()):
            return NVFP4Tensor.from_linear_scales(codes, blocks, shared), None
        return NVFP4Tensor.from_linear_scales(codes, blocks, torch.ones_like(shared)), scales

    def input_scales(
        self, first: tuple[str, ...]
    ) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
        """Read the static activation scales (E,) of both products; None where no expert has any."""
        convention = self._convention
        if convention is None or convention.input_global not in self._layer.parameters:
            return None, None
        a1_scales = self._globals(first, convention, convention.input_global)
        a2_scales = self._globals(("down",), convention, convention.input_global)
        return a1_scales.amax(dim=1), a2_scales[:, 0].contiguous()

    def _stack(self, projections: tuple[str, ...], parameter: str) -> torch.Tensor:
        rows = self._shapes[projections[0]][0]
        dtype, shape = self._spec(0, projections[0], parameter)
        kind = {**_PLAIN, "U8": torch.uint8, "F8_E4M3": torch.float8_e4m3fn}[dtype]
        stack = torch.empty((self._count, rows * len(projections), shape[1]), dtype=kind)
        # Bytes through NumPy: torch would wake its thread pool for each of many small copies.
        target = _bytes(stack)
        for expert in range(self._count):
            for place, projection in enumerate(projections):
                part = self._source.tensor(self._layer.name(expert, projection, parameter))
                stored = _bytes(part)
                if kind is torch.float8_e4m3fn:
                    self._check_blocks(expert, projection, parameter, stored)
                target[expert, place * rows : (place + 1) * rows] = stored
        return stack

    def _check_blocks(
        self, expert: int, projection: str, parameter: str, scales: npt.NDArray[np.uint8]
    ) -> None:
        """Refuse bytes past 0x7E: block scales are unsigned and finite."""
        if scales.max() < _NAN_BYTE:
            return
        bad = np.argwhere(scales >= _NAN_BYTE)
        row, block = bad[0]
        byte = int(scales[row, block])
        fault = "NaN" if byte & 0x7F == _NAN_BYTE else "sign bit set"
        raise self._error(
            expert,
            projection,
            parameter,
            f"has scale byte 0x{byte:02X} ({fault}) at row {row}, block {block}, the first of "
            f"{len(bad)}; need 0x00 to 0x7E. Export the checkpoint again",
        )

    def _globals(
        self, projections: tuple[str, ...], convention: Convention, parameter: str
    ) -> torch.Tensor:
        """Scalars of every expert as multipliers, (E, len(projections)) float32."""
        values = torch.empty((self._count, len(projections)), dtype=torch.float32)
        for expert in range(self._count):
            for place, projection in enumerate(projections):
                values[expert, place] = self._global(expert, projection, convention, parameter)
        return values

    def _global(
        self, expert: int, projection: str, convention: Convention, parameter: str
    ) -> torch.Tensor:
        dtype, shape = self._spec(expert, projection, parameter)
        if dtype != "F32" or shape not in ((), (1,)):
            raise self._error(
                expert, projection, parameter, f"is {dtype} {shape}; need one F32 scalar"
            )
        stored = self._source.tensor(self._layer.name(expert, projection, parameter)).reshape(())
        # The format's own inverse, rounded once: amax/2688 may differ from it in the last bit.
        scale = torch.ones(()) / stored if convention.reciprocal else stored
        if not bool(torch.isfinite(scale) & (scale > 0)):
            raise self._error(
                expert,
                projection,
                parameter,
                f"holds {stored.item()!r}{' (a divisor)' if convention.reciprocal else ''}; "
                "a global scale must be finite and positive",
            )
        return scale

    def _check_weight(self, expert: int, projection: str) -> None:
        rows, columns = self._shapes[projection]
        shape = self._weight_shape(expert, projection)
        if shape != (rows, columns):
            raise self._error(
                expert,
                projection,
                self._convention.codes if self._convention else "weight",
                f"holds {shape[0]} x {shape[1]} weights; need {rows} x {columns}, as follows from "
                "expert 0's first projection",
            )
        if self._convention is None:
            self._require_dtype(expert, projection, "weight", self._spec(0, "down", "weight")[0])
            return
        self._require_dtype(expert, projection, self._convention.scales, "F8_E4M3")
        blocks = self._spec(expert, projection, self._convention.scales)[1]
        if blocks != (rows, columns // BLOCK):
            raise self._error(
                expert,
                projection,
                self._convention.scales,
                f"has shape {blocks}; its codes hold {rows} x {columns} weights, which need "
                f"({rows}, {columns // BLOCK})",
            )

    def _weight_shape(self, expert: int, projection: str) -> tuple[int, int]:
        """Rows and logical columns of a projection, after checking type and rank."""
        parameter = "weight" if self._convention is None else self._convention.codes
        dtype, shape = self._spec(expert, projection, parameter)
        if self._convention is not None:
            self._require_dtype(expert, projection, parameter, "U8")
        elif dtype not in _PLAIN:
            raise UnsupportedError(
                f"load_moe: {self._where(expert, projection, parameter)} is {dtype} without "
                "scales; NVFP4 (U8 codes with block scales), BF16 and F16 experts are read"
            )
        packed = 1 if self._convention is None else 2
        if len(shape) != 2 or 0 in shape or shape[1] * packed % BLOCK:
            raise self._error(
                expert,
                projection,
                parameter,
                f"has shape {shape}; need (N, {'K/2' if packed == 2 else 'K'}) with K a multiple "
                f"of {BLOCK}",
            )
        return shape[0], shape[1] * packed

    def _require_dtype(self, expert: int, projection: str, parameter: str, needed: str) -> None:
        dtype, _ = self._spec(expert, projection, parameter)
        if dtype != needed:
            raise self._error(expert, projection, parameter, f"is {dtype}; need {needed}")

    def _spec(self, expert: int, projection: str, parameter: str) -> tuple[str, tuple[int, ...]]:
        name = self._layer.name(expert, projection, parameter)
        if name not in self._source.where:
            raise CheckpointError(
                f"load_moe: tensor {name} (expert {expert}) is missing in {self._source.title}; "
                "need every parameter for every expert"
            )
        return self._source.spec(name)

    def _where(self, expert: int, projection: str, parameter: str) -> str:
        name = self._layer.name(expert, projection, parameter)
        return f"tensor {name} (expert {expert}, in {self._source.where[name]})"

    def _error(self, expert: int, projection: str, parameter: str, fault: str) -> CheckpointError:
        return CheckpointError(f"load_moe: {self._where(expert, projection, parameter)} {fault}")
