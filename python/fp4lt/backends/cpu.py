# SPDX-License-Identifier: Apache-2.0
"""Backend ``cpu``: C++ with SIMD tables and threads, on every machine."""

from __future__ import annotations

import math

import torch

from fp4lt import _C
from fp4lt._interop import (
    DTYPES,
    address,
    dense_view,
    expert_parameter,
    nvfp4_view,
    row_strides,
    threads,
)
from fp4lt.codec import quantize_parts
from fp4lt.formats import BLOCK
from fp4lt.layout import tile_scales, untile_scales
from fp4lt.problem import GroupedCall, GroupedProblem, MoECall, MoEProblem, MoETrace, Operand
from fp4lt.tensor import NVFP4Tensor

GATE_ORDERS = {
    None: _C.GateOrder.NONE,
    "gate_up": _C.GateOrder.GATE_UP,
    "up_gate": _C.GateOrder.UP_GATE,
    "interleaved": _C.GateOrder.INTERLEAVED,
}
ACTIVATION_KINDS = {
    "silu": _C.Activation.SWISH,
    "swigluoai": _C.Activation.SWISH,
    "gelu": _C.Activation.GELU,
    "gelu_tanh": _C.Activation.GELU_TANH,
    "relu2": _C.Activation.RELU2,
}
# fp32 intermediates of one pass over the tokens: larger calls are cut, which changes no bit.
_PASS_ELEMENTS = 1 << 28


def depth(k: int, recipe: str) -> int:
    """Most fp32 roundings a product can meet on its way into a sum over `k`.

    A block of 16 is summed exactly for W4A4 and by two chains of 8 fused multiply-adds otherwise,
    which then take the weights' scale; chains of 16 block sums follow, then a pairwise tree
    (docs/numerics.md, "The CPU backend").

    Parameters
    ----------
    k : int
        Multiple of 16.
    recipe : str
        "w4a4", or "w4a16" for every other pair of operands.
    """
    chains = -(-(k // BLOCK) // _C.CHAIN_BLOCKS)
    # W4A4's first block sum enters its chain exactly; others round with their scale.
    to_chain = _C.CHAIN_BLOCKS - 1 if recipe == "w4a4" else BLOCK // 2 + _C.CHAIN_BLOCKS
    return to_chain + math.ceil(math.log2(chains))


class CpuBackend:
    """See the module."""

    name = "cpu"

    def refusal(self, problem: GroupedProblem | MoEProblem, device: torch.device) -> str | None:
        """See :class:`fp4lt.backends.base.Backend`."""
        if device.type != "cpu":
            return f"it computes in host memory, and the tensors are on {device}"
        return None

    def grouped_mm(self, problem: GroupedProblem, call: GroupedCall) -> None:
        """See :class:`fp4lt.backends.base.Backend`."""
        a = call.a
        if problem.quantizes:
            assert isinstance(a, torch.Tensor)
            rows = int(call.ends[-1])
            scale = call.a_scale
            if scale is not None and scale.ndim:
                counts = torch.diff(call.ends, prepend=call.ends.new_zeros(1))
                scale = scale.repeat_interleave(counts)
            # Rows past the last offset are not even read.
            a = _quantize_rows(a[:rows], scale)
        _grouped_gemm(a, call.b, call.ends, call.out, bias=call.bias, alpha=call.alpha)

    def moe(self, problem: MoEProblem, call: MoECall) -> None:
        """See :class:`fp4lt.backends.base.Backend`."""
        width = call.w13.shape[1] + problem.intermediate + problem.hidden
        step = max(1, _PASS_ELEMENTS // (width * problem.top_k))
        for t in range(0, call.hidden.shape[0], step):
            part = slice(t, t + step)
            _run(
                problem,
                call._replace(
                    hidden=call.hidden[part],
                    topk_weights=call.topk_weights[part],
                    topk_ids=call.topk_ids[part],
                    out=call.out[part],
                ),
            )

    def trace_moe(self, problem: MoEProblem, call: MoECall) -> MoETrace:
        """See :class:`fp4lt.backends.base.Backend`."""
        trace, index = _run(problem, call)
        return trace._replace(a1=_take(trace.a1, index))


def _quantize_rows(x: torch.Tensor, scale: torch.Tensor | None) -> NVFP4Tensor:
    """Rows under their own derived scales, or under given ones: () or one per row."""
    codes, scales, g = quantize_parts(x, "row" if scale is None else scale)
    return NVFP4Tensor._make(codes, scales, g.expand(x.shape[0]) if g.ndim == 0 else g)


def _view(operand: Operand) -> _C.Nvfp4View | _C.DenseView:
    if isinstance(operand, NVFP4Tensor):
        return nvfp4_view(operand.codes, operand.scales, operand.global_scale)
    return dense_view("operand", operand)


def _grouped_gemm(
    a: Operand,
    b: Operand,
    ends: torch.Tensor,
    out: torch.Tensor,
    *,
    row_index: torch.Tensor | None = None,
    alpha: torch.Tensor | None = None,
    order: str | None = None,
    bias: torch.Tensor | None = None,
) -> None:
    if out.numel() == 0:
        return
    experts, n, k = b.shape
    _C.grouped_gemm(
        experts=experts,
        n=n,
        k=k,
        ends=address(ends),
        a=_view(a),
        row_index=address(row_index),
        b=_view(b),
        alpha=address(alpha),
        alpha_expert_stride=alpha.stride(0) if alpha is not None else 0,
        order=GATE_ORDERS[order],
        bias=address(bias),
        bias_expert_stride=bias.stride(0) if bias is not None else 0,
        out=address(out),
        out_type=DTYPES[out.dtype],
        out_row_stride=row_strides("out", out)[1],
        threads=threads(),
    )


def _run(problem: MoEProblem, call: MoECall) -> tuple[MoETrace, torch.Tensor | None]:
    """The block, stage by stage, as numerics.md section 5 has it.

    Also returns which rows of the trace's ``a1`` the routed rows are, None if in order.
    """
    tokens, hidden = call.hidden.shape
    ends, rows_token, rows_expert, slot_row = _route(problem, call)
    rows = len(rows_token)
    x = call.hidden
    if call.router_weight_on_input:
        x = _scale_rows(x, call.topk_weights)

    # Rows that share a scale are rounded once a token; those of per-expert scales once a row.
    per_expert = call.a1_scale is not None and call.a1_scale.ndim == 1
    gathered = problem.quantizes and (per_expert or rows < tokens)
    if gathered:
        x = x[rows_token]
    a1: Operand = x
    if problem.quantizes:
        a1 = _quantize_rows(x, _per_row(call.a1_scale, rows_expert))
    index = None if gathered else rows_token
    # Dtypes and devices are always named: torch's defaults are the user's to change.
    host = torch.device("cpu")
    h = torch.empty(rows, call.w13.shape[1], dtype=torch.float32, device=host)
    _grouped_gemm(
        a1,
        call.w13,
        ends,
        h,
        row_index=index,
        alpha=call.gate_up_scales,
        order=problem.order,
        bias=call.w13_bias,
    )

    u_dtype = torch.float32 if problem.quantizes else problem.dtype
    u = torch.empty(rows, problem.intermediate, dtype=u_dtype, device=host)
    _activate(problem, call, h, rows_expert, u)
    a2: Operand = u
    if problem.quantizes:
        a2 = _quantize_rows(u, _per_row(call.a2_scale, rows_expert))
    z = torch.empty(rows, hidden, dtype=torch.float32, device=host)
    _grouped_gemm(a2, call.w2, ends, z, bias=call.w2_bias)

    weights = None if call.router_weight_on_input else call.topk_weights.contiguous()
    if call.out.numel():
        _C.combine(
            z=address(z),
            slot_row=address(slot_row),
            weights=address(weights),
            tokens=tokens,
            top_k=problem.top_k,
            hidden=hidden,
            out=address(call.out),
            out_type=DTYPES[call.out.dtype],
            out_row_stride=row_strides("out", call.out)[1],
            threads=threads(),
        )
    return MoETrace(rows_token, rows_expert, slot_row, a1, h, a2, z, call.out), index


def _route(
    problem: MoEProblem, call: MoECall
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    ids = call.topk_ids.contiguous()
    ends = ids.new_zeros(problem.experts)
    rows_token, rows_expert = ids.new_empty(ids.numel()), ids.new_empty(ids.numel())
    slot_row = ids.new_empty(ids.shape)
    rows = _C.route(
        ids=address(ids),
        tokens=ids.shape[0],
        top_k=ids.shape[1],
        expert_start=call.expert_start,
        experts=problem.experts,
        ends=address(ends),
        row_token=address(rows_token),
        row_expert=address(rows_expert),
        slot_row=address(slot_row),
    )
    return ends, rows_token[:rows], rows_expert[:rows], slot_row


def _per_row(scale: torch.Tensor | None, rows_expert: torch.Tensor) -> torch.Tensor | None:
    return scale if scale is None or scale.ndim == 0 else scale[rows_expert]


def _scale_rows(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    out = x.new_empty(x.shape)
    weights = weights.contiguous()
    if out.numel():
        _C.scale_rows(
            x=dense_view("hidden", x),
            weights=address(weights),
            rows=x.shape[0],
            n=x.shape[1],
            out=address(out),
            threads=threads(),
        )
    return out


def _activate(
    problem: MoEProblem,
    call: MoECall,
    h: torch.Tensor,
    rows_expert: torch.Tensor,
    out: torch.Tensor,
) -> None:
    if out.numel() == 0:
        return
    _C.activate(
        h=address(h),
        rows=h.shape[0],
        n=h.shape[1],
        order=GATE_ORDERS[problem.order],
        kind=ACTIVATION_KINDS[problem.activation],
        row_expert=address(rows_expert),
        alpha=expert_parameter(call.alpha),
        beta=expert_parameter(call.beta),
        limit=None if call.limit is None else expert_parameter(call.limit),
        out=address(out),
        out_type=DTYPES[out.dtype],
        threads=threads(),
    )


def _take(a: Operand, index: torch.Tensor | None) -> Operand:
    """Rows `index` of the first GEMM's input, as a trace shows them."""
    if index is None:
        return a
    if isinstance(a, torch.Tensor):
        return a[index]
    rows, k = a.shape
    linear = untile_scales(a.scales.view(torch.uint8), rows, k // BLOCK)
    scales = tile_scales(linear[index]).view(torch.float8_e4m3fn)
    return NVFP4Tensor._make(a.codes[index], scales, a.global_scale[index])
