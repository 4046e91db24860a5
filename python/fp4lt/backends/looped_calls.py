# SPDX-License-Identifier: Apache-2.0
"""grouped_mm and the MoE block as looped products, for both looped backends.

They differ in one thing: whether an NVFP4 operand goes to the tensor cores as codes, or as 16-bit
values that hold the same products exactly.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from fp4lt import _C
from fp4lt._interop import DTYPES, address, cuda_launch, is_aligned
from fp4lt.backends.looped import (
    Product,
    Sizes,
    finish_of,
    finish_rows,
    multiply,
    sums_like,
    usable_rows,
)
from fp4lt.backends.stages import (
    Places,
    Routes,
    Rows,
    activate,
    combine,
    passes,
    prepare,
    route,
    scale_rows,
)
from fp4lt.problem import GroupedCall, GroupedProblem, MoECall, MoEProblem, Operand
from fp4lt.tensor import NVFP4Tensor


def product_of(weights: Operand, rows: Rows | torch.Tensor, out: torch.dtype) -> Product:
    """The product of weights (E, N, K) with rows in one of the forms."""
    _, n, k = weights.shape
    if isinstance(rows, Rows) and rows.form == _C.RowForm.CODES:
        return Product(n, k, _C.LoopedWeights.CODES, _C.DType.BF16, DTYPES[out])
    values = rows.values if isinstance(rows, Rows) else rows
    expanded = isinstance(weights, NVFP4Tensor)
    kind = _C.LoopedWeights.EXPANDED if expanded else _C.LoopedWeights.DENSE
    return Product(n, k, kind, DTYPES[values.dtype], DTYPES[out])


def run_grouped(codes: bool, problem: GroupedProblem, call: GroupedCall) -> None:
    """Write ``call.out``."""
    a, device = call.a, call.out.device
    if a.shape[0] == 0:
        return
    sizes = Sizes(call.ends, a.shape[0], device).wait()
    rows = sizes.rows
    if rows == 0:
        return
    exact = problem.b_format == "nvfp4" and (problem.quantizes or isinstance(a, NVFP4Tensor))
    factors = _factors(problem, call)
    direct = factors is not _PER_ROW and _is_direct(call.out, exact, codes, problem)
    scale = call.a_scale
    needs_rows = codes or not direct or (scale is not None and scale.ndim == 1)
    place = _locate(sizes, codes) if needs_rows else None
    x = _grouped_rows(problem, a, sizes, codes, scale, place)
    values = x.values if isinstance(x, Rows) else x
    row_scales = x.scales if isinstance(x, Rows) else None
    if row_scales is not None:
        _clear(row_scales, sizes.device, rows, problem.k)
    if direct:
        out = call.out[:rows]
        alpha = factors if isinstance(factors, torch.Tensor) else None
    else:
        out, alpha = sums_like(rows, problem.n, device), None
    product = product_of(call.b, x, out.dtype)
    multiply(product, sizes, call.b, values, out, row_scales=row_scales, alpha=alpha)
    if not direct:
        assert place is not None
        a_global = x.global_scale if isinstance(x, Rows) else None
        alpha = call.alpha.unsqueeze(1) if call.alpha is not None else None
        finish = finish_of(call.b, a_global=a_global, alpha=alpha, bias=call.bias)
        finish_rows(out, finish, place.expert, call.out, sizes.count)


_PER_ROW = object()


def _factors(problem: GroupedProblem, call: GroupedCall) -> torch.Tensor | object | None:
    """F of each expert (E,) where it does not depend on the row; None for 1."""
    if call.bias is not None:
        return _PER_ROW
    f: torch.Tensor | None = None
    if isinstance(call.a, NVFP4Tensor):
        if call.a.global_scale.ndim:
            return _PER_ROW
        f = call.a.global_scale
    elif problem.quantizes:
        if call.a_scale is None:
            return _PER_ROW
        f = call.a_scale
    if isinstance(call.b, NVFP4Tensor):
        f = call.b.global_scale if f is None else f * call.b.global_scale
    if call.alpha is not None:
        f = call.alpha if f is None else f * call.alpha
    return None if f is None else f.expand(problem.experts).contiguous()


def _is_direct(out: torch.Tensor, exact: bool, codes: bool, problem: GroupedProblem) -> bool:
    """Whether the matmul may write the output itself: its type and its place are such."""
    size = out.element_size()
    placed = (
        problem.n % 8 == 0
        and out.stride(0) >= problem.n
        and out.stride(0) * size % 16 == 0
        and is_aligned(out, 16)
    )
    if out.dtype == torch.float32:
        return placed
    # FP4 products to fp16 are documented but refused by other callers: they go by way of fp32.
    operand = "bfloat16" if exact or codes else problem.a_format
    return placed and str(out.dtype) == f"torch.{operand}"


class _Place(NamedTuple):
    expert: torch.Tensor
    """(rows,) int32."""
    tiles: Places | None


def _locate(sizes: Sizes, codes: bool) -> _Place:
    ends, rows = sizes.device, sizes.rows
    memory = torch.empty(2 if codes else 1, rows, dtype=torch.int32, device=ends.device)
    _C.cuda_locate_rows(
        ends=address(ends),
        experts=len(ends),
        rows=rows,
        row_expert=address(memory[0]),
        scale_row=address(memory[1] if codes else None),
        **cuda_launch(ends.device),
    )
    tiles = Places(memory[1], _C.packed_tiles(rows, len(ends))) if codes else None
    return _Place(memory[0], tiles)


def _clear(scales: torch.Tensor, ends: torch.Tensor, rows: int, k: int) -> None:
    """Zero the rows of padding of an operand's scale tiles."""
    _C.cuda_clear_tiles(
        ends=address(ends),
        experts=len(ends),
        rows=rows,
        padded_blocks=-(-k // 64) * 4,
        scales=address(scales),
        **cuda_launch(scales.device),
    )


def _grouped_rows(
    problem: GroupedProblem,
    a: Operand,
    sizes: Sizes,
    codes: bool,
    scale: torch.Tensor | None,
    place: _Place | None,
) -> Rows | torch.Tensor:
    """The activations that are used, as the product takes them."""
    rows = sizes.rows
    if isinstance(a, torch.Tensor) and not problem.quantizes:
        return usable_rows(a[:rows])
    index = place.expert if place is not None and scale is not None and scale.ndim else None
    if isinstance(a, NVFP4Tensor) and a.global_scale.ndim:
        a = NVFP4Tensor._make(a.codes, a.scales, a.global_scale[:rows])
    return prepare(
        a,
        rows,
        problem.quantizes,
        form=_C.RowForm.CODES if codes else _C.RowForm.PLAIN,
        given=scale,
        index=index,
        count=address(sizes.count),
        places=place.tiles if place is not None else None,
    )


class Stages(NamedTuple):
    """What one pass leaves behind, for tracing: `h` and `z` are finished if it was asked for."""

    x: torch.Tensor
    routes: Routes
    h: torch.Tensor
    z: torch.Tensor


def run_moe(codes: bool, problem: MoEProblem, call: MoECall) -> None:
    """Write ``call.out``."""
    for part in passes(problem, call):
        run_block(codes, problem, part)


def run_block(codes: bool, problem: MoEProblem, call: MoECall, trace: bool = False) -> Stages:
    """The block, stage by stage, as numerics.md section 5 has it."""
    tokens, hidden = call.hidden.shape
    device = call.hidden.device
    slots = tokens * problem.top_k
    form = _C.RowForm.CODES if codes else _C.RowForm.PLAIN
    x = call.hidden
    h = sums_like(slots, call.w13.shape[1], device)
    z = torch.empty(slots, hidden, dtype=torch.float32, device=device)
    routes = route(problem, call)
    if tokens == 0:
        return Stages(x, routes, h, z)
    sizes = Sizes(routes.ends, slots, device)
    if call.router_weight_on_input:
        x = scale_rows(x, call.topk_weights)
    places = _places(routes, slots) if codes else None
    a1 = prepare(
        x,
        slots,
        problem.quantizes,
        form=form,
        given=call.a1_scale,
        index=routes.expert,
        source=routes.token,
        count=address(routes.rows),
        places=places,
    )
    sizes.wait()
    _product(call.w13, a1, routes, sizes, h)
    finish = finish_of(
        call.w13,
        a_global=a1.global_scale,
        alpha=call.gate_up_scales,
        order=problem.order,
        bias=call.w13_bias,
    )
    if trace:
        finish_rows(h, finish, routes.expert, h, routes.rows)
        a2 = activate(problem, call, h, routes, form=form, places=places)
    else:
        a2 = activate(problem, call, h, routes, form=form, places=places, finish=finish)
    _product(call.w2, a2, routes, sizes, z)
    finish = finish_of(call.w2, a_global=a2.global_scale, bias=call.w2_bias)
    if trace:
        finish_rows(z, finish, routes.expert, z, routes.rows)
        combine(problem, call, z, routes)
    else:
        combine(problem, call, z, routes, finish)
    return Stages(x, routes, h, z)


def _places(routes: Routes, slots: int) -> Places:
    row = torch.empty(slots, dtype=torch.int32, device=routes.ends.device)
    _C.cuda_locate_rows(
        ends=address(routes.ends),
        experts=len(routes.ends),
        rows=slots,
        row_expert=0,
        scale_row=address(row),
        **cuda_launch(row.device),
    )
    return Places(row, _C.packed_tiles(slots, len(routes.ends)))


def _product(weights: Operand, rows: Rows, routes: Routes, sizes: Sizes, out: torch.Tensor) -> None:
    if rows.scales is not None:
        _clear(rows.scales, routes.ends, rows.values.shape[0], weights.shape[2])
    product = product_of(weights, rows, out.dtype)
    multiply(product, sizes, weights, rows.values, out, row_scales=rows.scales)
