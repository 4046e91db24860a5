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
        work = _WorkList.empty(rows, problem.experts, device)
        _C.cuda_plan_blocks(
            ends=address(ends),
            ends_are_64_bit=ends.dtype == torch.int64,
            experts=problem.experts,
            rows=rows,
            block_rows=work.block_rows,
            blocks=address(work.blocks),
            block_count=address(work.length),
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
        a = _prepare(call.a, rows, problem.quantizes, scale, index, None, count)
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
    block_rows: int
    expected: int

    @staticmethod
    def empty(rows: int, experts: int, device: torch.device) -> _WorkList:
        block_rows = _C.row_block_size(rows=rows, experts=experts)
        most = _C.max_row_blocks(rows=rows, experts=experts, block_rows=block_rows)
        words = max(most, 1) * _C.ROW_BLOCK_BYTES // 4
        memory = torch.empty(words + 4, dtype=torch.int32, device=device)
        expected = _C.expected_row_blocks(rows=rows, experts=experts, block_rows=block_rows)
        return _WorkList(memory[4:], memory[:1], block_rows, expected)


class _Prepared(NamedTuple):
    """The fused kernel's activations, and their rows' global scales."""

    values: torch.Tensor
    global_scale: torch.Tensor | None


def _padded(k: int) -> int:
    return -(-k // _C.PREPARED_K) * _C.PREPARED_K


def _prepare(
    x: Operand,
    rows: int,
    quantize: bool,
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
    values = torch.empty(rows, _padded(k), dtype=dtype, device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device) if quantize else None
    if isinstance(x, NVFP4Tensor):
        view: _C.Nvfp4View | _C.DenseView = nvfp4_view(x.codes, x.scales, x.global_scale)
        scales = x.global_scale.expand(rows).contiguous()
    else:
        view = dense_view("activations", x)
    _C.cuda_prepare(
        x=view,
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
    return _Prepared(values, scales)


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
) -> None:
    assert isinstance(b, NVFP4Tensor)
    _C.cuda_fused_gemm(
        n=b.shape[1],
        k=b.shape[2],
        blocks=address(work.blocks),
        block_count=address(work.length),
        block_rows=work.block_rows,
        expected_blocks=work.expected,
        a=address(a.values),
        a_type=DTYPES[a.values.dtype],
        row_index=address(row_index),
        a_global=address(a.global_scale),
        b=nvfp4_view(b.codes, b.scales, b.global_scale),
        alpha=address(alpha),
        alpha_expert_stride=alpha.stride(0) if alpha is not None else 0,
        order=GATE_ORDERS[order],
        bias=address(bias),
        bias_expert_stride=bias.stride(0) if bias is not None else 0,
        out=address(out),
        out_type=DTYPES[out.dtype],
        out_row_stride=row_strides("out", out)[1],
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
    work = _WorkList.empty(slots, problem.experts, device)
    memory = torch.empty(3 * slots + 4, dtype=torch.int32, device=device)
    rows, rest = memory[:1], memory[4:]
    token, expert, slot_row = rest[:slots], rest[slots : 2 * slots], rest[2 * slots :]
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
        blocks=address(work.blocks),
        block_count=address(work.length),
        **cuda_launch(device),
    )
    return _Routes(rows, token, expert, slot_row.view(ids.shape), work)


def run_block(problem: MoEProblem, call: MoECall) -> _Stages:
    """The block, stage by stage, as numerics.md section 5 has it."""
    tokens, hidden = call.hidden.shape
    device = call.hidden.device
    slots = tokens * problem.top_k
    x = call.hidden
    h = torch.empty(slots, call.w13.shape[1], dtype=torch.float32, device=device)
    z = torch.empty(slots, hidden, dtype=torch.float32, device=device)
    routes = _route(problem, call)
    if tokens == 0:
        return _Stages(x, routes, h, z)
    if call.router_weight_on_input:
        x = _scale_rows(x, call.topk_weights)

    # Rows that share a scale are rounded once a token; those of per-expert scales once a row.
    if problem.quantizes and call.a1_scale is not None and call.a1_scale.ndim:
        count = address(routes.rows)
        a1 = _prepare(x, slots, True, call.a1_scale, routes.expert, routes.token, count)
        index = None
    else:
        a1 = _prepare(x, tokens, problem.quantizes, call.a1_scale)
        index = routes.token
    _gemm(
        routes.work,
        a1,
        index,
        call.w13,
        h,
        alpha=call.gate_up_scales,
        order=problem.order,
        bias=call.w13_bias,
    )
    a2 = activate(problem, call, h, routes)
    _gemm(routes.work, a2, None, call.w2, z, bias=call.w2_bias)
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
    slots, device, given = h.shape[0], h.device, call.a2_scale
    if form is None:
        form = _C.ActivationForm.ROUNDED if problem.quantizes else _C.ActivationForm.HALF
    scales = None
    if form == _C.ActivationForm.FLOAT:
        out = torch.empty(slots, problem.intermediate, dtype=torch.float32, device=device)
    else:
        dtype = torch.bfloat16 if problem.quantizes else problem.dtype
        out = torch.empty(slots, _padded(problem.intermediate), dtype=dtype, device=device)
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
        given=address(given),
        given_stride=given.stride(0) if given is not None and given.ndim else 0,
        global_out=address(scales),
        out=address(out),
        **cuda_launch(device),
    )
    return _Prepared(out, scales)


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
