# SPDX-License-Identifier: Apache-2.0
"""Backend ``fused``: FP4 weights straight from memory to 16-bit tensor cores, on CUDA.

All sizes that depend on the routing stay on the device: nothing waits for the GPU, and every call
can be captured in a CUDA graph, the first one included.  docs/kernels.md has the data flow.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch

from fp4lt import _C
from fp4lt._build import has_code_for
from fp4lt._interop import (
    DTYPES,
    address,
    cuda_launch,
    expert_parameter,
    nvfp4_view,
    row_strides,
)
from fp4lt.backends.cpu import GATE_ORDERS
from fp4lt.backends.stages import (
    Image,
    Routes,
    Rows,
    activate,
    combine,
    empty_rows,
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
        count = address(starts[-1:])
        image = None
        if _form(call.b, device) == _C.RowForm.IMAGE:
            image = Image(work.places, starts=starts, places=places)
        a = prepare(
            call.a, rows, problem.quantizes, given=scale, index=index, count=count, image=image
        )
        _gemm(work, a, None, call.b, call.out, alpha=call.alpha, bias=call.bias)

    def moe(self, problem: MoEProblem, call: MoECall) -> None:
        """See :class:`fp4lt.backends.base.Backend`."""
        for part in passes(problem, call):
            run_block(problem, part)

    def trace_moe(self, problem: MoEProblem, call: MoECall) -> MoETrace:
        """See :class:`fp4lt.backends.base.Backend`; everything is moved to host memory."""
        return host_trace(problem, call, *run_block(problem, call, keep_h=True))


def _view(weights: Operand) -> _C.Nvfp4View:
    assert isinstance(weights, NVFP4Tensor)
    return nvfp4_view(weights.codes, weights.scales, weights.global_scale)


def _form(weights: Operand, device: torch.device) -> _C.RowForm:
    """The form of activations for a GEMM with these weights, and so which kernel runs it.

    It hangs on shape, alignment and device; no bit of the result hangs on it.
    """
    wgmma = _C.can_wgmma(device=device.index, b=_view(weights), k=weights.shape[2])
    return _C.RowForm.IMAGE if wgmma else _C.RowForm.PREPARED


class _WorkList(NamedTuple):
    """Row blocks of the experts that have rows, and how many there are, on the device."""

    blocks: torch.Tensor
    length: torch.Tensor
    flags: torch.Tensor
    """(2, MAX_SHARERS) int32, of which each GEMM takes a row; zeroed with the list."""
    block_rows: int
    expected: int
    places: int
    """Most places that an image of the rows can have."""

    @staticmethod
    def empty(
        rows: int, experts: int, device: torch.device, weights: tuple[Operand, ...]
    ) -> _WorkList:
        """Room for any routing of `rows`, for GEMMs with these weights."""
        images = all(_form(w, device) == _C.RowForm.IMAGE for w in weights)
        form = _C.RowForm.IMAGE if images else _C.RowForm.PREPARED
        most_rows = _C.most_block_rows(device=device.index, form=form)
        block_rows = _C.row_block_size(rows=rows, experts=experts, most=most_rows)
        most = _C.max_row_blocks(rows=rows, experts=experts, block_rows=block_rows)
        words = max(most, 1) * _C.ROW_BLOCK_BYTES // 4
        flags = 4 + 2 * _C.MAX_SHARERS
        memory = torch.empty(flags + words, dtype=torch.int32, device=device)
        return _WorkList(
            blocks=memory[flags:],
            length=memory[:1],
            flags=memory[4:flags].view(2, -1),
            block_rows=block_rows,
            expected=_C.expected_row_blocks(rows=rows, experts=experts, block_rows=block_rows),
            places=8 * _C.max_row_blocks(rows=rows, experts=experts, block_rows=8),
        )


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
    second: bool = False,
    gated: _C.RowForm | None = None,
    limit: _C.ExpertParameter | None = None,
) -> None:
    """One launch.  `second`: of two over a work list; `gated`: `out` is u in that form, not h."""
    device = out.device
    scratch = _C.scratch_bytes(
        device=device.index, form=a.form, k=b.shape[2], block_rows=work.block_rows
    )
    # Held until the launch: another thread may launch on this stream meanwhile.
    sums = torch.empty(scratch, dtype=torch.uint8, device=device)
    # Each GEMM here follows a kernel of ours that follows the one that made the work list.
    _C.cuda_fused_gemm(
        form=a.form,
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
        shared_sums=address(sums),
        shared_flags=address(work.flags[int(second)]),
        **cuda_launch(device),
    )


class _Stages(NamedTuple):
    """What one pass leaves behind."""

    x: torch.Tensor
    routes: Routes
    h: torch.Tensor
    z: torch.Tensor


def _gates(problem: MoEProblem, call: MoECall) -> bool:
    """Whether w13's GEMM can apply the activation itself, which changes no bit.

    It has one thread hold gate and up of a column; a rounding to NVFP4 needs the whole row first.
    """
    return (
        not problem.quantizes
        and _form(call.w13, call.hidden.device) == _C.RowForm.IMAGE
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
    gates = not keep_h and _gates(problem, call)
    h = torch.empty(slots, 0 if gates else call.w13.shape[1], dtype=torch.float32, device=device)
    z = torch.empty(slots, hidden, dtype=torch.float32, device=device)
    work = _WorkList.empty(slots, problem.experts, device, (call.w13, call.w2))
    routes = route(problem, call, work.blocks, work.length, work.block_rows, work.flags)
    if tokens == 0:
        return _Stages(x, routes, h, z)
    if call.router_weight_on_input:
        x = scale_rows(x, call.topk_weights)

    a1, index = first_operand(problem, call, work, routes, x)
    first = partial(
        _gemm,
        work,
        a1,
        index,
        call.w13,
        alpha=call.gate_up_scales,
        order=problem.order,
        bias=call.w13_bias,
    )
    image = _image(work, routes) if _form(call.w2, device) == _C.RowForm.IMAGE else None
    if gates:
        form = _C.RowForm.PREPARED if image is None else _C.RowForm.IMAGE
        dtype, inner = a1.values.dtype, problem.intermediate
        a2 = empty_rows(form, slots, inner, dtype, device, scaled=False, image=image)
        limit = None if call.limit is None else expert_parameter(call.limit)
        first(a2.values, gated=form, limit=limit)
    else:
        first(h)
        a2 = activate(problem, call, h, routes, image=image)
    _gemm(work, a2, None, call.w2, z, bias=call.w2_bias, second=True)
    combine(problem, call, z, routes)
    return _Stages(x, routes, h, z)


def _image(work: _WorkList, routes: Routes) -> Image:
    return Image(work.places, routes.place)


def first_operand(
    problem: MoEProblem, call: MoECall, work: _WorkList, routes: Routes, x: torch.Tensor
) -> tuple[Rows, torch.Tensor | None]:
    """w13's operand from `x`, and which entry of its global scales a routed row has.

    An image has a place for each routed row, and per-expert scales differ between them; else a
    token is brought into form once.
    """
    images = _form(call.w13, x.device) == _C.RowForm.IMAGE
    given = call.a1_scale if problem.quantizes else None
    per_expert = given is not None and given.ndim > 0
    if images or per_expert:
        a1 = prepare(
            x,
            call.topk_ids.numel(),
            problem.quantizes,
            given=given,
            index=routes.expert if per_expert else None,
            source=routes.token,
            count=address(routes.rows),
            image=_image(work, routes) if images else None,
        )
        return a1, None
    return prepare(x, x.shape[0], problem.quantizes, given=given), routes.token
