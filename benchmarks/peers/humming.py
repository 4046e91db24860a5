# SPDX-License-Identifier: Apache-2.0
"""Humming: its indexed MoE GEMM on NVFP4 weights, with the kernels its own heuristics choose."""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from benchmarks.peers import bundle, glue, vllm_operators
from benchmarks.peers.base import Block, Inputs, Peer, Shape, Tensors, clones
from benchmarks.peers.vllm_operators import Slots
from benchmarks.peers.weights import Nvfp4, Weights

OPTIONS = {"use_batch_invariant": False, "use_f16_accum": False}
COMPUTE = json.dumps({**OPTIONS, "gemm_type": "indexed"})
PAD_N, PAD_K = 256, 128
_LAST = 1 << 30
Interval = list[Any]
"""[low, high, configuration]: a kernel for low < rows <= high."""


def tile_intervals(table: Sequence[Interval], rows: Sequence[int]) -> list[Interval]:
    """The intervals of a tuning table that hold one of ``rows``, stretched to cover (0, 2^30].

    Kernels of the others are not compiled.  The first must begin at 0: Humming's launcher looks up
    one row before it looks up the real number.
    """
    kept = [[*entry] for entry in table if any(entry[0] < r <= entry[1] for r in rows)]
    if not kept:
        raise ValueError(f"no interval of Humming's tuning table holds any of {list(rows)} rows")
    low = 0
    for entry in kept:
        entry[0], low = low, entry[1]
    kept[-1][1] = _LAST
    return kept


@dataclass(frozen=True)
class _Matrix:
    """One of the two GEMMs: its kernels, and the weights' copies."""

    layer: Any
    intervals: list[Interval]
    tuning: str
    copies: list[Tensors]
    device: torch.device

    @classmethod
    def make(cls, weight: Nvfp4, rows: Sequence[int], copies: int) -> _Matrix:
        layer, tensors = _convert(weight)
        tune = importlib.import_module("humming.tune")
        kind = importlib.import_module("humming.config").GemmType.INDEXED
        table = tune.get_heuristics_config(layer_config=layer, gemm_type=kind, **OPTIONS)
        intervals = tile_intervals(table, rows)
        device = weight.codes.device
        return cls(layer, intervals, json.dumps(intervals), clones(tensors, copies), device)

    def compile(self) -> None:
        """Compile what the intervals name, or find it in the cache."""
        kernel = importlib.import_module("humming.kernel.humming").HummingKernel
        kernel.prepare_kernels(self.layer.to_str(), COMPUTE, self.tuning, self.device)

    def block_rows(self, rows: int) -> int:
        """Rows of a block of the kernel that runs so many."""
        entries = (config for low, high, config in self.intervals if low < rows <= high)
        return int(next(entries)["block_shape"][0])


def _convert(weight: Nvfp4) -> tuple[Any, Tensors]:
    modelopt = importlib.import_module("humming.schema.modelopt")
    own = importlib.import_module("humming.schema.humming")
    transform = importlib.import_module("humming.transform")
    experts, n, k = weight.shape
    common = {"num_experts": experts, "device": weight.codes.device}
    schema, tensors = modelopt.ModeloptNvfp4WeightSchema().convert_humming(
        tensors={
            "weight": weight.codes,
            "weight_scale": weight.scales,
            "weight_scale_2": weight.global_scale,
        },
        shape_n_stacks=[n],
        shape_k_stacks=[k],
        param_dtype=torch.bfloat16,
        **common,
    )
    layer, tensors = transform.prepare_and_transform_humming_tensors(
        tensors=tensors,
        shape_n=n,
        shape_k=k,
        pad_n_to_multiple=PAD_N,
        pad_k_to_multiple=PAD_K,
        weight_schema=schema,
        input_schema=own.HummingInputSchema(),
        has_bias=False,
        torch_dtype=torch.bfloat16,
        **common,
    )
    names = ("weight", "weight_scale", "weight_scale_2", "zero_point")
    return layer, tuple(tensors.get(name) for name in names)


class HummingBlock(Block):
    """See the module."""

    def __init__(self, weights: Weights, rows: Sequence[int], copies: int) -> None:
        super().__init__(weights, copies)
        device = weights.w13.codes.device
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        self._locks = torch.zeros(64 * processors, dtype=torch.int32, device=device)
        self._forward = importlib.import_module("humming.forward").humming_forward
        self._w13, self._w2 = (_Matrix.make(weight, rows, copies) for weight in weights)
        # Half a minute of compilers' work: both matrices' kernels at once.
        with ThreadPoolExecutor(2) as pool:
            for done in [pool.submit(matrix.compile) for matrix in (self._w13, self._w2)]:
                done.result()

    def plan(self, call: Inputs) -> tuple[Slots, Slots]:
        first, second = (m.block_rows(call.slots) for m in (self._w13, self._w2))
        slots = vllm_operators.align(call.ids, self.experts, first)
        if first == second:
            return slots, slots
        return slots, vllm_operators.align(call.ids, self.experts, second)

    def gemm1(self, call: Inputs, plan: Any, copy: int = 0) -> torch.Tensor:
        n, top_k = 2 * self.intermediate, call.ids.shape[1]
        return self._gemm(self._w13, copy, call.x, plan[0], top_k, (call.slots, n))

    def gemm2(self, call: Inputs, plan: Any, u: torch.Tensor, copy: int = 0) -> torch.Tensor:
        return self._gemm(self._w2, copy, u, plan[1], 1, (call.slots, self.hidden))

    def combine(self, call: Inputs, plan: Any, z: torch.Tensor) -> torch.Tensor:
        return glue.weighted_sum(z, call.weights)

    def _gemm(
        self,
        matrix: _Matrix,
        copy: int,
        a: torch.Tensor,
        slots: Slots,
        top_k: int,
        shape: tuple[int, int],
    ) -> torch.Tensor:
        weight, scale, scale_2, zero_point = matrix.copies[copy]
        out = a.new_empty(shape)
        self._forward(
            matrix.layer,
            inputs=a,
            weight=weight,
            weight_scale=scale,
            weight_scale_2=scale_2,
            zero_point=zero_point,
            outputs=out,
            sorted_ids=slots.sorted,
            expert_ids=slots.owners,
            num_tokens_padded=slots.padded,
            locks=self._locks,
            top_k=top_k,
            valid_shape_m=shape[0],
            compute_config=COMPUTE,
            tuning_config=matrix.tuning,
        )
        return out


class Humming(Peer):
    """See the module; token slots are aligned by vLLM's operator, as vLLM does for it."""

    name = "humming"
    # Sums of up to 10 slices of K are added up in bf16: gate and up are rounded as often.
    limit: ClassVar[float] = 1.6e-2

    def load(self) -> None:
        vllm_operators.load()
        bundle.load_package("humming")
        for name in ("forward", "kernel.humming", "schema.modelopt", "transform", "tune"):
            importlib.import_module(f"humming.{name}")

    def refusal(self, shape: Shape) -> str | None:
        for name, (n, k) in (("w13", shape.w13), ("w2", shape.w2)):
            if n % PAD_N or k % PAD_K:
                return (
                    f"it would pad {name} ({n} x {k}) to multiples of {PAD_N} and {PAD_K}; a "
                    "padded race would not be of the same bytes"
                )
        return None

    def prepare(
        self, weights: Weights, *, tokens: Sequence[int], top_k: int, copies: int = 1
    ) -> HummingBlock:
        return HummingBlock(weights, [t * top_k for t in tokens], copies)
