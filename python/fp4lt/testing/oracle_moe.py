# SPDX-License-Identifier: Apache-2.0
"""The MoE block, step by step: routing, activations with their tolerance, the combine.

:func:`moe_reference` follows the definition literally from end to end.  A last-bit change of h may
flip a code of u, so only exact inputs can be compared with it bit by bit; everything else is
judged stage by stage (:mod:`fp4lt.testing.oracle_trace`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from fp4lt.testing import bounds
from fp4lt.testing.oracle_codec import F32, F64, I64
from fp4lt.testing.oracle_gemm import (
    Expected,
    Operand,
    concatenate,
    is_nvfp4,
    per_expert,
    product,
    quantize_rows,
)

SWIGLU_DEFAULTS: Final = {"silu": (1.0, 0.0, math.inf), "swigluoai": (1.702, 1.0, 7.0)}
"""alpha, beta and limit where the weights give none."""

ULPS: Final = {"silu": 4.0, "swigluoai": 4.0, "gelu": 4.0, "gelu_tanh": 4.0, "relu2": 0.5}
"""Allowed error of each activation (before the gate's product with up) in ulps of fp32."""

GELU_TANH_ROUNDINGS: Final = 6
"""fp32 roundings in the argument of gelu_tanh's sigmoid: x^2, x^3, constants, sum, product."""


@dataclass(frozen=True)
class PlainWeights:
    """The fields of ``MoEWeights`` without its checks, for tests of the checks themselves."""

    w13: Any
    w2: Any
    order: str | None = None
    activation: str = "silu"
    gate_up_scales: Any = None
    w13_bias: Any = None
    w2_bias: Any = None
    a1_scale: Any = None
    a2_scale: Any = None
    swiglu_alpha: Any = None
    swiglu_beta: Any = None
    swiglu_limit: Any = None
    expert_start: int = 0
    num_experts: int | None = None

    @property
    def gated(self) -> bool:
        """Whether w13 holds gate and up rows."""
        return self.order is not None


class Routes(NamedTuple):
    """Routed rows: by local expert, then by slot ``t k + j``.

    Attributes
    ----------
    token, expert, slot : (M,) int64
        Of each row; ``slot`` is ``t k + j``.
    slot_row : (T, k) int64
        Row of each slot, -1 where the slot contributes nothing.
    """

    token: I64
    expert: I64
    slot: I64
    slot_row: I64


def num_experts(weights: Any) -> int:
    """Local experts: the extent of w13's first axis."""
    stored = weights.w13.codes if is_nvfp4(weights.w13) else weights.w13
    return int(stored.shape[0])


def route(topk_ids: Any, expert_start: int, experts: int) -> Routes:
    """Sort the valid slots by expert; ids outside the local experts, -1 too, have no row."""
    ids = bounds.to_float64(topk_ids).astype(np.int64)
    local = ids.reshape(-1) - expert_start
    valid = np.flatnonzero((ids.reshape(-1) >= 0) & (local >= 0) & (local < experts))
    slot = valid[np.argsort(local[valid], kind="stable")]
    slot_row = np.full(ids.size, -1, np.int64)
    slot_row[slot] = np.arange(slot.size)
    return Routes(slot // max(ids.shape[1], 1), local[slot], slot, slot_row.reshape(ids.shape))


def expert_rows(expert: I64) -> Iterator[tuple[int, int, int]]:
    """Expert, start and end of each run of sorted rows."""
    for index in np.unique(expert):
        yield (
            int(index),
            int(np.searchsorted(expert, index)),
            int(np.searchsorted(expert, index, side="right")),
        )


def input_rows(
    hidden: torch.Tensor, topk_weights: Any, routes: Routes, router_weight_on_input: bool
) -> F64:
    """Each routed row of ``hidden``; times its router weight in fp32, rounded, if asked.

    Returns
    -------
    (M, H) float64, values of hidden's type
    """
    x = bounds.to_float64(hidden)[routes.token]
    if not router_weight_on_input:
        return x
    r = bounds.to_float64(topk_weights).reshape(-1)[routes.slot]
    with np.errstate(invalid="ignore"):
        return bounds.round_to(bounds.round_to(x * r[:, None], torch.float32), hidden.dtype)


def gate_up_columns(weights: Any, columns: int) -> tuple[I64, I64]:
    """Columns of h that hold the gate and those that hold up, by ``weights.order``."""
    half = columns // 2
    first, second = np.arange(half), np.arange(half, columns)
    if weights.order == "gate_up":
        return first, second
    if weights.order == "up_gate":
        return second, first
    if weights.order == "interleaved":
        return 2 * first, 2 * first + 1
    raise ValueError(f"order must be gate_up, up_gate or interleaved, got {weights.order!r}")


def _multiply(a: Operand, weight: Any, bias: Any, expert: I64, alpha: Any = None) -> Expected:
    """Product of routed rows with their experts' matrices; alpha (E, N) or None."""
    parts = []
    for index, start, stop in expert_rows(expert):
        columns = 1.0 if alpha is None else alpha[index]
        own = None if bias is None else bias[index]
        right = Operand.of(weight, expert=index)
        parts.append(product(a.rows(start, stop), right, alpha=columns, bias=own))
    return concatenate(parts)


def first_product(a1: Operand, weights: Any, expert: I64) -> Expected:
    """``h`` (M, N13) of routed rows, at least one: row, gate and up scales and w13's bias in it."""
    alpha = None
    if weights.gate_up_scales is not None:
        scales = bounds.to_float64(weights.gate_up_scales)
        stored = weights.w13.codes if is_nvfp4(weights.w13) else weights.w13
        gate, up = gate_up_columns(weights, stored.shape[1])
        alpha = np.empty((scales.shape[0], stored.shape[1]))
        alpha[:, gate], alpha[:, up] = scales[:, :1], scales[:, 1:]
    return _multiply(a1, weights.w13, weights.w13_bias, expert, alpha)


def second_product(a2: Operand, weights: Any, expert: I64) -> Expected:
    """``z`` (M, H) of routed rows, at least one, with w2's bias."""
    return _multiply(a2, weights.w2, weights.w2_bias, expert)


def _sigmoid(x: F64) -> F64:
    small = np.exp(-np.abs(x))
    return np.asarray(np.where(x >= 0, 1.0, small) / (1.0 + small))


def _ulp(x: F64) -> F64:
    """Distance of neighbouring fp32 numbers at ``x``, that of the subnormals at least."""
    exponent = np.maximum(np.frexp(x)[1].astype(np.int64) - 1, -126)
    return np.asarray(np.ldexp(1.0, exponent - 23))


def _activation(name: str, x: F64, alpha: F64) -> tuple[F64, F64]:
    """Value in float64, and the error that an fp32 implementation may have."""
    conditioning: F64 = np.zeros_like(x)
    if name in SWIGLU_DEFAULTS:
        z = alpha * x
        value = x * _sigmoid(z)
        # alpha x is rounded before the exponential, whose relative error that becomes.
        conditioning = np.where(alpha == 1, 0.0, np.abs(z) * _sigmoid(-z))
    elif name == "gelu":
        erfc = np.frompyfunc(math.erfc, 1, 1)
        value = 0.5 * x * np.asarray(erfc(-x / math.sqrt(2)), np.float64)
    elif name == "gelu_tanh":
        # 0.5 (1 + tanh(z / 2)) without its cancellation.
        z = 2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
        value = x * _sigmoid(z)
        conditioning = GELU_TANH_ROUNDINGS * np.abs(z) * _sigmoid(-z)
    elif name == "relu2":
        value = np.maximum(x, 0.0) ** 2
    else:
        raise ValueError(f"activation {name!r} is not defined")
    finite = np.where(np.isfinite(value), value, 0.0)
    conditioning = np.where(np.isfinite(conditioning), conditioning, 0.0)
    return value, ULPS[name] * _ulp(finite) + 2.0**-24 * conditioning * np.abs(finite)


def activate(h: F64, weights: Any, expert: I64) -> tuple[F64, F64]:
    """``u = act(gate, up)`` in float64, and how far an fp32 ``u`` may be from it.

    Parameters
    ----------
    h : (M, N13) float64, fp32 values
    weights : MoEWeights or alike
    expert : (M,) int64

    Returns
    -------
    u, tolerance : (M, I) float64
        The tolerance is the activation's (4 ulp for silu and gelu), plus half an ulp for each
        further operation, plus what rounding ``alpha x`` (swigluoai) or gelu_tanh's argument does
        to the exponential.  Where u is exactly 0 there is none; it is NaN or infinite where u is.

    Raises
    ------
    ValueError
        For what the definition does not define: swigluoai without a gate, or ``swiglu_*`` with an
        activation other than gated silu and swigluoai.
    """
    name, experts = weights.activation, num_experts(weights)
    swiglu = (weights.swiglu_alpha, weights.swiglu_beta, weights.swiglu_limit)
    takes_swiglu = weights.gated and name in SWIGLU_DEFAULTS
    if not takes_swiglu and (name == "swigluoai" or any(v is not None for v in swiglu)):
        raise ValueError(f"no swiglu parameters exist for {name!r}, gated={weights.gated}")
    defaults = SWIGLU_DEFAULTS[name] if takes_swiglu else (1.0, 0.0, math.inf)
    alpha, beta, limit = (
        per_expert(v, experts, d)[expert].astype(np.float64)[:, None]
        for v, d in zip(swiglu, defaults, strict=True)
    )
    with np.errstate(all="ignore"):
        if not weights.gated:
            value, tolerance = _activation(name, h, alpha)
        else:
            gate_columns, up_columns = gate_up_columns(weights, h.shape[1])
            gate = np.minimum(h[:, gate_columns], limit)
            up = np.clip(h[:, up_columns], -limit, limit) + beta
            act, error = _activation(name, gate, alpha)
            value = act * up
            operations = 1.0 + (beta != 0)
            tolerance = np.abs(up) * error + operations * (2.0**-24 * np.abs(value) + 2.0**-150)
        # Errors of errors: 2^-20 is far above the product of any two terms.
        return value, np.where(value == 0, 0.0, tolerance * (1 + 2.0**-20))


def combine(z: F32, slot_row: I64, topk_weights: Any, router_weight_on_input: bool) -> F32:
    """``y = sum_j r_j z_j`` in fp32: each product and each sum rounded, j ascending.

    Parameters
    ----------
    z : (M, H) float32
    slot_row : (T, k) int64
    topk_weights : (T, k) float32
    router_weight_on_input : bool
        The weights are in z already.

    Returns
    -------
    (T, H) float32
        Before its one rounding to hidden's type; zeros for a token without an expert.
    """
    r = bounds.to_float64(topk_weights).astype(np.float32)
    y = np.zeros((slot_row.shape[0], z.shape[1]), np.float32)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        for j in range(slot_row.shape[1]):
            tokens = np.flatnonzero(slot_row[:, j] >= 0)
            term = z[slot_row[tokens, j]]
            y[tokens] += term if router_weight_on_input else r[tokens, j, None] * term
    return y


def quantized_activations(weight: Any, recipe: str) -> bool:
    """Whether rows are quantized before they meet this weight."""
    if recipe not in ("w4a4", "w4a16"):
        raise ValueError(f"recipe must be w4a4 or w4a16, got {recipe!r}")
    return recipe == "w4a4" and is_nvfp4(weight)


def static_scales(scale: Any, expert: I64, experts: int) -> F32 | None:
    """Given activation scale of each routed row, or None."""
    return None if scale is None else per_expert(scale, experts)[expert]


def moe_reference(
    hidden: torch.Tensor,
    weights: Any,
    topk_weights: Any,
    topk_ids: Any,
    recipe: str = "w4a4",
    *,
    router_weight_on_input: bool = False,
) -> F32:
    """Compute the whole block by its definition; products are exact, then rounded to fp32 once.

    Parameters
    ----------
    hidden : (T, H) bfloat16, float16 or float32
    weights : MoEWeights or PlainWeights
    topk_weights : (T, k) float
    topk_ids : (T, k) int
        Global ids.
    recipe : {"w4a4", "w4a16"}, optional
        Does not matter where the weights are plain tensors.
    router_weight_on_input : bool, optional

    Returns
    -------
    (T, H) float32
        Before its one rounding to hidden's type.
    """
    experts = num_experts(weights)
    routes = route(topk_ids, weights.expert_start, experts)
    if routes.token.size == 0:
        return np.zeros(tuple(hidden.shape), np.float32)

    def operand(rows: F64, weight: Any, scale: Any, dtype: torch.dtype) -> Operand:
        if quantized_activations(weight, recipe):
            given = static_scales(scale, routes.expert, experts)
            return Operand.from_quantized(quantize_rows(rows, given))
        return Operand(bounds.round_to(rows, dtype), np.asarray(1, np.float32), nvfp4=False)

    x = input_rows(hidden, topk_weights, routes, router_weight_on_input)
    a1 = operand(x, weights.w13, weights.a1_scale, hidden.dtype)
    h = bounds.round_to(first_product(a1, weights, routes.expert).value, torch.float32)
    u = bounds.round_to(activate(h, weights, routes.expert)[0], torch.float32)
    a2 = operand(u, weights.w2, weights.a2_scale, hidden.dtype)
    z = bounds.round_to(second_product(a2, weights, routes.expert).value, torch.float32)
    return combine(z.astype(np.float32), routes.slot_row, topk_weights, router_weight_on_input)
