# SPDX-License-Identifier: Apache-2.0
"""moe against itself, and against its definition where nothing rounds: equal bits throughout."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_moe import DTYPES, SIZES, Case, make, same

import fp4lt
from fp4lt import errors
from fp4lt.backends import cpu
from fp4lt.problem import ORDERS
from fp4lt.testing import bounds, cases, oracle
from fp4lt.testing.oracle_moe import gate_up_columns

PER_EXPERT = (
    *("w13", "w2", "gate_up_scales", "w13_bias", "w2_bias", "a1_scale", "a2_scale"),
    *("swiglu_alpha", "swiglu_beta", "swiglu_limit"),
)
NAN = float("nan")

SAMPLE = [
    "biases split",
    "fp32 static_each missing swigluoai interleaved alpha_each limit_each k5 E6",
    "w4a16 fp16 up_gate gelu duplicates biases",
    "dense ungated relu2 out_of_range",
    "H528 I272 T5 k2",
    "H528 I272 T5 k2 w4a16",
]


def select(weights: fp4lt.MoEWeights, index: list[int], **changes: Any) -> fp4lt.MoEWeights:
    """The weights of the experts in `index`, in that order."""

    def chosen(value: Any) -> Any:
        if isinstance(value, fp4lt.NVFP4Tensor):
            # As bytes: older torch cannot index float8.
            scales = value.scales.view(torch.uint8)[index].view(torch.float8_e4m3fn)
            g = value.global_scale.expand(len(value))[index]
            return fp4lt.NVFP4Tensor(value.codes[index], scales, g)
        return value[index] if isinstance(value, torch.Tensor) and value.ndim else value

    fields = {name: chosen(getattr(weights, name)) for name in PER_EXPERT}
    return dataclasses.replace(weights, **(fields | changes))


def shards(case: Case, at: int) -> tuple[Case, Case]:
    """The same call on the experts before `at` and on those from it on."""
    experts = case.weights.num_local_experts
    parts = [
        case._replace(
            weights=select(case.weights, list(range(a, b)), expert_start=a, num_experts=experts)
        )
        for a, b in ((0, at), (at, experts))
    ]
    return parts[0], parts[1]


def tokens(case: Case, index: Any) -> Case:
    routing = cases.Routing(*(t[index] for t in case.routing))
    return case._replace(hidden=case.hidden[index], routing=routing)


def with_ids(case: Case, ids: torch.Tensor) -> Case:
    return case._replace(routing=case.routing._replace(topk_ids=ids))


# ---- exact inputs against the definition, end to end

KINDS = [
    *(f"w4a4 {dtype} {scale}" for dtype in DTYPES for scale in ("derived", "power")),
    *("w4a16 bf16", "w4a16 fp16", "dense bf16", "dense fp16"),
]


def exact_case(kind: str, *, mix: str, order: str | None, on_input: bool = False) -> Case:
    """A case whose sums are exact in fp32 in any order, and its activations too.

    The matrix `mix` adds up small integers, the other copies.  All scales are powers of two, but
    for a derived one of activations, which is applied in one rounding.
    """
    recipe, dtype_word, *scale = kind.split()
    dtype, rng = DTYPES[dtype_word], cases.generator(7)
    T, E, H, inner, k = SIZES.values()
    k = 1 if on_input else k
    rows = inner if order is None else 2 * inner

    def operand(name: str, shape: tuple[int, ...]) -> Any:
        mixed = cases.exact_operand if name == mix else cases.selection_operand
        parts = mixed(rng, shape)
        if name == "w13" or mix == "none":
            parts = parts._replace(global_scale=torch.ones(E))
        t = fp4lt.NVFP4Tensor.from_linear_scales(*parts)
        return t.dequantize(dtype) if recipe == "dense" else t

    options: dict[str, Any] = {}
    if "derived" not in scale:
        # In integers, so that adding them rounds nothing.
        options["w2_bias"] = torch.from_numpy(rng.integers(-8, 9, (E, H)).astype(np.float32))
    if "power" in scale:
        options |= {"a1_scale": torch.full((E,), 0.5), "a2_scale": torch.tensor(4.0)}
    if order is not None:
        options["gate_up_scales"] = torch.tensor([[1.0, 2.0], [0.5, 1.0], [1.0, 1.0], [2.0, 0.5]])
    weights = fp4lt.MoEWeights(
        operand("w13", (E, rows, H)),
        operand("w2", (E, H, inner)),
        order=order,  # type: ignore[arg-type]
        activation="relu2",
        **options,
    )
    hidden = torch.from_numpy(rng.integers(-2, 3, (T, H)).astype(np.float32)).to(dtype)
    routing = cases.route_missing(rng, T, E, k)
    powers = torch.from_numpy(rng.choice([0.25, 0.5, 1.0], (T, k)).astype(np.float32))
    routing = routing._replace(topk_weights=powers)
    return Case(hidden, weights, routing, recipe.replace("dense", "w4a4"), on_input)  # type: ignore[arg-type]


# With a gate, products of two large sums would round on the way to u.
@pytest.mark.parametrize("on_input", [False, True], ids=["", "on_input"])
@pytest.mark.parametrize(("mix", "order"), [("w13", None), *(("w2", o) for o in (*ORDERS, None))])
@pytest.mark.parametrize("kind", KINDS)
def test_exact_inputs_give_the_definition(
    kind: str, mix: str, order: str | None, on_input: bool, kernel_table: str
) -> None:
    case = exact_case(kind, mix=mix, order=order, on_input=on_input)
    y = oracle.moe_reference(
        case.hidden,
        case.weights,
        *case.routing,
        case.recipe,
        router_weight_on_input=on_input,
    )
    assert (y != 0).sum() > 100
    want = bounds.round_to(y, case.hidden.dtype)
    bounds.assert_bitwise(case.run(), want, signed_zeros=False)


@pytest.mark.parametrize("kind", ["w4a4 fp32 power", "w4a16 bf16", "dense fp16"])
def test_shards_sum_to_the_whole(kind: str) -> None:
    case = exact_case(kind, mix="none", order="gate_up")
    whole = case.run()
    for at in range(1, case.weights.num_local_experts):
        low, high = (part.run() for part in shards(case, at))
        assert int((low != 0).sum()) > 50
        assert int((high != 0).sum()) > 50
        same(low.float() + high.float(), whole.float())


# ---- any inputs against themselves


@pytest.mark.parametrize("sentence", SAMPLE)
def test_rows_do_not_depend_on_the_shard(sentence: str) -> None:
    case = make(sentence)
    whole = case.trace()
    at = case.weights.num_local_experts // 2
    low, high = (part.trace() for part in shards(case, at))
    for name in ("rows_token", "h", "z"):
        same(torch.cat([getattr(low, name), getattr(high, name)]), getattr(whole, name))
    assert len(low.z) == int((whole.rows_expert < at).sum())


@pytest.mark.parametrize("sentence", SAMPLE)
def test_experts_may_be_permuted(sentence: str) -> None:
    case = make(sentence)
    experts = case.weights.num_local_experts
    order = np.random.default_rng(0).permutation(experts).tolist()
    place = torch.tensor([order.index(e) for e in range(experts)])
    ids = case.routing.topk_ids.long()
    local = (ids >= 0) & (ids < experts)
    moved = torch.where(local, place[ids.clamp(0, experts - 1)], ids)
    permuted = with_ids(case, moved)._replace(weights=select(case.weights, order))
    same(permuted.run(), case.run())


@pytest.mark.parametrize("on_input", ["", "on_input k1"])
@pytest.mark.parametrize("sentence", SAMPLE[:4])
def test_a_token_does_not_depend_on_its_batch(
    sentence: str, on_input: str, kernel_table: str
) -> None:
    case = make(f"{sentence} {on_input} T40")
    whole = case.run()
    for t in range(0, 40, 7):
        same(tokens(case, slice(t, t + 1)).run(), whole[t : t + 1])
    for at in (1, 13, 39):
        parts = [tokens(case, part).run() for part in (slice(at), slice(at, None))]
        same(torch.cat(parts), whole)
    order = torch.from_numpy(np.random.default_rng(0).permutation(40))
    same(tokens(case, order).run(), whole[order])


@pytest.mark.parametrize("sentence", SAMPLE)
def test_orders_of_the_same_weights(sentence: str) -> None:
    words = [w for w in sentence.split() if w not in (*ORDERS, "ungated")]
    case = make(" ".join([*words, "gate_up"]))
    weights = case.weights
    rows = weights.w13.shape[1]
    gate, up = gate_up_columns(weights, rows)
    want = case.run()
    for order in ORDERS:
        to_gate, to_up = gate_up_columns(oracle.PlainWeights(None, None, order), rows)
        source = np.empty(rows, np.int64)
        source[to_gate], source[to_up] = gate, up
        changes: dict[str, Any] = {"order": order}
        if weights.w13_bias is not None:
            changes["w13_bias"] = weights.w13_bias[:, source]
        if isinstance(weights.w13, torch.Tensor):
            changes["w13"] = weights.w13[:, source]
        else:
            scales = oracle.from_packed(weights.w13).scales[:, source]
            codes = weights.w13.codes[:, source].contiguous()
            changes["w13"] = fp4lt.NVFP4Tensor.from_linear_scales(
                codes, torch.from_numpy(scales), weights.w13.global_scale
            )
        same(case.with_weights(**changes).run(), want)


@pytest.mark.parametrize("sentence", ["fp32", "w4a16 biases", "dense fp16", "shard fp32"])
def test_duplicates_count_each_time(sentence: str) -> None:
    """Two halves of one expert are that expert; a slot that is left out is as if it were not."""
    case = make(f"{sentence} k1 uniform")
    once = case.run()
    ids, r = case.routing.topk_ids, case.routing.topk_weights
    halves = cases.Routing(torch.cat([r / 2, r / 2], dim=1), torch.cat([ids, ids], dim=1))
    same(case._replace(routing=halves).run(), once)
    padded = cases.Routing(
        torch.cat([torch.full_like(r, NAN), r, torch.full_like(r, 9.0)], dim=1),
        torch.cat([torch.full_like(ids, -1), ids, torch.full_like(ids, 2**31 - 1)], dim=1),
    )
    same(case._replace(routing=padded).run(), once)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("sentence", ["biases", "w4a16 biases", "dense", "shard fp32 biases"])
def test_a_token_without_an_expert_is_zero(sentence: str, dtype: torch.dtype) -> None:
    case = make(f"{sentence} T6")
    want = case.run()
    ids = case.routing.topk_ids.to(dtype)
    extremes = torch.iinfo(dtype)
    ids[1] = -1
    ids[4] = torch.tensor([extremes.max, extremes.min, case.weights.num_experts], dtype=dtype)
    case = with_ids(case, ids)
    hidden, r = case.hidden.clone(), case.routing.topk_weights.clone()
    hidden[1], r[1], hidden[4], r[4] = NAN, NAN, float("inf"), NAN
    routing = case.routing._replace(topk_weights=r)
    y = torch.full_like(want, NAN)
    case._replace(hidden=hidden, routing=routing).run(out=y)
    assert not y[[1, 4]].view(torch.uint8).any(), "zeros, and positive ones"
    same(y[[0, 2, 3, 5]], want[[0, 2, 3, 5]])


def test_ids_of_both_widths_and_of_every_side() -> None:
    case = make("shard T30")
    weights, ids = case.weights, case.routing.topk_ids
    start, count = weights.expert_start, weights.num_local_experts
    assert {int(i) < start for i in ids.view(-1)} == {True, False}
    assert {int(i) >= start + count for i in ids.view(-1)} == {True, False}
    same(with_ids(case, ids.long()).run(), case.run())
    first = dataclasses.replace(weights, expert_start=0, num_experts=count)
    same(with_ids(case, ids - start)._replace(weights=first).run(), case.run())


@pytest.mark.parametrize("value", [NAN, float("inf"), float("-inf")], ids=str)
@pytest.mark.parametrize("sentence", [*SAMPLE, "fp16 k1 on_input", "w4a16 k1 on_input"])
def test_what_is_not_finite_stays_in_its_token(sentence: str, value: float) -> None:
    case = make(sentence)
    clean = case.run()
    hidden = case.hidden.clone()
    hidden[2, 5] = value
    y = case._replace(hidden=hidden).run()
    others = [t for t in range(len(y)) if t != 2]
    same(y[others], clean[others])
    if np.isnan(value) and bool((case.trace().slot_row[2] >= 0).any()):
        assert bool(y[2].isnan().all())


@pytest.mark.parametrize("sentence", [*SAMPLE, "T300 k2 H32 I32 fp32", "k1 on_input fp16"])
@pytest.mark.usefixtures("two_threads")
def test_bits_do_not_depend_on_threads_or_time(sentence: str, kernel_table: str) -> None:
    case = make(sentence)
    many = case.trace()
    for _ in range(3):
        same(case.trace(), many)
    torch.set_num_threads(1)
    same(case.trace(), many)


@pytest.mark.usefixtures("two_threads")
def test_calls_from_several_threads_at_once() -> None:
    calls = [make(sentence) for sentence in SAMPLE]
    want = [case.run() for case in calls]
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(Case.run, calls * 10))
    for i, got in enumerate(results):
        same(got, want[i % len(calls)])


@pytest.mark.parametrize("sentence", [*SAMPLE, "poison", "T1", "T0"])
def test_large_calls_are_cut_without_a_trace(
    sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make(sentence)
    want = case.run()
    top_k = case.routing.topk_ids.shape[1]
    width = case.weights.w13.shape[1] + case.weights.w2.shape[2] + case.weights.hidden_size
    for rows in (1, 4):
        monkeypatch.setattr(cpu, "_PASS_ELEMENTS", rows * width * top_k)
        same(case.run(), want)


def test_denormals_count_although_the_thread_flushes_them() -> None:
    case = make("fp32 relu2 ungated biases")
    hidden, r = case.hidden * 2.0**-60, case.routing.topk_weights * 2.0**-20
    w2_bias = torch.zeros_like(case.weights.w2_bias)  # type: ignore[arg-type]
    w13_bias = torch.zeros_like(case.weights.w13_bias)  # type: ignore[arg-type]
    case = case._replace(hidden=hidden, routing=case.routing._replace(topk_weights=r))
    case = case.with_weights(w2_bias=w2_bias, w13_bias=w13_bias)
    want = case.trace()
    small = torch.finfo(torch.float32).tiny
    assert int(((want.y != 0) & (want.y.abs() < small)).sum()) > 100
    if not torch.set_flush_denormal(True):
        pytest.skip("torch cannot flush denormals on this processor")
    try:
        got = case.trace()
    finally:
        torch.set_flush_denormal(False)
    same(got, want)


@pytest.mark.parametrize("name", ["hidden", "topk_weights"])
def test_lazily_negated_inputs(name: str) -> None:
    """Torch may leave a sign in a flag beside the memory: it counts, or the input is refused."""
    case = make("fp32 biases")
    if name == "hidden":
        flagged = case._replace(hidden=torch._neg_view(-case.hidden))
    else:
        r = torch._neg_view(-case.routing.topk_weights)
        flagged = case._replace(routing=case.routing._replace(topk_weights=r))
    try:
        y = flagged.run()
    except errors.Error:
        return
    same(y, case.run())


DEFAULTS = """
import torch
from test_moe import make, same
calls = [make("fp32 biases"), make("w4a16 fp16 swigluoai k1 on_input"), make("missing dense gelu")]
want = [case.trace() for case in calls]
{setting}
for case, trace in zip(calls, want):
    same(case.trace(), trace)
    same(case.run(), trace.y)
    case.with_weights(swiglu_limit=2.0 if case.weights.activation != "gelu" else None, a1_scale=1.0)
"""


@pytest.mark.parametrize(
    "setting",
    [
        *(f"dtype(torch.{name})" for name in ("float16", "bfloat16", "float64")),
        'device("meta")',
    ],
)
def test_defaults_of_torch_do_not_matter(setting: str) -> None:
    # In a process of its own: a buffer of the wrong size or place is memory overrun.
    code = DEFAULTS.format(setting=f"torch.set_default_{setting}")
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parent, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]


def bit_flips(case: Case) -> Iterator[Case]:
    """The case with the last bit of one input value changed."""
    r = case.routing.topk_weights.clone()
    r[3, 0] = torch.nextafter(r[3, 0], torch.tensor(2.0))
    yield case._replace(routing=case.routing._replace(topk_weights=r))
    hidden = case.hidden.clone()
    hidden[3] = torch.nextafter(hidden[3], torch.full_like(hidden[3], 99.0))
    yield case._replace(hidden=hidden)


def test_these_comparisons_can_fail() -> None:
    case = make("w4a4 fp32 uniform")
    want = case.run()
    for other in bit_flips(case):
        with pytest.raises(AssertionError, match="differ"):
            same(other.run(), want)
