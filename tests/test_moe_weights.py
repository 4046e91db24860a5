# SPDX-License-Identifier: Apache-2.0
"""MoEWeights as an object; what users of other libraries reported; the activations' accuracy."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from test_moe import DTYPES, Case, make, same
from torch.utils import _pytree as pytree

import fp4lt
from fp4lt import _C
from fp4lt._interop import DTYPES as TYPES, address, expert_parameter
from fp4lt.backends import cpu
from fp4lt.problem import ACTIVATIONS, ORDERS
from fp4lt.testing import bounds, cases
from fp4lt.testing.oracle_moe import PlainWeights, gate_up_columns

EVERYTHING = "biases split static_each swigluoai interleaved alpha_each beta limit_each shard"
NAN = float("nan")


def silu(x: float) -> float:
    return x / (1 + math.exp(-x))


# ---- the object


@pytest.mark.parametrize("sentence", ["shard", "ungated dense fp16 relu2", "w4a16 up_gate E1"])
def test_properties(sentence: str) -> None:
    w = make(sentence).weights
    assert w.num_local_experts == (1 if "E1" in sentence else 4)
    assert (w.hidden_size, w.intermediate_size) == (80, 48)
    assert w.gated == ("ungated" not in sentence)
    assert w.device == torch.device("cpu")
    for part in (f"H={w.hidden_size}", f"I={w.intermediate_size}", w.activation, repr(w.order)):
        assert part in repr(w)
    start = 2 if "shard" in sentence else 0
    assert f"{start}:{start + w.num_local_experts} of {w.num_experts}" in repr(w)


def test_experts_in_all_default_to_the_local_ones_being_the_last() -> None:
    w = make("shard").weights
    assert dataclasses.replace(w, expert_start=0, num_experts=None).num_experts == 4
    assert dataclasses.replace(w, expert_start=7, num_experts=None).num_experts == 11


def test_weights_are_frozen() -> None:
    w = make("").weights
    with pytest.raises(dataclasses.FrozenInstanceError):
        w.order = "up_gate"  # type: ignore[misc]


@pytest.mark.parametrize("sentence", [EVERYTHING, "", "dense fp16 biases", "ungated shared_g"])
def test_pytree_round_trip_keeps_everything(sentence: str) -> None:
    case = make(sentence)
    leaves, spec = pytree.tree_flatten(case.weights)
    back = pytree.tree_unflatten(leaves, spec)
    assert type(back) is fp4lt.MoEWeights
    for field in dataclasses.fields(case.weights):
        one, other = getattr(back, field.name), getattr(case.weights, field.name)
        assert one is other or isinstance(one, fp4lt.NVFP4Tensor), field.name
    same(case._replace(weights=back).run(), case.run())
    tensors = [leaf for leaf in leaves if leaf is not None]
    assert all(isinstance(t, torch.Tensor) for t in tensors)
    # Two 3-part operands and ten more, of which everything is there.
    assert sentence != EVERYTHING or len(tensors) == 6 + 8


def test_specs_differ_where_the_static_parts_do() -> None:
    w = make("").weights
    spec = pytree.tree_structure(w)
    assert pytree.tree_structure(dataclasses.replace(w)) == spec
    for change in ({"order": "up_gate"}, {"activation": "gelu"}, {"num_experts": 9}):
        other = dataclasses.replace(w, **change)
        assert pytree.tree_structure(other) != spec


@pytest.mark.parametrize("sentence", [EVERYTHING, "dense", "ungated"])
def test_to_moves_everything(sentence: str) -> None:
    case = make(sentence)
    there = case.weights.to("cpu")
    same(there, case.weights)
    same(case._replace(weights=there).run(), case.run())
    meta = case.weights.to("meta")
    assert pytree.tree_structure(meta) == pytree.tree_structure(case.weights)
    moved = [leaf for leaf in pytree.tree_leaves(meta) if leaf is not None]
    assert {t.device.type for t in moved} == {"meta"}
    assert meta.device.type == "meta"


def test_numbers_are_float32_tensors() -> None:
    w = make("").weights
    names = ("a1_scale", "a2_scale", "swiglu_alpha", "swiglu_beta", "swiglu_limit")
    w = dataclasses.replace(w, **dict.fromkeys(names, 3))  # type: ignore[arg-type]
    for name in names:
        same(getattr(w, name), torch.tensor(3.0))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
def test_biases_of_any_float_type_are_kept_as_float32(dtype: torch.dtype) -> None:
    case = make("biases")
    for name in ("w13_bias", "w2_bias"):
        bias = getattr(case.weights, name).to(dtype)
        other = case.with_weights(**{name: bias})
        same(getattr(other.weights, name), bias.float())
        other.check(other.trace())


@pytest.mark.parametrize(
    ("activation", "want"), [("silu", (1.0, 0.0, None)), ("swigluoai", (1.702, 1.0, 7.0))]
)
def test_swiglu_defaults(activation: str, want: tuple[float | None, ...]) -> None:
    case = make(f"{activation} k1")
    assert case.weights.swiglu() == want
    given = dict(zip(("swiglu_alpha", "swiglu_beta", "swiglu_limit"), want, strict=True))
    same(case.with_weights(**given).run(), case.run())
    each = {k: None if v is None else torch.full((4,), v) for k, v in given.items()}
    same(case.with_weights(**each).run(), case.run())


# ---- reports from the field


def constant_block(recipe: str, order: Any, gate: float, up: float, **options: Any) -> Case:
    """One expert for which x = 1 gives this gate and this up everywhere, and y = r u."""
    n = 16
    rows = n if order is None else 2 * n
    values = np.full(rows, gate)
    if order is not None:
        values[gate_up_columns(PlainWeights(None, None, order), rows)[1]] = up

    def operand(matrix: np.ndarray[Any, Any]) -> fp4lt.NVFP4Tensor:
        """One value in a row at most: its magnitude is the scale."""
        codes = np.where(matrix > 0, 2, np.where(matrix < 0, 10, 0)).astype(np.uint8)
        scales = torch.from_numpy(np.abs(matrix).max(axis=1, keepdims=True).astype(np.float32))
        packed = torch.from_numpy(codes[:, 0::2] | codes[:, 1::2] << 4)
        e4m3 = scales.to(torch.float8_e4m3fn)
        assert torch.equal(e4m3.float(), scales)
        return fp4lt.NVFP4Tensor.from_linear_scales(packed[None], e4m3[None], torch.ones(1))

    first = np.zeros((rows, n))
    first[:, 0] = values
    # 6 * (1/6) is 1 in fp32, so that 1 and its halves come through the quantizer exactly.
    weights = fp4lt.MoEWeights(
        operand(first), operand(np.eye(n)), order=order, a1_scale=1 / 6, **options
    )
    dtype = torch.float32 if recipe == "w4a4" else torch.bfloat16
    hidden = torch.zeros(2, n, dtype=dtype)
    hidden[:, 0] = 1.0
    ids = torch.zeros(2, 1, dtype=torch.int64)
    return Case(hidden, weights, cases.Routing(torch.ones(2, 1), ids), recipe)  # type: ignore[arg-type]


def require_output(case: Case, want: float) -> None:
    """Every output is `want`: exactly in bf16, else to the few fp32 roundings on the way."""
    y = case.run()
    case.check(case.trace())
    value = torch.full_like(y, want)
    # 4 ulp of the activation, and 3 roundings: up, the derived scale, and its return.
    rtol = 0.0 if case.recipe == "w4a16" else 8 * 2.0**-23
    torch.testing.assert_close(y, value, rtol=rtol, atol=0.0)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("recipe", ["w4a4", "w4a16"])
def test_gate_and_up_are_not_exchanged(recipe: str, order: str) -> None:
    case = constant_block(recipe, order, 1.0, 2.0)
    require_output(case, silu(1.0) * 2.0)
    gate, up = gate_up_columns(case.weights, 32)
    h = case.trace().h
    assert bool((h[:, gate] == 1).all())
    assert bool((h[:, up] == 2).all())


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("recipe", ["w4a4", "w4a16"])
@pytest.mark.parametrize(
    ("activation", "limit", "want"),
    [
        ("silu", None, silu(20) * -20),
        ("silu", 7.0, silu(7) * -7),
        ("silu", 10.0, silu(10) * -10),
        ("swigluoai", None, 7 / (1 + math.exp(-1.702 * 7)) * -6),
        ("swigluoai", 10.0, 10 / (1 + math.exp(-1.702 * 10)) * -9),
    ],
)
def test_limit(recipe: str, order: str, activation: str, limit: Any, want: float) -> None:
    case = constant_block(recipe, order, 20.0, -20.0, activation=activation, swiglu_limit=limit)
    require_output(case, want)


def test_limit_leaves_a_negative_gate_and_cuts_a_positive_up() -> None:
    case = constant_block("w4a16", "up_gate", -20.0, 20.0, swiglu_limit=7.0)
    require_output(case, silu(-20) * 7)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("recipe", ["w4a4", "w4a16"])
def test_gate_and_up_keep_their_own_scales(recipe: str, order: str) -> None:
    case = constant_block(recipe, order, 1.0, 2.0, gate_up_scales=torch.tensor([[1.0, 10.0]]))
    require_output(case, silu(1.0) * 20.0)
    case = constant_block(recipe, order, 1.0, 2.0, gate_up_scales=torch.tensor([[4.0, 0.125]]))
    require_output(case, silu(4.0) * 0.25)


@pytest.mark.parametrize("recipe", ["w4a4", "w4a16"])
@pytest.mark.parametrize("on_input", [False, True])
def test_router_weight_is_applied_once(recipe: str, on_input: bool) -> None:
    case = constant_block(recipe, "gate_up", 1.0, 2.0)
    half = case.routing._replace(topk_weights=torch.full((2, 1), 0.5))
    want = silu(0.5) if on_input else 0.5 * (silu(1.0) * 2.0)
    require_output(case._replace(routing=half, on_input=on_input), want)


@pytest.mark.parametrize("sentence", ["", "fp32 static_each", "w4a16", "dense", "ungated shared_g"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_zero_experts_give_exact_zeros(activation: str, sentence: str, kernel_table: str) -> None:
    if activation == "swigluoai" and "ungated" in sentence:
        activation = "silu"
    case = make(f"{sentence} {activation}")
    zeros: dict[str, Any] = {}
    for name in ("w13", "w2"):
        w = getattr(case.weights, name)
        if isinstance(w, torch.Tensor):
            zeros[name] = torch.zeros_like(w)
            continue
        zeros[name] = fp4lt.quantize(torch.zeros(w.shape))
        # Zero codes under any scale are zeros as well.
        silent = dataclasses.replace(w, codes=torch.zeros_like(w.codes))
        assert not case.with_weights(**{name: silent}).run().view(torch.uint8).any()
    for changes in ({"w13": zeros["w13"]}, {"w2": zeros["w2"]}, zeros):
        assert not case.with_weights(**changes).run().view(torch.uint8).any()
    quiet = case._replace(hidden=torch.zeros_like(case.hidden))
    assert not quiet.run().view(torch.uint8).any()


@pytest.mark.parametrize("limit", [None, 7.0])
@pytest.mark.parametrize("recipe", ["w4a4", "w4a16"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("side", [0, 1], ids=["gate", "up"])
def test_nan_passes_every_activation(
    activation: str, recipe: str, limit: float | None, side: int
) -> None:
    if limit is not None and activation not in ("silu", "swigluoai"):
        limit = None
    bias = torch.zeros(1, 32)
    bias[0, 16 * side + 5] = NAN
    case = constant_block(
        recipe, "gate_up", 1.0, 2.0, activation=activation, swiglu_limit=limit, w13_bias=bias
    )
    assert bool(case.run().isnan().all())
    case.check(case.trace())


# ---- accuracy of the activations


def activate(
    name: str, h: torch.Tensor, order: Any = None, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """The CPU backend's own stage with alpha 1, beta 0 and no limit."""
    rows, n = h.shape
    out = torch.empty(rows, n if order is None else n // 2, dtype=dtype)
    expert = torch.zeros(rows, dtype=torch.int64)
    _C.activate(
        h=address(h),
        rows=rows,
        n=n,
        order=cpu.GATE_ORDERS[order],
        kind=cpu.ACTIVATION_KINDS[name],
        row_expert=address(expert),
        alpha=expert_parameter(1.0),
        beta=expert_parameter(0.0),
        limit=None,
        out=address(out),
        out_type=TYPES[dtype],
        threads=2,
    )
    return out


def all_sizes() -> torch.Tensor:
    """fp32 numbers of every exponent and sign, and many where the activations bend."""
    rng = cases.generator(0)
    bits = (np.arange(255, dtype=np.uint32)[:, None] << 23) | rng.integers(
        0, 1 << 23, (255, 64), np.uint32
    )
    values = np.concatenate([bits.reshape(-1).view(np.float32), np.linspace(0, 120, 40000)])
    both = np.concatenate([values, -values, [0.0, -0.0, 3.0e38, -3.0e38]]).astype(np.float32)
    return torch.from_numpy(np.resize(both, (16, len(both) // 16 + 1)).copy())


def accurate(name: str, h: torch.Tensor) -> torch.Tensor:
    """Float64 values by other formulas than the backend's, where there are any."""
    x = h.double()
    if name == "silu":
        return x * torch.exp(-torch.nn.functional.softplus(-x, threshold=800))
    if name == "gelu":
        return x * torch.exp(torch.special.log_ndtr(x))
    if name == "gelu_tanh":
        y = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
        return x * torch.exp(-torch.nn.functional.softplus(-2 * y, threshold=800))
    return x.relu() ** 2


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh", "relu2"])
def test_activations_are_accurate_over_their_whole_range(name: str, kernel_table: str) -> None:
    h = all_sizes()
    u, want = activate(name, h).double(), accurate(name, h)
    if name == "relu2":
        bounds.assert_bitwise(u, want.float().double())
        return
    assert bool(torch.isfinite(u).all())
    exponent = (torch.frexp(want).exponent - 1).clamp(min=-126)
    ulp = torch.ldexp(torch.ones_like(want), exponent - 23)
    error = (u - want).abs() / ulp
    worst = int(error.argmax())
    assert error.max() <= 4, (h.view(-1)[worst], u.view(-1)[worst], want.view(-1)[worst])
    deep = (want.abs() < 2.0**-126) & (want.abs() > 2.0**-148) & (h < -1)
    assert int(deep.sum()) > 20, "subnormal results of large negative numbers were among them"
    assert bool((u[deep] != 0).all())


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh", "relu2"])
def test_gated_by_one_is_ungated(name: str, order: str) -> None:
    h = all_sizes()
    want = activate(name, h)
    gate, up = gate_up_columns(PlainWeights(None, None, order), 2 * h.shape[1])
    wide = torch.empty(h.shape[0], 2 * h.shape[1])
    wide[:, gate], wide[:, up] = h, 1.0
    same(activate(name, wide, order), want)
    wide[:, up] = -2.0
    # Twice a subnormal would not be twice its rounded value, nor twice the largest finite.
    exact = (want.abs() >= 2.0**-126) & (want.abs() < 2.0**127)
    same(activate(name, wide, order)[exact], want[exact] * -2.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh", "relu2"])
def test_u_is_rounded_from_float32(name: str, dtype: torch.dtype, kernel_table: str) -> None:
    h = all_sizes()
    same(activate(name, h, dtype=dtype), activate(name, h).to(dtype))
