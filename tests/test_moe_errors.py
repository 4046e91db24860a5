# SPDX-License-Identifier: Apache-2.0
"""What MoEWeights, moe and plan_moe refuse: the class, the essential words, and nothing written."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_moe import Case, make, same
from torch.utils import _pytree as pytree

import fp4lt
from fp4lt import errors
from fp4lt.errors import (
    ArgumentError,
    DeviceError,
    DTypeError,
    LayoutError,
    ShapeError,
    UnsupportedError,
)

NAN, INF = float("nan"), float("inf")
T, E, H, I, K = 9, 4, 80, 48, 3  # noqa: E741 - the tensors' letters


IDS, ROUTER = torch.zeros(T, K, dtype=torch.int32), torch.ones(T, K)


def sentence_of(name: str) -> str:
    return name.rpartition(":")[0]


def dense(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.bfloat16)


def grad(*shape: int) -> torch.Tensor:
    return torch.ones(shape, requires_grad=True)


def packed(*shape: int) -> fp4lt.NVFP4Tensor:
    return fp4lt.quantize(dense(*shape))


def both(experts: int, rows: int, hidden: int, inner: int) -> dict[str, Any]:
    return {"w13": dense(experts, rows, hidden), "w2": dense(experts, hidden, inner)}


# Named "sentence of the good weights: fault"; with the error, its words, and the changed fields.
Bad = dict[str, tuple[type[Exception], str, dict[str, Any]]]

BAD_WEIGHTS: Bad = {
    "no order": (ArgumentError, r"order=None.*gate_up.*where is the gate", {"order": None}),
    "unknown order": (ArgumentError, r"order='gate'.*interleaved", {"order": "gate"}),
    "ungated: order": (ArgumentError, "gate_up.*I=48 rows.*order=None", {"order": "gate_up"}),
    "unknown activation": (ArgumentError, r"'tanh'.*swigluoai", {"activation": "tanh"}),
    "situ": (ArgumentError, r"'situ'", {"activation": "situ"}),
    "ungated: swigluoai": (ArgumentError, "needs a gate", {"activation": "swigluoai"}),
    "other E": (ShapeError, "4 experts and w2 has 5", {"w2": packed(E + 1, H, I)}),
    "other H": (ShapeError, r"H=80.*\(4, 96, 48\).*H=96", {"w2": packed(E, 96, I)}),
    "other I": (ShapeError, "96 rows.*I=64.*2I=128.*I=64", {"w2": packed(E, H, 64)}),
    "dense: no experts": (ShapeError, "0 exp.*at least 1", both(0, 2 * I, H, I)),
    "dense: H of 72": (ShapeError, "H=72.*multiple of 16", both(E, 2 * I, 72, I)),
    "dense: I of 40": (ShapeError, "I=40.*multiple of 16", both(E, 80, H, 40)),
    "dense: H of 0": (ShapeError, "H=0", both(E, 2 * I, 0, I)),
    "2-D w13": (ShapeError, r"w13.*\(96, 80\).*3-D", {"w13": packed(2 * I, H)}),
    "dense: 2-D w2": (ShapeError, r"w2.*\(80, 48\).*3-D", {"w2": dense(H, I)}),
    "transposed w13": (LayoutError, "w13 is transposed", {"w13": packed(E, H, 2 * I).mT}),
    "transposed w2": (LayoutError, "w2 is transposed", {"w2": packed(E, I, H).mT}),
    "dense: strided w13": (
        LayoutError,
        r"w13.*strides \(7680, 1, 96\)",
        {"w13": dense(E, H, 96).mT},
    ),
    "two formats": (DTypeError, "w13 is nvfp4 but w2 is bfloat16", {"w2": dense(E, H, I)}),
    "dense: two dtypes": (DTypeError, "bfloat16 but w2 is float16", {"w2": dense(E, H, I).half()}),
    "dense: float32": (
        DTypeError,
        "w13 is float32.*bfloat16, fl",
        {"w13": dense(E, 96, H).float()},
    ),
    "codes alone": (DTypeError, "w13 is uint8", {"w13": packed(E, 2 * I, H).codes}),
    "numpy": (ArgumentError, "w13 is a ndarray", {"w13": dense(E, 2 * I, H).float().numpy()}),
    "meta w2": (DeviceError, "w2 is on meta", {"w2": packed(E, H, I).to("meta")}),
    "scales of one": (ShapeError, r"\(2,\).*\(4, 2\)", {"gate_up_scales": torch.ones(2)}),
    "scales.T": (
        ShapeError,
        r"s has shape \(2, 4\).*\(4, 2\)",
        {"gate_up_scales": torch.ones(2, E)},
    ),
    "ungated: scales": (ArgumentError, "scales.*no gate", {"gate_up_scales": torch.ones(E, 2)}),
    "bf16 scales": (DTypeError, "up_scales is bfloat16", {"gate_up_scales": dense(E, 2)}),
    "meta scales": (DeviceError, "scales is on meta", {"gate_up_scales": dense(E, 2).to("meta")}),
    "bias of one": (ShapeError, r"w13_bias.*\(96,\).*\(4, 96\)", {"w13_bias": dense(2 * I)}),
    "half a bias": (ShapeError, r"w13_bias.*\(4, 48\).*\(4, 96\)", {"w13_bias": torch.zeros(E, I)}),
    "bias of I": (ShapeError, r"w2_bias.*\(4, 48\).*\(4, 80\)", {"w2_bias": torch.zeros(E, I)}),
    "bias of ints": (DTypeError, "w2_bias is int32", {"w2_bias": torch.zeros(E, H).int()}),
    "meta bias": (DeviceError, "w2_bias is on meta", {"w2_bias": dense(E, H).to("meta")}),
    "learned w13_bias": (ArgumentError, "w13_bias.*requires grad", {"w13_bias": grad(E, 2 * I)}),
    "learned w2_bias": (ArgumentError, "w2_bias.*requires grad", {"w2_bias": grad(E, H)}),
    "relu2: alpha of relu2": (ArgumentError, "swiglu_alpha.*'relu2'", {"swiglu_alpha": 1.5}),
    "gelu: beta of gelu": (ArgumentError, "swiglu_beta.*'gelu'", {"swiglu_beta": 1.0}),
    "ungated: beta": (
        ArgumentError,
        "swiglu_beta.*without gate",
        {"swiglu_beta": 1.0},
    ),
    "negative start": (ArgumentError, "expert_start=-1", {"expert_start": -1}),
    "past the end": (ArgumentError, "=5 and 4 local.*=8", {"expert_start": 5, "num_experts": 8}),
    "fewer than local": (ArgumentError, "4 local.*num_experts=3", {"num_experts": 3}),
}
for name in ("a1_scale", "a2_scale", "swiglu_alpha", "swiglu_beta", "swiglu_limit"):
    meta = torch.ones(E, device="meta")
    BAD_WEIGHTS |= {
        f"{name} 2-D": (ShapeError, rf"{name}.*\(4, 1\).*\(4,\)", {name: torch.ones(E, 1)}),
        f"{name} short": (ShapeError, rf"{name}.*\(3,\).*\(4,\)", {name: torch.ones(3)}),
        f"{name} bf16": (DTypeError, f"{name} is bfloat16", {name: dense(E)}),
        f"meta {name}": (DeviceError, f"{name} is on meta", {name: meta}),
        f"{name} nan": (ArgumentError, f"{name} is nan.*finite", {name: NAN}),
        f"{name} inf": (ArgumentError, f"{name} is inf.*finite", {name: INF}),
    }
for name in ("a1_scale", "a2_scale", "swiglu_limit"):
    BAD_WEIGHTS[f"{name} 0"] = (ArgumentError, rf"{name} is 0\.0", {name: 0.0})
    BAD_WEIGHTS[f"{name} -1"] = (ArgumentError, rf"{name} is -1\.0", {name: -1})
for value in (0.0, -2.0, NAN, INF):
    scales, each = torch.ones(E, 2), torch.ones(E)
    scales[3, 1], each[2] = value, value
    BAD_WEIGHTS |= {
        f"scales {value}": (ArgumentError, rf"\[3, 1\] is {value}", {"gate_up_scales": scales}),
        f"one a1_scale {value}": (ArgumentError, rf"e\[2\] is {value}", {"a1_scale": each}),
    }


@pytest.mark.parametrize("name", BAD_WEIGHTS)
def test_bad_weights(name: str) -> None:
    error, words, changes = BAD_WEIGHTS[name]
    good = make(sentence_of(name)).weights
    with pytest.raises(errors.Error, match=f"^MoEWeights.*{words}") as caught:
        dataclasses.replace(good, **changes)
    assert type(caught.value) is error


def test_order_has_no_default() -> None:
    with pytest.raises(TypeError, match="order"):
        fp4lt.MoEWeights(packed(E, 2 * I, H), packed(E, H, I))  # type: ignore[call-arg]


def transposed(t: torch.Tensor) -> torch.Tensor:
    """The same values with strided columns."""
    return t.mT.contiguous().mT


def learned(t: torch.Tensor) -> torch.Tensor:
    return t.clone().requires_grad_()


def to_meta(t: Any) -> Any:
    return t.to("meta")


def routing(change: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Any]:
    return {"topk_ids": change, "topk_weights": change}


# As above; a callable makes an argument of the good one.
BAD_CALLS: Bad = {
    "other T": (ShapeError, r"10 tokens.*topk_ids.*\(9, 3\)", {"hidden": dense(T + 1, H)}),
    "k differs": (ShapeError, r"\(9, 3\).*weights \(9, 2\)", {"topk_weights": lambda r: r[:, :2]}),
    "T of ids": (ShapeError, r"\(5, 3\).*topk_weights \(9, 3\)", {"topk_ids": lambda ids: ids[:5]}),
    "k1: 1-D routing": (ShapeError, r"ids has shape \(9,\).*\(T, k\)", routing(lambda t: t[:, 0])),
    "no slots": (ShapeError, r"\(9, 0\).*k at least 1", routing(lambda t: t[:, :0])),
    "float ids": (DTypeError, "topk_ids is float32.*int64", {"topk_ids": torch.Tensor.float}),
    "bool ids": (DTypeError, "topk_ids is bool", {"topk_ids": torch.Tensor.bool}),
    "short ids": (DTypeError, "topk_ids is int16", {"topk_ids": torch.Tensor.short}),
    "exchanged": (DTypeError, "topk_ids is float32", {"topk_ids": ROUTER, "topk_weights": IDS}),
    "integer weights": (DTypeError, "topk_weights is int3", {"topk_weights": torch.Tensor.int}),
    "double weights": (DTypeError, "weights is float64", {"topk_weights": torch.Tensor.double}),
    "ids in a list": (ArgumentError, "topk_ids is a list", {"topk_ids": torch.Tensor.tolist}),
    "other H": (ShapeError, r"hidden.*\(9, 96\).*H=80", {"hidden": dense(T, 96)}),
    "1-D hidden": (ShapeError, r"hidden.*\(80,\).*\(T, H\)", {"hidden": dense(H)}),
    "3-D hidden": (ShapeError, r"hidden.*\(1, 9, 80\)", {"hidden": dense(1, T, H)}),
    "strided columns": (LayoutError, r"hidden.*strides \(1, 9\).*contig", {"hidden": transposed}),
    "double hidden": (DTypeError, "hidden is float64", {"hidden": torch.Tensor.double}),
    "integer hidden": (DTypeError, "hidden is int32", {"hidden": torch.Tensor.int}),
    "hidden in a list": (ArgumentError, "hidden is a list", {"hidden": torch.Tensor.tolist}),
    "quantized hidden": (ArgumentError, "hidden is a NVFP4Tensor", {"hidden": packed(T, H)}),
    "w4a16: fp32": (
        DTypeError,
        "w4a16.*hidden is float32.*bfloat16",
        {"hidden": torch.Tensor.float},
    ),
    "dense: fp16": (DTypeError, "bfloat16 but hidden is float16", {"hidden": torch.Tensor.half}),
    "dense: fp32": (DTypeError, "bfloat16 but hidden is float32", {"hidden": torch.Tensor.float}),
    "a tuple": (ArgumentError, "weights is a tuple; MoEW", {"weights": lambda w: (w.w13, w.w2)}),
    "meta weights": (DeviceError, "w13 is on meta", {"weights": to_meta}),
    "meta hidden": (DeviceError, "on meta", {"hidden": to_meta}),
    "meta ids": (DeviceError, "topk_ids is on meta", {"topk_ids": to_meta}),
    "meta router": (DeviceError, "topk_weights is on meta", {"topk_weights": to_meta}),
    "k2: on input": (ArgumentError, "on_input.*top-1.*k=2", {"router_weight_on_input": True}),
    "unknown recipe": (ArgumentError, "'w8a8'.*w4a4.*w4a16", {"recipe": "w8a8"}),
    "unknown backend": (ArgumentError, "'cutlass'.*auto", {"backend": "cutlass"}),
    "learned hidden": (ArgumentError, "moe.*requires grad", {"hidden": learned}),
    "learned router": (ArgumentError, "moe.*requires grad", {"topk_weights": learned}),
}


def learn(field: str) -> Callable[[fp4lt.MoEWeights], fp4lt.MoEWeights]:
    def change(w: fp4lt.MoEWeights) -> fp4lt.MoEWeights:
        changes: dict[str, Any] = {field: learned(getattr(w, field))}
        return dataclasses.replace(w, **changes)

    return change


for sentence, fields in {
    "dense": "w13 w2",
    "split static": "gate_up_scales a1_scale a2_scale",
    "alpha_each beta_each limit": "swiglu_alpha swiglu_beta swiglu_limit",
}.items():
    for field in fields.split():
        name = f"{sentence}: learned {field}"
        BAD_CALLS[name] = (ArgumentError, "moe.*requires grad", {"weights": learn(field)})


def changed(case: Case, changes: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
    """Arguments of the call, the two positional ones first."""
    given = {"hidden": case.hidden, "weights": case.weights, "recipe": case.recipe}
    given |= case.arguments()
    for key, value in changes.items():
        given[key] = value(given[key]) if callable(value) else value
    return given.pop("hidden"), given.pop("weights"), given


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_calls(name: str) -> None:
    error, words, changes = BAD_CALLS[name]
    hidden, weights, options = changed(make(sentence_of(name)), changes)
    like = hidden if isinstance(hidden, torch.Tensor) else dense(T, H)
    out = torch.full(like.shape, 7, dtype=like.dtype)
    with pytest.raises(errors.Error, match=words) as caught:
        fp4lt.moe(hidden, weights, **options, out=out)
    assert type(caught.value) is error
    assert bool((out == 7).all())


def test_everything_of_meta() -> None:
    names = ("hidden", "weights", "topk_weights", "topk_ids")
    hidden, weights, options = changed(make(""), dict.fromkeys(names, to_meta))
    with pytest.raises(UnsupportedError, match=r"no backend.*E=4.*on meta.*cpu: .*host memory"):
        fp4lt.moe(hidden, weights, **options)


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("sentence", ["dense biases k1 on_input", "biases static", "split limit"])
def test_grad_is_allowed_where_it_is_off(guard: Callable[[], Any], sentence: str) -> None:
    case = make(sentence)
    want = case.run()
    leaves, spec = pytree.tree_flatten(case)
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor) and leaf.dtype in (torch.bfloat16, torch.float32):
            leaves[i] = learned(leaf)
    learning: Case = pytree.tree_unflatten(leaves, spec)
    assert learning.hidden.requires_grad
    with guard():
        same(learning.run(), want)


def bad_outs(x: torch.Tensor) -> dict[str, tuple[torch.Tensor, type[Exception], str]]:
    """By name: out= for these hidden states, the error and its words."""
    flat = torch.zeros(2 * T * H, dtype=x.dtype)
    return {
        "columns": (x.new_zeros(T, H + 16), ShapeError, r"out=.*\(9, 96\).*\(9, 80\)"),
        "rows": (x.new_zeros(T + 1, H), ShapeError, r"out=.*\(10, 80\).*\(9, 80\)"),
        "1-D": (x.new_zeros(T * H), ShapeError, r"out=.*\(720,\).*\(9, 80\)"),
        "dtype": (torch.zeros(T, H), DTypeError, "out=.*float32.*bfloat16"),
        "meta": (torch.empty_like(x, device="meta"), DeviceError, "out= is on meta"),
        "strided": (x.new_zeros(H, T).mT, LayoutError, r"out=.*strides \(1, 9\)"),
        "one row": (flat.as_strided((T, H), (0, 1)), LayoutError, "rows overlap"),
        "near rows": (flat.as_strided((T, H), (H - 1, 1)), LayoutError, "rows overlap"),
        "learned": (learned(x), ArgumentError, "out.*requires grad"),
    }


@pytest.mark.parametrize("name", bad_outs(make("").hidden))
def test_bad_out(name: str) -> None:
    case = make("")
    out, error, words = bad_outs(case.hidden)[name]
    before = out.detach().clone()
    with pytest.raises(errors.Error, match=words) as caught:
        case.run(out=out)
    assert type(caught.value) is error
    if name != "meta":
        same(out.detach(), before)


OVERLAPPED = (
    *("hidden", "topk_weights", "topk_ids", "gate_up_scales", "w13_bias", "w2_bias"),
    *(f"{w}.{part}" for w in ("w13", "w2") for part in ("codes", "scales", "global_scale")),
    *("a1_scale", "a2_scale", "swiglu_alpha", "swiglu_beta", "swiglu_limit"),
)


@pytest.mark.parametrize("name", OVERLAPPED)
def test_out_may_not_overlap(name: str) -> None:
    case = make("fp32 biases split static_each alpha_each beta_each limit_each")
    buffer = torch.zeros(1 << 16, dtype=torch.uint8)

    def placed(t: torch.Tensor) -> torch.Tensor:
        return buffer[: t.nbytes].view(t.dtype).view(t.shape).copy_(t)

    field, _, part = name.partition(".")
    if field == "hidden":
        case = case._replace(hidden=placed(case.hidden))
    elif field in case.routing._fields:
        moved = placed(getattr(case.routing, field))
        case = case._replace(routing=case.routing._replace(**{field: moved}))
    else:
        t = getattr(case.weights, field)
        moved = dataclasses.replace(t, **{part: placed(getattr(t, part))}) if part else placed(t)
        case = case.with_weights(**{field: moved})
    before = buffer.clone()
    size = case.hidden.nbytes
    out = buffer[:size].view(torch.float32).view(case.hidden.shape)
    with pytest.raises(LayoutError, match="out= overlaps an input"):
        case.run(out=out)
    same(buffer, before)
    beside = buffer[-size:].view(torch.float32).view(case.hidden.shape)
    same(case.run(out=beside), case.run())


@pytest.mark.parametrize(
    "words",
    ["fp16", "w4a16", "E5", "H96", "I64", "k2", "up_gate", "ungated", "gelu", "dense"],
)
def test_a_plan_is_for_its_problem(words: str) -> None:
    case, other = make(""), make(words)
    k = case.routing.topk_ids.shape[1]
    plan = fp4lt.plan_moe(case.hidden, case.weights, top_k=k)
    assert plan is fp4lt.plan_moe(case.hidden, case.weights, top_k=k), "plans are kept"
    if words == "w4a16":
        # The recipe is the plan's own; its activations would have to be refused.
        plan = fp4lt.plan_moe(case.hidden, case.weights, top_k=k, recipe="w4a16")
        with pytest.raises(DTypeError, match=r"w4a16.*float32"):
            plan.run(case.hidden.float(), case.weights, **case.arguments())
        return
    for call in (plan.run, plan.trace):
        with pytest.raises(ArgumentError, match=r"this plan is for moe E=4 H=80 I=48 top-3"):
            call(other.hidden, other.weights, **other.arguments())
    same(plan.run(case.hidden, case.weights, **case.arguments()), case.run())


def test_a_plan_takes_any_number_of_tokens() -> None:
    plan = None
    for tokens in (5, 0, 1, 40):
        case = make(f"T{tokens} biases")
        plan = plan or fp4lt.plan_moe(case.hidden, case.weights, top_k=3, backend="cpu")
        same(plan.run(case.hidden, case.weights, **case.arguments()), case.run())
    assert "moe E=4 H=80 I=48 top-3 bfloat16 x nvfp4 w4a4 silu gate_up" in repr(plan)
    assert "'cpu'" in repr(plan)
