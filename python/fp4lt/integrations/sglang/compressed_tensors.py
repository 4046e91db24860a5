# SPDX-License-Identifier: Apache-2.0
"""compressed-tensors NVFP4 checkpoints (nvfp4-pack-quantized), with and without activations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.layers.moe.moe_runner import MoeRunner, MoeRunnerConfig
from sglang.srt.layers.moe.utils import resolve_moe_runner_backend
from sglang.srt.layers.quantization.compressed_tensors.schemes import (
    compressed_tensors_w4a4_nvfp4_moe as w4a4,
)
from sglang.srt.layers.utils.common import copy_or_rebind_param

from fp4lt.errors import UnsupportedError
from fp4lt.integrations.sglang.layer import bind, keep_scale, tile_in_place
from fp4lt.integrations.sglang.limits import describe
from fp4lt.integrations.sglang.names import in_force
from fp4lt.integrations.weights import Stack, check_positive

_GLOBALS = ("w13_weight_global_scale", "w2_weight_global_scale")
_INPUTS = ("w13_input_global_scale", "w2_input_global_scale")


class CompressedTensorsNvfp4MoE(w4a4.CompressedTensorsW4A4Nvfp4MoE):
    """SGLang's parameters of such a layer, with our weights, runner and call.

    Unlike its base, it keeps every parameter that it loads, so that weights can be loaded again.
    """

    requires_blackwell = False
    served_by_fp4lt = True

    def __init__(self, name: str, *, weight_only: bool) -> None:
        super().__init__()
        self._fp4lt = name
        self._weight_only = weight_only

    @classmethod
    def get_min_capability(cls) -> int:
        """The oldest GPU that some backend of ours computes on."""
        return 80

    @property
    def load_up_proj_weight_first(self) -> bool:
        """Which half of w13 the loader fills with up: ours is the second, as in checkpoints."""
        return False

    def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
        """Make the parameters; global scales start at 0, which no checkpoint has."""
        super().create_weights(layer, *args, **kwargs)
        for name in (*_GLOBALS, *_INPUTS):
            getattr(layer, name).data.zero_()

    def create_moe_runner(self, layer: Any, moe_runner_config: MoeRunnerConfig) -> None:
        """Make the runner; refuses a layer that we cannot serve."""
        if not moe_runner_config.is_gated:
            raise UnsupportedError(
                f"fp4lt cannot serve {describe(layer)}: SGLang loads compressed-tensors NVFP4 "
                "experts only with a gate, and this layer has none"
            )
        self.moe_runner_config = moe_runner_config
        backend = resolve_moe_runner_backend(self._fp4lt)
        self.runner = MoeRunner(backend, moe_runner_config)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Tile the scales and bind everything; the codes stay where and as they were loaded."""
        for name in _GLOBALS:
            check_positive(f"{describe(layer)}: {name}", getattr(layer, name))
            # The format stores divisors; gate's and up's stay apart.
            multiplier = getattr(layer, name).data.reciprocal()
            copy_or_rebind_param(layer, name.replace("_global_scale", "_scale_2"), multiplier)
        a1, a2 = (_input_scale(getattr(layer, name).data) for name in _INPUTS)
        # Other parts of SGLang ask for the codes by these names.
        layer.w13_weight, layer.w2_weight = layer.w13_weight_packed, layer.w2_weight_packed
        layer.fp4lt_quant_info = bind(
            layer,
            self._fp4lt,
            "compressed-tensors",
            Stack(
                layer.w13_weight_packed,
                tile_in_place(layer, "w13_weight_scale", "w13_blockscale_swizzled"),
                layer.w13_weight_scale_2,
            ),
            Stack(
                layer.w2_weight_packed,
                tile_in_place(layer, "w2_weight_scale", "w2_blockscale_swizzled"),
                layer.w2_weight_scale_2,
            ),
            order="gate_up",
            a1_scale=keep_scale(layer, "fp4lt_a1_scale", a1),
            a2_scale=keep_scale(layer, "fp4lt_a2_scale", a2),
            weight_only=self._weight_only,
        )

    def apply_weights(self, layer: Any, dispatch_output: Any) -> Any:
        """Run the experts."""
        return self.runner.run(dispatch_output, layer.fp4lt_quant_info)


def _input_scale(divisors: torch.Tensor) -> torch.Tensor | None:
    """Multipliers (E,) of divisors (E, 2) or (E,); gate and up share x, so the larger holds both.

    None if the checkpoint has none, or not for every expert.
    """
    if not bool((divisors > 0).all()):
        return None
    return divisors.reshape(divisors.shape[0], -1).amin(dim=1).reciprocal()


def choose_scheme(
    original: Callable[..., Any], config: Any, layer: Any, layer_name: str | None = None
) -> Any:
    """Around ``CompressedTensorsConfig.get_moe_scheme``: our scheme for NVFP4 experts.

    SGLang itself would choose by compute capability, and Marlin before Blackwell.
    """
    name = in_force()
    if name is not None:
        # SGLang's own first step: what targets "Linear" is meant for experts too.
        config._add_fused_moe_to_target_scheme_map()
        found = [
            config.get_scheme_dict(layer, f"{layer_name}.0.{projection}")
            for projection in ("gate_proj", "up_proj", "down_proj")
        ]
        if found[0] is not None and all(scheme == found[0] for scheme in found):
            kinds = found[0].get("weights"), found[0].get("input_activations")
            if config._is_fp4a4_nvfp4(*kinds):
                return CompressedTensorsNvfp4MoE(name, weight_only=False)
            if config._is_fp4a16_nvfp4(*kinds):
                return CompressedTensorsNvfp4MoE(name, weight_only=True)
    return original(config, layer, layer_name)
