# SPDX-License-Identifier: Apache-2.0
"""The same layers in plain torch: a loop over experts, or torch's grouped GEMM."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import fp4lt
from benchmarks.layers import Batch, GemmBatch, GemmLayer, Layer, MoEBatch, MoELayer
from benchmarks.prepared import Runner

Matrices = Callable[[int, int], tuple[torch.Tensor, ...]]
"""From copy and expert to the expert's dense matrices, (N, K) each."""

_SWIGLU: dict[str, tuple[Any, ...]] = {"silu": (1.0, 0.0, None), "swigluoai": (1.702, 1.0, 7.0)}


def dense_stacks(layer: Layer, copy: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Expand all matrices, (E, N, K) each, global scales included."""
    if isinstance(layer, MoELayer) and layer.weights.gate_up_scales is not None:
        every = [dense(layer, copy, expert, dtype) for expert in range(layer.experts)]
        return tuple(torch.stack(matrices) for matrices in zip(*every, strict=True))
    return tuple(stack.dequantize(dtype) for stack in stored(layer, copy))


def stored(layer: Layer, copy: int) -> tuple[fp4lt.NVFP4Tensor, ...]:
    """The NVFP4 stacks of a copy of the weights."""
    if isinstance(layer, GemmLayer):
        return (layer.copies[copy],)
    w13, w2 = layer.copies[copy].w13, layer.copies[copy].w2
    assert isinstance(w13, fp4lt.NVFP4Tensor)
    assert isinstance(w2, fp4lt.NVFP4Tensor)
    return w13, w2


def dense(layer: Layer, copy: int, expert: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Expand one expert's matrices, (N, K) each, global scales included."""
    stacks = stored(layer, copy)
    scales = None if isinstance(layer, GemmLayer) else layer.copies[copy].gate_up_scales
    if isinstance(layer, GemmLayer) or scales is None:
        return tuple(stack[expert].dequantize(dtype) for stack in stacks)
    w13 = stacks[0][expert].dequantize(torch.float32)
    index = torch.arange(w13.shape[0], device=w13.device)
    factor = torch.empty(w13.shape[0], device=w13.device)
    parts = split(index, layer.weights.order, dim=0)
    for rows, scale in zip(parts, scales[expert], strict=True):
        factor[rows] = scale
    return (w13 * factor[:, None]).to(dtype), stacks[1][expert].dequantize(dtype)


def split(x: torch.Tensor, order: str | None, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gate's and the up projection's part of ``x`` along ``dim``."""
    if order == "interleaved":
        index = torch.arange(0, x.shape[dim], 2, device=x.device)
        return x.index_select(dim, index), x.index_select(dim, index + 1)
    first, second = x.chunk(2, dim=dim)
    return (second, first) if order == "up_gate" else (first, second)


def activate(
    h: torch.Tensor, weights: fp4lt.MoEWeights, expert: int | torch.Tensor
) -> torch.Tensor:
    """Apply the activation in fp32, and round to h's dtype.

    ``expert`` is that of all rows, or (M,) of each.
    """
    functions = {
        "gelu": torch.nn.functional.gelu,
        "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
        "relu2": lambda x: torch.relu(x).square(),
    }
    name = weights.activation
    given = (weights.swiglu_alpha, weights.swiglu_beta, weights.swiglu_limit)
    alpha, beta, limit = (
        default if value is None else _of_rows(value, expert)
        for value, default in zip(given, _SWIGLU.get(name, _SWIGLU["silu"]), strict=True)
    )
    # A float alpha is the activation's own.
    swish = torch.nn.functional.silu if name == "silu" and isinstance(alpha, float) else None
    act = functions.get(name) or swish or (lambda x: x * torch.sigmoid(alpha * x))
    if not weights.gated:
        return act(h.float()).to(h.dtype)
    gate, up = (part.float() for part in split(h, weights.order, dim=1))
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    if isinstance(beta, torch.Tensor) or beta:
        up = up + beta
    return (act(gate) * up).to(h.dtype)


def _of_rows(value: torch.Tensor | float, expert: int | torch.Tensor) -> Any:
    if not isinstance(value, torch.Tensor) or not value.ndim:
        return value
    return value[expert] if isinstance(expert, int) else value[expert][:, None]


def loop(layer: Layer, matrices: Matrices, dtype: torch.dtype) -> Runner:
    """One ``torch.mm`` per matrix of each active expert.

    How many rows an expert has is known on the host, so the loop can be captured in a CUDA graph.
    """
    if isinstance(layer, GemmLayer):
        return lambda batch: _loop_gemm(batch, matrices, dtype)
    return lambda batch: _loop_moe(layer, batch, matrices, dtype)


def _loop_gemm(batch: Batch, matrices: Matrices, dtype: torch.dtype) -> torch.Tensor:
    assert isinstance(batch, GemmBatch)
    x = batch.x.to(dtype)
    parts, start = [], 0
    for expert, rows in enumerate(batch.rows):
        if rows:
            (w,) = matrices(batch.copy, expert)
            parts.append(torch.mm(x[start : start + rows], w.t()))
        start += rows
    return torch.cat(parts).to(torch.bfloat16)


def _loop_moe(
    layer: MoELayer, batch: Batch, matrices: Matrices, dtype: torch.dtype
) -> torch.Tensor:
    assert isinstance(batch, MoEBatch)
    weights, top_k = layer.copies[batch.copy], layer.top_k
    ids, router = batch.routing.ids, batch.routing.weights
    x = batch.x.to(dtype)
    if layer.router_weight_on_input:
        x = (batch.x.float() * router).to(torch.bfloat16).to(dtype)
    y = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    # Experts of other devices have higher ids: their slots are at the end and are never reached.
    slots = ids.reshape(-1).argsort(stable=True)
    start = 0
    for expert, rows in enumerate(batch.rows):
        if not rows:
            continue
        mine = slots[start : start + rows]
        start += rows
        tokens = mine // top_k
        w13, w2 = matrices(batch.copy, expert)
        h = torch.mm(x[tokens], w13.t())
        if weights.w13_bias is not None:
            h = h + weights.w13_bias[expert].to(dtype)
        z = torch.mm(activate(h, weights, expert), w2.t()).float()
        if weights.w2_bias is not None:
            z = z + weights.w2_bias[expert]
        if not layer.router_weight_on_input:
            z = z * router.reshape(-1)[mine, None]
        y.index_add_(0, tokens, z)
    return y.to(torch.bfloat16)


def grouped(layer: Layer, stacks: Callable[[int], tuple[torch.Tensor, ...]]) -> Runner:
    """torch's grouped GEMM on dense bf16 stacks (E, N, K); no size is needed on the host."""
    if isinstance(layer, GemmLayer):
        return lambda batch: _grouped_gemm(batch, stacks)
    return lambda batch: _grouped_moe(layer, batch, stacks)


def _grouped_gemm(batch: Batch, stacks: Callable[[int], tuple[torch.Tensor, ...]]) -> torch.Tensor:
    assert isinstance(batch, GemmBatch)
    (w,) = stacks(batch.copy)
    return torch._grouped_mm(batch.x, w.mT, offs=batch.offs)


def _grouped_moe(
    layer: MoELayer, batch: Batch, stacks: Callable[[int], tuple[torch.Tensor, ...]]
) -> torch.Tensor:
    assert isinstance(batch, MoEBatch)
    weights, (w13, w2) = layer.copies[batch.copy], stacks(batch.copy)
    ids, router = batch.routing.ids.reshape(-1), batch.routing.weights
    every = weights.num_experts
    assert every is not None
    x = batch.x
    if layer.router_weight_on_input:
        x = (x.float() * router).to(torch.bfloat16)
    slots = ids.argsort(stable=True)
    counts = torch.zeros(every, dtype=torch.int32, device=ids.device)
    counts.scatter_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))
    offs = counts[: layer.experts].cumsum(0, dtype=torch.int32)
    h = torch._grouped_mm(x[slots // layer.top_k], w13.mT, offs=offs)
    expert = ids[slots].clamp(max=layer.experts - 1)
    if weights.w13_bias is not None:
        h = h + weights.w13_bias[expert].to(h.dtype)
    z = torch._grouped_mm(activate(h, weights, expert), w2.mT, offs=offs)
    if weights.w2_bias is not None:
        z = z + weights.w2_bias[expert].to(z.dtype)
    by_slot = torch.empty_like(z)
    by_slot[slots] = z
    # Rows of other devices' experts were never written.
    here = (ids < layer.experts).reshape(router.shape)
    terms = by_slot.reshape(*router.shape, -1).float()
    if not layer.router_weight_on_input:
        terms = terms * router[..., None]
    return torch.where(here[..., None], terms, 0.0).sum(1).to(torch.bfloat16)
