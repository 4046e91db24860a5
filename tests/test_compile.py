# SPDX-License-Identifier: Apache-2.0
"""The API under torch.compile and torch.export: the bytes of eager calls, and errors."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ops_cases import (
    BF16_HIDDEN,
    EXTRAS,
    INTER,
    OFFS,
    ROUTE,
    WEIGHTS,
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
    block,
    dense_weights,
    full_weights,
    multiply,
    offsets,
    rand,
    rate,
    routing,
)
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils import _pytree as pytree

import fp4lt
from fp4lt import MoEWeights, NVFP4Tensor
from fp4lt.errors import ArgumentError

# Inductor imports what torch itself has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is:DeprecationWarning")

VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])


def assert_compiles(
    function: Callable[..., Any], *arguments: Any, backend: str = "aot_eager", **options: Any
) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend=backend, **options)
    assert_same(compiled(*arguments), function(*arguments))


FUNCTIONS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "grouped_mm": (multiply, (X, W, OFFS)),
    "of nvfp4": (multiply, (X_ROWS, W, OFFS)),
    "of plain": (multiply, (X.half(), rand(E, N, K).half(), OFFS)),
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
    "an expert": (lambda w: (w[1], w[1:], w[-1].dequantize(), w.codes.new_zeros(w.shape)), (W,)),
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
    assert_compiles(function, *arguments)


class Layer(torch.nn.Module):
    """A layer that holds its weights as an attribute, between operations of torch."""

    def __init__(self, weights: MoEWeights) -> None:
        super().__init__()
        self.weights = weights
        self.gain = torch.nn.Parameter(rate(H))

    def forward(self, hidden: torch.Tensor, route: dict[str, Any]) -> torch.Tensor:
        y = block((hidden * 2).detach(), self.weights, route)
        return y * self.gain + hidden


@pytest.mark.parametrize("weights", [full_weights(), dense_weights()], ids=["full", "plain"])
@pytest.mark.parametrize("options", [{}, {"recipe": "w4a16"}], ids=str)
def test_compiled_moe_is_eager(weights: MoEWeights, options: dict[str, Any]) -> None:
    assert_compiles(lambda *a: block(*a, **options), BF16_HIDDEN, weights, ROUTE)


def test_compiled_module_and_its_gradient() -> None:
    layer = Layer(WEIGHTS)
    assert_compiles(layer, rand(T, H), ROUTE)
    gradients: list[Any] = []
    for run in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        layer.gain.grad = None
        run(rand(T, H), ROUTE).sum().backward()
        gradients.append(layer.gain.grad)
    assert_same(*gradients)


def test_inductor_of_a_module() -> None:
    with torch.no_grad():
        assert_compiles(Layer(WEIGHTS), rand(T, H), ROUTE, backend="inductor")


def test_weights_made_in_the_graph() -> None:
    def make(w13: torch.Tensor, w2: torch.Tensor, scale: torch.Tensor) -> MoEWeights:
        w = (fp4lt.quantize(w13), fp4lt.quantize(w2))
        return MoEWeights(*w, order="interleaved", a1_scale=scale, a2_scale=0.5, swiglu_beta=1.0)

    def run(*dense: torch.Tensor) -> tuple[MoEWeights, torch.Tensor]:
        weights = make(*dense)
        return weights, block(BF16_HIDDEN, weights, ROUTE)

    assert_compiles(run, rand(E, 2 * INTER, H), rand(E, H, INTER), rate(E))


@pytest.mark.parametrize("name", ["options", "closure", "chain"])
def test_inductor_is_eager(name: str) -> None:
    function, arguments = FUNCTIONS[name]
    assert_compiles(function, *arguments, backend="inductor")


def test_all_sizes_symbolic() -> None:
    assert_compiles(FUNCTIONS["chain"][0], *FUNCTIONS["chain"][1], dynamic=True)
    assert_compiles(block, BF16_HIDDEN, full_weights(), ROUTE, dynamic=True)


def test_plans_run_in_a_graph() -> None:
    weights = full_weights()
    gemm, moe = fp4lt.plan_grouped_mm(X, W.mT), fp4lt.plan_moe(BF16_HIDDEN, weights, top_k=2)

    def run(route: dict[str, Any]) -> tuple[torch.Tensor, ...]:
        planned_here = fp4lt.plan_grouped_mm(X_ROWS, W.mT)
        return (
            gemm.run(X, W.mT, offs=OFFS),
            planned_here.run(X_ROWS, W.mT, offs=OFFS),
            moe.run(BF16_HIDDEN, weights, **route),
        )

    assert_compiles(run, ROUTE)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_out_is_written(backend: str) -> None:
    def run(
        y: torch.Tensor, z: torch.Tensor, route: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        z.add_(1)
        first = fp4lt.grouped_mm(X, W.mT, offs=OFFS - 1, out=y)
        return first * 2, fp4lt.moe(BF16_HIDDEN, WEIGHTS, **route, out=z)

    torch._dynamo.reset()
    results = []
    for f in (run, torch.compile(run, fullgraph=True, backend=backend)):
        y, z = torch.full((M, 2 * N), 7.0), torch.full((T, 2 * H), 7.0, dtype=torch.bfloat16)
        first, second = f(y[:, :N], z[:, H:], ROUTE)
        assert second.data_ptr() == z[:, H:].data_ptr()
        results.append((first, second.clone(), y, z))
    assert_same(results[1], results[0])
    y, z = results[1][2:]
    # The last group ends a row early; the first half of z and the second of y are nobody's.
    assert bool((y[-1] == 7).all())
    assert bool((y[:, N:] == 7).all())
    assert bool((z[:, :H] == 7).all())


def test_a_new_batch_size_compiles_nothing() -> None:
    torch._dynamo.reset()
    counts = CompileCounterWithBackend("aot_eager")
    gemm = torch.compile(FUNCTIONS["chain"][0], fullgraph=True, backend=counts)
    for m in (6, 9, 129, 2):
        x = rand(m, K, seed=m)
        torch._dynamo.mark_dynamic(x, 0)
        arguments = (x, rand(E, N, K, seed=m), offsets(m // 2, m // 2, m))
        assert_same(gemm(*arguments), FUNCTIONS["chain"][0](*arguments))
    assert counts.frame_count == 1
    # Torch never shares code with sizes 0 and 1.
    for m in (0, 1):
        arguments = (rand(m, K), rand(E, N, K), offsets(0, 0, m))
        assert_same(gemm(*arguments), FUNCTIONS["chain"][0](*arguments))


def test_moe_compiles_twice_at_most_for_any_tokens_and_weights() -> None:
    torch._dynamo.reset()
    counts = CompileCounterWithBackend("aot_eager")
    moe = torch.compile(block, fullgraph=True, backend=counts)
    for tokens in (5, 8, 3, 200):
        hidden = rand(tokens, H, dtype=torch.bfloat16, seed=tokens)
        weights = full_weights()
        assert_same(moe(hidden, weights, routing(tokens)), block(hidden, weights, routing(tokens)))
    assert counts.frame_count == 2


def test_rows_that_only_the_data_tells() -> None:
    def run(x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        rows = x[keep]
        return fp4lt.grouped_mm(fp4lt.quantize(rows, global_scale="row"), W.mT, offs=OFFS // 2)

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        torch._dynamo.reset()
        compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
        keep = torch.arange(M) % 2 == 0
        got, want = compiled(X, keep), run(X, keep)
    assert_same(got[: M // 2], want[: M // 2])


@pytest.mark.skipif(VERSION < (2, 7), reason="older torch.export wants other registrations")
@pytest.mark.parametrize("strict", [False, True])
def test_export(strict: bool) -> None:
    class Chain(torch.nn.Module):
        def forward(self, x: torch.Tensor, w: NVFP4Tensor, offs: torch.Tensor) -> torch.Tensor:
            return multiply(fp4lt.quantize(x, global_scale="row"), w, offs)

    class Block(torch.nn.Module):
        def forward(
            self, hidden: torch.Tensor, weights: MoEWeights, route: dict[str, Any]
        ) -> torch.Tensor:
            return block(hidden, weights, route)

    for module, arguments in ((Chain(), (X, W, OFFS)), (Block(), (BF16_HIDDEN, WEIGHTS, ROUTE))):
        exported = torch.export.export(module, arguments, strict=strict)
        assert_same(exported.module()(*arguments), module(*arguments))

    tokens = torch.export.Dim("tokens", min=2, max=4096)
    names = ("topk_weights", "topk_ids")
    shapes = ({0: tokens}, {name: {0: tokens} for name in names})
    layer = Layer(WEIGHTS)
    with torch.no_grad():
        exported = torch.export.export(
            layer, (rand(T, H), ROUTE), dynamic_shapes=shapes, strict=strict
        )
        file = io.BytesIO()
        torch.export.save(exported, file)
        file.seek(0)
        loaded = torch.export.load(file).module()
        hidden = rand(11, H)
        assert_same(loaded(hidden, routing(11)), layer(hidden, routing(11)))


ROUTE_OF_4 = routing(4)

# What shapes and dtypes show is refused while tracing, in the package's own words.
TRACED_ERRORS: dict[str, tuple[str, Callable[[], Any]]] = {
    "K": ("activations have K=32 but weights have K=64", lambda: multiply(X[:, :32], W, OFFS)),
    "dtype": ("a is int64", lambda: multiply(X.long(), W, OFFS)),
    "offs": ("offs has shape", lambda: multiply(X, W, OFFS[1:])),
    "recipe": (
        "recipe='w8'",
        lambda: fp4lt.grouped_mm(X, W.mT, offs=OFFS, recipe="w8"),  # type: ignore[arg-type]
    ),
    "out": (
        "out= has shape",
        lambda: fp4lt.grouped_mm(X, W.mT, offs=OFFS, out=torch.empty(M, N + 1)),
    ),
    "grad": ("requires grad", lambda: multiply(X.clone().requires_grad_(), W, OFFS)),
    "quantize": ("K=30 must be", lambda: fp4lt.quantize(X[:, :30])),
    "quantize grad": ("requires grad", lambda: fp4lt.quantize(X.clone().requires_grad_())),
    "dequantize": ("dtype is torch.int8", lambda: W.dequantize(torch.int8)),
    "hidden": ("hidden has shape", lambda: block(BF16_HIDDEN[:, :32], WEIGHTS, ROUTE)),
    "tokens": ("hidden has 5 tokens", lambda: block(BF16_HIDDEN, WEIGHTS, ROUTE_OF_4)),
    "top-1": (
        "is for top-1 routing",
        lambda: block(BF16_HIDDEN, WEIGHTS, ROUTE, router_weight_on_input=True),
    ),
}
# Before an operator is reached, the words depend on torch's tracer.
UNTRACED_ERRORS: dict[str, tuple[str, Callable[[], Any]]] = {
    "mT": ("pass its transpose", lambda: fp4lt.grouped_mm(X, W, offs=OFFS)),
    "index": ("expert 7 of a stack of 3", lambda: W[7]),
}
# Values are looked at when the graph runs.
RUN_ERRORS: dict[str, tuple[str, Callable[..., Any]]] = {
    "offs": ("offs.-1. is 14", lambda: multiply(X, W, OFFS * 2)),
    "global scale": ("global_scale is -1.0", lambda: fp4lt.quantize(X, global_scale=-1.0)),
    "a_scale": (
        "a_scale is 0.0",
        lambda: fp4lt.grouped_mm(X, W.mT, offs=OFFS, a_scale=0.0),
    ),
    "backend": (
        "no such backend",
        lambda: fp4lt.grouped_mm(X, W.mT, offs=OFFS, backend="abacus"),
    ),
}


def compiled_call(call: Callable[[], Any]) -> None:
    torch._dynamo.reset()
    torch.compile(call, fullgraph=True, backend="aot_eager")()


@pytest.mark.parametrize(("words", "call"), TRACED_ERRORS.values(), ids=TRACED_ERRORS)
def test_errors_while_tracing(words: str, call: Callable[[], Any]) -> None:
    with pytest.raises(fp4lt.errors.Error, match=words):
        call()
    with pytest.raises(RuntimeError, match=words) as caught:
        compiled_call(call)
    assert not isinstance(caught.value, fp4lt.errors.Error)


@pytest.mark.parametrize(("words", "call"), UNTRACED_ERRORS.values(), ids=UNTRACED_ERRORS)
def test_errors_before_an_operator(words: str, call: Callable[[], Any]) -> None:
    with pytest.raises(RuntimeError, match=words):
        compiled_call(call)


@pytest.mark.parametrize(("words", "call"), RUN_ERRORS.values(), ids=RUN_ERRORS)
def test_errors_when_the_graph_runs(words: str, call: Callable[[], Any]) -> None:
    for run in (call, lambda: compiled_call(call)):
        with pytest.raises(ArgumentError, match=words):
            run()
