# SPDX-License-Identifier: Apache-2.0
"""moe: the whole MoE block, from hidden states and routing to hidden states."""

from __future__ import annotations

from dataclasses import fields
from functools import lru_cache
from typing import Any

import torch

from fp4lt._interop import dtype_name, require_dtype, require_no_grad, row_strides, tracing
from fp4lt.arguments import check_out, parts_of, require_device, tensors_of
from fp4lt.codec import FLOATS
from fp4lt.errors import ArgumentError, DTypeError, ShapeError
from fp4lt.experts import MoEWeights
from fp4lt.plan import Plan
from fp4lt.problem import (
    MoECall,
    MoEProblem,
    MoETrace,
    Recipe,
    check_backend,
    check_recipe,
    format_name,
)
from fp4lt.tensor import NVFP4Tensor

_IDS = (torch.int32, torch.int64)
_FIELDS = tuple(f.name for f in fields(MoEProblem))


def moe(
    hidden: torch.Tensor,
    weights: MoEWeights,
    *,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    recipe: Recipe = "w4a4",
    router_weight_on_input: bool = False,
    out: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Run a MoE block: two grouped GEMMs, the activation between them, and the weighted sum.

    For token t with experts e_j and router weights r_j, in the order j = 0 .. k-1::

        h = W13[e] x        fp32, with all scales and w13's bias
        u = act(gate, up)   fp32, then rounded to hidden's dtype (w4a16) or to NVFP4 (w4a4)
        z = W2[e] u         fp32, with all scales and w2's bias
        y = sum of r_j z_j  fp32, rounded once

    Parameters
    ----------
    hidden : (T, H) bfloat16, float16 or float32
        H contiguous; rows may be strided.
    weights : MoEWeights
    topk_weights : (T, k) floating point
    topk_ids : (T, k) int32 or int64
        Global expert ids.  -1 and ids of experts that are not in `weights` contribute nothing;
        duplicates count each time.
    recipe : "w4a4" or "w4a16"
        As in :func:`fp4lt.grouped_mm`; with bf16 or fp16 weights it makes no difference.
    router_weight_on_input : bool
        Multiply x, not z, by the router weight; for top-1 only.
    out : (T, H) of hidden's dtype, optional
        Written instead of a new tensor.  It may not overlap an input.
    backend : str
        "auto" or the name of one.

    Returns
    -------
    (T, H) of hidden's dtype
        Zeros for a token that has no expert here.

    Raises
    ------
    ShapeError, DTypeError, LayoutError, DeviceError, ArgumentError, UnsupportedError
        Before anything is computed or written.
    """
    _check_types(hidden, weights)
    if tracing(hidden, topk_weights, topk_ids, *_tensors(weights)):
        routing = (topk_weights, topk_ids, router_weight_on_input)
        return _record(hidden, weights, *routing, out, recipe, backend)
    _check_routing(topk_weights, topk_ids)
    plan = plan_moe(hidden, weights, top_k=topk_ids.shape[1], recipe=recipe, backend=backend)
    return plan.run(
        hidden,
        weights,
        topk_weights=topk_weights,
        topk_ids=topk_ids,
        router_weight_on_input=router_weight_on_input,
        out=out,
    )


def plan_moe(
    hidden: torch.Tensor,
    weights: MoEWeights,
    *,
    top_k: int,
    recipe: Recipe = "w4a4",
    backend: str = "auto",
) -> MoEPlan:
    """Plan :func:`moe` for arguments like these; T may differ from call to call.

    Parameters and errors are those of :func:`moe`, and `top_k` is k.  Plans are cached: asking
    again for the same problem gives the same object.
    """
    check_backend("moe", backend)
    if not isinstance(top_k, int) or top_k < 1:
        raise ArgumentError(f"moe: top_k={top_k!r}; it must be an integer of at least 1")
    plan = MoEPlan if tracing() else cached_plan
    return plan(_problem(hidden, weights, top_k, recipe), hidden.device, backend)


class MoEPlan(Plan[MoEProblem]):
    """A MoE block whose backend is chosen; see :func:`plan_moe`."""

    def run(
        self,
        hidden: torch.Tensor,
        weights: MoEWeights,
        *,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        router_weight_on_input: bool = False,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute; parameters, result and errors as in :func:`moe`."""
        p = self.problem
        routing = (topk_weights, topk_ids, router_weight_on_input)
        self._check_same(hidden, weights, topk_weights, topk_ids)
        if tracing(hidden, topk_weights, topk_ids, *_tensors(weights)):
            return _record(hidden, weights, *routing, out, p.recipe, self.backend.name)
        call = moe_call(p, hidden, weights, *routing, out)
        self.backend.moe(p, call)
        return call.out

    def trace(
        self,
        hidden: torch.Tensor,
        weights: MoEWeights,
        *,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        router_weight_on_input: bool = False,
    ) -> MoETrace:
        """As :meth:`run`, returning the backend's own value of each stage."""
        self._check_same(hidden, weights, topk_weights, topk_ids)
        routing = (topk_weights, topk_ids, router_weight_on_input)
        call = moe_call(self.problem, hidden, weights, *routing, None)
        return self.backend.trace_moe(self.problem, call)

    def _check_same(
        self,
        hidden: torch.Tensor,
        weights: MoEWeights,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
    ) -> None:
        p = self.problem
        given = moe_problem(hidden, weights, topk_weights, topk_ids, p.recipe)
        # By field, since older torch cannot trace a dataclass's ==.
        same = all(getattr(given, name) == getattr(p, name) for name in _FIELDS)
        if not same or hidden.device != self.device:
            raise ArgumentError(
                f"this plan is for {p} on {self.device}, but the arguments are {given} on "
                f"{hidden.device}; make a plan for them"
            )


def moe_call(
    p: MoEProblem,
    hidden: torch.Tensor,
    weights: MoEWeights,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    router_weight_on_input: bool,
    out: torch.Tensor | None,
) -> MoECall:
    """The checked tensors of one call, with an output if none is given."""
    tokens = hidden.shape[0]
    if topk_ids.shape[0] != tokens:
        raise ShapeError(
            f"moe: hidden has {tokens} tokens but topk_ids has shape {tuple(topk_ids.shape)}; "
            "it must be (T, k)"
        )
    if router_weight_on_input and p.top_k != 1:
        raise ArgumentError(
            f"moe: router_weight_on_input is for top-1 routing, but topk_ids has k={p.top_k}: "
            "x would need another weight for each expert"
        )
    require_device("moe: topk_weights", topk_weights, hidden.device)
    require_device("moe: topk_ids", topk_ids, hidden.device)
    inputs = (hidden, topk_weights, topk_ids, *_tensors(weights))
    require_no_grad("moe", *inputs)
    if out is None:
        out = torch.empty(hidden.shape, dtype=p.dtype, device=hidden.device)
    else:
        require_no_grad("moe: out", out)
        check_out("moe", out, tuple(hidden.shape), p.dtype, hidden.device, inputs)
    alpha, beta, limit = weights.swiglu()
    return MoECall(
        hidden=hidden.detach(),
        w13=weights.w13,
        w2=weights.w2,
        topk_weights=topk_weights.detach().to(torch.float32),
        topk_ids=topk_ids if topk_ids.is_cuda else topk_ids.to(torch.int64),
        expert_start=weights.expert_start,
        gate_up_scales=weights.gate_up_scales,
        w13_bias=weights.w13_bias,
        w2_bias=weights.w2_bias,
        a1_scale=_tensor(weights.a1_scale),
        a2_scale=_tensor(weights.a2_scale),
        alpha=alpha,
        beta=beta,
        limit=limit,
        router_weight_on_input=router_weight_on_input,
        out=out,
    )


def _record(
    hidden: torch.Tensor,
    weights: MoEWeights,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    router_weight_on_input: bool,
    out: torch.Tensor | None,
    recipe: str,
    backend: str,
) -> torch.Tensor:
    """The call as an operator, which does the checks."""
    arguments = (
        hidden,
        *parts_of(weights.w13),
        *parts_of(weights.w2),
        topk_weights,
        topk_ids,
        *_small_tensors(weights),
        weights.order,
        weights.activation,
        weights.expert_start,
        weights.num_experts,
        recipe,
        router_weight_on_input,
        backend,
    )
    if out is None:
        result: torch.Tensor = torch.ops.fp4lt.moe(*arguments)
        return result
    torch.ops.fp4lt.moe_out(out, *arguments)
    return out


@lru_cache(maxsize=1024)
def cached_plan(problem: MoEProblem, device: torch.device, backend: str) -> MoEPlan:
    """The plan of a problem, the same object each time."""
    return MoEPlan(problem, device, backend)


def _tensor(value: torch.Tensor | float | None) -> torch.Tensor | None:
    # MoEWeights keeps tensors only.
    assert value is None or isinstance(value, torch.Tensor)
    return value


def _small_tensors(weights: MoEWeights) -> tuple[Any, ...]:
    return (
        weights.gate_up_scales,
        weights.w13_bias,
        weights.w2_bias,
        weights.a1_scale,
        weights.a2_scale,
        weights.swiglu_alpha,
        weights.swiglu_beta,
        weights.swiglu_limit,
    )


def _tensors(weights: MoEWeights) -> tuple[torch.Tensor | None, ...]:
    return (*tensors_of(weights.w13), *tensors_of(weights.w2), *_small_tensors(weights))


def _check_routing(topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> None:
    for name, t in (("topk_weights", topk_weights), ("topk_ids", topk_ids)):
        if not isinstance(t, torch.Tensor):
            raise ArgumentError(f"moe: {name} is a {type(t).__name__}; a tensor is needed")
    require_dtype("moe: topk_ids", topk_ids, _IDS)
    require_dtype("moe: topk_weights", topk_weights, FLOATS)
    if topk_ids.ndim != 2 or topk_ids.shape != topk_weights.shape or topk_ids.shape[1] == 0:
        raise ShapeError(
            f"moe: topk_ids has shape {tuple(topk_ids.shape)} and topk_weights "
            f"{tuple(topk_weights.shape)}; both must be (T, k) with k at least 1"
        )


def _check_types(hidden: torch.Tensor, weights: MoEWeights) -> None:
    if not isinstance(weights, MoEWeights):
        raise ArgumentError(f"moe: weights is a {type(weights).__name__}; MoEWeights is needed")
    if not isinstance(hidden, torch.Tensor):
        raise ArgumentError(f"moe: hidden is a {type(hidden).__name__}; a tensor is needed")
    for w in (weights.w13, weights.w2):
        if isinstance(w, NVFP4Tensor):
            w.check_layout()  # pytree functions can have changed the parts


def moe_problem(
    hidden: torch.Tensor,
    weights: MoEWeights,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    recipe: Recipe | str,
) -> MoEProblem:
    """The problem that checked arguments pose."""
    _check_routing(topk_weights, topk_ids)
    return _problem(hidden, weights, topk_ids.shape[1], recipe)


def _problem(
    hidden: torch.Tensor, weights: MoEWeights, top_k: int, recipe: Recipe | str
) -> MoEProblem:
    _check_types(hidden, weights)
    check_recipe("moe", recipe)
    require_dtype("moe: hidden", hidden, FLOATS)
    if hidden.ndim != 2 or hidden.shape[1] != weights.hidden_size:
        raise ShapeError(
            f"moe: hidden has shape {tuple(hidden.shape)}; it must be (T, H) with "
            f"H={weights.hidden_size}, as the weights have it"
        )
    row_strides("moe: hidden", hidden)
    require_device("moe: w13", tensors_of(weights.w13)[0], hidden.device)
    w_format = format_name(weights.w13)
    if w_format == "nvfp4":
        if recipe == "w4a16":
            require_dtype(
                "moe: with recipe='w4a16', hidden", hidden, (torch.bfloat16, torch.float16)
            )
    elif w_format != dtype_name(hidden.dtype):
        raise DTypeError(
            f"moe: weights are {w_format} but hidden is {dtype_name(hidden.dtype)}; dense weights "
            "take hidden states of their own dtype"
        )
    return MoEProblem(
        experts=weights.num_local_experts,
        hidden=weights.hidden_size,
        intermediate=weights.intermediate_size,
        top_k=top_k,
        dtype=hidden.dtype,
        w_format=w_format,
        recipe=str(recipe),
        order=weights.order,
        activation=weights.activation,
    )
