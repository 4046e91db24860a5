# SPDX-License-Identifier: Apache-2.0
"""What of SGLang's MoE layers fp4lt does not serve; asked once a layer, at start-up."""

from __future__ import annotations

from typing import Any, Final

from sglang.srt.layers.moe.moe_runner.base import MoeRunnerConfig
from sglang.srt.layers.moe.utils import get_moe_a2a_backend
from sglang.srt.runtime_context import get_exec, get_parallel

from fp4lt.formats import BLOCK
from fp4lt.problem import Activation

ACTIVATIONS: Final[dict[str, Activation]] = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_tanh": "gelu_tanh",
    "relu2": "relu2",
}
"""SGLang's names of activations, and ours."""


def swiglu(config: MoeRunnerConfig) -> dict[str, Any]:
    """The layer's ``swiglu_*`` of MoEWeights.

    As in SGLang, an alpha brings GPT-OSS's ``up + 1`` with it unless beta says otherwise.
    """
    alpha, beta = config.gemm1_alpha, config.gemm1_beta
    if beta is None and alpha is not None:
        beta = 1.0
    found = {
        "swiglu_alpha": alpha,
        "swiglu_beta": beta,
        "swiglu_limit": config.gemm1_clamp_limit or config.swiglu_limit,
    }
    return {name: float(value) for name, value in found.items() if value is not None}


def refusal(config: MoeRunnerConfig) -> str | None:
    """Why a layer with this configuration cannot be served, and what to do; None if it can."""
    a2a = get_moe_a2a_backend()
    if not a2a.is_none():
        return (
            f"--moe-a2a-backend {a2a.value} delivers tokens in its own layout; use the default, "
            "none, which serves tensor and expert parallelism"
        )
    if get_parallel().dwdp_size > 1:
        return "DWDP replaces the experts' weights after loading; serve without it"
    if get_exec().moe.enable_paged_experts:
        return "paged experts replace the weights while serving; drop --enable-paged-experts"
    offload = get_exec().offload
    if offload.cpu_offload_gb > 0 or offload.offload_group_size > 0:
        return (
            "offloaded weights are elsewhere when a call comes; drop --cpu-offload-gb or the groups"
        )
    if config.no_combine:
        return "no_combine asks for one row per expert and token; fp4lt returns their sum"
    return _model_refusal(config)


def _model_refusal(config: MoeRunnerConfig) -> str | None:
    if config.activation not in ACTIVATIONS:
        return f"activation {config.activation!r} is not among {', '.join(ACTIVATIONS)}"
    if swiglu(config) and (config.activation != "silu" or not config.is_gated):
        return f"gemm1_alpha, beta or a limit with activation {config.activation!r}"
    if config.apply_router_weight_on_input and config.top_k != 1:
        return f"apply_router_weight_on_input with top_k={config.top_k}; it is for top-1 only"
    if getattr(config.layer, "with_bias", False):
        return "the experts have biases, which SGLang does not load for NVFP4"
    sizes = {
        "hidden size": config.hidden_size,
        "intermediate size per rank": config.intermediate_size_per_partition,
    }
    for what, size in sizes.items():
        if size is None or size % BLOCK:
            return f"the {what} is {size}, no multiple of {BLOCK}; use another --tp-size"
    return None


def describe(layer: Any) -> str:
    """A layer's name for messages."""
    name = getattr(layer, "layer_name", "")
    return f"layer {getattr(layer, 'layer_id', '?')}" + (f" ({name})" if name else "")
