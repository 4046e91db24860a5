# SPDX-License-Identifier: Apache-2.0
"""SGLang's FusedMoE on fp4lt: every rank's output, bit by bit, and its stages by the oracle."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from sglang_on_cpu import need_sglang

need_sglang()

from safetensors.torch import load_file
from sglang_layer import (
    COMPRESSED,
    DATA,
    MODELOPT,
    PLACES,
    Checkpoint,
    Place,
    build,
    check,
    forward,
    inputs,
    load,
    quant_config,
    served,
    server,
)

import fp4lt
from fp4lt.testing import bounds, cases

pytestmark = pytest.mark.filterwarnings("ignore")

KINDS = (MODELOPT, COMPRESSED)
BACKENDS = ("fp4lt_w4a4", "fp4lt_w4a16")


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["modelopt", "modelopt_split", "compressed_tensors"])
def test_real_checkpoints(name: str, backend: str, place: Place) -> None:
    """Files that the formats' own tools wrote, read by SGLang's loader and by load_moe."""
    kind = COMPRESSED if name == COMPRESSED else MODELOPT
    weights = fp4lt.load_moe(DATA / name, **place._asdict())
    if kind == MODELOPT:
        every = fp4lt.load_moe(DATA / name)
        assert isinstance(every.a1_scale, torch.Tensor)
        assert isinstance(every.a2_scale, torch.Tensor)
        # SGLang shares ModelOpt's input scales among all experts of all ranks.
        weights = dataclasses.replace(
            weights, a1_scale=every.a1_scale.amax(), a2_scale=every.a2_scale.amax()
        )
    tensors = load_file(DATA / name / "model.safetensors")
    tensors = {key: t for key, t in tensors.items() if ".experts." in key}
    with server(backend, place):
        layer = build(quant_config(kind), 8, 256, 128)
        load(layer, tensors, 8)
        for router in ("uniform", "missing", "duplicates"):
            check(layer, weights, *inputs(9, 256, 8, router=router))


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_shapes_that_need_padding(kind: str, backend: str, place: Place) -> None:
    """I of 48 a rank, which SGLang's own NVFP4 paths refuse, and H of 80: scales need padding."""
    checkpoint = Checkpoint.make(kind, 4, 80, 48 * place.tp_size)
    with server(backend, place):
        layer = served(checkpoint)
        check(layer, checkpoint.weights(place), *inputs(7, 80, 4))


@pytest.mark.parametrize("kind", KINDS)
def test_expert_parallel_ranks_add_up(kind: str) -> None:
    checkpoint = Checkpoint.make(kind, 8, 128, 64)
    hidden, routing = inputs(6, 128, 8)
    parts = []
    for rank in (0, 1):
        with server("fp4lt_w4a16", Place(2, rank)):
            parts.append(forward(served(checkpoint), hidden, routing).double())
    whole = fp4lt.moe(hidden, checkpoint.weights(), recipe="w4a16", **routing._asdict()).double()
    # Each part and the whole are rounded to bf16 once: 2^-8 of each.
    limit = 2.0**-8 * (parts[0].abs() + parts[1].abs() + whole.abs()) + 2.0**-20
    assert bool(((parts[0] + parts[1] - whole).abs() <= limit).all())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", [Place(), Place(2, 1)], ids=str)
def test_padding_rows(kind: str, place: Place) -> None:
    """No token; rows of -1; rows of NaN, which must not reach others; int64 ids, bf16 weights."""
    checkpoint = Checkpoint.make(kind, 4, 128, 64)
    hidden, routing = inputs(6, 128, 4)
    for recipe in BACKENDS:
        with server(recipe, place):
            layer = served(checkpoint)
            want = forward(layer, hidden, routing)

            none = cases.Routing(*(t[:0] for t in routing))
            assert forward(layer, hidden[:0], none).shape == (0, 128)

            ids = routing.topk_ids.clone()
            ids[4:] = -1
            dirty = hidden.clone()
            dirty[4:] = float("nan")
            y = forward(layer, dirty, routing._replace(topk_ids=ids))
            bounds.assert_bitwise(y[:4], want[:4])
            assert not y[4:].any()

            weights = routing.topk_weights.to(torch.bfloat16)
            other = cases.Routing(weights, routing.topk_ids.to(torch.int64))
            check(layer, checkpoint.weights(place), hidden, other)


def test_activations_and_limits() -> None:
    checkpoint = Checkpoint.make(MODELOPT, 4, 128, 64)
    hidden, routing = inputs(6, 128, 4)
    settings: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"activation": "gelu"}, {"activation": "gelu"}),
        ({"activation": "gelu_tanh"}, {"activation": "gelu_tanh"}),
        ({"gemm1_clamp_limit": 0.5}, {"swiglu_limit": 0.5}),
        ({"swiglu_limit": 0.25}, {"swiglu_limit": 0.25}),
        (
            {"gemm1_alpha": 1.702, "gemm1_clamp_limit": 0.5},
            {"swiglu_alpha": 1.702, "swiglu_beta": 1.0, "swiglu_limit": 0.5},
        ),
        (
            {"gemm1_alpha": 1.5, "gemm1_beta": 0.25, "gemm1_clamp_limit": 0.5},
            {"swiglu_alpha": 1.5, "swiglu_beta": 0.25, "swiglu_limit": 0.5},
        ),
    ]
    for options, ours in settings:
        for backend in BACKENDS:
            with server(backend):
                layer = served(checkpoint, **options)
                check(layer, checkpoint.weights(**ours), hidden, routing)


@pytest.mark.parametrize("place", [Place(), Place(1, 0, 2, 1)], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_without_a_gate(backend: str, place: Place) -> None:
    checkpoint = Checkpoint.make(MODELOPT, 4, 128, 96)
    with server(backend, place):
        layer = served(checkpoint, gated=False, activation="relu2")
        weights = checkpoint.weights(place, gated=False, activation="relu2")
        check(layer, weights, *inputs(6, 128, 4))


@pytest.mark.parametrize("place", [Place(), Place(2, 0), Place(2, 1)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_fused_shared_experts(kind: str, place: Place) -> None:
    """A shared expert is the last slot of every rank's table, and a column of the routing."""
    checkpoint = Checkpoint.make(kind, 5, 128, 64)
    hidden, routing = inputs(6, 128, 4)
    extra = torch.full((6, 1), 4, dtype=torch.int32)
    shared = cases.Routing(
        torch.cat([routing.topk_weights, torch.full((6, 1), 0.75)], dim=1),
        torch.cat([routing.topk_ids, extra], dim=1),
    )
    count = 4 // place.ep_size
    mine = [*range(place.ep_rank * count, (place.ep_rank + 1) * count), 4]
    local = dataclasses.replace(
        checkpoint,
        gate=[checkpoint.gate[e] for e in mine],
        up=[checkpoint.up[e] for e in mine],
        down=[checkpoint.down[e] for e in mine],
        input_scales=checkpoint.input_scales[mine],
    )
    to_local = torch.full((5,), -1, dtype=torch.int32)
    to_local[mine] = torch.arange(len(mine), dtype=torch.int32)
    with server("fp4lt_w4a16", place):
        layer = served(checkpoint, num_fused_shared_experts=1, top_k=3)
        y = forward(layer, hidden, shared)
    want = fp4lt.moe(
        hidden,
        local.weights(),
        topk_weights=shared.topk_weights,
        topk_ids=to_local[shared.topk_ids.long()],
        recipe="w4a16",
    )
    bounds.assert_bitwise(y, want)


def test_router_weight_on_input() -> None:
    checkpoint = Checkpoint.make(MODELOPT, 4, 128, 64)
    for backend in BACKENDS:
        with server(backend):
            layer = served(checkpoint, top_k=1, apply_router_weight_on_input=True)
            check(layer, checkpoint.weights(), *inputs(6, 128, 4, top_k=1))


def test_the_routed_scaling_factor_is_left_to_sglang() -> None:
    for kind, fused in ((MODELOPT, True), (COMPRESSED, False)):
        checkpoint = Checkpoint.make(kind, 4, 128, 64)
        with server("fp4lt_w4a16"):
            layer = served(checkpoint, routed_scaling_factor=2.5)
            # Where it is fused, the router's weights have it; else the model multiplies.
            assert layer.should_fuse_routed_scaling_factor_in_topk is fused
            check(layer, checkpoint.weights(), *inputs(6, 128, 4))


@pytest.mark.parametrize("kind", KINDS)
def test_without_stored_input_scales(kind: str) -> None:
    """Each row then derives its own; SGLang's filling of 1 is not taken for a scale."""
    checkpoint = Checkpoint.make(kind, 4, 128, 64)
    with server("fp4lt_w4a4"):
        layer = served(checkpoint, stored_inputs=False)
        check(layer, checkpoint.weights(inputs=False), *inputs(6, 128, 4))


def test_activation_scales_per_token() -> None:
    checkpoint = Checkpoint.make(MODELOPT, 4, 128, 64)
    config = quant_config(MODELOPT)
    config.use_per_token_activation = True
    with server("fp4lt_w4a4"):
        layer = served(checkpoint, config=config)
        check(layer, checkpoint.weights(inputs=False), *inputs(6, 128, 4))


def test_weight_only_checkpoints_stay_weight_only() -> None:
    modelopt = quant_config(MODELOPT)
    modelopt.is_w4a16 = True
    compressed = quant_config(COMPRESSED)
    for scheme in compressed.target_scheme_map.values():
        scheme["input_activations"] = None
    for kind, config in ((MODELOPT, modelopt), (COMPRESSED, compressed)):
        checkpoint = Checkpoint.make(kind, 4, 128, 64)
        with server("fp4lt"):
            layer = served(checkpoint, config=config, stored_inputs=False)
            assert layer.fp4lt_quant_info.block.recipe == "w4a16"
            check(layer, checkpoint.weights(inputs=False), *inputs(6, 128, 4))


@pytest.mark.parametrize("size", [(128, 64), (80, 48)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_weights_can_be_loaded_again(kind: str, size: tuple[int, int]) -> None:
    """As an update from disk does; captured graphs hold addresses, so none may change."""
    first, second = (Checkpoint.make(kind, 4, *size, seed=s) for s in (3, 4))
    hidden, routing = inputs(6, size[0], 4)
    with server("fp4lt_w4a4"):
        layer = served(first)
        check(layer, first.weights(), hidden, routing)
        before = addresses(layer)
        load(layer, second.tensors(), 4)
        assert addresses(layer) == before
        check(layer, second.weights(), hidden, routing)


def addresses(layer: Any) -> list[int]:
    w = layer.fp4lt_quant_info.block.weights
    parts = [*(getattr(m, n) for m in (w.w13, w.w2) for n in ("codes", "scales"))]
    parts += [w.w2.global_scale, w.gate_up_scales, w.a1_scale, w.a2_scale]
    return [part.data_ptr() for part in parts]


@pytest.mark.parametrize("kind", KINDS)
def test_no_second_copy_of_the_weights(kind: str) -> None:
    checkpoint = Checkpoint.make(kind, 4, 128, 64)
    with server("fp4lt_w4a16"):
        layer = build(quant_config(kind), 4, 128, 64)
        suffix = "_packed" if kind == COMPRESSED else ""
        loaded = [getattr(layer, f"{name}_weight{suffix}").data_ptr() for name in ("w13", "w2")]
        load(layer, checkpoint.tensors(), 4)
        w = layer.fp4lt_quant_info.block.weights
        assert [w.w13.codes.data_ptr(), w.w2.codes.data_ptr()] == loaded
        held = [p.untyped_storage() for p in layer.parameters()]
        storages = {storage.data_ptr(): storage.nbytes() for storage in held}
        codes = sum(p.numel() for p in (w.w13.codes, w.w2.codes))
        scales = sum(p.numel() for p in (w.w13.scales, w.w2.scales))
        assert sum(storages.values()) < codes + scales + 1024
