# SPDX-License-Identifier: Apache-2.0
"""ModelOpt NVFP4 checkpoints."""

from __future__ import annotations

from typing import Any

from sglang.srt.layers.moe.moe_runner import MoeRunner, MoeRunnerConfig
from sglang.srt.layers.moe.utils import resolve_moe_runner_backend
from sglang.srt.layers.quantization import modelopt_quant
from sglang.srt.runtime_context import override_platform

from fp4lt.integrations.sglang.layer import bind, keep_scale, tile_in_place
from fp4lt.integrations.sglang.names import in_force
from fp4lt.integrations.sglang.runner import Fp4ltQuantInfo
from fp4lt.integrations.weights import Stack, shared_scale
from fp4lt.problem import Order


# Its base's name, since SGLang's loader asks for parts of it.
class ModelOptNvFp4FusedMoEMethod(modelopt_quant.ModelOptNvFp4FusedMoEMethod):
    """SGLang's method, with our weights, runner and call where our backend was asked for.

    Where it was not, everything is SGLang's.
    """

    def __init__(self, quant_config: Any) -> None:
        self._fp4lt = in_force()
        if self._fp4lt is None:
            super().__init__(quant_config)
            return
        # SGLang refuses GPUs without FP4 tensor cores here; we need none.
        with override_platform(is_blackwell=True):
            super().__init__(quant_config)

    @property
    def served_by_fp4lt(self) -> bool:
        """Whether this layer is ours."""
        return self._fp4lt is not None

    @property
    def load_up_proj_weight_first(self) -> bool:
        """Which half of w13 the loader fills with up: ours is the second, as in checkpoints."""
        return self._fp4lt is None and bool(super().load_up_proj_weight_first)

    def create_moe_runner(self, layer: Any, moe_runner_config: MoeRunnerConfig) -> None:
        """Make the runner; refuses a layer that we cannot serve."""
        if self._fp4lt is None:
            super().create_moe_runner(layer, moe_runner_config)
            return
        self.moe_runner_config = moe_runner_config
        self._moe_runner_backend = resolve_moe_runner_backend(self._fp4lt)
        self.runner = MoeRunner(self._moe_runner_backend, moe_runner_config)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Tile the scales and bind everything; the codes stay where and as they were loaded."""
        if self._fp4lt is None:
            super().process_weights_after_loading(layer)
            return
        dynamic = bool(self.quant_config.use_per_token_activation)
        scales = [
            None if dynamic else keep_scale(layer, f"fp4lt_{name}", shared_scale(stored.data))
            for name, stored in (
                ("a1_scale", layer.w13_input_scale),
                ("a2_scale", layer.w2_input_scale),
            )
        ]
        layer.fp4lt_quant_info = bind(
            layer,
            self._fp4lt,
            "ModelOpt",
            Stack(
                layer.w13_weight,
                tile_in_place(layer, "w13_weight_scale", "w13_blockscale_swizzled"),
                layer.w13_weight_scale_2,
            ),
            Stack(
                layer.w2_weight,
                tile_in_place(layer, "w2_weight_scale", "w2_blockscale_swizzled"),
                layer.w2_weight_scale_2,
            ),
            order=_order(layer),
            a1_scale=scales[0],
            a2_scale=scales[1],
            weight_only=bool(getattr(self.quant_config, "is_w4a16", False)),
        )
        layer.dispatcher.set_quant_config({"input_global_scale": None})

    def apply(self, layer: Any, dispatch_output: Any) -> Any:
        """Run the experts."""
        if self._fp4lt is None:
            return super().apply(layer, dispatch_output)
        info: Fp4ltQuantInfo = layer.fp4lt_quant_info
        return self.runner.run(dispatch_output, info)


def _order(layer: Any) -> Order | None:
    if not layer.moe_runner_config.is_gated:
        return None
    # Such a layer's rows come in pairs, which we take as they are.
    interleaved = getattr(layer, "inference_moe_w13_interleaved", False)
    return "interleaved" if interleaved else "gate_up"
