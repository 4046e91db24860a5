# SPDX-License-Identifier: Apache-2.0
"""A peer in the race: asked whether it can run a layer, prepared, and taken apart for timing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.accounting import WeightFormat, weight_bytes
from benchmarks.dense_reference import DenseReference
from benchmarks.layers import Batch, Layer, MoEBatch, MoELayer
from benchmarks.peers.base import Block, Inputs, Peer, Shape
from benchmarks.peers.weights import linear, unsupported
from benchmarks.prepared import Prepared, Recipe
from benchmarks.timing import Call


@dataclass(frozen=True)
class PeerContender:
    """See :class:`benchmarks.contenders.Contender`."""

    peer: Peer
    memory_budget: int
    recipe: Recipe = "w4a16"

    @property
    def name(self) -> str:
        return self.peer.name

    @property
    def limit(self) -> float:
        return self.peer.limit

    @property
    def weight_format(self) -> WeightFormat:
        return self.peer.weight_format

    def refusal(self, layer: Layer) -> str | None:
        # Its code is loaded last: a block that it does not take needs none.
        if reason := unsupported(layer):
            return reason
        assert isinstance(layer, MoELayer)
        (_, hidden), (_, intermediate) = layer.gemms
        shape = Shape(layer.experts, hidden, intermediate, layer.top_k)
        if reason := self.peer.refusal(shape):
            return reason
        need = self._set_bytes(layer)
        if need > self.memory_budget:
            return (
                f"its weights need {need / 2**30:.1f} GiB, the budget is "
                f"{self.memory_budget / 2**30:.1f} GiB; use --experts or --memory-budget"
            )
        return self.peer.available(layer.device)

    def _set_bytes(self, layer: Layer) -> int:
        return weight_bytes(layer.experts * sum(n * k for n, k in layer.gemms), self.weight_format)

    def prepare(self, layer: Layer) -> Prepared:
        assert isinstance(layer, MoELayer)
        copies = max(1, min(len(layer.copies), self.memory_budget // self._set_bytes(layer)))
        weights = linear(layer)
        block = self.peer.prepare(weights, tokens=layer.sweep, top_k=layer.top_k, copies=copies)
        # What a converted format stores is what its result is held to.
        converted = block.dense(0) is not None
        dense = block.dense if converted else weights.dense
        return prepared(block, DenseReference(layer, dense))


def prepared(block: Block, reference: DenseReference | None = None) -> Prepared:
    """A block's calls, each with what is not timed done before."""

    def given(batch: Batch) -> tuple[Inputs, int]:
        assert isinstance(batch, MoEBatch)
        call = block.inputs(batch.x, batch.routing.ids, batch.routing.weights)
        return call, batch.copy % block.copies

    def whole(batch: Batch) -> Call:
        call, copy = given(batch)
        return lambda: block.block(call, copy)

    def gemm1(batch: Batch) -> Call:
        call, copy = given(batch)
        plan = block.plan(call)
        return lambda: block.gemm1(call, plan, copy)

    def gemm2(batch: Batch) -> Call:
        call, copy = given(batch)
        plan = block.plan(call)
        u = block.activate(block.gemm1(call, plan, copy))
        return lambda: block.gemm2(call, plan, u, copy)

    run: Callable[[Batch], torch.Tensor] = lambda batch: block.block(*given(batch))  # noqa: E731
    return Prepared(run, whole, gemm1, gemm2, reference)
