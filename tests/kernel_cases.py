# SPDX-License-Identifier: Apache-2.0
"""The NVFP4 MoE cases of SGLang's and vLLM's kernel tests, held to a derived bound.

Those tests compare with atol = rtol = 0.1 on outputs that are often smaller.  Here every element of
both products is judged, on the device that made it: c and sum |a b| by float64 products, in which
sums of NVFP4 products are exact.  Codes are judged by the oracle on a sample of rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

import fp4lt
from fp4lt.layout import untile_scales
from fp4lt.problem import MoETrace
from fp4lt.testing import bounds, oracle
from fp4lt.testing.targets import find_depth

# (tokens, I, H): SGLang's ten, and the one that only vLLM has.
SHAPES = [
    (2, 1024, 1024),
    (2, 1024, 1536),
    (2, 3072, 1024),
    (2, 3072, 1536),
    (64, 1024, 1024),
    (64, 1024, 1536),
    (64, 3072, 1024),
    (64, 2048, 1024),
    (64, 2048, 1536),
    (224, 1024, 1024),
    (224, 1024, 1536),
]
SMALL_SHAPES = [(2, 64, 128), (17, 96, 80), (64, 48, 64)]
EXPERTS = [40, 64, 256]
TOP_K = [1, 6, 8]
DTYPES = [torch.float16, torch.bfloat16]
ORDERS: list[Literal["gate_up", "up_gate"]] = ["gate_up", "up_gate"]
RECIPES: list[Literal["w4a4", "w4a16"]] = ["w4a4", "w4a16"]
SAMPLE = 16


class Case(NamedTuple):
    """One line of their parameters."""

    shape: tuple[int, int, int]
    experts: int
    top_k: int
    dtype: torch.dtype
    order: Literal["gate_up", "up_gate"] | None

    def __str__(self) -> str:
        m, n, k = self.shape
        dtype = str(self.dtype).removeprefix("torch.")
        return f"T{m}-I{n}-H{k}-E{self.experts}-k{self.top_k}-{dtype}-{self.order}"


def every(shapes: Sequence[tuple[int, int, int]], *, gated: bool = True) -> list[Case]:
    """All combinations, those of one set of weights side by side."""
    orders: list[Any] = list(ORDERS) if gated else [None]
    return [Case(*values) for values in itertools.product(shapes, EXPERTS, TOP_K, DTYPES, orders)]


@lru_cache(maxsize=1)
def stacks(
    experts: int, inner: int, hidden: int, gated: bool, device: str
) -> tuple[fp4lt.NVFP4Tensor, fp4lt.NVFP4Tensor]:
    """Normal weights over 10, as theirs, with a global scale for each expert."""
    generator = torch.Generator(device).manual_seed(7)

    def stack(rows: int, k: int) -> fp4lt.NVFP4Tensor:
        parts = []
        for first in range(0, experts, 16):
            shape = (min(16, experts - first), rows, k)
            dense = torch.randn(shape, generator=generator, device=device) / 10
            parts.append(fp4lt.quantize(dense))
        codes, scales, g = (
            torch.cat([getattr(part, name) for part in parts])
            for name in ("codes", "scales", "global_scale")
        )
        return fp4lt.NVFP4Tensor(codes, scales, g)

    return stack(2 * inner if gated else inner, hidden), stack(hidden, inner)


class Call(NamedTuple):
    """A call of the block on some device."""

    hidden: torch.Tensor
    weights: fp4lt.MoEWeights
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor

    def routing(self) -> dict[str, Any]:
        return {"topk_weights": self.topk_weights, "topk_ids": self.topk_ids}


def make(case: Case, device: str) -> Call:
    """Hidden states over 10 and a softmax router, as theirs; static scales that fit."""
    m, n, k = case.shape
    generator = torch.Generator(device).manual_seed(11)
    hidden = (torch.randn(m, k, generator=generator, device=device) / 10).to(case.dtype)
    scores = torch.randn(m, case.experts, generator=generator, device=device).softmax(dim=1)
    topk_weights, topk_ids = scores.topk(case.top_k, dim=1)
    gated = case.order is not None
    w13, w2 = stacks(case.experts, n, k, gated, device)
    options: dict[str, Any] = {}
    if gated:
        options["gate_up_scales"] = 0.5 + torch.rand(
            case.experts, 2, generator=generator, device=device
        )
    weights = fp4lt.MoEWeights(
        w13,
        w2,
        order=case.order,
        activation="silu" if gated else "relu2",
        a1_scale=(hidden.abs().max().float() / 2688).clone(),
        a2_scale=torch.full((case.experts,), 3 / 2688, device=device),
        **options,
    )
    return Call(hidden, weights, topk_weights, topk_ids.to(torch.int32))


def products(operand: fp4lt.NVFP4Tensor | torch.Tensor, device: torch.device) -> torch.Tensor:
    """An operand without its global scales in float64, exactly."""
    if isinstance(operand, torch.Tensor):
        return operand.to(device).double()
    one = torch.ones((), device=operand.device)
    bare = fp4lt.NVFP4Tensor(operand.codes, operand.scales, one).to(device)
    return bare.dequantize(torch.float32).double()


def check_product(
    got: torch.Tensor,
    a: fp4lt.NVFP4Tensor | torch.Tensor,
    w: fp4lt.NVFP4Tensor,
    expert: torch.Tensor,
    depth: int,
    *,
    columns: torch.Tensor | None = None,
    name: str,
) -> None:
    """Judge routed rows, sorted by expert, by the bound of docs/numerics.md, section 4.

    Parameters
    ----------
    got : (M, N) float32
    a : (M, K)
    w : (E, N, K)
    expert : (M,) int64
    depth : int
    columns : (E, N) float32, optional
        Factors of w's rows.
    name : str
    """
    device = w.device
    values = products(a, device)
    row_scale = torch.ones(len(expert), device=device)
    if isinstance(a, fp4lt.NVFP4Tensor):
        row_scale = a.global_scale.to(device).expand(len(expert))
    counts = torch.bincount(expert, minlength=len(w)).tolist()
    # Small stacks are decoded in one go.
    small = w.codes.numel() < 1 << 24
    stack = products(w, device) if small else None
    start = 0
    for index, count in enumerate(counts):
        rows = slice(start, start + count)
        start += count
        if not count:
            continue
        left = values[rows]
        right = products(w[index], device) if stack is None else stack[index]
        c, total = left @ right.mT, left.abs() @ right.abs().mT
        slack = torch.zeros_like(total)
        if isinstance(a, fp4lt.NVFP4Tensor):
            assert bool((total < 2.0**33).all()), "float64 would round"
        else:
            slack = right.shape[1] * 2.0**-53 * total
        f = row_scale[rows, None] * w.global_scale[index]
        if columns is not None:
            f = f * columns[index]
        f = f.double()
        want = f * c
        fp32 = bounds.format_of(torch.float32)
        limit = f.abs() * (depth * 2.0**-23 * total + slack)
        limit += (fp32.unit_roundoff + 2.0**-22) * want.abs() + fp32.tiny
        error = (got[rows].to(device).double() - want).abs()
        if not bool((error <= limit).all()):
            excess = (error / limit).nan_to_num(nan=torch.inf)
            worst = divmod(int(excess.argmax()), excess.shape[1])
            raise AssertionError(
                f"{name}: expert {index}, row {worst[0]}, column {worst[1]}: error "
                f"{float(error[worst]):.6g} > bound {float(limit[worst]):.6g}"
            )


def some_rows(t: fp4lt.NVFP4Tensor | torch.Tensor, index: torch.Tensor) -> Any:
    """Rows of a host operand."""
    if isinstance(t, torch.Tensor):
        return t[index]
    rows, k = t.shape
    linear = untile_scales(t.scales, rows, k // 16)[index]
    g = t.global_scale if t.global_scale.ndim == 0 else t.global_scale[index]
    return fp4lt.NVFP4Tensor.from_linear_scales(t.codes[index], linear, g)


def check(call: Call, trace: MoETrace, recipe: str, backend: Any) -> None:
    """Judge a trace: both products and the sum in full, codes on a sample of rows."""
    w = call.weights
    assert isinstance(w.w13, fp4lt.NVFP4Tensor)
    assert isinstance(w.w2, fp4lt.NVFP4Tensor)
    hidden, tw, ids = (t.cpu() for t in (call.hidden, call.topk_weights, call.topk_ids))
    experts = w.num_local_experts
    oracle.check_routing(trace, oracle.route(ids, w.expert_start, experts))
    expert, rows = trace.rows_expert, len(trace.rows_expert)

    columns = None
    if w.gate_up_scales is not None:
        order = [0, 1] if w.order == "gate_up" else [1, 0]
        columns = w.gate_up_scales[:, order].repeat_interleave(w.intermediate_size, dim=1)
    depths = [find_depth(backend, k, recipe) for k in (w.hidden_size, w.intermediate_size)]
    check_product(trace.h, trace.a1, w.w13, expert, depths[0], columns=columns, name="h")
    check_product(trace.z, trace.a2, w.w2, expert, depths[1], name="z")

    sample = torch.linspace(0, rows - 1, min(SAMPLE, rows)).long().unique()
    owner = expert[sample].numpy()
    x, a1 = hidden[trace.rows_token[sample]], some_rows(trace.a1, sample)
    scales = [None if s is None else s.cpu() for s in (w.a1_scale, w.a2_scale)]  # type: ignore[union-attr]
    if recipe == "w4a4":
        given = oracle_scale(scales[0], owner, experts)
        want = oracle.quantize_rows(bounds.to_float64(x), given)
        oracle.check_quantized(a1, want, name="a1")
    else:
        bounds.assert_bitwise(a1, x, name="a1")
    parameters = SimpleNamespace(
        w13=SimpleNamespace(shape=(experts,)),
        order=w.order,
        gated=w.gated,
        activation=w.activation,
        a2_scale=oracle_scale(scales[1], np.arange(experts), experts),
        swiglu_alpha=None,
        swiglu_beta=None,
        swiglu_limit=None,
    )
    part = trace.h[sample], some_rows(trace.a2, sample)
    oracle.check_activation(*part, parameters, owner, recipe == "w4a4", hidden.dtype)

    z = trace.z.numpy()
    y = oracle.combine(z, trace.slot_row.numpy(), tw.float(), False)
    bounds.assert_bitwise(trace.y, bounds.round_to(y, hidden.dtype), signed_zeros=False, name="y")


def oracle_scale(scale: torch.Tensor | None, owner: Any, experts: int) -> Any:
    """A static scale for each of some rows."""
    return None if scale is None else scale.expand(experts).numpy()[owner]
