# SPDX-License-Identifier: Apache-2.0
"""fp4lt's experts in vLLM's own methods and kernel: selection, both layouts, the numbers."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from vllm_on_cpu import need_vllm

need_vllm()

from vllm.model_executor.layers.fused_moe.oracle import nvfp4
from vllm.model_executor.layers.quantization.utils.quant_utils import kNvfp4Dynamic, kNvfp4Static
from vllm_layer import (
    COMPRESSED,
    INNER,
    MODELOPT,
    Checkpoint,
    H,
    engine,
    experts,
    moe_config,
    served,
)

import fp4lt
from fp4lt.backends import cpu
from fp4lt.errors import ArgumentError, UnsupportedError
from fp4lt.integrations.interface import Target, faults
from fp4lt.integrations.vllm import plugin, register
from fp4lt.testing import bounds, cases, oracle

pytestmark = pytest.mark.filterwarnings("ignore")
KINDS = (MODELOPT, COMPRESSED)
BACKENDS = ("flashinfer_cutlass", "cutlass")


@pytest.fixture(autouse=True)
def on_this_machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """vLLM's GPU gate open: what is behind it runs on the CPU too."""
    monkeypatch.setattr(
        experts.Fp4ltExperts, "_supports_current_device", staticmethod(lambda: True)
    )
    # Its tiling of scales and its workspaces take a device for granted.
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self: self)
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    with engine():
        yield


def inputs(tokens: int = 6, top_k: int = 2, number: int = 4) -> tuple[torch.Tensor, cases.Routing]:
    rng = cases.generator(5)
    hidden = cases.random_matrix(rng, (tokens, H)) / 4
    routing = cases.ROUTERS["uniform"](rng, tokens, number, top_k)
    return hidden, routing._replace(topk_ids=routing.topk_ids.to(torch.int32))


def check(method: Any, layer: Any, weights: fp4lt.MoEWeights, ids: torch.Tensor | None) -> None:
    """The kernel's output, bit by bit that of `weights`, and their stages by the oracle."""
    recipe = method.moe_kernel.fused_experts._block.recipe
    hidden, routing = inputs(number=layer.global_num_experts)
    y = method.apply(layer, hidden, routing.topk_weights, routing.topk_ids, None, None)
    if ids is not None:
        routing = routing._replace(topk_ids=ids[routing.topk_ids.long()])
    plan = fp4lt.plan_moe(hidden, weights, top_k=2, recipe=recipe)
    trace = plan.trace(
        hidden, weights, topk_weights=routing.topk_weights, topk_ids=routing.topk_ids
    )
    depths = [cpu.depth(k, recipe) for k in (H, INNER)]
    oracle.check_moe_trace(trace, weights, hidden, *routing, recipe, *depths)
    bounds.assert_bitwise(y, trace.y)


@pytest.mark.parametrize("recipe", ["w4a4", "w4a16"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rank", [None, 0, 1], ids=["one", "ep0of2", "ep1of2"])
def test_both_layouts(
    kind: str, backend: str, recipe: str, rank: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FP4LT_SERVING_RECIPE", recipe)
    checkpoint = Checkpoint.make(split=kind == COMPRESSED)
    ranks: dict[str, Any] = {} if rank is None else {"ep_size": 2, "ep_rank": rank}
    method, layer = served(kind, moe_config(backend, **ranks), checkpoint)
    ours = experts.FlashInferLayoutExperts if "flash" in backend else experts.CutlassLayoutExperts
    assert type(method.moe_kernel.fused_experts) is ours
    mine = slice(None) if rank is None else slice(2 * rank, 2 * rank + 2)
    check(method, layer, checkpoint.weights(kind, backend, mine), layer.expert_map)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("activation", "options", "ours"),
    [
        ("gelu", {}, {"activation": "gelu"}),
        ("gelu_tanh", {}, {"activation": "gelu_tanh"}),
        ("silu", {"swiglu_limit": 0.5}, {"swiglu_limit": 0.5}),
        (
            "swigluoai_uninterleave",
            {"swiglu_alpha": 1.5, "swiglu_beta": 0.5, "swiglu_limit": 0.75},
            {
                "activation": "swigluoai",
                "swiglu_alpha": 1.5,
                "swiglu_beta": 0.5,
                "swiglu_limit": 0.75,
            },
        ),
    ],
)
def test_activations(
    backend: str, activation: str, options: dict[str, Any], ours: dict[str, Any]
) -> None:
    checkpoint = Checkpoint.make()
    config = moe_config(backend, activation=activation, **options)
    method, layer = served(MODELOPT, config, checkpoint)
    check(method, layer, checkpoint.weights(MODELOPT, backend, **ours), None)


def test_router_weights_that_are_in_the_tokens() -> None:
    checkpoint = Checkpoint.make()
    method, layer = served(MODELOPT, moe_config(top_k=1), checkpoint)
    layer.apply_router_weight_on_input = True
    hidden, routing = inputs(top_k=1)
    routing = routing._replace(topk_weights=routing.topk_weights * torch.rand(6, 1))
    y = method.apply(layer, hidden, routing.topk_weights, routing.topk_ids, None, None)
    want = fp4lt.moe(
        hidden * routing.topk_weights.to(torch.bfloat16),
        checkpoint.weights(MODELOPT, "flashinfer_cutlass"),
        topk_weights=torch.ones(6, 1),
        topk_ids=routing.topk_ids,
        recipe="w4a16",
    )
    bounds.assert_bitwise(y, want)


def test_padding_and_no_tokens() -> None:
    checkpoint = Checkpoint.make()
    method, layer = served(MODELOPT, moe_config(), checkpoint)
    hidden, routing = inputs()
    want = method.apply(layer, hidden, *routing, None, None).clone()
    ids = routing.topk_ids.clone()
    ids[3:] = -1
    hidden[3:] = float("nan")
    y = method.apply(layer, hidden, routing.topk_weights, ids, None, None)
    bounds.assert_bitwise(y[:3], want[:3])
    assert not bool(y[3:].any())
    none = [t[:0] for t in (hidden, *routing)]
    assert method.apply(layer, *none, None, None).shape == (0, H)


def test_weights_are_vllm_s_own() -> None:
    method, layer = served(MODELOPT, moe_config("cutlass"), Checkpoint.make())
    w: Any = method.moe_kernel.fused_experts._block.weights
    assert w.w13.codes is layer.w13_weight
    assert w.w2.codes is layer.w2_weight
    assert w.w13.scales.data_ptr() == layer.w13_weight_scale.data_ptr()
    assert w.w2.global_scale.data_ptr() == layer.w2_weight_scale_2.data_ptr()


# ---- selection


def select(backend: str, **options: Any) -> type:
    config = moe_config(backend, **options)
    chosen: type = nvfp4.select_nvfp4_moe_backend(config, kNvfp4Static, kNvfp4Dynamic)[1]
    return chosen


def test_everything_that_is_used_is_there() -> None:
    assert faults(plugin.TARGETS) == []


def test_the_plugin_is_registered_once() -> None:
    before = nvfp4.backend_to_kernel_cls
    register()
    assert nvfp4.backend_to_kernel_cls is before
    ours = [
        backend.value
        for backend in nvfp4.NvFp4MoeBackend
        if backend.value in ("FLASHINFER_CUTLASS", "VLLM_CUTLASS", "MARLIN")
        and issubclass(before(backend)[0], experts.Fp4ltExperts)
    ]
    assert sorted(ours) == ["FLASHINFER_CUTLASS", "VLLM_CUTLASS"]
    # vLLM's own stay behind ours.
    assert len(before(nvfp4.NvFp4MoeBackend.VLLM_CUTLASS)) == 2


def test_auto_is_vllm_s_unless_it_is_given_away(monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen() -> type | None:
        try:
            return select("auto")
        except NotImplementedError:  # on a CPU none of vLLM's own may be left
            return None

    for offer in ("explicit", ""):
        monkeypatch.setenv("FP4LT_VLLM", offer)
        found = chosen()
        assert found is None or not issubclass(found, experts.Fp4ltExperts)
    monkeypatch.setenv("FP4LT_VLLM", "auto")
    assert chosen() is experts.FlashInferLayoutExperts
    monkeypatch.setenv("FP4LT_VLLM", "perhaps")
    with pytest.raises(ArgumentError, match="it must be explicit, auto or off"):
        plugin.offer()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"activation": "swigluoai"}, "activation"),
        ({"activation": "situ"}, "activation"),
        ({"has_bias": True}, "the experts have biases"),
        ({"is_lora_enabled": True}, "LoRA"),
        ({"intermediate_size": 96}, "needs a multiple of 64"),
        ({"hidden_dim": 120}, "hidden size is 120"),
    ],
)
def test_refusals_are_loud(
    options: dict[str, Any],
    reason: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with caplog.at_level(logging.WARNING), pytest.raises(ValueError, match="does not support"):
        select("cutlass", **options)
    (record,) = [r for r in caplog.records if r.name == experts.logger.name]
    assert "fp4lt does not serve this layer" in record.message
    assert reason in record.message
    monkeypatch.setenv("FP4LT_REQUIRE", "1")
    with pytest.raises(UnsupportedError, match="FP4LT_REQUIRE=1"):
        select("cutlass", **options)


def test_other_all_to_alls_are_refused() -> None:
    class Parallel:
        use_all2all_kernels = True
        use_ag_rs_all2all_kernels = False

    assert not experts.Fp4ltExperts._supports_parallel_config(Parallel())
    Parallel.use_ag_rs_all2all_kernels = True
    assert experts.Fp4ltExperts._supports_parallel_config(Parallel())


def test_another_vllm_is_refused(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugin, "WINDOW", ("0.1", "0.2"))
    with caplog.at_level(logging.ERROR):
        register()
    assert "fp4lt is not offered: vllm 0.33.0 is outside >=0.1,<0.2" in caplog.text
    monkeypatch.setenv("FP4LT_REQUIRE", "1")
    with pytest.raises(UnsupportedError, match="outside"):
        register()
    monkeypatch.setenv("FP4LT_ANY_VERSION", "1")
    register()
    monkeypatch.setattr(plugin, "TARGETS", (Target(f"{plugin.MODULAR}.gone"),))
    with pytest.raises(UnsupportedError, match="does not look as fp4lt expects"):
        register()
    monkeypatch.setenv("FP4LT_VLLM", "off")
    register()
