# SPDX-License-Identifier: Apache-2.0
"""torch.ops.fp4lt: opcheck, direct calls, fake tensors and recording."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from ops_cases import (
    BF16_HIDDEN,
    EXTRAS,
    OFFS,
    X_ROWS,
    E,
    H,
    K,
    M,
    N,
    T,
    W,
    X,
    assert_same,
    dense_weights,
    full_weights,
    multiply,
    offsets,
    packed,
    parts,
    rand,
    rate,
    routing,
)
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode

import fp4lt
import fp4lt.gemm
from fp4lt import MoEWeights, NVFP4Tensor
from fp4lt.errors import ArgumentError, DTypeError, ShapeError

OPS = torch.ops.fp4lt


def moe_arguments(hidden: torch.Tensor, weights: MoEWeights, **options: Any) -> tuple[Any, ...]:
    route = routing(hidden.shape[0], options.pop("top_k", 2))
    names = "gate_up_scales w13_bias w2_bias a1_scale a2_scale swiglu_alpha swiglu_beta"
    small = [getattr(weights, name) for name in (*names.split(), "swiglu_limit")]
    static = (weights.order, weights.activation, weights.expert_start, weights.num_experts)
    operands = (*parts(weights.w13), *parts(weights.w2), *route.values())
    rest = ("recipe", "router_weight_on_input")
    return (
        hidden,
        *operands,
        *small,
        *static,
        *(options[name] for name in rest if name in options),
    )


GROUPED: dict[str, tuple[Any, ...]] = {
    "dense": (*parts(X), *parts(W), OFFS),
    "strided": (*parts(rand(M, 2 * K)[:, :K]), *parts(W), OFFS.long()),
    "nvfp4": (*parts(X_ROWS), *parts(W), OFFS, None, rate(), None, "w4a4", torch.float16),
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
    "quantize shared": (X, rate()),
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
    room = torch.full((want.shape[0], want.shape[1] + 3), 7.0, dtype=want.dtype)
    out = room[:, :-3]
    opcheck(getattr(OPS, f"{op}_out").default, (out, *arguments))
    getattr(OPS, f"{op}_out")(out, *arguments)
    assert_same(out.clone(memory_format=torch.contiguous_format), want)
    assert bool((room[:, -3:] == 7).all()), "wrote beyond out"


def test_opcheck_of_float8_scales() -> None:
    tests = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    scales = (W.codes, W.scales, W.global_scale)
    opcheck(OPS.grouped_mm.default, (*parts(X), *scales, OFFS), test_utils=tests)
    assert_same(OPS.grouped_mm(*parts(X), *scales, OFFS), fp4lt.grouped_mm(X, W.mT, offs=OFFS))


def test_fake_tensors() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(M, K, dtype=torch.float16)
        q = fp4lt.quantize(x, global_scale="row")
        assert (q.shape, tuple(q.scales.shape)) == ((M, K), (128, 4))
        y = fp4lt.grouped_mm(x, W.mT, offs=OFFS)
        assert (tuple(y.shape), y.dtype) == ((M, N), torch.float16)
        NVFP4Tensor(q.codes, q.scales, q.global_scale)
    with pytest.raises(ShapeError, match="K=64 but weights have K=128"):
        fp4lt.grouped_mm(x, packed(E, N, 2 * K).mT, offs=OFFS)


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_recording_bakes_nothing_in(mode: Literal["real", "fake", "symbolic"]) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return fp4lt.quantize(x).mT.dequantize(torch.bfloat16)

    graph = make_fx(function, tracing_mode=mode)(rand(E, N, K, seed=1))
    assert_same(graph(rand(E, N, K, seed=2)), function(rand(E, N, K, seed=2)))


def test_dispatch_modes_see_operators_and_eager_calls_have_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = []

    class Spy(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Spy():  # type: ignore[no-untyped-call]
        got = multiply(X, W, OFFS)
    assert "fp4lt.grouped_mm.default" in seen
    monkeypatch.setattr(fp4lt.gemm, "_record", None)
    assert_same(got, multiply(X, W, OFFS))


# Operators may be called directly, so they trust nothing.
DIRECT_ERRORS: dict[str, tuple[type[Exception], str, Callable[[], Any]]] = {
    "half an operand": (
        ArgumentError,
        "needs codes, scales and global scale",
        lambda: OPS.grouped_mm(X, None, None, W.codes, W.scales, None, OFFS),
    ),
    "scales of fewer rows": (
        ShapeError,
        "need tiled scales",
        lambda: OPS.dequantize(W.codes, W.scales[:, :64], W.global_scale, torch.float32),
    ),
    "codes of another type": (
        DTypeError,
        "codes is int8",
        lambda: OPS.dequantize(W.codes.view(torch.int8), W.scales, W.global_scale, torch.float32),
    ),
    "two kinds of scale": (
        ArgumentError,
        "per_row",
        lambda: OPS.quantize(X, rate(M), True),
    ),
    "a gradient": (
        ArgumentError,
        "requires grad",
        lambda: OPS.grouped_mm(*parts(X.clone().requires_grad_()), *parts(W), OFFS),
    ),
    "no order": (ArgumentError, "order=None", lambda: OPS.moe(*MOE["everything"][:17])),
}


@pytest.mark.parametrize(("error", "words", "call"), DIRECT_ERRORS.values(), ids=DIRECT_ERRORS)
def test_errors_of_direct_calls(
    error: type[Exception], words: str, call: Callable[[], Any]
) -> None:
    with pytest.raises(error, match=words):
        call()
