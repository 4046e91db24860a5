# SPDX-License-Identifier: Apache-2.0
"""torch.ops.fp4lt, and the API under torch.compile, torch.export and fake tensors."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.library import opcheck
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import fp4lt
import fp4lt.gemm
from fp4lt import MoEWeights, NVFP4Tensor
from fp4lt.errors import ArgumentError, DTypeError, ShapeError

# Inductor imports what torch itself has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is:DeprecationWarning")

OPS = torch.ops.fp4lt
E, N, K, M = 3, 40, 64, 7
H, INTER, T = 64, 32, 5
VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])


def rand(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def rate(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(9)) + 0.5


def offsets(*ends: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(ends, dtype=dtype)


def packed(*shape: int, seed: int = 1) -> NVFP4Tensor:
    return fp4lt.quantize(rand(*shape, seed=seed))


def routing(tokens: int = T, top_k: int = 2, experts: int = 5) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(tokens)
    return {
        "topk_weights": torch.rand(tokens, top_k, generator=g),
        "topk_ids": torch.randint(-1, experts, (tokens, top_k), generator=g),
    }


def full_weights() -> MoEWeights:
    """Every optional part given."""
    return MoEWeights(
        packed(E, 2 * INTER, H),
        packed(E, H, INTER, seed=2),
        order="up_gate",
        activation="swigluoai",
        gate_up_scales=rate(E, 2),
        w13_bias=rand(E, 2 * INTER),
        w2_bias=rand(E, H),
        a1_scale=rate(E) / 100,
        a2_scale=0.02,
        swiglu_alpha=1.5,
        swiglu_beta=rate(E),
        swiglu_limit=5.0,
        expert_start=1,
        num_experts=5,
    )


def dense_weights() -> MoEWeights:
    w13, w2 = rand(E, INTER, H).bfloat16(), rand(E, H, INTER).bfloat16()
    return MoEWeights(w13, w2, order=None, activation="relu2")


def parts(x: NVFP4Tensor | torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """As operators take it; bytes, since opcheck's schema test cannot compare float8."""
    if isinstance(x, torch.Tensor):
        return x, None, None
    return x.codes, x.scales.view(torch.uint8), x.global_scale


def assert_same(got: Any, want: Any) -> None:
    """The same structure, types and strides, and the same bytes."""
    found, structure = pytree.tree_flatten(got)
    expected, wanted = pytree.tree_flatten(want)
    assert structure == wanted
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        if b is not None:
            assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
            raw = [t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
            assert torch.equal(*raw)


def assert_compiles(
    function: Callable[..., Any], *arguments: Any, backend: str = "aot_eager", **options: Any
) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend=backend, **options)
    assert_same(compiled(*arguments), function(*arguments))


W = packed(E, N, K)
X = rand(M, K)
X_ROWS = fp4lt.quantize(X, global_scale="row")
OFFS = offsets(2, 2, M)
EXTRAS = (rand(E, N, dtype=torch.float16), rate(E), rate(()) / 100)


def moe_arguments(hidden: torch.Tensor, weights: MoEWeights, **options: Any) -> tuple[Any, ...]:
    route = routing(hidden.shape[0], options.pop("top_k", 2))
    names = "gate_up_scales w13_bias w2_bias a1_scale a2_scale swiglu_alpha swiglu_beta"
    small = [getattr(weights, name) for name in (*names.split(), "swiglu_limit")]
    static = (weights.order, weights.activation, weights.expert_start, weights.num_experts)
    operands = (*parts(weights.w13), *parts(weights.w2), *route.values())
    rest = ("recipe", "router_weight_on_input")
    return (hidden, *operands, *small, *static, *(options[name] for name in rest if name in options))


BF16_HIDDEN = rand(T, H, dtype=torch.bfloat16)
GROUPED: dict[str, tuple[Any, ...]] = {
    "dense": (*parts(X), *parts(W), OFFS),
    "strided": (*parts(rand(M, 2 * K)[:, :K]), *parts(W), OFFS.long()),
    "nvfp4": (*parts(X_ROWS), *parts(W), OFFS, None, rate(()), None, "w4a4", torch.float16),
    "nvfp4, one scale": (*parts(packed(M, K)), *parts(W), OFFS),
    "everything": (*parts(X), *parts(W), OFFS, *EXTRAS, "w4a4", torch.bfloat16, "cpu"),
    "w4a16": (*parts(X.bfloat16()), *parts(W), OFFS, None, None, None, "w4a16"),
    "plain": (*parts(X.half()), *parts(rand(E, N, K, dtype=torch.float16)), OFFS),
    "no rows": (*parts(X[:0]), *parts(W), offsets(0, 0, 0)),
}
MOE: dict[str, tuple[Any, ...]] = {
    "everything": moe_arguments(BF16_HIDDEN, full_weights()),
    "w4a16": moe_arguments(BF16_HIDDEN, full_weights(), recipe="w4a16"),
    "plain": moe_arguments(BF16_HIDDEN, dense_weights()),
    "top-1": moe_arguments(
        rand(T, H), full_weights(), top_k=1, recipe="w4a4", router_weight_on_input=True
    ),
    "no tokens": moe_arguments(BF16_HIDDEN[:0], full_weights()),
}
CODEC: dict[str, tuple[Any, ...]] = {
    "quantize matrix": (X,),
    "quantize stack": (rand(E, N, K, dtype=torch.float16),),
    "quantize rows": (rand(M, 2 * K, dtype=torch.bfloat16)[:, K:], None, True),
    "quantize shared": (X, rate(())),
    "quantize given": (rand(E, N, K), rate(E)),
    "quantize nothing": (X[:0], None, True),
    "dequantize stack": (*parts(W), torch.bfloat16),
    "dequantize rows": (*parts(X_ROWS), torch.float32),
}
CASES = [
    *((name.split()[0], name, arguments) for name, arguments in CODEC.items()),
    *(("grouped_mm", name, arguments) for name, arguments in GROUPED.items()),
    *(("moe", name, arguments) for name, arguments in MOE.items()),
]
IDS = [f"{op}: {name}" for op, name, _ in CASES]


@pytest.mark.parametrize(("op", "name", "arguments"), CASES, ids=IDS)
def test_opcheck(op: str, name: str, arguments: tuple[Any, ...]) -> None:
    opcheck(getattr(OPS, op).default, arguments)
    if op not in ("grouped_mm", "moe"):
        return
    want = getattr(OPS, op)(*arguments)
    out = torch.full((want.shape[0], want.shape[1] + 3), 7.0, dtype=want.dtype)[:, :-3]
    opcheck(getattr(OPS, f"{op}_out").default, (out, *arguments))
    getattr(OPS, f"{op}_out")(out, *arguments)
    assert_same(out.contiguous(), want)
    full = out.as_strided((*out.shape[:1], 3), out.stride(), out.shape[1]) if len(out) else out
    assert bool((full == 7).all()), "wrote beyond out"


def test_opcheck_of_float8_scales() -> None:
    tests = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    scales = (W.codes, W.scales, W.global_scale)
    opcheck(OPS.grouped_mm.default, (*parts(X), *scales, OFFS), test_utils=tests)
    assert_same(OPS.grouped_mm(*parts(X), *scales, OFFS), fp4lt.grouped_mm(X, W.mT, offs=OFFS))


def grouped(a: Any, w: Any, offs: torch.Tensor, **options: Any) -> Callable[..., Any]:
    return lambda a, w, offs: fp4lt.grouped_mm(a, w.mT, offs=offs, **options)


FUNCTIONS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "grouped_mm": (lambda a, w, offs: fp4lt.grouped_mm(a, w.mT, offs=offs), (X, W, OFFS)),
    "of nvfp4": (lambda a, w, offs: fp4lt.grouped_mm(a, w.mT, offs=offs), (X_ROWS, W, OFFS)),
    "of plain": (
        lambda a, w, offs: fp4lt.grouped_mm(a, w.mT, offs=offs),
        (X.half(), rand(E, N, K).half(), OFFS),
    ),
    "options": (
        lambda a, w, offs, bias: fp4lt.grouped_mm(
            a, w, offs=offs, bias=bias, alpha=1.5, a_scale=0.01, out_dtype=torch.float16
        ),
        (X, W.mT, OFFS, EXTRAS[0]),
    ),
    "closure": (lambda a: fp4lt.grouped_mm(a + 1, W.mT, offs=OFFS) * 2, (X,)),
    "quantize": (lambda x: fp4lt.quantize(x), (X,)),
    "quantize, given": (lambda x: fp4lt.quantize(x, global_scale=0.25), (rand(E, N, K),)),
    "round trip": (lambda x: fp4lt.quantize(x).mT.dequantize(torch.bfloat16), (rand(E, N, K),)),
    "dequantize": (lambda w: fp4lt.dequantize(w), (X_ROWS,)),
    "an expert": (lambda w: (w[1], w[1:], w[-1].dequantize(), w.codes.new_empty(w.shape)), (W,)),
    "chain": (
        lambda x, w, offs: fp4lt.grouped_mm(
            fp4lt.quantize(x, global_scale="row"), fp4lt.quantize(w).mT, offs=offs
        ),
        (X, rand(E, N, K), OFFS),
    ),
    "constructor": (
        lambda w: NVFP4Tensor(w.codes ^ 8, w.scales, w.global_scale * 2).dequantize(),
        (W,),
    ),
    "map": (lambda w: pytree.tree_map(lambda t: t.clone(), w), (W,)),
}


@pytest.mark.parametrize(("function", "arguments"), FUNCTIONS.values(), ids=FUNCTIONS)
def test_compiled_is_eager(function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    if function is FUNCTIONS["an expert"][0]:
        inner = function
        function = lambda w: inner(w)[:3]  # noqa: E731 - the last is uninitialised
    assert_compiles(function, *arguments)
