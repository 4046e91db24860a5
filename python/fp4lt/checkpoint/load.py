# SPDX-License-Identifier: Apache-2.0
"""One MoE layer of a checkpoint, or one rank's part of it, as MoEWeights."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch

from fp4lt.checkpoint.config import ModelConfig
from fp4lt.checkpoint.files import TensorSource
from fp4lt.checkpoint.names import BIAS, Convention, ExpertLayer, find_layers, select_layer
from fp4lt.checkpoint.progress import check_progress, progress_bar
from fp4lt.checkpoint.reader import ExpertReader
from fp4lt.checkpoint.shard import Shard
from fp4lt.checkpoint.stacks import StackReader
from fp4lt.errors import ArgumentError, DeviceError
from fp4lt.experts import MoEWeights
from fp4lt.formats import BLOCK
from fp4lt.problem import ORDERS, Operand, Order
from fp4lt.tensor import NVFP4Tensor


def load_moe(
    path: str | os.PathLike[str],
    *,
    layer: int | None = None,
    device: torch.device | str | None = None,
    tp_rank: int = 0,
    tp_size: int = 1,
    ep_rank: int = 0,
    ep_size: int = 1,
    order: Order | None = None,
    progress: bool | None = None,
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
    tp_rank, tp_size : int
        Take slice `tp_rank` of `tp_size` of every expert's I; a slice is a multiple of 16.
    ep_rank, ep_size : int
        Take run `ep_rank` of `ep_size` of the experts; `ep_size` divides E.
    order : "gate_up", "up_gate" or "interleaved", optional
        Where a stacked ``gate_up_proj`` has its gate.  By default interleaved where the config says
        gpt_oss, else the first half.  Not for experts with a gate and an up of their own.
    progress : bool, optional
        Whether to draw a bar on stderr; by default on a terminal, with rich installed, from 64
        experts or 256 MiB on.

    Returns
    -------
    MoEWeights
        ``w13`` (E, 2I, H) and ``w2`` (E, H, I) of this rank: E its experts, with ``expert_start``
        and ``num_experts`` set, and I its slice.  Gate rows stand above up rows
        (``order="gate_up"``), or as a stack has them.  NVFP4 codes and scales as stored, or
        bf16/fp16 tensors where the experts are not quantized.
        Global scales are multipliers whatever the checkpoint stores.  Where gate and up of any
        expert differ, ``gate_up_scales`` (E, 2) float32 has both and ``w13.global_scale`` is one.
        ``a1_scale`` and ``a2_scale`` (E,) float32 are each expert's own input scales, the larger
        of gate's and up's for the first; None in a weight-only checkpoint.
        ``w13_bias`` (E, 2I) and ``w2_bias`` (E, H) float32, where there are any; ``w2_bias`` on
        `tp_rank` 0 only, so that the sum over the ranks has it once.

    Raises
    ------
    CheckpointError
        A tensor is missing, damaged or contradicts another or the config; the message names the
        tensor, its expert and its file.
    UnsupportedError
        Another quantization, unknown tensors, an unknown activation, or no safetensors package.
    ArgumentError, DeviceError
        An argument is none, or the layer cannot be divided so.

    Notes
    -----
    Reads this rank's bytes, the headers of their files, and every expert's global scales of gate
    and up, so that all ranks hold them in one form.  See docs/checkpoints.md.
    """
    target = _device(device)
    shard = Shard(tp_rank, tp_size, ep_rank, ep_size)
    if order is not None and order not in ORDERS:
        raise ArgumentError(f"load_moe: order={order!r}; it must be one of {ORDERS}, or None")
    check_progress(progress)
    # Files are read into host memory, whatever the user made torch's default device.
    with torch.device("cpu"), TensorSource(Path(path)) as source:
        found = select_layer(find_layers(source.where), layer, source.title)
        convention = found.convention()
        config = ModelConfig.read(source.folder)
        if convention is not None:
            config.check_quantization(convention, found)
        activation = config.activation()
        alpha, limit = config.swiglu()
        # Experts without a gate exist only with relu2; elsewhere the gate has been lost.
        gated = bool(found.stacks) or "gate" in found.projections or activation != "relu2"
        if found.stacks:
            order = order or config.stack_order()
        elif order is not None:
            raise ArgumentError(
                f"load_moe: order={order!r} says where a stacked gate_up_proj has its gate, but "
                f"layer {found.number} ({found.root}) has a tensor for each; leave order out"
            )
        else:
            order = "gate_up" if gated else None
        reader, experts = _open(source, found, convention, config, shard)
        part = _Part(reader, experts, shard.columns(reader.intermediate), gated, order)
        reader.check(experts, part.first)
        title = f"{source.folder.name}, layer {found.number}"
        with progress_bar(progress, title, len(experts), part.size()) as tick:
            w13, gate_up_scales = part.w13(tick)
            w2 = part.w2(tick)
        a1_scale, a2_scale = part.input_scales()
        w13_bias, w2_bias = part.biases(tp_rank)
    return MoEWeights(
        w13.to(target),
        w2.to(target),
        order=order,
        activation=activation or "silu",
        gate_up_scales=_to(gate_up_scales, target),
        w13_bias=_to(w13_bias, target),
        w2_bias=_to(w2_bias, target),
        a1_scale=_to(a1_scale, target),
        a2_scale=_to(a2_scale, target),
        swiglu_alpha=alpha,
        swiglu_limit=limit,
        expert_start=experts.start,
        num_experts=reader.count,
    )


def _device(device: torch.device | str | None) -> torch.device:
    try:
        return torch.device("cpu" if device is None else device)
    except (RuntimeError, TypeError) as error:
        raise DeviceError(f"load_moe: device {device!r} is none that torch knows") from error


def _to(tensor: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
    return None if tensor is None else tensor.to(device)


def _open(
    source: TensorSource,
    layer: ExpertLayer,
    convention: Convention | None,
    config: ModelConfig,
    shard: Shard,
) -> tuple[ExpertReader, range]:
    """The layer's reader, and the experts that this rank takes."""
    if layer.stacks:
        source.settle(layer.stacks.values())
        stacks = StackReader(source, layer, convention)
        config.check_expert_count(layer, stacks.count)
        return stacks, shard.experts(stacks.count)
    layer.require_contiguous()
    config.check_expert_count(layer, len(layer.experts))
    experts = shard.experts(len(layer.experts))
    shared = {(name, convention.weight_global) for name in ("gate", "up")} if convention else set()
    source.settle(layer.names_of(experts, shared))
    return ExpertReader(source, layer, convention, experts), experts


class _Part:
    """One rank's part of a layer: pieces of its experts' matrices, copied into stacks."""

    def __init__(
        self,
        reader: ExpertReader,
        experts: range,
        inner: range,
        gated: bool,
        order: Order | None,
    ) -> None:
        self._reader = reader
        self._experts = experts
        self._inner = inner
        self._order = order
        hidden = reader.shapes["down"][0]
        self._down = [("down", range(hidden))]
        self._hidden = range(hidden)
        # Projections with their rows, one below the other.
        self._rows: list[tuple[str, range]]
        if "gate_up" not in reader.shapes:
            self._rows = [(name, inner) for name in (("gate", "up") if gated else ("up",))]
        elif order == "interleaved":
            self._rows = [("gate_up", range(2 * inner.start, 2 * inner.stop))]
        else:
            second = reader.intermediate
            below = range(second + inner.start, second + inner.stop)
            self._rows = [("gate_up", inner), ("gate_up", below)]
        self.first = tuple(dict.fromkeys(name for name, _ in self._rows))

    def size(self) -> int:
        """Bytes of the two stacks."""
        rows = sum(len(rows) for _, rows in self._rows)
        weights = len(self._experts) * len(self._hidden) * (rows + len(self._inner))
        return weights * 9 // 16 if self._reader.convention else weights * 2

    def w13(self, tick: Callable[[int], object]) -> tuple[Operand, torch.Tensor | None]:
        """Stack gate and up; also (E, 2) scales if their globals differ in any expert."""
        reader, convention = self._reader, self._reader.convention
        if convention is None:
            return self._stack(self._rows, "weight", self._hidden, tick), None
        parameter = convention.weight_global
        # Of all experts, for one form on every rank: another one could round otherwise.
        scales = reader.multipliers(range(reader.count), self.first, parameter)
        apart = not bool((scales == scales[:, :1]).all())
        if scales.shape[1] == 2 and "gate_up" in self.first and self._order != "gate_up":
            raise ArgumentError(
                f"load_moe: {reader.where(self._experts[0], 'gate_up', parameter)} has two scales "
                f"per expert, and with order={self._order!r} it is not known which is the gate's; "
                "they are read with order='gate_up' only"
            )
        own = scales[self._experts.start : self._experts.stop].contiguous()
        one = torch.ones(len(own), dtype=torch.float32, device=own.device)
        shared = one if apart else own[:, 0].contiguous()
        return self._packed(self._rows, self._hidden, shared, tick), own if apart else None

    def w2(self, tick: Callable[[int], object]) -> Operand:
        """Stack the down projections' columns."""
        convention = self._reader.convention
        if convention is None:
            return self._stack(self._down, "weight", self._inner, tick)
        scales = self._reader.multipliers(self._experts, ("down",), convention.weight_global)
        return self._packed(self._down, self._inner, scales[:, 0].contiguous(), tick)

    def input_scales(self) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
        """Read the static activation scales (E,) of both products; None where no expert has any."""
        reader, convention = self._reader, self._reader.convention
        every = (*self.first, "down")
        if convention is None or not reader.layer.has(every, convention.input_global):
            return None, None
        a1_scales = reader.multipliers(self._experts, self.first, convention.input_global)
        a2_scales = reader.multipliers(self._experts, ("down",), convention.input_global)
        return a1_scales.amax(dim=1), a2_scales[:, 0].contiguous()

    def biases(self, tp_rank: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Read w13's and w2's bias; the latter is added once, by the first slice of I."""
        return self._bias(self._rows), self._bias(self._down) if tp_rank == 0 else None

    def _bias(self, pieces: list[tuple[str, range]]) -> torch.Tensor | None:
        if not self._reader.layer.has((name for name, _ in pieces), BIAS):
            return None
        read = self._reader.bias
        return torch.stack(
            [
                torch.cat([read(expert, name, rows).float() for name, rows in pieces])
                for expert in self._experts
            ]
        )

    def _packed(
        self,
        pieces: list[tuple[str, range]],
        columns: range,
        global_scale: torch.Tensor,
        tick: Callable[[int], object],
    ) -> NVFP4Tensor:
        convention = self._reader.convention
        assert convention is not None
        codes = self._stack(pieces, convention.codes, columns, tick)
        scales = self._stack(pieces, convention.scales, columns, tick)
        return NVFP4Tensor.from_linear_scales(codes, scales, global_scale)

    def _stack(
        self,
        pieces: list[tuple[str, range]],
        parameter: str,
        columns: range,
        tick: Callable[[int], object],
    ) -> torch.Tensor:
        reader = self._reader
        rows = sum(len(rows) for _, rows in pieces)
        if reader.convention is None:
            kind, width = reader.dtype, len(columns)
        elif parameter == reader.convention.codes:
            kind, width = torch.uint8, len(columns) // 2
        else:
            kind, width = torch.float8_e4m3fn, len(columns) // BLOCK
        stack = torch.empty((len(self._experts), rows, width), dtype=kind, device="cpu")
        # Bytes through NumPy: torch would wake its thread pool for each of many small copies.
        target = stack.view(torch.uint8).numpy()
        for place, expert in enumerate(self._experts):
            start = 0
            for projection, taken in pieces:
                stored = reader.block(expert, projection, parameter, taken, columns)
                target[place, start : start + len(taken)] = stored
                start += len(taken)
                tick(stored.nbytes)
        return stack
