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
from fp4lt._interop import DTYPES, address, cuda_launch, nvfp4_view, row_strides
from fp4lt.backends.cpu import GATE_ORDERS
from fp4lt.backends.stages import (
    Routes,
    Rows,
    activate,
    combine,
    passes,
    prepare,
    route,
    scale_rows,
)
from fp4lt.backends.trace import host_trace
from fp4lt.problem import GroupedCall, GroupedProblem, MoECall, MoEProblem, MoETrace, Operand
from fp4lt.tensor import NVFP4Tensor


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
        a = prepare(call.a, rows, problem.quantizes, given=scale, index=index, count=count)
        _gemm(work, a, None, call.b, call.out, alpha=call.alpha, bias=call.bias)

    def moe(self, problem: MoEProblem, call: MoECall) -> None:
        """See :class:`fp4lt.backends.base.Backend`."""
        for part in passes(problem, call):
            run_block(problem, part)

    def trace_moe(self, problem: MoEProblem, call: MoECall) -> MoETrace:
        """See :class:`fp4lt.backends.base.Backend`; everything is moved to host memory."""
        return host_trace(problem, call, *run_block(problem, call))


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


def _gemm(
    work: _WorkList,
    a: Rows,
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


class _Stages(NamedTuple):
    """What one pass leaves behind."""

    x: torch.Tensor
    routes: Routes
    h: torch.Tensor
    z: torch.Tensor


def run_block(problem: MoEProblem, call: MoECall) -> _Stages:
    """The block, stage by stage, as numerics.md section 5 has it."""
    tokens, hidden = call.hidden.shape
    device = call.hidden.device
    slots = tokens * problem.top_k
    x = call.hidden
    h = torch.empty(slots, call.w13.shape[1], dtype=torch.float32, device=device)
    z = torch.empty(slots, hidden, dtype=torch.float32, device=device)
    work = _WorkList.empty(slots, problem.experts, device)
    routes = route(problem, call, work.blocks, work.length, work.block_rows)
    if tokens == 0:
        return _Stages(x, routes, h, z)
    if call.router_weight_on_input:
        x = scale_rows(x, call.topk_weights)

    # Rows that share a scale are rounded once a token; those of per-expert scales once a row.
    if problem.quantizes and call.a1_scale is not None and call.a1_scale.ndim:
        count = address(routes.rows)
        a1 = prepare(
            x,
            slots,
            True,
            given=call.a1_scale,
            index=routes.expert,
            source=routes.token,
            count=count,
        )
        index = None
    else:
        a1 = prepare(x, tokens, problem.quantizes, given=call.a1_scale)
        index = routes.token
    _gemm(
        work,
        a1,
        index,
        call.w13,
        h,
        alpha=call.gate_up_scales,
        order=problem.order,
        bias=call.w13_bias,
    )
    a2 = activate(problem, call, h, routes)
    _gemm(work, a2, None, call.w2, z, bias=call.w2_bias)
    combine(problem, call, z, routes)
    return _Stages(x, routes, h, z)
