# SPDX-License-Identifier: Apache-2.0
"""vLLM's modular experts on :func:`fp4lt.moe`."""

from __future__ import annotations

import logging
from typing import Any, Final

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP
from vllm.model_executor.layers.quantization.utils.quant_utils import kNvfp4Dynamic, kNvfp4Static
from vllm.platforms import current_platform

from fp4lt.backends import choose
from fp4lt.block import moe
from fp4lt.errors import Error
from fp4lt.formats import BLOCK
from fp4lt.integrations.options import Options, choose_recipe, fall_back
from fp4lt.integrations.vllm.plugin import offer
from fp4lt.integrations.weights import Block, Stack, build_weights, check_positive, plan_block
from fp4lt.problem import Activation, MoEProblem, Order

logger = logging.getLogger(__name__)

_PLAIN: Final[dict[str, Activation]] = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_tanh": "gelu_tanh",
    "relu2": "relu2",
}
ACTIVATIONS: Final[dict[str, Activation]] = {
    **_PLAIN,
    **{f"{name}_no_mul": ours for name, ours in _PLAIN.items()},
    "swigluoai_uninterleave": "swigluoai",
}
"""vLLM's names of activations, and ours.  Its plain "swigluoai" means interleaved rows, which the
preparation of these backends tears apart."""
REQUESTS: Final = ("flashinfer_cutlass", "cutlass")
_reported: set[str] = set()


class Fp4ltExperts(mk.FusedMoEExpertsModular):
    """NVFP4 experts whose weights vLLM prepared for one of its CUTLASS backends.

    Tokens come in 16 bits.  Memory between the two products is torch's, so vLLM's workspaces are
    left empty, but for the output.
    """

    ORDER: Order = "gate_up"
    """Where w13, as prepared, has its gate."""

    _block: Block | None = None

    # ---- what vLLM asks before it takes us

    @staticmethod
    def is_supported_config(
        cls: type[mk.FusedMoEExperts],
        moe_config: Any,
        weight_key: Any,
        activation_key: Any,
        activation_format: Any,
    ) -> tuple[bool, str | None]:
        """Whether a layer is for us; a refusal of an explicit request is logged, or an error."""
        asked = moe_config.moe_backend in REQUESTS
        if not asked and offer() != "auto":
            return False, "fp4lt was not asked for by --moe-backend"
        supported, reason = mk.FusedMoEExpertsModular.is_supported_config(
            cls, moe_config, weight_key, activation_key, activation_format
        )
        if supported:
            reason = refusal(moe_config)
        if reason is None:
            return True, None
        if asked:
            fall_back(logger, f"fp4lt does not serve this layer: {reason}; vLLM's own kernels do")
        return False, reason

    @staticmethod
    def _supports_current_device() -> bool:
        return bool(current_platform.is_cuda() and current_platform.has_device_capability(80))

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return True

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        return (weight_key, activation_key) == (kNvfp4Static, kNvfp4Dynamic)

    @staticmethod
    def _supports_activation(activation: Any) -> bool:
        return activation.value in ACTIVATIONS

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: Any) -> bool:
        c = moe_parallel_config
        return not c.use_all2all_kernels or bool(c.use_ag_rs_all2all_kernels)

    @staticmethod
    def _supports_batch_invariance() -> bool:
        return True

    @staticmethod
    def activation_format() -> Any:
        """Tokens as they are, not in batches by expert."""
        return mk.FusedMoEActivationFormat.Standard

    @property
    def expects_unquantized_inputs(self) -> bool:
        """Tokens in 16 bits."""
        return True

    # ---- weights

    def process_weights_after_loading(self, layer: Any) -> None:
        """Bind the prepared weights, choose the backend, and log once what serves the layer.

        vLLM's own experts multiply input scales into the weights' global scales here; we keep the
        two apart.
        """
        config, scales = self.moe_config, self.quant_config
        swiglu: dict[str, Any] = {}
        if config.activation == MoEActivation.SWIGLUOAI_UNINTERLEAVE:
            swiglu = {
                "swiglu_alpha": scales.gemm1_alpha,
                "swiglu_beta": scales.gemm1_beta,
                "swiglu_limit": scales.gemm1_clamp_limit,
            }
        elif config.activation == MoEActivation.SILU:
            swiglu = {"swiglu_limit": scales.gemm1_clamp_limit}
        w13_scale_2 = _both_columns(layer, layer.w13_weight_scale_2)
        check_positive("global scales of w13", w13_scale_2)
        check_positive("global scales of w2", layer.w2_weight_scale_2)
        weights = build_weights(
            Stack(layer.w13_weight, layer.w13_weight_scale, w13_scale_2),
            Stack(layer.w2_weight, layer.w2_weight_scale, layer.w2_weight_scale_2),
            order=self.ORDER if config.activation.is_gated else None,
            activation=ACTIVATIONS[config.activation.value],
            a1_scale=_stored(layer.w13_input_scale),
            a2_scale=_stored(layer.w2_input_scale),
            **{name: value for name, value in swiglu.items() if value is not None},
        )
        options = Options.read()
        recipe = choose_recipe(options.recipe, weights.device, weight_only=False)
        top_k, dtype = config.experts_per_token, config.in_dtype
        self._block = plan_block(weights, recipe, options.backend, top_k, dtype)
        what = f"{self._block.plan.problem} on {weights.device}"
        level = logging.DEBUG if what in _reported else logging.INFO
        _reported.add(what)
        backend = self._block.plan.backend.name
        logger.log(level, "fp4lt serves NVFP4 experts: %s by fp4lt's backend %s", what, backend)

    # ---- the call

    def workspace_shapes(
        self,
        M: int,
        N: int,
        K: int,
        topk: int,
        global_num_experts: int,
        local_num_experts: int,
        expert_tokens_meta: Any,
        activation: Any,
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """No workspace but the output, (M, K)."""
        return (0,), (0,), (M, K)

    def finalize_weight_and_reduce_impl(self) -> Any:
        """Nothing: the output has its router weights and its sum."""
        return TopKWeightAndReduceNoOP()

    def apply(
        self,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: Any,
        global_num_experts: int,
        expert_map: torch.Tensor | None,
        a1q_scale: torch.Tensor | None,
        a2_scale: torch.Tensor | None,
        workspace13: torch.Tensor | None,
        workspace2: torch.Tensor | None,
        expert_tokens_meta: Any,
        apply_router_weight_on_input: bool,
    ) -> None:
        """Write the weighted sum of the local experts to `output`, (M, K)."""
        block = self._block
        assert block is not None, "process_weights_after_loading() comes first"
        if expert_map is not None:
            local = expert_map.to(topk_ids.dtype)[topk_ids.clamp_min(0)]
            topk_ids = torch.where(topk_ids < 0, topk_ids, local)
        if apply_router_weight_on_input:
            # They are in hidden_states already.
            topk_weights = torch.ones_like(topk_weights)
        moe(
            hidden_states,
            block.weights,
            topk_weights=topk_weights,
            topk_ids=topk_ids,
            recipe=block.recipe,
            out=output,
            backend=block.plan.backend.name,
        )


class FlashInferLayoutExperts(Fp4ltExperts):
    """Weights as for FLASHINFER_CUTLASS: up above gate, one input scale for all experts."""

    ORDER: Order = "up_gate"


class CutlassLayoutExperts(Fp4ltExperts):
    """Weights as for VLLM_CUTLASS: gate above up, an input scale for each expert."""

    ORDER: Order = "gate_up"


def refusal(config: Any) -> str | None:
    """Why no backend of ours takes a layer of this configuration on the current device."""
    if config.has_bias:
        return "the experts have biases, which vLLM does not give to NVFP4 kernels"
    gated = bool(config.activation.is_gated)
    if gated and config.intermediate_size_per_partition % 64:
        return (
            f"the intermediate size per rank is {config.intermediate_size_per_partition}, and "
            "vLLM's preparation of gated weights needs a multiple of 64"
        )
    sizes = {
        "hidden size": config.hidden_dim,
        "intermediate size per rank": config.intermediate_size_per_partition,
    }
    for what, size in sizes.items():
        if size % BLOCK:
            return f"the {what} is {size}, no multiple of {BLOCK}"
    device = torch.empty(0, device=config.device).device  # with its index
    try:
        options = Options.read()
        problem = MoEProblem(
            experts=config.num_local_experts,
            hidden=config.hidden_dim,
            intermediate=config.intermediate_size_per_partition,
            top_k=config.experts_per_token,
            dtype=config.in_dtype,
            w_format="nvfp4",
            recipe=choose_recipe(options.recipe, device, weight_only=False),
            order="gate_up" if gated else None,
            activation=ACTIVATIONS[config.activation.value],
        )
        choose(problem, device, options.backend)
    except Error as error:
        return str(error)
    return None


def _both_columns(layer: Any, shared: torch.Tensor) -> torch.Tensor:
    """Gate's and up's global scales where the layer still has both, else the one it has.

    vLLM keeps gate's for both; only compressed-tensors layers still hold the stored divisors.
    """
    stored = getattr(layer, "w13_weight_global_scale", None)
    moved = getattr(layer.moe_config.moe_parallel_config, "enable_eplb", False)
    if stored is None or moved or tuple(stored.shape) != (shared.shape[0], 2):
        return shared
    both: torch.Tensor = stored.data.reciprocal()
    return both


def _stored(scale: torch.Tensor) -> torch.Tensor:
    """An input scale (E,) as MoEWeights takes it: one for all where all are equal.

    Then each token is rounded once, not once for each of its experts.
    """
    scale = scale.data
    check_positive("input scales", scale)
    return scale[0] if bool((scale == scale[0]).all()) else scale
