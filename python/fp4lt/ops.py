# SPDX-License-Identifier: Apache-2.0
"""``torch.ops.fp4lt``: the API as operators on plain tensors, for torch.compile and torch.export.

The package's functions call these operators while torch is tracing and compute directly otherwise.
Values and errors are those of the functions.  An NVFP4 operand is three arguments, its codes,
tiled scales (float8_e4m3fn, or their bytes as uint8) and global scale; of a dense operand, the last
two are None.  Weights come as they are stored, (E, N, K).

Each operator has a fake kernel beside its real one.  Both make the same checks, but only the real
one looks at values and chooses a backend: a graph may be traced where it will not run.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._compile import _disable_dynamo

from fp4lt.block import cached_plan as moe_plan, moe_call, moe_problem
from fp4lt.codec import check_source, check_target, dequantize_parts, quantize_parts
from fp4lt.errors import ArgumentError
from fp4lt.experts import MoEWeights
from fp4lt.gemm import cached_plan as grouped_plan, grouped_call, grouped_problem
from fp4lt.layout import padded_scale_shape
from fp4lt.problem import GroupedCall, GroupedProblem, MoECall, MoEProblem, Operand
from fp4lt.tensor import NVFP4Tensor

Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

_GROUPED_MM = """
    Tensor a, Tensor? a_scales, Tensor? a_global, Tensor b, Tensor? b_scales, Tensor? b_global,
    Tensor offs, Tensor? bias=None, Tensor? alpha=None, Tensor? a_scale=None, str recipe="w4a4",
    ScalarType? out_dtype=None, str backend="auto"
"""
_MOE = """
    Tensor hidden, Tensor w13, Tensor? w13_scales, Tensor? w13_global, Tensor w2,
    Tensor? w2_scales, Tensor? w2_global, Tensor topk_weights, Tensor topk_ids,
    Tensor? gate_up_scales=None, Tensor? w13_bias=None, Tensor? w2_bias=None,
    Tensor? a1_scale=None, Tensor? a2_scale=None, Tensor? swiglu_alpha=None,
    Tensor? swiglu_beta=None, Tensor? swiglu_limit=None, str? order=None, str activation="silu",
    int expert_start=0, int? num_experts=None, str recipe="w4a4",
    bool router_weight_on_input=False, str backend="auto"
"""
_SCHEMAS = {
    "quantize": (
        "(Tensor x, Tensor? global_scale=None, bool per_row=False) -> (Tensor, Tensor, Tensor)"
    ),
    "dequantize": "(Tensor codes, Tensor scales, Tensor global_scale, ScalarType dtype) -> Tensor",
    "grouped_mm": f"({_GROUPED_MM}) -> Tensor",
    "grouped_mm_out": f"(Tensor(a!) out, {_GROUPED_MM}) -> ()",
    "moe": f"({_MOE}) -> Tensor",
    "moe_out": f"(Tensor(a!) out, {_MOE}) -> ()",
}
# Strides of arguments stay in the order that tracing saw.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)


def _quantize(
    x: torch.Tensor, global_scale: torch.Tensor | None = None, per_row: bool = False
) -> Parts:
    _check_one_scale(global_scale, per_row)
    return quantize_parts(x, "row" if per_row else global_scale)


def _fake_quantize(
    x: torch.Tensor, global_scale: torch.Tensor | None = None, per_row: bool = False
) -> Parts:
    _check_one_scale(global_scale, per_row)
    check_source(x, global_scale, per_row)
    *lead, rows, k = x.shape
    shape = [rows] if per_row else lead if global_scale is None else global_scale.shape
    return (
        x.new_empty((*lead, rows, k // 2), dtype=torch.uint8),
        x.new_empty((*lead, *padded_scale_shape(rows, k)), dtype=torch.float8_e4m3fn),
        x.new_empty(shape, dtype=torch.float32),
    )


def _dequantize(
    codes: torch.Tensor, scales: torch.Tensor, global_scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    return dequantize_parts(*_nvfp4(codes, scales, global_scale)._parts, dtype)


def _fake_dequantize(
    codes: torch.Tensor, scales: torch.Tensor, global_scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    _nvfp4(codes, scales, global_scale)
    check_target(dtype)
    return codes.new_empty((*codes.shape[:-1], codes.shape[-1] * 2), dtype=dtype)


def _grouped_mm(*arguments: Any) -> torch.Tensor:
    return _run_grouped(None, *arguments)


def _fake_grouped_mm(*arguments: Any) -> torch.Tensor:
    return _grouped(None, *arguments)[1].out


def _grouped_mm_out(out: torch.Tensor, *arguments: Any) -> None:
    _run_grouped(out, *arguments)


def _fake_grouped_mm_out(out: torch.Tensor, *arguments: Any) -> None:
    _grouped(out, *arguments)


def _moe(*arguments: Any) -> torch.Tensor:
    return _run_moe(None, *arguments)


def _fake_moe(*arguments: Any) -> torch.Tensor:
    return _block(None, *arguments)[1].out


def _moe_out(out: torch.Tensor, *arguments: Any) -> None:
    _run_moe(out, *arguments)


def _fake_moe_out(out: torch.Tensor, *arguments: Any) -> None:
    _block(out, *arguments)


def _run_grouped(out: torch.Tensor | None, *arguments: Any) -> torch.Tensor:
    problem, call, backend = _grouped(out, *arguments)
    grouped_plan(problem, call.a.device, backend).backend.grouped_mm(problem, call)
    return call.out


def _grouped(
    out: torch.Tensor | None,
    a: torch.Tensor,
    a_scales: torch.Tensor | None,
    a_global: torch.Tensor | None,
    b: torch.Tensor,
    b_scales: torch.Tensor | None,
    b_global: torch.Tensor | None,
    offs: torch.Tensor,
    bias: torch.Tensor | None = None,
    alpha: torch.Tensor | None = None,
    a_scale: torch.Tensor | None = None,
    recipe: str = "w4a4",
    out_dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> tuple[GroupedProblem, GroupedCall, str]:
    rows, weights = _operand(a, a_scales, a_global), _operand(b, b_scales, b_global).mT
    problem = grouped_problem(rows, weights, recipe, out_dtype, out)
    call = grouped_call(problem, rows, weights, offs, bias, alpha, a_scale, out)
    return problem, call, backend


def _run_moe(out: torch.Tensor | None, *arguments: Any) -> torch.Tensor:
    problem, call, backend = _block(out, *arguments)
    moe_plan(problem, call.hidden.device, backend).backend.moe(problem, call)
    return call.out


def _block(
    out: torch.Tensor | None,
    hidden: torch.Tensor,
    w13: torch.Tensor,
    w13_scales: torch.Tensor | None,
    w13_global: torch.Tensor | None,
    w2: torch.Tensor,
    w2_scales: torch.Tensor | None,
    w2_global: torch.Tensor | None,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    gate_up_scales: torch.Tensor | None = None,
    w13_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
    a1_scale: torch.Tensor | None = None,
    a2_scale: torch.Tensor | None = None,
    swiglu_alpha: torch.Tensor | None = None,
    swiglu_beta: torch.Tensor | None = None,
    swiglu_limit: torch.Tensor | None = None,
    order: Any = None,
    activation: Any = "silu",
    expert_start: int = 0,
    num_experts: int | None = None,
    recipe: str = "w4a4",
    router_weight_on_input: bool = False,
    backend: str = "auto",
) -> tuple[MoEProblem, MoECall, str]:
    weights = MoEWeights(
        _operand(w13, w13_scales, w13_global),
        _operand(w2, w2_scales, w2_global),
        order=order,
        activation=activation,
        gate_up_scales=gate_up_scales,
        w13_bias=w13_bias,
        w2_bias=w2_bias,
        a1_scale=a1_scale,
        a2_scale=a2_scale,
        swiglu_alpha=swiglu_alpha,
        swiglu_beta=swiglu_beta,
        swiglu_limit=swiglu_limit,
        expert_start=expert_start,
        num_experts=num_experts,
    )
    problem = moe_problem(hidden, weights, topk_weights, topk_ids, recipe)
    routing = (topk_weights, topk_ids, router_weight_on_input)
    return problem, moe_call(problem, hidden, weights, *routing, out), backend


def _operand(
    data: torch.Tensor, scales: torch.Tensor | None, global_scale: torch.Tensor | None
) -> Operand:
    if scales is None and global_scale is None:
        return data
    if scales is None or global_scale is None:
        raise ArgumentError(
            "torch.ops.fp4lt: an NVFP4 operand needs codes, scales and global scale; scales or "
            "global scale is None (a dense operand has neither)"
        )
    return _nvfp4(data, scales, global_scale)


def _nvfp4(codes: torch.Tensor, scales: torch.Tensor, global_scale: torch.Tensor) -> NVFP4Tensor:
    if scales.dtype == torch.uint8:
        scales = scales.view(torch.float8_e4m3fn)
    return NVFP4Tensor._make(codes, scales, global_scale)._check_parts()


def _check_one_scale(global_scale: torch.Tensor | None, per_row: bool) -> None:
    if per_row and global_scale is not None:
        raise ArgumentError("torch.ops.fp4lt.quantize: per_row derives scales; give it none")


def _register() -> Any:
    # Not torch.library.custom_op, which takes twice as long at import.
    library: Any = torch.library.Library("fp4lt", "DEF")
    for name, schema in _SCHEMAS.items():
        real, fake = globals()[f"_{name}"], globals()[f"_fake_{name}"]
        library.define(name + schema, tags=_TAGS)
        library.impl(name, _disable_dynamo(real), "CompositeExplicitAutograd")
        torch.library.register_fake(f"fp4lt::{name}", fake, lib=library)
    return library


_LIBRARY = _register()
"""Keeps the operators registered."""
