# SPDX-License-Identifier: Apache-2.0
"""Backend ``fused``: FP4 weights straight from memory to 16-bit tensor cores, on CUDA.

All sizes that depend on the routing stay on the device: nothing waits for the GPU, and every call
can be captured in a CUDA graph, the first one included.  docs/kernels.md has the data flow.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from fp4lt import _C
from fp4lt._build import has_code_for
from fp4lt._interop import (
    DTYPES,
    address,
    cuda_launch,
    dense_view,
    expert_parameter,
    nvfp4_view,
    row_strides,
)
from fp4lt.backends.cpu import ACTIVATION_KINDS, GATE_ORDERS
from fp4lt.problem import GroupedCall, GroupedProblem, MoECall, MoEProblem, MoETrace, Operand
from fp4lt.tensor import NVFP4Tensor

# Bytes of intermediates of one pass over the tokens: larger calls are cut, which changes no bit.
_PASS_BYTES = 1 << 32


def depth(k: int, recipe: str) -> int:
    """Most fp32 roundings or cuts a product can meet on its way into a sum over `k`.

    The recipe makes no difference: see docs/numerics.md, "The fused backend".
    """
    del recipe
    return _C.fused_depth(k)


class FusedBackend:
    """See the module."""

    name = "fused"

    def refusal(self, problem: GroupedProblem | MoEProblem, device: torch.device) -> str | None:
        """See :class:`fp4lt.backends.base.Backend`."""
        if device.type != "cuda":
            return f"it needs a CUDA device, and the tensors are on {device}"
        if not _C.cuda_built_with():
            return "this build of fp4lt has no CUDA code; reinstall it where nvcc is found"
        major, minor = torch.cuda.get_device_capability(device)
        if major < 8:
            return f"it needs compute capability 8.0 or later, and {device} has {major}.{minor}"
        if not has_code_for((major, minor)):
            return (
                f"this build has code for {_C.cuda_architectures()}, and {device} has compute "
                f"capability {major}.{minor}; reinstall with "
                f"-Ccmake.define.CMAKE_CUDA_ARCHITECTURES={major}{minor}"
            )
        weights = problem.b_format if isinstance(problem, GroupedProblem) else problem.w_format
        if weights != "nvfp4":
            return f"it multiplies NVFP4 weights, and these are {weights}"
        if problem.experts > _C.MAX_EXPERTS:
            return f"it takes at most {_C.MAX_EXPERTS} experts, and there are {problem.experts}"
        return None

    def grouped_mm(self, problem: GroupedProblem, call: GroupedCall) -> None:
        """See :class:`fp4lt.backends.base.Backend`."""
        rows = call.a.shape[0]
        if rows == 0:
            return
        device = call.out.device
        launch = cuda_launch(device)
        ends = call.ends.to(device, non_blocking=True)
        work = _WorkList.empty(rows, problem.experts, device, (call.b,))
        starts, places = torch.empty(
            2, problem.experts + 1, dtype=torch.int32, device=device
        ).unbind()
        _C.cuda_plan_blocks(
            ends=address(ends),
            ends_are_64_bit=ends.dtype == torch.int64,
            experts=problem.experts,
            rows=rows,
            block_rows=work.block_rows,
            blocks=address(work.blocks),
            block_count=address(work.length),
            flags=address(work.flags),
            starts=address(starts),
            places=address(places),
            **launch,
        )
        scale = call.a_scale
        index = None
        if scale is not None and scale.ndim:
            every = torch.arange(rows, dtype=ends.dtype, device=device)
            index = torch.searchsorted(ends, every, right=True).clamp_(max=problem.experts - 1)
            index = index.to(torch.int32)
        # Its low half is what an int64 end has in its first four bytes: fewer than 2^31 rows.
        count = address(ends[-1:])
        order = _order_for(call.b, device)
        to = _Places(work.places, starts=starts, places=places)
        a = _prepare(call.a, order, rows, problem.quantizes, to, scale, index, None, count)
        _gemm(work, a, None, call.b, call.out, alpha=call.alpha, bias=call.bias)

    def moe(self, problem: MoEProblem, call: MoECall) -> None:
        """See :class:`fp4lt.backends.base.Backend`."""
        for part in _passes(problem, call):
            run_block(problem, part)

    def trace_moe(self, problem: MoEProblem, call: MoECall) -> MoETrace:
        """See :class:`fp4lt.backends.base.Backend`; everything is moved to host memory."""
        from fp4lt.backends.fused_trace import host_trace

        return host_trace(problem, call)


class _WorkList(NamedTuple):
    """Row blocks of the experts that have rows, and how many there are, on the device."""

    blocks: torch.Tensor
    length: torch.Tensor
    flags: torch.Tensor
    """(2, MAX_SHARERS) int32, of which each GEMM takes a row; zeroed with the list."""
    block_rows: int
    expected: int
    places: int
    """Most places that an image of the rows can have: groups of eight, an expert's rows together."""

    @staticmethod
    def empty(
        rows: int, experts: int, device: torch.device, weights: tuple[Operand, ...]
    ) -> _WorkList:
        """Room for any routing of `rows`, for GEMMs with these weights."""
        order = min(_order_for(w, device) for w in weights)
        block_rows = _C.row_block_size(rows=rows, experts=experts, order=order)
        most = _C.max_row_blocks(rows=rows, experts=experts, block_rows=block_rows)
        words = max(most, 1) * _C.ROW_BLOCK_BYTES // 4
        most_flags = 2 * _C.MAX_SHARERS
        memory = torch.empty(4 + most_flags + words, dtype=torch.int32, device=device)
        flags, blocks = memory[4 : 4 + most_flags].view(2, -1), memory[4 + most_flags :]
        expected = _C.expected_row_blocks(rows=rows, experts=experts, block_rows=block_rows)
        places = 8 * _C.max_row_blocks(rows=rows, experts=experts, block_rows=8)
        return _WorkList(blocks, memory[:1], flags, block_rows, expected, places)


def _view(weights: Operand) -> _C.Nvfp4View:
    assert isinstance(weights, NVFP4Tensor)
    return nvfp4_view(weights.codes, weights.scales, weights.global_scale)


def _order_for(weights: Operand, device: torch.device) -> _C.PreparedOrder:
    """The order of activations for a GEMM with these weights, and so which kernel runs it.

    It hangs on shape, alignment and device; no bit of the result hangs on it.
    """
    wgmma = _C.can_wgmma(device=device.index, b=_view(weights), k=weights.shape[2])
    return _C.PreparedOrder.WGMMA if wgmma else _C.PreparedOrder.MMA


class _Places(NamedTuple):
    """Where rows go in an image; see Places in csrc/cuda/quantize.h."""

    count: int
    row_place: torch.Tensor | None = None
    slot_row: torch.Tensor | None = None
    starts: torch.Tensor | None = None
    places: torch.Tensor | None = None


class _Prepared(NamedTuple):
    """The fused kernel's activations, and their rows' global scales."""

    order: _C.PreparedOrder
    values: torch.Tensor
    global_scale: torch.Tensor | None


def _padded(k: int) -> int:
    return -(-k // _C.PREPARED_K) * _C.PREPARED_K


def _prepare(
    x: Operand,
    order: _C.PreparedOrder,
    rows: int,
    quantize: bool,
    to: _Places,
    given: torch.Tensor | None = None,
    index: torch.Tensor | None = None,
    source: torch.Tensor | None = None,
    count: int = 0,
) -> _Prepared:
    """Bring activations into the fused kernel's form; see csrc/cuda/quantize.h."""
    k = x.shape[1]
    exact = quantize or isinstance(x, NVFP4Tensor)
    assert exact or isinstance(x, torch.Tensor)
    dtype = torch.bfloat16 if exact else x.dtype  # type: ignore[union-attr]
    stored = to.count if order == _C.PreparedOrder.WGMMA else rows
    values = torch.empty(stored, _padded(k), dtype=dtype, device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device) if quantize else None
    if isinstance(x, NVFP4Tensor):
        view: _C.Nvfp4View | _C.DenseView = nvfp4_view(x.codes, x.scales, x.global_scale)
        scales = x.global_scale.expand(rows).contiguous()
    else:
        view = dense_view("activations", x)
    _C.cuda_prepare(
        x=view,
        prepared=order,
        row_place=address(to.row_place),
        slot_row=address(to.slot_row),
        top_k=0 if to.slot_row is None else to.slot_row.shape[1],
        starts=address(to.starts),
        places=address(to.places),
        experts=0 if to.places is None else to.places.shape[0] - 1,
        quantize=quantize,
        rows=rows,
        k=k,
        source=address(source),
        count=count,
        given=address(given),
        given_stride=given.stride(0) if given is not None and given.ndim else 0,
        scale_index=address(index),
        global_out=address(scales),
        out=address(values),
        **cuda_launch(x.device),
    )
    return _Prepared(order, values, scales)


def _gemm(
    work: _WorkList,
    a: _Prepared,
    row_index: torch.Tensor | None,
    b: Operand,
    out: torch.Tensor,
    *,
    alpha: torch.Tensor | None = None,
    order: str | None = None,
    bias: torch.Tensor | None = None,
    second: bool = False,
    gated: _C.PreparedOrder | None = None,
    limit: _C.ExpertParameter | None = None,
) -> None:
    """One launch.  `second`: of two over a work list; `gated`: `out` is u in that order, not h."""
    scratch = torch.empty(
        _C.scratch_bytes(
            device=out.device.index, order=a.order, k=b.shape[2], block_rows=work.block_rows
        ),
        dtype=torch.uint8,
        device=out.device,
    )
    # Each GEMM here follows a kernel of ours that follows the one that made the work list.
    _C.cuda_fused_gemm(
        prepared=a.order,
        n=b.shape[1],
        k=b.shape[2],
        blocks=address(work.blocks),
        block_count=address(work.length),
        block_rows=work.block_rows,
        expected_blocks=work.expected,
        list_is_older=True,
        a=address(a.values),
        a_type=DTYPES[a.values.dtype],
        row_index=address(row_index),
        a_global=address(a.global_scale),
        b=_view(b),
        alpha=address(alpha),
        alpha_expert_stride=alpha.stride(0) if alpha is not None else 0,
        order=GATE_ORDERS[order],
        bias=address(bias),
        bias_expert_stride=bias.stride(0) if bias is not None else 0,
        out=address(out),
        out_type=DTYPES[out.dtype],
        out_row_stride=row_strides("out", out)[1],
        gated=gated,
        limit=limit,
        shared_sums=address(scratch),
        shared_flags=address(work.flags[int(second)]),
        **cuda_launch(out.device),
    )


class _Routes(NamedTuple):
    rows: torch.Tensor
    """(1,) int32: routed rows."""
    token: torch.Tensor
    """(T * k,) int32, the first `rows` of them."""
    expert: torch.Tensor
    slot_row: torch.Tensor
    """(T, k) int32."""
    place: torch.Tensor
    """(T * k,) int32, the first `rows` of them: where each row goes in an image."""
    work: _WorkList


class _Stages(NamedTuple):
    """What one pass leaves behind."""

    x: torch.Tensor
    routes: _Routes
    h: torch.Tensor
    z: torch.Tensor


def _passes(problem: MoEProblem, call: MoECall) -> list[MoECall]:
    width = 4 * call.w13.shape[1] + 2 * problem.intermediate + 6 * problem.hidden
    step = max(1, _PASS_BYTES // (width * problem.top_k))
    return [
        call._replace(
            hidden=call.hidden[t : t + step],
            topk_weights=call.topk_weights[t : t + step],
            topk_ids=call.topk_ids[t : t + step],
            out=call.out[t : t + step],
        )
        for t in range(0, call.hidden.shape[0], step)
    ]


def _route(problem: MoEProblem, call: MoECall) -> _Routes:
    device = call.hidden.device
    ids = call.topk_ids.contiguous()
    slots = ids.numel()
    work = _WorkList.empty(slots, problem.experts, device, (call.w13, call.w2))
    memory = torch.empty(4 * slots + 4, dtype=torch.int32, device=device)
    rows = memory[:1]
    token, expert, slot_row, place = memory[4:].view(4, slots).unbind()
    _C.cuda_route(
        ids=address(ids),
        ids_are_64_bit=ids.dtype == torch.int64,
        tokens=ids.shape[0],
        top_k=ids.shape[1],
        expert_start=call.expert_start,
        experts=problem.experts,
        block_rows=work.block_rows,
        row_count=address(rows),
        row_token=address(token),
        row_expert=address(expert),
        slot_row=address(slot_row),
        row_place=address(place),
        blocks=address(work.blocks),
        block_count=address(work.length),
        flags=address(work.flags),
        **cuda_launch(device),
    )
    return _Routes(rows, token, expert, slot_row.view(ids.shape), place, work)


def _gates(problem: MoEProblem, call: MoECall, first: _C.PreparedOrder) -> bool:
    """Whether w13's GEMM applies the activation itself, which changes no bit.

    It has one thread hold gate and up of a column; a rounding to NVFP4 needs the whole row first.
    """
    return (
        not problem.quantizes
        and first == _C.PreparedOrder.WGMMA
        and problem.activation == "silu"
        and problem.order in ("gate_up", "up_gate")
        and isinstance(call.alpha, float)
        and isinstance(call.beta, float)
        and (call.alpha, call.beta) == (1.0, 0.0)
        and problem.intermediate % _C.PREPARED_K == 0
    )


def run_block(problem: MoEProblem, call: MoECall, *, keep_h: bool = False) -> _Stages:
    """The block, stage by stage, as numerics.md section 5 has it.

    Without `keep_h`, h may never be in memory.
    """
    tokens, hidden = call.hidden.shape
    device = call.hidden.device
    slots = tokens * problem.top_k
    x = call.hidden
    routes = _route(problem, call)
    order = _order_for(call.w13, device)
    gates = not keep_h and _gates(problem, call, order)
    n = 0 if gates else call.w13.shape[1]
    h = torch.empty(slots, n, dtype=torch.float32, device=device)
    z = torch.empty(slots, hidden, dtype=torch.float32, device=device)
    if tokens == 0:
        return _Stages(x, routes, h, z)
    if call.router_weight_on_input:
        x = _scale_rows(x, call.topk_weights)

    # Rows that share a scale are rounded once a token; those of per-expert scales once a row.
    if problem.quantizes and call.a1_scale is not None and call.a1_scale.ndim:
        count = address(routes.rows)
        to = _Places(routes.work.places, routes.place)
        a1 = _prepare(x, order, slots, True, to, call.a1_scale, routes.expert, routes.token, count)
        index = None
    else:
        to = _Places(routes.work.places, routes.place, routes.slot_row)
        a1 = _prepare(x, order, tokens, problem.quantizes, to, call.a1_scale)
        index = routes.token
    second = _order_for(call.w2, device)
    width = problem.intermediate if gates else 0
    places = routes.work.places if second == _C.PreparedOrder.WGMMA else slots
    u = torch.empty(places, width, dtype=a1.values.dtype, device=device)
    _gemm(
        routes.work,
        a1,
        index,
        call.w13,
        u if gates else h,
        alpha=call.gate_up_scales,
        order=problem.order,
        bias=call.w13_bias,
        gated=second if gates else None,
        limit=expert_parameter(call.limit) if gates and call.limit is not None else None,
    )
    a2 = _Prepared(second, u, None) if gates else activate(problem, call, h, routes)
    _gemm(routes.work, a2, None, call.w2, z, bias=call.w2_bias, second=True)
    weights = None if call.router_weight_on_input else call.topk_weights.contiguous()
    _C.cuda_combine(
        z=address(z),
        slot_row=address(routes.slot_row),
        weights=address(weights),
        tokens=tokens,
        top_k=problem.top_k,
        hidden=hidden,
        out=address(call.out),
        out_type=DTYPES[call.out.dtype],
        out_row_stride=row_strides("out", call.out)[1],
        **cuda_launch(device),
    )
    return _Stages(x, routes, h, z)


def activate(
    problem: MoEProblem,
    call: MoECall,
    h: torch.Tensor,
    routes: _Routes,
    form: _C.ActivationForm | None = None,
) -> _Prepared:
    """Gate and up to w2's operand, or with a `form` of the caller's to that."""
    order = _order_for(call.w2, h.device)
    slots, device, given = h.shape[0], h.device, call.a2_scale
    if form is None:
        form = _C.ActivationForm.ROUNDED if problem.quantizes else _C.ActivationForm.HALF
    scales = None
    if form == _C.ActivationForm.FLOAT:
        out = torch.empty(slots, problem.intermediate, dtype=torch.float32, device=device)
    else:
        dtype = torch.bfloat16 if problem.quantizes else problem.dtype
        stored = routes.work.places if order == _C.PreparedOrder.WGMMA else slots
        out = torch.empty(stored, _padded(problem.intermediate), dtype=dtype, device=device)
        if problem.quantizes:
            scales = torch.empty(slots, dtype=torch.float32, device=device)
    _C.cuda_activate(
        h=address(h),
        row_count=address(routes.rows),
        row_expert=address(routes.expert),
        rows=slots,
        n=h.shape[1],
        order=GATE_ORDERS[problem.order],
        kind=ACTIVATION_KINDS[problem.activation],
        alpha=expert_parameter(call.alpha),
        beta=expert_parameter(call.beta),
        limit=None if call.limit is None else expert_parameter(call.limit),
        form=form,
        type=DTYPES[out.dtype],
        prepared=order,
        row_place=address(routes.place),
        given=address(given),
        given_stride=given.stride(0) if given is not None and given.ndim else 0,
        global_out=address(scales),
        out=address(out),
        **cuda_launch(device),
    )
    return _Prepared(order, out, scales)


def _scale_rows(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    weights = weights.contiguous()
    _C.cuda_scale_rows(
        x=dense_view("hidden", x),
        weights=address(weights),
        rows=x.shape[0],
        n=x.shape[1],
        out=address(out),
        **cuda_launch(x.device),
    )
    return out
