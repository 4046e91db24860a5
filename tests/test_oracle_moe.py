# SPDX-License-Identifier: Apache-2.0
"""The MoE oracle: its activations, its stage checks and its end-to-end definition."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.nn import functional as F  # noqa: N812 - torch's own idiom

from fp4lt.testing import bounds, cases, mutations, oracle
from fp4lt.testing.oracle_codec import encode_with

CHECKPOINTS = Path(__file__).parent / "data" / "checkpoints"
T, E, H, I, TOPK = 7, 4, 64, 32, 3  # noqa: E741 - the tensors' letters


class Trace(NamedTuple):
    rows_token: torch.Tensor
    rows_expert: torch.Tensor
    slot_row: torch.Tensor
    a1: Any
    h: torch.Tensor
    a2: Any
    z: torch.Tensor
    y: torch.Tensor


class Block(NamedTuple):
    """One call of the block, its options and what checks it."""

    hidden: torch.Tensor
    weights: oracle.PlainWeights
    routing: cases.Routing
    recipe: str
    on_input: bool = False

    def check(self, trace: Any) -> None:
        oracle.check_moe_trace(
            trace,
            self.weights,
            self.hidden,
            *self.routing,
            self.recipe,
            H,
            I,
            router_weight_on_input=self.on_input,
        )


def make_block(seed: int, options: dict[str, Any], recipe: str = "w4a4", **call: Any) -> Block:
    rng = cases.generator(seed)
    order = options.get("order", "gate_up")
    rows = I if order is None else 2 * I
    fields: dict[str, Any] = {
        "w13": cases.random_operand(rng, (E, rows, H)).packed(),
        "w2": cases.random_operand(rng, (E, H, I)).packed(),
        "order": order,
    }
    # Scaled so that gates lie between -20 and 20, where activations bend.
    fields["w13"] = dataclasses.replace(fields["w13"], global_scale=torch.full((E,), 2.0**-9))
    weights = oracle.PlainWeights(**(fields | options))
    hidden = cases.random_matrix(rng, (T, H), call.pop("dtype", torch.bfloat16)) / 4
    router = cases.ROUTERS[call.pop("router", "uniform")]
    return Block(hidden, weights, router(rng, T, E, TOPK), recipe, **call)


def torch_activation(block: Block, h: torch.Tensor, expert: list[int]) -> torch.Tensor:
    """u by torch's own float64 functions."""
    w, h = block.weights, h.double()
    if not w.gated:
        gate, up = h, torch.ones((), dtype=torch.float64)
    elif w.order == "interleaved":
        gate, up = h[:, 0::2], h[:, 1::2]
    else:
        gate, up = h.chunk(2, dim=1) if w.order == "gate_up" else h.chunk(2, dim=1)[::-1]
    act: torch.Tensor
    if w.activation == "relu2":
        act = gate.relu() ** 2
    elif w.activation == "gelu":
        act = 0.5 * gate * torch.special.erfc(-gate * 0.5**0.5)
    elif w.activation == "gelu_tanh":
        # torch's own subtracts from 1 and loses the tail.
        act = gate * ((8 / math.pi) ** 0.5 * (gate + 0.044715 * gate**3)).sigmoid()
    elif w.activation == "silu":
        limit = math.inf if w.swiglu_limit is None else w.swiglu_limit
        act, up = F.silu(gate.clamp(max=limit)), up.clamp(-limit, limit)
    else:
        alpha = torch.full((E,), 1.702) if w.swiglu_alpha is None else w.swiglu_alpha
        gate, up = gate.clamp(max=7), up.clamp(-7, 7) + 1
        act = gate * (gate * alpha[expert, None].double()).sigmoid()
    return act * up


def run_block(block: Block) -> Trace:
    """Run the block in fp32 with torch: every sum in some order, so depth K."""
    w, r, dtype = block.weights, block.routing, block.hidden.dtype
    slots = sorted((int(e), i) for i, e in enumerate(r.topk_ids.reshape(-1)) if 0 <= e < E)
    expert = [e for e, _ in slots]
    token = [i // TOPK for _, i in slots]
    slot_row = torch.full((T * TOPK,), -1)
    slot_row[[i for _, i in slots]] = torch.arange(len(slots))
    x = block.hidden[token].float()
    router = r.topk_weights.reshape(-1)[[i for _, i in slots]]
    if block.on_input:
        x = (x * router[:, None]).to(dtype).float()

    def operand(rows: torch.Tensor, scale: Any) -> tuple[Any, torch.Tensor, torch.Tensor]:
        if block.recipe == "w4a16":
            return rows.to(dtype), rows.to(dtype).float(), torch.ones(len(slots), 1)
        given = None if scale is None else bounds.to_float64(scale)[expert].astype(np.float32)
        q = oracle.to_packed(oracle.quantize_rows(rows.numpy(), given))
        return q, torch.from_numpy(oracle.Operand.of(q).products).float(), q.global_scale[:, None]

    def multiply(a: torch.Tensor, g_a: torch.Tensor, weight: Any, bias: Any) -> Any:
        matrix = torch.from_numpy(oracle.Operand.of(weight).products).float()
        c = torch.stack([a[i] @ matrix[e].T for i, e in enumerate(expert)])
        y = c * (g_a * weight.global_scale[expert, None])
        if weight is w.w13 and w.gate_up_scales is not None:
            scales = w.gate_up_scales[expert]
            if w.order == "interleaved":
                y = y * scales.repeat(1, I)
            else:
                scales = scales if w.order == "gate_up" else scales.flip(1)
                y = y * scales.repeat_interleave(I, dim=1)
        return y if bias is None else y + bias[expert]

    a1, values, g = operand(x, w.a1_scale)
    h = multiply(values, g, w.w13, w.w13_bias)
    a2, values, g = operand(torch_activation(block, h, expert).float(), w.a2_scale)
    z = multiply(values, g, w.w2, w.w2_bias)
    y = torch.zeros(T, H)
    for i in range(T * TOPK):
        if slot_row[i] >= 0:
            factor = 1.0 if block.on_input else r.topk_weights.reshape(-1)[i]
            y[i // TOPK] += factor * z[slot_row[i]]
    rows = torch.tensor(token), torch.tensor(expert)
    return Trace(*rows, slot_row.view(T, TOPK), a1, h, a2, z, y.to(dtype))


per_expert = torch.linspace(0.01, 0.02, E)
SPLIT = torch.linspace(0.5, 1.5, 2 * E).view(E, 2)
VARIANTS: dict[str, dict[str, Any]] = {
    "silu": {},
    "silu_limit": {"swiglu_limit": 2.5, "order": "up_gate"},
    "silu_plain": {"order": None},
    "swigluoai": {"activation": "swigluoai", "order": "interleaved"},
    "swigluoai_alpha": {"activation": "swigluoai", "swiglu_alpha": 100 * per_expert},
    "gelu": {"activation": "gelu", "order": "interleaved"},
    "gelu_tanh": {"activation": "gelu_tanh", "order": "up_gate"},
    "gelu_plain": {"activation": "gelu", "order": None},
    "relu2": {"activation": "relu2"},
    "relu2_plain": {"activation": "relu2", "order": None},
    "static": {"a1_scale": per_expert, "a2_scale": 10 * per_expert},
    "biases": {"w13_bias": torch.full((E, 2 * I), 0.5), "w2_bias": torch.full((E, H), -2.0)},
    "split_scales": {"gate_up_scales": SPLIT, "order": "up_gate"},
    "split_interleaved": {"gate_up_scales": SPLIT, "order": "interleaved"},
}


@pytest.mark.parametrize("recipe", ["w4a4", "w4a16"])
@pytest.mark.parametrize("name", VARIANTS)
def test_a_correct_block_passes(name: str, recipe: str) -> None:
    block = make_block(1, VARIANTS[name], recipe)
    block.check(run_block(block))


@pytest.mark.parametrize("router", cases.ROUTERS)
@pytest.mark.parametrize("on_input", [False, True])
def test_any_routing_passes(router: str, on_input: bool) -> None:
    block = make_block(2, {}, router=router, on_input=on_input, dtype=torch.float16)
    block.check(run_block(block))


def broken_traces(block: Block, t: Trace) -> dict[str, tuple[Trace, str]]:
    """One fault a stage, and the stage that has to be named."""
    weights = block.weights
    found: dict[str, tuple[Trace, str]] = {}

    def wrong(stage: str, **fields: Any) -> None:
        name = f"{stage} {len(found)}"
        found[name] = (t._replace(**fields), stage)

    def other(**fields: Any) -> Trace:
        return run_block(block._replace(weights=dataclasses.replace(weights, **fields)))

    wrong("rows_token", rows_token=t.rows_token.flip(0))
    wrong("rows_expert", rows_expert=t.rows_expert.clamp(max=1))
    wrong("slot_row", slot_row=t.slot_row.flip(1))
    wrong("h", h=other(w13=mutations.double_global(weights.w13, 1)).h)
    wrong("h", h=other(w13=mutations.swap_gate_up(weights.w13, "gate_up")).h)
    wrong("h", h=mutations.zero_column(t.h, 5))
    wrong("a2", a2=other(order="up_gate").a2)
    wrong("a2", a2=other(activation="gelu_tanh").a2)
    wrong("z", z=other(w2=mutations.shift_scale_tile(weights.w2, 1)).z)
    wrong("z", z=mutations.zero_column(t.z, 5))
    wrong("y", y=t.y.flip(0))
    wrong("y", y=torch.nextafter(t.y, torch.ones_like(t.y)))
    if block.recipe == "w4a4":
        wrong("a1", a1=mutations.swap_nibble(t.a1, row=3))
        wrong("a1", a1=mutations.shift_scale_tile(t.a1))
        wrong("a1", a1=mutations.double_global(t.a1, 2))
        wrong("a2", a2=mutations.swap_nibble(t.a2, row=3))
        wrong("a2", a2=mutations.double_global(t.a2, 2))
        wrong("a2", a2=mutations.shift_scale_tile(t.a2))
        wrong("a2", a2=dataclasses.replace(t.a2, codes=t.a2.codes ^ 8))
        q = oracle.from_packed(t.a2)
        scales = np.maximum(q.scales, 1) - np.uint8(1)
        u = torch_activation(block, t.h, t.rows_expert.tolist()).float()
        blocks = u.numpy().reshape(*scales.shape, 16)
        g = np.broadcast_to(q.global_scale[:, None], scales.shape)
        codes = encode_with(blocks, scales, g).reshape(q.codes.shape)
        wrong("a2", a2=oracle.to_packed(q._replace(codes=codes, scales=scales)))
    else:
        wrong("a1", a1=t.a1.float().mul(1.01).to(t.a1.dtype))
        wrong("a2", a2=torch.nextafter(t.a2, torch.full_like(t.a2, math.inf)))
        wrong("a2", a2=-t.a2)
        wrong("a2", a2=t.a2.float())
    return found


@pytest.mark.parametrize("recipe", ["w4a4", "w4a16"])
def test_every_fault_is_named(recipe: str) -> None:
    block = make_block(3, {}, recipe)
    for name, (trace, stage) in broken_traces(block, run_block(block)).items():
        with pytest.raises(AssertionError, match=rf"^{stage}[\[. ]") as caught:
            block.check(trace)
        assert caught.value.args, name


def test_u_rounded_before_quantizing_is_caught() -> None:
    block = make_block(4, {})
    t = run_block(block)
    u = torch_activation(block, t.h, t.rows_expert.tolist()).to(torch.bfloat16).float()
    twice = oracle.to_packed(oracle.quantize_rows(u.numpy(), None))
    with pytest.raises(AssertionError, match=r"^a2"):
        block.check(t._replace(a2=twice))


def test_gelu_with_cancellation_is_caught() -> None:
    h = torch.linspace(-5, 0.5, 64).view(1, 64)
    weights = make_block(5, {"activation": "gelu", "order": None}).weights
    expert = np.zeros(1, np.int64)
    bad = h * 0.5 * (1 + torch.erf(h * 0.5**0.5))
    for u, good in ((F.gelu(h.double()).float(), True), (bad, False)):
        arguments = (h, u, weights, expert, False, torch.float32)
        if good:
            oracle.check_activation(*arguments)
        else:
            with pytest.raises(AssertionError, match=r"^a2\[0, \d+\]"):
                oracle.check_activation(*arguments)


def test_activation_values_against_torch() -> None:
    h = np.concatenate([np.linspace(-30, 30, 999), [-88.0, -100.0, 0.0, -0.0, 1e30]])
    x = torch.from_numpy(h)
    values = {
        "silu": F.silu(x),
        "gelu": 0.5 * x * torch.special.erfc(-x * 0.5**0.5),
        "gelu_tanh": F.gelu(x, approximate="tanh"),
        "relu2": x.relu() ** 2,
    }
    for name, want in values.items():
        weights = make_block(6, {"activation": name, "order": None}).weights
        u, tolerance = oracle.activate(h[None], weights, np.zeros(1, np.int64))
        # torch's tanh form cancels in float64 below about -5.
        atol = 3e-14 if name == "gelu_tanh" else 0.0
        near = np.isclose(u[0], want.numpy(), rtol=1e-12, atol=atol)
        assert near.all(), name
        assert (tolerance[0][u[0] == 0] == 0).all()
        assert (tolerance <= np.abs(u) * 2.0**-21 * 200 + 2.0**-146).all()
    weights = make_block(6, {"order": None}).weights
    silu, _ = oracle.activate(np.full((1, 1), -100.0), weights, np.zeros(1, np.int64))
    assert silu < -(2.0**-149), "no early underflow"


@pytest.mark.parametrize(
    "options",
    [
        {"activation": "swigluoai", "order": None},
        {"activation": "gelu", "swiglu_limit": 1.0},
        {"activation": "tanh"},
        {"order": "up"},
    ],
)
def test_undefined_activations_are_refused(options: dict[str, Any]) -> None:
    weights = dataclasses.replace(make_block(6, {}).weights, **options)
    with pytest.raises(ValueError, match=r"swiglu|defined|order"):
        oracle.activate(np.zeros((1, 2 * I)), weights, np.zeros(1, np.int64))


@pytest.mark.parametrize("recipe", ["w4a4", "w4a16"])
def test_nan_and_infinity_stay_in_their_token(recipe: str) -> None:
    block = make_block(7, {}, recipe)
    clean = oracle.moe_reference(block.hidden, block.weights, *block.routing, recipe)
    block.hidden[2, 5] = math.nan
    trace = run_block(block)
    block.check(trace)
    y = oracle.moe_reference(block.hidden, block.weights, *block.routing, recipe)
    assert np.isnan(y[2]).all()
    others = np.arange(T) != 2
    bounds.assert_bitwise(y[others], clean[others])
    if recipe == "w4a16":
        with pytest.raises(AssertionError, match=r"^a2"):
            block.check(trace._replace(a2=trace.a2.nan_to_num(0.0)))


@pytest.mark.parametrize("recipe", ["w4a4", "w4a16"])
def test_reference_on_exact_inputs(recipe: str) -> None:
    """Selections and relu2: no sum rounds, so any implementation gives these very bits."""
    rng = cases.generator(8)
    weights = oracle.PlainWeights(
        cases.selection_operand(rng, (E, 2 * I, H)).packed(),
        cases.selection_operand(rng, (E, H, I)).packed(),
        order="gate_up",
        activation="relu2",
    )
    hidden, routing = cases.random_matrix(rng, (T, H)), cases.route_uniform(rng, T, E, TOPK)
    block = Block(hidden, weights, routing, recipe)
    y = oracle.moe_reference(block.hidden, weights, *block.routing, recipe)
    trace = run_block(block)
    block.check(trace)
    want = bounds.round_to(y, torch.bfloat16)
    assert (want != 0).mean() > 0.3
    bounds.assert_bitwise(trace.y, want, signed_zeros=False)


# ---- real checkpoints


def safetensors(path: Path) -> dict[str, Any]:
    """Tensors of a file as arrays: uint8 (float8 too) and float32."""
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    kinds = {"U8": np.uint8, "F8_E4M3": np.uint8, "F32": np.float32}
    found = {}
    for name, entry in json.loads(raw[8 : 8 + size]).items():
        if name != "__metadata__" and entry["dtype"] in kinds:
            start, stop = (8 + size + i for i in entry["data_offsets"])
            flat = np.frombuffer(raw[start:stop], kinds[entry["dtype"]])
            found[name] = flat.reshape(entry["shape"])
    return found


def checkpoint_weights(folder: str) -> oracle.PlainWeights:
    tensors = safetensors(CHECKPOINTS / folder / "model.safetensors")
    reciprocal = folder == "compressed_tensors"
    names = ("weight_packed", "weight_global_scale", "input_global_scale")
    code, g, given = names if reciprocal else ("weight", "weight_scale_2", "input_scale")

    def stack(proj: str, field: str) -> Any:
        base = "model.layers.0.mlp.experts"
        return np.stack([tensors[f"{base}.{e}.{proj}_proj.{field}"] for e in range(8)])

    def multiplier(proj: str, field: str) -> Any:
        value = stack(proj, field).reshape(8)
        return np.float32(1) / value if reciprocal else value

    def operand(codes: Any, scales: Any, scale: Any) -> Any:
        return oracle.to_packed(oracle.Quantized(oracle.unpack(codes), scales, scale))

    fields = (code, "weight_scale")
    both = [np.concatenate([stack(proj, f) for proj in ("gate", "up")], axis=1) for f in fields]
    split = np.stack([multiplier(p, g) for p in ("gate", "up")], axis=1)
    return oracle.PlainWeights(
        operand(both[0], both[1], np.ones(8, np.float32)),
        operand(stack("down", code), stack("down", "weight_scale"), multiplier("down", g)),
        order="gate_up",
        gate_up_scales=split,
        a1_scale=np.maximum(multiplier("gate", given), multiplier("up", given)),
        a2_scale=multiplier("down", given),
    )


@pytest.mark.parametrize("folder", ["modelopt", "modelopt_split", "compressed_tensors"])
@pytest.mark.parametrize(("recipe", "limit"), [("w4a16", 3e-3), ("w4a4", 2.5e-3)])
def test_reference_against_checkpoint_oracles(folder: str, recipe: str, limit: float) -> None:
    with np.load(CHECKPOINTS / "oracle.npz") as data:
        bits, ids, router = (data[k] for k in ("x_bf16_bits", "topk_ids", "topk_w"))
        want = data[f"{folder}.y_{recipe}"]
    hidden = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
    y = oracle.moe_reference(hidden, checkpoint_weights(folder), router, ids, recipe)
    rounded = bounds.round_to(y, torch.bfloat16)
    assert np.linalg.norm(rounded - want) < limit * np.linalg.norm(want)
    if recipe == "w4a4":
        # Without y's rounding only fp32's remain.
        assert np.linalg.norm(y - want) < 1e-6 * np.linalg.norm(want)
