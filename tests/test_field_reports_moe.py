# SPDX-License-Identifier: Apache-2.0
"""Reports from the field about the MoE block: routing, shards, activations.

See test_field_reports.py for what the row numbers are.

Blocks made by `linear_block` have one possible result, whatever the order of any sum and however
the experts or the intermediate size are split, so that shards are compared bit by bit.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_files import CT, MO, ROOT, original, refuse, save
from test_field_reports import EVERYWHERE, Machine
from test_grouped_mm import nvfp4
from test_moe import Case, make, same
from test_moe_relations import select

import fp4lt
from fp4lt import errors
from fp4lt.testing import bounds, cases, oracle

NAN, INF = float("nan"), float("inf")


def untouched(shape: tuple[int, ...]) -> torch.Tensor:
    """Zero bytes that take no memory until they are written; torch.zeros would write them."""
    return torch.from_numpy(np.zeros(shape, np.uint8))


def sparse_stack(shape: tuple[int, int, int], live: dict[int, cases.Linear]) -> fp4lt.NVFP4Tensor:
    """A stack that is zero but for some experts."""
    experts, n, k = shape
    codes = untouched((experts, n, k // 2))
    scales = untouched((experts, -(-n // 128) * 128, -(-k // 64) * 4))
    g = torch.ones(experts)
    for e, linear in live.items():
        packed = linear.packed()
        codes[e], scales[e] = packed.codes, packed.scales.view(torch.uint8)
        g[e] = packed.global_scale
    return fp4lt.NVFP4Tensor.from_tiled_scales(codes, scales, g)


def linear_block(
    sizes: tuple[int, int, int, int, int], live: Sequence[int] | None = None, seed: int = 1
) -> Case:
    """A block (T, E, H, I, k) of fp32 hidden states whose every step is exact.

    Gates are 1 by their bias and up copies one input, so u is a multiple of 1/2 up to 6.  Each
    block of 16 has a 6 in it: under static scales of 1 nothing is lost by quantizing.  z adds
    multiples of 1/4, at most 144 each, and the router weights are powers of two.
    """
    T, E, H, inner, k = sizes
    rng, chosen = cases.generator(seed), np.arange(E) if live is None else np.array(live)
    first, second = {}, {}
    for e in chosen:
        codes = np.zeros((2 * inner, H), np.uint8)
        source = rng.integers(0, H, inner)
        source[::16] = 16 * rng.integers(0, H // 16, source[::16].size)
        codes[inner + np.arange(inner), source] = rng.choice(np.array([2, 10], np.uint8), inner)
        ones = torch.full((2 * inner, H // 16), 0x38, dtype=torch.uint8).view(torch.float8_e4m3fn)
        packed = torch.from_numpy(oracle.pack(codes))
        first[int(e)] = cases.Linear(packed, ones, torch.tensor(1.0))
        g = torch.tensor(rng.choice([1.0, 2.0]), dtype=torch.float32)
        second[int(e)] = cases.exact_operand(rng, (H, inner))._replace(global_scale=g)
    w13_bias = torch.zeros(E, 2 * inner)
    w13_bias[:, :inner] = 1.0
    weights = fp4lt.MoEWeights(
        sparse_stack((E, 2 * inner, H), first),
        sparse_stack((E, H, inner), second),
        order="gate_up",
        activation="relu2",
        w13_bias=w13_bias,
        a1_scale=1.0,
        a2_scale=1.0,
    )
    values = oracle.decode_e2m1(rng.integers(0, 16, (T, H)))
    values[:, ::16] = 6.0 * rng.choice([-1, 1], (T, H // 16))
    ids = torch.from_numpy(rng.choice(chosen, (T, k)))
    powers = torch.from_numpy(rng.choice([0.25, 0.5, 1.0], (T, k)).astype(np.float32))
    hidden = torch.from_numpy(values).float()
    return Case(hidden, weights, cases.Routing(powers, ids))


def expert_shards(case: Case, ranks: int) -> list[Case]:
    """The same call on each rank's range of experts."""
    experts = case.weights.num_local_experts
    ends = [experts * r // ranks for r in range(ranks + 1)]
    return [
        case._replace(
            weights=select(case.weights, list(range(a, b)), expert_start=a, num_experts=experts)
        )
        for a, b in itertools.pairwise(ends)
    ]


def tensor_shards(case: Case, ranks: int) -> list[Case]:
    """The same call on each rank's part of the intermediate size; w2 has no bias to divide."""
    w = case.weights
    inner = w.intermediate_size // ranks
    parts = []
    for r in range(ranks):
        up = slice(r * inner, (r + 1) * inner)
        gate_and_up = [*range(up.start, up.stop)]
        gate_and_up += [w.intermediate_size + i for i in gate_and_up]
        first, second = (oracle.from_packed(t) for t in (w.w13, w.w2))
        w13 = first._replace(codes=first.codes[:, gate_and_up], scales=first.scales[:, gate_and_up])
        blocks = slice(up.start // 16, up.stop // 16)
        w2 = second._replace(codes=second.codes[..., up], scales=second.scales[..., blocks])
        stored = [
            oracle.to_packed(q._replace(codes=np.ascontiguousarray(q.codes))) for q in (w13, w2)
        ]
        assert w.w13_bias is not None
        bias = w.w13_bias[:, gate_and_up]
        part13, part2 = (fp4lt.NVFP4Tensor(t.codes, t.scales, t.global_scale) for t in stored)
        parts.append(case.with_weights(w13=part13, w2=part2, w13_bias=bias))
    return parts


def check_sum(machine: Machine, whole: Case, parts: Sequence[Case]) -> None:
    """The definition's bits from the whole, and from the sum of the parts, each of them needed."""
    want = torch.from_numpy(oracle.moe_reference(whole.hidden, whole.weights, *whole.routing))
    assert int((want != 0).sum()) > want.numel() // 2
    # No sum of z by weights of up to 2.5 rounds: multiples of 2^-5 below 2^19.
    assert float(machine.trace(whole).z.abs().max()) * 2.5 * whole.routing.topk_ids.shape[1] < 2**19
    bounds.assert_bitwise(machine.run(whole), want, signed_zeros=False)
    results = [machine.run(part) for part in parts]
    assert all(int((y != 0).sum()) > 0 for y in results)
    bounds.assert_bitwise(torch.stack(results).sum(0), want, signed_zeros=False, name="sum")


# ---- routing and shards


@EVERYWHERE
@pytest.mark.parametrize("recipe", ["w4a4", "w4a16", "fp32 static_each"])
def test_row_11_padding_tokens(machine: Machine, recipe: str) -> None:
    """Row 11 (vllm #40047): NaN in the padding of a batch spread to the valid tokens.

    5 of 64 tokens are valid, whether the others are routed or not.
    """
    case = make(f"{recipe} T64 E4")
    five = case._replace(
        hidden=case.hidden[:5], routing=cases.Routing(*(t[:5] for t in case.routing))
    )
    want = machine.run(five)
    hidden, ids = case.hidden.clone(), case.routing.topk_ids.clone()
    hidden[5::2], hidden[6::2] = NAN, INF
    for masked in (False, True):
        if masked:
            ids[5:] = -1
        routing = case.routing._replace(topk_ids=ids)
        y = machine.run(case._replace(hidden=hidden, routing=routing))
        same(y[:5], want)
        assert not masked or not bool(y[5:].any())


@EVERYWHERE
@pytest.mark.parametrize("ranks", [2, 4])
def test_rows_17_and_40_expert_parallel(machine: Machine, ranks: int) -> None:
    """Rows 17 (vllm #42118) and 40 (flashinfer #3383): scales lost their tile order on a rank's
    slice of the experts, and offsets of ranks read beyond their weights."""
    case = linear_block((7, 8, 128, 80, 4))
    check_sum(machine, case, expert_shards(case, ranks))


@pytest.mark.parametrize("name", ["3.gate_proj", "7.down_proj"])
@pytest.mark.parametrize("checkpoint", [MO, CT])
def test_row_19_a_checkpoint_with_nan_scales(tmp_path: Path, checkpoint: str, name: str) -> None:
    """Row 19 (Model-Optimizer #1397): a checkpoint had scale bytes of NaN in it.

    Loading it is refused, with the place.
    """
    tensors, key = original(checkpoint), f"{ROOT}{name}.weight_scale"
    raw = tensors[key]
    blocks = raw.shape[1]
    data = bytearray(raw.data)
    data[5 * blocks + 2] = 0x7F
    tensors[key] = raw._replace(data=bytes(data))
    path = save(tmp_path, checkpoint, tensors)
    refuse(path, f"expert {name[0]}", key, "0x7F (NaN) at row 5, block 2", layer=0)


@EVERYWHERE
@pytest.mark.parametrize("recipe", ["w4a4", "w4a16"])
def test_row_36_routes_of_minus_one(machine: Machine, recipe: str) -> None:
    """Row 36 (sglang #29055): routes of -1 broke a rank that holds 36 experts."""
    case = make(f"{recipe} E36 k4 T30 missing H64 I32")
    assert bool((case.routing.topk_ids < 0).any())
    machine.check(case)
    kept = case.routing.topk_ids >= 0
    silent = case.routing._replace(
        topk_weights=torch.where(kept, case.routing.topk_weights, NAN),
    )
    same(machine.run(case._replace(routing=silent)), machine.run(case))


@EVERYWHERE
def test_row_41_scales_of_each_expert_on_its_rank(machine: Machine) -> None:
    """Row 41 (sglang #21602, #23531, #36597): ranks took the first ranks' activation scales."""
    case = make("fp32 T9 E8 k4")
    each = 2.0 ** torch.arange(-12.0, -4.0)
    case = case.with_weights(a1_scale=each, a2_scale=each.flip(0))
    lower, upper = expert_shards(case, 2)
    assert isinstance(upper.weights.a1_scale, torch.Tensor)
    assert torch.equal(upper.weights.a1_scale, each[4:])
    whole, low, high = (machine.check(part) for part in (case, lower, upper))
    same(torch.cat([low.z, high.z]), whole.z)
    for name in ("a1_scale", "a2_scale"):
        wrong = upper.with_weights(**{name: getattr(lower.weights, name)})
        assert not torch.equal(machine.trace(wrong).z, high.z)


@EVERYWHERE
@pytest.mark.parametrize("scaling", [2.5, 1.0])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_row_45_routed_scaling_and_slices(machine: Machine, ranks: int, scaling: float) -> None:
    """Row 45 (sglang #29931; vllm #45836, #49070): a factor on the routed sum was lost, and slices
    of I = 3072 gave garbage.  The factor is part of the router's weights."""
    case = linear_block((3, 2, 64, 3072, 2))
    plain = machine.run(case)
    routing = case.routing._replace(topk_weights=case.routing.topk_weights * scaling)
    case = case._replace(routing=routing)
    check_sum(machine, case, tensor_shards(case, ranks))
    bounds.assert_bitwise(machine.run(case), scaling * plain, signed_zeros=False)


# ---- weights and activations


@EVERYWHERE
@pytest.mark.parametrize("recipe", ["w4a4 fp32", "w4a4", "w4a16"])
@pytest.mark.parametrize("ratio", [1.25, 10.0])
def test_row_31_gate_and_up_of_different_scales(
    machine: Machine, ratio: float, recipe: str
) -> None:
    """Row 31 (vllm #54974; TRT-LLM #14199, #18772; sglang #27588): one global scale, the larger,
    was taken for gate and up."""
    case = make(f"{recipe} T6 E3 k2 split")
    plain = case.with_weights(gate_up_scales=None)
    two = torch.tensor([[1.0, ratio]]).expand(3, 2)
    case = case.with_weights(gate_up_scales=two)
    h, each = machine.check(case).h, machine.check(plain).h
    inner = case.weights.intermediate_size
    same(h[:, :inner], each[:, :inner])
    assert not torch.equal(h[:, inner:], each[:, inner:])
    largest = case.with_weights(gate_up_scales=torch.full((3, 2), ratio))
    assert not torch.equal(machine.run(largest), machine.run(case))


def one_expert(gate: float, up: float, dtype: torch.dtype, **options: Any) -> Case:
    """Every gate is `gate` and every up is `up`, and the output copies u."""
    codes = np.zeros((1, 32, 16), np.uint8)
    codes[0, :16, 0], codes[0, 16:, 1] = 2, 2
    identity = 2 * np.eye(16, dtype=np.uint8)[None]

    def stored(values: Any) -> fp4lt.NVFP4Tensor:
        ones = torch.full((1, values.shape[1], 1), 0x38, dtype=torch.uint8)
        return fp4lt.NVFP4Tensor.from_linear_scales(
            torch.from_numpy(oracle.pack(values)), ones, torch.tensor(1.0)
        )

    weights = fp4lt.MoEWeights(stored(codes), stored(identity), **options)
    hidden = torch.zeros(1, 16, dtype=dtype)
    hidden[0, 0], hidden[0, 1] = gate, up
    routing = cases.Routing(torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.int32))
    return Case(hidden, weights, routing, "w4a16")


def sigmoid(x: float) -> float:
    return 1 / (1 + float(np.exp(-x)))


@EVERYWHERE
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("limit", [7.0, 10.0, None])
@pytest.mark.parametrize("activation", ["silu", "swigluoai"])
def test_row_33_the_clamp_counts(
    machine: Machine, activation: Any, limit: float | None, dtype: torch.dtype
) -> None:
    """Row 33 (sglang #28092, #28326, #39920, #39939): the clamp of gate and up was dropped."""
    case = one_expert(20, -20, dtype, order="gate_up", activation=activation, swiglu_limit=limit)
    edge = limit or (7.0 if activation == "swigluoai" else 20.0)
    alpha, beta = (1.702, 1.0) if activation == "swigluoai" else (1.0, 0.0)
    u = edge * sigmoid(alpha * edge) * (-edge + beta)
    want = torch.from_numpy(bounds.round_to(np.full((1, 16), u), dtype)).to(dtype)
    same(machine.run(case), want)
    machine.check(case)


@EVERYWHERE
@pytest.mark.parametrize("order", ["gate_up", "up_gate"])
def test_row_42_order_of_gate_and_up(machine: Machine, order: str) -> None:
    """Row 42 (sglang #32430, #39388): w13's halves were taken in the other order.

    silu(1) * 2 and silu(2) * 1 tell; and nobody guesses the order.
    """
    case = one_expert(1, 2, torch.bfloat16, order=order)
    want = 1 * sigmoid(1) * 2 if order == "gate_up" else 2 * sigmoid(2) * 1
    same(machine.run(case), torch.full((1, 16), want, dtype=torch.bfloat16))
    with pytest.raises(errors.ArgumentError, match="where is the gate"):
        case.with_weights(order=None)


@EVERYWHERE
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_row_43_router_weight_on_the_input(machine: Machine, dtype: str) -> None:
    """Row 43 (sglang #34192, #35504; vllm #43694): a router weight meant for the input was refused,
    or applied twice.  Through a square, .5 on the input is .25, and on the output .5."""
    case = make(f"w4a16 ungated relu2 E4 k1 T9 {dtype}")
    half = torch.full_like(case.routing.topk_weights, 0.5)
    weights = [torch.ones_like(half), half]
    once, output = (
        machine.run(case._replace(routing=case.routing._replace(topk_weights=r))) for r in weights
    )
    case = case._replace(routing=case.routing._replace(topk_weights=half), on_input=True)
    if dtype == "bf16":  # whose exponents have room for the factors
        same(output, once * 0.5)
        same(machine.run(case), once * 0.25)
    machine.check(case)
    two = make("k2 T9")._replace(on_input=True)
    with pytest.raises(errors.ArgumentError, match="router_weight_on_input is for top-1"):
        machine.run(two)


def test_row_46_sizes_that_do_not_fit() -> None:
    """Row 46 (sglang #29562): expert weights of 3072 met a 6144 of the shared expert, deep inside.

    Refused at construction, and at the call, with both numbers.
    """
    rng = cases.generator(46)
    w13 = nvfp4(cases.exact_operand(rng, (1, 32, 3072)))
    wrong = nvfp4(cases.exact_operand(rng, (1, 6144, 16)))
    with pytest.raises(errors.ShapeError, match=r"H=3072 but w2 \(1, 6144, 16\) has H=6144"):
        fp4lt.MoEWeights(w13, wrong, order="gate_up")
    right = nvfp4(cases.exact_operand(rng, (1, 3072, 16)))
    weights = fp4lt.MoEWeights(w13, right, order="gate_up")
    hidden, ids = torch.zeros(2, 6144), torch.zeros(2, 1, dtype=torch.int32)
    with pytest.raises(errors.ShapeError, match=r"shape \(2, 6144\).*H=3072"):
        fp4lt.moe(hidden, weights, topk_weights=torch.ones(2, 1), topk_ids=ids)
    with pytest.raises(errors.ShapeError, match="K=6144 but weights have K=3072"):
        fp4lt.grouped_mm(hidden, w13.mT, offs=torch.tensor([2]))
