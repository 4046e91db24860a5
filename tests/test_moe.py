# SPDX-License-Identifier: Apache-2.0
"""moe, stage by stage: every intermediate of a run against the oracle.

A case is a sentence: its words switch on what they name, the rest stays at the defaults below; of
two sizes the later counts.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.utils import _pytree as pytree

import fp4lt
from fp4lt import _C
from fp4lt.backends import cpu
from fp4lt.problem import ACTIVATIONS, ORDERS, MoETrace, Recipe
from fp4lt.testing import bounds, cases, mutations, oracle

SIZES = {"T": 9, "E": 4, "H": 80, "I": 48, "k": 3}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
FLAGS = (
    *("dense", "biases", "half_biases", "split", "static", "static_each", "shared_g"),
    *("alpha", "alpha_each", "beta", "beta_each", "limit", "limit_each"),
    *("shard", "on_input", "poison"),
    *("derived", "plain", "defaults"),  # the absence of others, for the ids
)


class Case(NamedTuple):
    """One call of the block."""

    hidden: torch.Tensor
    weights: fp4lt.MoEWeights
    routing: cases.Routing
    recipe: Recipe = "w4a4"
    on_input: bool = False

    def arguments(self) -> dict[str, Any]:
        return {**self.routing._asdict(), "router_weight_on_input": self.on_input}

    def run(self, **options: Any) -> torch.Tensor:
        given = self.arguments() | options
        return fp4lt.moe(self.hidden, self.weights, recipe=self.recipe, **given)

    def trace(self) -> MoETrace:
        k = self.routing.topk_ids.shape[1]
        plan = fp4lt.plan_moe(self.hidden, self.weights, top_k=k, recipe=self.recipe)
        return plan.trace(self.hidden, self.weights, **self.arguments())

    def check(self, trace: MoETrace) -> None:
        w = self.weights
        exact = isinstance(w.w13, fp4lt.NVFP4Tensor) and self.recipe == "w4a4"
        oracle.check_moe_trace(
            trace,
            w,
            self.hidden,
            *self.routing,
            self.recipe,
            *(cpu.depth(k, "w4a4" if exact else "w4a16") for k in (w.hidden_size, w.w2.shape[2])),
            router_weight_on_input=self.on_input,
        )

    def with_weights(self, **changes: Any) -> Case:
        return self._replace(weights=dataclasses.replace(self.weights, **changes))


def make(sentence: str, seed: int = 1) -> Case:
    words = set(sentence.split())
    rng = cases.generator(seed)

    def pick(names: Iterable[str], default: str) -> str:
        (name,) = [name for name in names if name in words] or [default]
        words.discard(name)
        return name

    sized = re.findall(r"\b[TEHIk]\d+\b", sentence)
    size = SIZES | {word[0]: int(word[1:]) for word in sized}
    words.difference_update(sized)
    T, E, H, inner, k = size.values()
    dtype = DTYPES[pick(DTYPES, "bf16")]
    order: Any = pick((*ORDERS, "ungated"), "gate_up")
    activation = pick(ACTIVATIONS, "silu")
    recipe: Any = pick(("w4a4", "w4a16"), "w4a4")
    router = pick(cases.ROUTERS, "uniform")
    on = {flag: flag in words for flag in FLAGS}
    assert words <= set(FLAGS), words

    def per_expert(middle: float) -> torch.Tensor:
        spread = rng.permutation(np.linspace(0.6, 1.4, E))
        return torch.from_numpy((middle * spread).astype(np.float32))

    def normal(*shape: int) -> torch.Tensor:
        kind = torch.bfloat16 if on["half_biases"] else torch.float32
        return torch.from_numpy(rng.standard_normal(shape).astype(np.float32)).to(kind)

    order, rows = (None, inner) if order == "ungated" else (order, 2 * inner)

    def stored(shape: tuple[int, ...], middle: float) -> Any:
        # Sized so that most gates lie where the activations bend, and fp16 results stay finite.
        if on["dense"]:
            return cases.random_matrix(rng, shape, dtype) * (64 * middle)
        codes, scales, _ = cases.random_operand(rng, shape)
        g = torch.tensor(middle) if on["shared_g"] else per_expert(middle)
        return fp4lt.NVFP4Tensor.from_linear_scales(codes, scales, g)

    options: dict[str, Any] = {}
    if on["biases"] or on["half_biases"]:
        options |= {"w13_bias": normal(E, rows), "w2_bias": normal(E, H)}
    if on["split"]:
        options["gate_up_scales"] = torch.stack([per_expert(1.0), per_expert(0.3)], dim=1)
    for name, middle in (("a1_scale", 0.0017), ("a2_scale", 0.011)):
        if on["static"] or on["static_each"]:
            options[name] = per_expert(middle) if on["static_each"] else torch.tensor(middle)
    for name, middle in (("alpha", 1.3), ("beta", 0.7), ("limit", 2.5)):
        if on[name] or on[f"{name}_each"]:
            options[f"swiglu_{name}"] = per_expert(middle) if on[f"{name}_each"] else middle
    experts = E + 5 if on["shard"] else E
    if on["shard"]:
        # Local experts in the middle of all, so that ids lie on both sides of them.
        options |= {"expert_start": 2, "num_experts": experts}
    weights = fp4lt.MoEWeights(
        stored((E, rows, H), 2.0**-7),
        stored((E, H, inner), 2.0**-8),
        order=order,
        activation=activation,  # type: ignore[arg-type]
        **options,
    )
    hidden = cases.random_matrix(rng, (T, H), dtype) / 4
    if on["poison"]:
        hidden[1, H // 2], hidden[T - 1, 3] = float("nan"), float("-inf")
    routing = cases.ROUTERS[router](rng, T, experts, k)
    return Case(hidden, weights, routing, recipe, on["on_input"])


def same(got: Any, want: Any) -> None:
    """Equal bits of everything in two structures (traces, weights, tensors)."""
    leaves, spec = pytree.tree_flatten(got)
    others, other_spec = pytree.tree_flatten(want)
    assert spec == other_spec
    for a, b in zip(leaves, others, strict=True):
        if not isinstance(a, torch.Tensor):
            assert a == b
            continue
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        if a.dtype == torch.float8_e4m3fn:
            a, b = a.view(torch.uint8), b.view(torch.uint8)
        bounds.assert_bitwise(a, b)


FACTORS: tuple[tuple[str, ...], ...] = (
    tuple(
        f"{order} {activation}"
        for order, activation in itertools.product((*ORDERS, "ungated"), ACTIVATIONS)
        if (order, activation) != ("ungated", "swigluoai")
    ),
    ("w4a4", "w4a16", "dense"),
    tuple(DTYPES),
    ("derived", "static", "static_each"),
    tuple(cases.ROUTERS),
    ("plain", "biases", "split", "shared_g k1", "half_biases split k5 E6", "shard", "biases k2"),
    ("defaults", "limit", "alpha_each limit_each", "beta", "alpha beta_each limit"),
)


def possible(words: tuple[str, ...]) -> bool:
    found = set(" ".join(words).split())
    ungated, swiglu = "ungated" in found, found & {"silu", "swigluoai"}
    return not (
        ("fp32" in found and found & {"w4a16", "dense"})
        or (ungated and "split" in found)
        # Parameters are only named beside an activation that has them.
        or (found & {"limit", "limit_each", "beta"} and (ungated or not swiglu))
    )


def covering() -> list[str]:
    """Sentences in which any two choices of different factors meet, as far as they can."""
    pairs = [
        (i, a, j, b)
        for i, j in itertools.combinations(range(len(FACTORS)), 2)
        for a, b in itertools.product(FACTORS[i], FACTORS[j])
    ]
    missing = {frozenset(((i, a), (j, b))): None for i, a, j, b in pairs if possible((a, b))}
    sentences = []
    while missing:
        chosen = dict(next(iter(missing)))
        for i, factor in enumerate(FACTORS):
            if i not in chosen:
                fits = [w for w in factor if possible((*chosen.values(), w))]
                new = [sum(frozenset(((i, w), c)) in missing for c in chosen.items()) for w in fits]
                chosen[i] = fits[int(np.argmax(new))]
        for one in itertools.combinations(chosen.items(), 2):
            missing.pop(frozenset(one), None)
        sentences.append(" ".join(chosen[i] for i in range(len(FACTORS))))
    return sentences


SHAPES = [
    "T0",
    "T0 w4a16 static_each",
    "T1 k1 E1 H16 I16",
    "T1 w4a16 E1 k1 interleaved biases",
    "E1 k5 duplicates static_each",
    "T2 E24 k22",
    "T3 E24 k22 w4a16 up_gate missing",
    "E8 k1 on_input fp16 biases",
    "E8 k1 on_input w4a16 missing static",
    "E8 k1 on_input dense out_of_range",
    "E8 k1 on_input fp32 static_each split",
    "H528 I272 T5 fp32 biases split interleaved",
    "H528 I272 T5 w4a16 swigluoai interleaved biases",
    "H272 I528 T5 dense fp16 gelu",
    "H144 I80 up_gate static_each split",
    "T300 E3 k2 H32 I32 fp32 static_each",
    "T300 E3 k2 H32 I32 w4a16 fp16 ungated relu2",
    "T200 E2 k2 H32 I32 one_hot",
    "T40 E40 k2 H32 I32 shard",
    "poison",
    "poison fp32 static_each biases interleaved swigluoai",
    "poison w4a16 split limit",
    "poison dense fp16 ungated gelu k1 on_input",
]


@pytest.mark.parametrize("sentence", [*covering(), *SHAPES])
def test_every_stage(sentence: str, kernel_table: str) -> None:
    case = make(sentence)
    trace = case.trace()
    case.check(trace)
    bounds.assert_bitwise(case.run(), trace.y)


@settings(max_examples=60)
@given(
    sizes=st.tuples(st.integers(0, 9), st.integers(1, 5), st.integers(1, 6), st.integers(1, 6)),
    top_k=st.integers(1, 5),
    words=st.tuples(
        st.sampled_from(["w4a4 bf16", "w4a4 fp32", "w4a16 fp16", "dense bf16"]),
        st.sampled_from(ORDERS),
        st.sampled_from(ACTIVATIONS),
        st.sampled_from(["", "static_each", "biases split", "shard"]),
    ),
    data=st.data(),
)
def test_any_shape_and_routing(
    sizes: tuple[int, ...], top_k: int, words: tuple[str, ...], data: st.DataObject
) -> None:
    T, E, h, i = sizes
    case = make(f"{' '.join(words)} T{T} E{E} H{16 * h} I{16 * i} k{top_k} duplicates", seed=h)
    ids = data.draw(st.lists(st.integers(-2, E + 3), min_size=T * top_k, max_size=T * top_k))
    topk_ids = torch.tensor(ids, dtype=torch.int64).reshape(T, top_k)
    case = case._replace(routing=case.routing._replace(topk_ids=topk_ids))
    trace = case.trace()
    case.check(trace)
    bounds.assert_bitwise(case.run(), trace.y)


BITS = [
    "w4a4 H528 I272 T5 biases",
    "w4a4 fp32 static_each interleaved swigluoai split poison",
    "w4a16 fp16 up_gate gelu biases",
    "w4a16 H528 I272 T5 poison",
    "dense bf16 ungated gelu_tanh k1 on_input",
    "dense fp16 H272 I528 T5 relu2",
]


@pytest.mark.parametrize("sentence", BITS)
def test_kernel_tables_give_the_same_bits(sentence: str, kernel_table: str) -> None:
    case = make(sentence, seed=2)
    trace = case.trace()
    _C.select_cpu_kernels("scalar")
    same(trace, case.trace())


@pytest.mark.parametrize("sentence", ["", "w4a16 fp16", "fp32 missing", "T0", "dense k1 on_input"])
def test_out_is_written_and_returned(sentence: str) -> None:
    case = make(sentence)
    tokens, hidden = case.hidden.shape
    want = case.run()
    out = torch.full((tokens, hidden), float("nan"), dtype=want.dtype)
    assert case.run(out=out) is out
    same(out, want)
    # What lies around a view stays.
    buffer = torch.full((2 * tokens + 2, hidden + 24), 7.0, dtype=want.dtype)
    view = buffer[1 : 1 + 2 * tokens : 2, 8 : 8 + hidden]
    assert case.run(out=view) is view
    same(view, want)
    view.fill_(7.0)
    assert bool((buffer == 7.0).all())


@pytest.mark.parametrize("sentence", ["", "fp32 interleaved", "fp16 k1 on_input", "shard k5"])
def test_one_static_scale_or_the_same_for_each(sentence: str) -> None:
    case = make(f"{sentence} static")
    each = {
        name: getattr(case.weights, name).expand(case.weights.num_local_experts)
        for name in ("a1_scale", "a2_scale")
    }
    same(case.with_weights(**each).trace(), case.trace())


STRIDED = [
    *(
        (name, "w4a4 static_each split")
        for name in ("hidden", "topk_weights", "topk_ids", "scales")
    ),
    *((name, "k1 on_input fp16") for name in ("hidden", "topk_weights", "topk_ids")),
    *((name, "dense biases") for name in ("w13", "w2", "hidden")),
]


@pytest.mark.parametrize(("name", "sentence"), STRIDED)
def test_strided_inputs_are_honoured(name: str, sentence: str) -> None:
    case = make(sentence)
    want = case.trace()

    def spread(t: torch.Tensor) -> torch.Tensor:
        """The same values with gaps between, wherever the interface allows gaps."""
        wide = t.new_zeros([2 * n for n in t.shape])
        view = wide[tuple(slice(None, None, 2) for _ in t.shape)]
        if name in ("hidden", "w13", "w2"):
            view = wide[..., 8 : 8 + t.shape[-1]][tuple(slice(None, None, 2) for _ in t.shape[1:])]
        assert not view.is_contiguous()
        return view.copy_(t)

    if name == "hidden":
        case = case._replace(hidden=spread(case.hidden))
    elif name in ("w13", "w2"):
        case = case.with_weights(**{name: spread(getattr(case.weights, name))})
    elif name == "scales":
        fields = ("gate_up_scales", "a1_scale", "a2_scale")
        case = case.with_weights(**{f: spread(getattr(case.weights, f)) for f in fields})
    else:
        spaced = spread(getattr(case.routing, name))
        case = case._replace(routing=case.routing._replace(**{name: spaced}))
    same(case.trace(), want)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sentence", ["", "w4a16 k1 on_input"])
def test_router_weights_of_half_precision(sentence: str, dtype: torch.dtype) -> None:
    case = make(sentence)
    half = case.routing.topk_weights.to(dtype)
    case = case._replace(routing=case.routing._replace(topk_weights=half))
    case.check(case.trace())
    wide = case._replace(routing=case.routing._replace(topk_weights=half.float()))
    same(case.run(), wide.run())


def broken_weights(weights: Any) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """A fault, the stage that has to be named, and the fields that hold the fault."""
    order = weights.order or ""
    yield "gate and up", "h", {"w13": mutations.swap_gate_up(weights.w13, order)}
    for name in set(ORDERS) - {order}:
        yield f"order {name}", "h", {"order": name}
    for name, stage in (("w13", "h"), ("w2", "z")):
        t = getattr(weights, name)
        yield f"{name} global", stage, {name: mutations.double_global(t, 2)}
        for e in range(weights.num_local_experts):
            yield f"{name} nibble {e}", stage, {name: mutations.swap_nibble(t, e, 3)}
            yield f"{name} scale tile {e}", stage, {name: mutations.shift_scale_tile(t, e)}
    w13_bias, w2_bias, split = weights.w13_bias, weights.w2_bias, weights.gate_up_scales
    yield "w13 bias", "h", {"w13_bias": w13_bias.roll(1, dims=0)}
    yield "w2 bias", "z", {"w2_bias": w2_bias.roll(1, dims=1)}
    yield "gate_up_scales", "h", {"gate_up_scales": split.flip(1)}
    yield "largest scale", "h", {"gate_up_scales": split.clamp(min=1.0)}
    yield "activation", "a2", {"activation": "gelu"}
    yield "limit", "a2", {"swiglu_limit": 0.5}
    yield "alpha", "a2", {"swiglu_alpha": 1.01}
    yield "beta", "a2", {"swiglu_beta": 0.01}
    yield "shard", "rows_token", {"expert_start": 1, "num_experts": None}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("recipe", ["w4a4", "w4a16"])
def test_broken_weights_are_caught(recipe: str, order: str) -> None:
    case = make(f"{recipe} {order} biases split H32 I32 T16")
    case.check(case.trace())
    wrong = {}
    for fault, stage, fields in broken_weights(case.weights):
        said = "nothing"
        try:
            case.check(case.with_weights(**fields).trace())
        except AssertionError as error:
            said = str(error)
        if not re.match(rf"{stage}[.:\[ ]", said):
            wrong[fault] = said
    assert not wrong
