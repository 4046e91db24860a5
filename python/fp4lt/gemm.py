# SPDX-License-Identifier: Apache-2.0
"""grouped_mm: rows sorted by expert times each expert's matrix."""

from __future__ import annotations

from functools import lru_cache
from operator import gt

import torch

from fp4lt._interop import (
    as_tensor,
    dtype_name,
    require_dtype,
    require_no_grad,
    require_tensor,
    row_strides,
    tracing,
)
from fp4lt.arguments import (
    check_bias,
    check_out,
    parts_of,
    per_expert,
    tensors_of,
)
from fp4lt.codec import FLOATS, check_global_scale
from fp4lt.errors import ArgumentError, DeviceError, DTypeError, LayoutError, ShapeError
from fp4lt.formats import BLOCK
from fp4lt.plan import Plan
from fp4lt.problem import (
    GroupedCall,
    GroupedProblem,
    Operand,
    Recipe,
    check_backend,
    check_recipe,
    format_name,
)
from fp4lt.tensor import NVFP4Tensor

_HALVES = (torch.bfloat16, torch.float16)


def grouped_mm(
    a: Operand,
    b: Operand,
    *,
    offs: torch.Tensor,
    bias: torch.Tensor | None = None,
    alpha: torch.Tensor | float | None = None,
    recipe: Recipe = "w4a4",
    a_scale: torch.Tensor | float | None = None,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Multiply each group of rows by its expert's matrix.

    The call is that of ``torch.nn.functional.grouped_mm(x, w.mT, offs=offs)``.  For the rows m of
    expert e, from ``offs[e - 1]`` (or 0) up to but not including ``offs[e]``::

        y[m, n] = round(f * c + bias[e, n]),    f = (g_a[m] * g_b[e]) * alpha[e]
        c       = sum over k of a[m, k] * b[e, k, n]   without global scales, in fp32

    Parameters
    ----------
    a : (M, K) bfloat16, float16 or float32, or an NVFP4Tensor
        K contiguous, a multiple of 16; rows may be strided.
    b : (E, K, N) NVFP4Tensor, bfloat16 or float16
        ``w.mT`` of weights stored as (E, N, K): K is the contiguous dimension.
    offs : (E,) int32 or int64
        End offsets, not decreasing, at most M.  Groups may be empty.  Rows from ``offs[-1]`` on are
        neither read nor written.
    bias : (E, N) floating point, optional
    alpha : float or () or (E,) float32, optional
        A factor per expert.
    recipe : "w4a4" or "w4a16"
        For dense activations on NVFP4 weights.  "w4a4" rounds them to NVFP4; "w4a16" takes bf16 and
        fp16 as they are.  bf16 and fp16 weights always take the activations as they are.
    a_scale : float or () or (E,) float32, optional
        Static global scale of the activations, with "w4a4".  By default each row has a derived
        scale of its own, so that no row depends on another.
    out_dtype : torch.dtype, optional
        bfloat16, float16 or float32; a's dtype by default, bfloat16 for an NVFP4Tensor.
    out : (M, N) of `out_dtype`, optional
        Written instead of a new tensor; rows may be strided.  It may not overlap an input.
    backend : str
        "auto" or the name of one.

    Returns
    -------
    (M, N) of `out_dtype`
        Rows from ``offs[-1]`` on are uninitialised, or as they were in `out`.

    Raises
    ------
    ShapeError, DTypeError, LayoutError, DeviceError, ArgumentError, UnsupportedError
        Before anything is computed or written.
    """
    if tracing(*tensors_of(a), *tensors_of(b), offs):
        return _record(a, b, offs, bias, alpha, a_scale, out, recipe, out_dtype, backend)
    plan = plan_grouped_mm(a, b, recipe=recipe, out_dtype=out_dtype, backend=backend, out=out)
    return plan.run(a, b, offs=offs, bias=bias, alpha=alpha, a_scale=a_scale, out=out)


def plan_grouped_mm(
    a: Operand,
    b: Operand,
    *,
    recipe: Recipe = "w4a4",
    out_dtype: torch.dtype | None = None,
    backend: str = "auto",
    out: torch.Tensor | None = None,
) -> GroupedMMPlan:
    """Plan :func:`grouped_mm` for operands like `a` and `b`; M may differ from call to call.

    Parameters and errors are those of :func:`grouped_mm`.  Plans are cached: asking again for the
    same problem gives the same object.
    """
    check_backend("grouped_mm", backend)
    plan = GroupedMMPlan if tracing() else cached_plan
    return plan(grouped_problem(a, b, recipe, out_dtype, out), a.device, backend)


def grouped_problem(
    a: Operand,
    b: Operand,
    recipe: Recipe | str,
    out_dtype: torch.dtype | None,
    out: torch.Tensor | None,
) -> GroupedProblem:
    """The problem that checked operands pose."""
    if out is not None:
        require_tensor("grouped_mm: out=", out)
    experts, n, k = _check_operands(a, b)
    check_recipe("grouped_mm", recipe)
    if recipe == "w4a16" and isinstance(b, NVFP4Tensor):
        if isinstance(a, NVFP4Tensor):
            raise ArgumentError(
                "grouped_mm: recipe='w4a16' takes bf16 or fp16 activations, but a is an "
                "NVFP4Tensor; use recipe='w4a4'"
            )
        require_dtype("grouped_mm: with recipe='w4a16', a", a, _HALVES)
    if out_dtype is None:
        out_dtype = torch.bfloat16 if isinstance(a, NVFP4Tensor) else a.dtype
        if out is not None:
            out_dtype = out.dtype
    if out_dtype not in FLOATS:
        names = ", ".join(dtype_name(d) for d in FLOATS)
        raise DTypeError(f"grouped_mm: out_dtype is {out_dtype}; it must be one of: {names}")
    return GroupedProblem(experts, n, k, format_name(a), format_name(b), out_dtype, str(recipe))


class GroupedMMPlan(Plan[GroupedProblem]):
    """A grouped GEMM whose backend is chosen; see :func:`plan_grouped_mm`."""

    def run(
        self,
        a: Operand,
        b: Operand,
        *,
        offs: torch.Tensor,
        bias: torch.Tensor | None = None,
        alpha: torch.Tensor | float | None = None,
        a_scale: torch.Tensor | float | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute; parameters, result and errors as in :func:`grouped_mm`."""
        p = self.problem
        experts, n, k = _check_operands(a, b)
        given = (experts, n, k, format_name(a), format_name(b))
        if given != (p.experts, p.n, p.k, p.a_format, p.b_format) or a.device != self.device:
            raise ArgumentError(
                f"this plan is for {p} on {self.device}, but the operands are E={experts} N={n} "
                f"K={k} {given[3]} x {given[4]} on {a.device}; make a plan for them"
            )
        if tracing(*tensors_of(a), *tensors_of(b), offs):
            name = self.backend.name
            return _record(a, b, offs, bias, alpha, a_scale, out, p.recipe, p.out_dtype, name)
        call = grouped_call(p, a, b, offs, bias, alpha, a_scale, out)
        self.backend.grouped_mm(p, call)
        return call.out


def grouped_call(
    p: GroupedProblem,
    a: Operand,
    b: Operand,
    offs: torch.Tensor,
    bias: torch.Tensor | None,
    alpha: torch.Tensor | float | None,
    a_scale: torch.Tensor | float | None,
    out: torch.Tensor | None,
) -> GroupedCall:
    """The checked tensors of one call, with an output if none is given.

    While torch is tracing, shapes and dtypes are checked and values are not.
    """
    device, rows = a.device, a.shape[0]
    small = tuple(t for t in (bias, alpha, a_scale) if isinstance(t, torch.Tensor))
    require_no_grad("grouped_mm", *tensors_of(a), *tensors_of(b), *small)
    ends = _check_offsets(offs, p.experts, rows, device)
    if bias is not None:
        bias = check_bias("grouped_mm: bias", bias, p.experts, p.n, device)
    factors = None
    if alpha is not None:
        factors = per_expert("grouped_mm: alpha", alpha, p.experts, device).expand(p.experts)
        factors = factors.contiguous()
    static = None
    if a_scale is not None:
        if not p.quantizes:
            raise ArgumentError(
                f"grouped_mm: a_scale is the static scale of activations that the call rounds "
                f"to NVFP4, but {p} rounds none; leave it out"
            )
        static = per_expert("grouped_mm: a_scale", a_scale, p.experts, device)
        check_global_scale("grouped_mm: a_scale", static, ((), "shared"), ((p.experts,), "each"))
    if out is None:
        out = torch.empty(rows, p.n, dtype=p.out_dtype, device=device)
    else:
        require_no_grad("grouped_mm: out", out)
        inputs = (*tensors_of(a), *tensors_of(b), *small, offs)
        check_out("grouped_mm", out, (rows, p.n), p.out_dtype, device, inputs)
    return GroupedCall(a, b.mT, ends, bias, factors, static, out)


def _record(
    a: Operand,
    b: Operand,
    offs: torch.Tensor,
    bias: torch.Tensor | None,
    alpha: torch.Tensor | float | None,
    a_scale: torch.Tensor | float | None,
    out: torch.Tensor | None,
    recipe: str,
    out_dtype: torch.dtype | None,
    backend: str,
) -> torch.Tensor:
    """The call as an operator, which checks all that it can see: neither types nor .mT."""
    _check_types(a, b)
    alpha, a_scale = as_tensor(alpha, a.device), as_tensor(a_scale, a.device)
    operands = (*parts_of(a), *parts_of(b.mT))
    options = (offs, bias, alpha, a_scale, recipe, out_dtype, backend)
    if out is None:
        result: torch.Tensor = torch.ops.fp4lt.grouped_mm(*operands, *options)
        return result
    torch.ops.fp4lt.grouped_mm_out(out, *operands, *options)
    return out


@lru_cache(maxsize=1024)
def cached_plan(problem: GroupedProblem, device: torch.device, backend: str) -> GroupedMMPlan:
    """The plan of a problem, the same object each time."""
    return GroupedMMPlan(problem, device, backend)


def _check_types(a: Operand, b: Operand) -> None:
    for name, t in (("a", a), ("b", b)):
        if not isinstance(t, (torch.Tensor, NVFP4Tensor)):
            raise ArgumentError(
                f"grouped_mm: {name} is a {type(t).__name__}; a torch.Tensor or NVFP4Tensor is "
                "needed"
            )
    if isinstance(b, NVFP4Tensor) and b.ndim == 3 and not b.transposed:
        raise LayoutError(
            f"grouped_mm: b is stored as (E, N, K) = {b.shape}; pass its transpose, b.mT"
        )
    for t in (a, b):
        if isinstance(t, NVFP4Tensor):
            t.check_layout()  # pytree functions can have changed the parts
    if isinstance(a, NVFP4Tensor) and a.transposed:
        raise LayoutError("grouped_mm: a is transposed; pass it as (M, K)")


def _check_operands(a: Operand, b: Operand) -> tuple[int, int, int]:
    """Experts, N and K of operands that fit together."""
    _check_types(a, b)
    if b.ndim != 3:
        raise ShapeError(
            f"grouped_mm: b has shape {tuple(b.shape)}; it must be 3-D, (E, K, N): for one matrix "
            "add a dimension of 1 expert"
        )
    if a.ndim != 2:
        raise ShapeError(
            f"grouped_mm: a has shape {tuple(a.shape)}; it must be 2-D, (M, K), the rows sorted by "
            "expert"
        )
    if isinstance(b, torch.Tensor):
        require_dtype("grouped_mm: b", b, _HALVES)
        if isinstance(a, NVFP4Tensor) or a.dtype != b.dtype:
            raise DTypeError(
                f"grouped_mm: b is {format_name(b)} but a is {format_name(a)}; dense weights take "
                "activations of their own dtype"
            )
    if isinstance(a, torch.Tensor):
        require_dtype("grouped_mm: a", a, FLOATS)
    experts, k, n = b.shape
    if a.shape[1] != k:
        raise ShapeError(
            f"grouped_mm: activations have K={a.shape[1]} but weights have K={k} (b is (E, K, N) = "
            f"{tuple(b.shape)}); K must match"
        )
    if k == 0 or k % BLOCK:
        raise ShapeError(
            f"grouped_mm: K={k}; it must be a positive multiple of {BLOCK}: pad with zeros"
        )
    if experts == 0 or n == 0:
        raise ShapeError(f"grouped_mm: b has shape {tuple(b.shape)}; E and N must be at least 1")
    if a.device != b.device:
        raise DeviceError(f"grouped_mm: a is on {a.device}, but b is on {b.device}")
    if isinstance(a, torch.Tensor):
        row_strides("grouped_mm: a", a)
    if isinstance(b, torch.Tensor) and b.stride(1) != 1:
        raise LayoutError(
            f"grouped_mm: b has shape {tuple(b.shape)} and strides {b.stride()}; K, its second "
            "dimension, must be contiguous: store weights as (E, N, K) and pass .mT"
        )
    return experts, n, k


def _check_offsets(
    offs: torch.Tensor, experts: int, rows: int, device: torch.device
) -> torch.Tensor:
    """End offsets: on the device as they are, since looking would wait for it; else as int64."""
    if not isinstance(offs, torch.Tensor):
        raise ArgumentError(f"grouped_mm: offs is a {type(offs).__name__}; a tensor is needed")
    require_dtype("grouped_mm: offs", offs, (torch.int32, torch.int64))
    if tuple(offs.shape) != (experts,):
        raise ShapeError(
            f"grouped_mm: offs has shape {tuple(offs.shape)}; it must be ({experts},), the end "
            "offset of each expert's rows"
        )
    if offs.device not in (device, torch.device("cpu")):
        raise DeviceError(
            f"grouped_mm: offs is on {offs.device}; it must be on the CPU or on {device}, with a"
        )
    if offs.is_meta or tracing(offs):
        return offs
    if offs.device.type != "cpu":
        return offs.detach().contiguous()
    ends = offs.detach().to(device="cpu", dtype=torch.int64).contiguous()
    # As Python's integers: a dozen operators of torch take longer than all of the call's checks.
    values: list[int] = ends.tolist()
    starts = [0, *values[:-1]]
    if any(map(gt, starts, values)):
        e = next(i for i, end in enumerate(values) if starts[i] > end)
        raise ArgumentError(
            f"grouped_mm: offs[{e}] is {values[e]}, less than {starts[e]} before it; end offsets "
            "must not decrease (are these counts? use offs = counts.cumsum(0))"
        )
    if values[-1] > rows:
        raise ArgumentError(f"grouped_mm: offs[-1] is {values[-1]}, but a has only {rows} rows")
    return ends
