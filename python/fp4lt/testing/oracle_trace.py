# SPDX-License-Identifier: Apache-2.0
"""Judge a MoE block stage by stage, each stage fed with the backend's own input to it.

Routing, quantized or copied rows and the combine must be equal; products lie within their bound;
a rounded or quantized ``u`` must be what some fp32 value within the activation's tolerance gives.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fp4lt.testing import bounds
from fp4lt.testing.oracle_codec import (
    F32,
    F64,
    FLT_MAX,
    I64,
    NAN_SCALE,
    Quantized,
    derive_global,
    encode_e4m3,
    encode_with,
    from_packed,
)
from fp4lt.testing.oracle_gemm import Operand, is_nvfp4, quantize_rows
from fp4lt.testing.oracle_moe import (
    Routes,
    activate,
    combine,
    first_product,
    gate_up_columns,
    input_rows,
    num_experts,
    quantized_activations,
    route,
    second_product,
    static_scales,
)

Bool = npt.NDArray[np.bool_]


def _require(good: Any, name: str, got: Any, low: Any, high: Any) -> None:
    """Name the first element that is not good, with the interval it had to be in."""
    mask = np.asarray(good)
    if mask.all():
        return
    index = tuple(int(i) for i in np.argwhere(~mask)[0])
    shown = [np.broadcast_to(np.asarray(v), mask.shape)[index].item() for v in (got, low, high)]
    raise AssertionError(
        f"{name}{list(index)}: got {shown[0]!r}, want {shown[1]!r} to {shown[2]!r}; "
        f"{int((~mask).sum())} of {mask.size} wrong"
    )


def check_routing(trace: Any, routes: Routes) -> None:
    """Require the trace's rows in the one order that the definition allows."""
    bounds.assert_bitwise(trace.rows_token, routes.token, name="rows_token")
    bounds.assert_bitwise(trace.rows_expert, routes.expert, name="rows_expert")
    bounds.assert_bitwise(trace.slot_row, routes.slot_row, name="slot_row")


def check_quantized(t: Any, want: Quantized, *, name: str) -> None:
    """Require the same global scales, scale bytes and codes, bit by bit."""
    got = from_packed(t)
    bounds.assert_bitwise(got.global_scale, want.global_scale, name=f"{name}.global_scale")
    bounds.assert_bitwise(got.scales, want.scales, name=f"{name}.scales")
    bounds.assert_bitwise(got.codes, want.codes, name=f"{name}.codes")


def _kind(t: Any, quantized: bool, dtype: torch.dtype, name: str) -> None:
    if is_nvfp4(t) != quantized or not (quantized or t.dtype == dtype):
        found = "an NVFP4 tensor" if is_nvfp4(t) else str(t.dtype)
        raise AssertionError(f"{name} is {found}, want {'NVFP4' if quantized else dtype}")


class _Interval:
    """What an fp32 ``u`` may be: |u| in [low, high] (fp32 values), sign as given.

    ``free`` marks elements of an infinite h, of which the definition says nothing but that they
    stay in their row; ``nan`` those of a NaN, which must stay visible.
    """

    def __init__(self, h: F64, weights: Any, expert: I64) -> None:
        u, tolerance = activate(h, weights, expert)
        parts = [h]
        if weights.gated:
            gate, up = gate_up_columns(weights, h.shape[1])
            parts = [h[:, gate], h[:, up]]
        self.nan: Bool = np.any([np.isnan(part) for part in parts], axis=0)
        infinite: Bool = np.any([np.isinf(part) for part in parts], axis=0)
        self.free = infinite & ~self.nan
        known = ~(self.nan | self.free)
        magnitude = np.where(known, np.abs(u), 0.0)
        error = np.where(known & np.isfinite(u), tolerance, 0.0)
        low = bounds.round_to(np.maximum(magnitude - error, 0.0), torch.float32)
        high = bounds.round_to(magnitude + error, torch.float32)
        self.low: F32 = np.where(known, low, 0.0).astype(np.float32)
        self.high: F32 = np.where(self.free, np.inf, high).astype(np.float32)
        self.negative: Bool = np.signbit(u)

    def check_rounded(self, a2: torch.Tensor) -> None:
        """Require values that one rounding of a possible u gives."""
        got = bounds.to_float64(a2)
        low, high = (bounds.round_to(end, a2.dtype) for end in (self.low, self.high))
        sign = (np.signbit(got) == self.negative) | (got == 0)
        good = (low <= np.abs(got)) & (np.abs(got) <= high) & sign
        good = np.where(self.nan, np.isnan(got), good) | self.free
        sides = np.where(self.negative, -1.0, 1.0)
        with np.errstate(invalid="ignore"):
            _require(good, "a2", got, sides * low, sides * high)

    def _amax(self) -> tuple[F32, F32]:
        """Smallest and largest finite magnitude that a row's maximum can be."""
        sure = np.where(np.isinf(self.high), np.float32(0), self.low)
        possible = np.where(np.isinf(self.low), np.float32(0), np.minimum(self.high, FLT_MAX))
        zero = np.float32(0)
        return sure.max(axis=1, initial=zero), possible.max(axis=1, initial=zero)

    def check_quantized(self, a2: Any, given: F32 | None) -> None:
        """Require global scales, block scales and codes of a possible u.

        Each is monotonic in |u|, so it lies between those of the interval's ends; block scales
        are judged with the trace's global scale and codes with the trace's block scale.
        """
        q = from_packed(a2)
        if given is not None:
            bounds.assert_bitwise(q.global_scale, given, name="a2.global_scale")
        else:
            smallest, largest = self._amax()
            low = derive_global(smallest[:, None], per="row")
            high = derive_global(largest[:, None], per="row")
            # A maximum of 0 gives 1; one that may be 0 gives 1 or the least scale and more.
            low = np.where((smallest == 0) & (largest > 0), np.float32(2.0**-126), low)
            good = (low <= q.global_scale) & (q.global_scale <= high)
            good |= (smallest == 0) & (q.global_scale == 1)
            _require(good, "a2.global_scale", q.global_scale, low, high)

        shape = (*q.scales.shape, 16)
        low, high = self.low.reshape(shape), self.high.reshape(shape)
        nan = np.asarray(self.nan.reshape(shape).any(axis=-1))
        judged = ~nan & ~self.free.reshape(shape).any(axis=-1)
        _require(~nan | (q.scales == NAN_SCALE), "a2.scales", q.scales, NAN_SCALE, NAN_SCALE)
        g = np.broadcast_to(q.global_scale[:, None], q.scales.shape)
        with np.errstate(over="ignore", under="ignore"):
            ends = [
                encode_e4m3(np.minimum(end, FLT_MAX).max(axis=-1) / (np.float32(6) * g))
                for end in (low, high)
            ]
        good = (ends[0] <= q.scales) & (q.scales <= ends[1])
        _require(good | ~judged, "a2.scales", q.scales, *ends)

        codes = q.codes.reshape(shape)
        scales = np.where(judged, q.scales, np.uint8(0))
        ends = [encode_with(end, scales, g) for end in (low, high)]
        sign = self.negative.reshape(shape).astype(np.uint8) << 3
        good = (ends[0] <= codes & 7) & (codes & 7 <= ends[1]) & (codes & 8 == sign)
        good = np.where(nan[..., None], codes == 0, good | ~judged[..., None])
        _require(good, "a2.codes (row, block, element)", codes, ends[0] | sign, ends[1] | sign)


def check_activation(
    h: torch.Tensor, a2: Any, weights: Any, expert: I64, quantized: bool, dtype: torch.dtype
) -> None:
    """Judge ``a2``, u after its rounding or quantization, by the backend's own ``h``.

    Parameters
    ----------
    h : (M, N13) float32
    a2 : NVFP4Tensor with one global scale per row, or tensor (M, I) of ``dtype``
    weights : MoEWeights or alike
    expert : (M,) int64
    quantized : bool
        Whether ``a2`` has to be an NVFP4Tensor.
    dtype : torch.dtype
        Hidden's type, to which u is rounded otherwise.

    Raises
    ------
    AssertionError
        Naming the first element that no u within the activation's tolerance gives.
    """
    _kind(a2, quantized, dtype, "a2")
    interval = _Interval(bounds.to_float64(h), weights, expert)
    if quantized:
        given = static_scales(weights.a2_scale, expert, num_experts(weights))
        interval.check_quantized(a2, given)
    else:
        interval.check_rounded(a2)


def check_moe_trace(
    trace: Any,
    weights: Any,
    hidden: torch.Tensor,
    topk_weights: Any,
    topk_ids: Any,
    recipe: str,
    depth13: int,
    depth2: int,
    *,
    router_weight_on_input: bool = False,
) -> None:
    """Judge every intermediate of one run of the block.

    Parameters
    ----------
    trace : MoETrace
        ``rows_token``, ``rows_expert``, ``slot_row``, ``a1``, ``h``, ``a2``, ``z``, ``y``.
    weights : MoEWeights or PlainWeights
    hidden : (T, H) bfloat16, float16 or float32
    topk_weights, topk_ids : (T, k)
    recipe : {"w4a4", "w4a16"}
    depth13, depth2 : int
        The backend's depth at K = H and at K = I.
    router_weight_on_input : bool, optional

    Raises
    ------
    AssertionError
        Naming the stage and the element: routing, a1 and y are compared bit by bit, h and z by
        their bound, a2 by the activation's tolerance.
    """
    experts = num_experts(weights)
    routes = route(topk_ids, weights.expert_start, experts)
    check_routing(trace, routes)
    if trace.h.dtype != torch.float32 or trace.z.dtype != torch.float32:
        raise AssertionError(f"h and z must be float32, got {trace.h.dtype}, {trace.z.dtype}")

    x = input_rows(hidden, topk_weights, routes, router_weight_on_input)
    quantized = quantized_activations(weights.w13, recipe)
    _kind(trace.a1, quantized, hidden.dtype, "a1")
    if quantized:
        given = static_scales(weights.a1_scale, routes.expert, experts)
        check_quantized(trace.a1, quantize_rows(x, given), name="a1")
    else:
        bounds.assert_bitwise(trace.a1, x, name="a1")

    if routes.token.size:
        h = first_product(Operand.of(trace.a1), weights, routes.expert)
        h.check(trace.h, depth13, name="h")
        quantized = quantized_activations(weights.w2, recipe)
        check_activation(trace.h, trace.a2, weights, routes.expert, quantized, hidden.dtype)
        z = second_product(Operand.of(trace.a2), weights, routes.expert)
        z.check(trace.z, depth2, name="z")

    if trace.y.dtype != hidden.dtype:
        raise AssertionError(f"y is {trace.y.dtype}, want hidden's {hidden.dtype}")
    rows = bounds.to_float64(trace.z).astype(np.float32)
    y = combine(rows, routes.slot_row, topk_weights, router_weight_on_input)
    bounds.assert_bitwise(trace.y, bounds.round_to(y, hidden.dtype), signed_zeros=False, name="y")
