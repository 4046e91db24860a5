# SPDX-License-Identifier: Apache-2.0
"""vLLM's own NVFP4 MoE methods on the CPU: selection, weight preparation and modular kernel.

The layer that holds the parameters is a stand-in for RoutedExperts, whose constructor needs a
distributed engine; the parameters are filled as its loader fills them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
import warnings
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch

import fp4lt
from fp4lt.testing import cases

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from vllm.plugins import load_general_plugins

    load_general_plugins()

    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import (
        FusedMoEConfig,
        FusedMoEParallelConfig,
        RoutingMethodType,
    )
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
        compressed_tensors_moe_w4a4_nvfp4 as compressed,
    )
    from vllm.model_executor.layers.quantization.modelopt import (
        ModelOptNvFp4Config,
        ModelOptNvFp4FusedMoE,
    )
    from vllm.v1.worker.workspace import init_workspace_manager

    from fp4lt.integrations.vllm import experts

__all__ = ["engine", "experts"]

MODELOPT, COMPRESSED = "modelopt", "compressed_tensors"
H, INNER = 128, 64


@lru_cache
def _groups() -> None:
    with tempfile.NamedTemporaryFile() as file:
        init_distributed_environment(1, 0, f"file://{file.name}", 0, "gloo")
        initialize_model_parallel()
    init_workspace_manager(torch.device("cpu"))


@contextlib.contextmanager
def engine() -> Iterator[None]:
    """What vLLM's layers ask about the process that they are in."""
    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig("cpu"))):
        _groups()
        yield


def moe_config(
    backend: str = "flashinfer_cutlass",
    *,
    experts: int = 4,
    ep_size: int = 1,
    ep_rank: int = 0,
    top_k: int = 2,
    activation: str = "silu",
    **options: Any,
) -> Any:
    parallel = dataclasses.replace(
        FusedMoEParallelConfig.make_no_parallel(), ep_size=ep_size, ep_rank=ep_rank
    )
    act = MoEActivation.from_str(activation)
    fields: dict[str, Any] = {
        "num_experts": experts,
        "experts_per_token": top_k,
        "hidden_dim": H,
        "intermediate_size": INNER,
        "num_local_experts": experts // ep_size,
        "num_logical_experts": experts,
        "activation": act,
        "device": "cpu",
        "routing_method": RoutingMethodType.TopK,
        "moe_parallel_config": parallel,
        "in_dtype": torch.bfloat16,
        "moe_backend": backend,
    }
    return FusedMoEConfig(**(fields | options))


class Layer(torch.nn.Module):
    """What the methods ask of RoutedExperts."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.moe_config = config
        self.activation = config.activation
        self.global_num_experts = config.num_experts
        self.apply_router_weight_on_input = False
        self.swiglu_limit = config.swiglu_limit
        self.swiglu_alpha, self.swiglu_beta = config.swiglu_alpha, config.swiglu_beta
        parallel, local = config.moe_parallel_config, config.num_local_experts
        self.expert_map: torch.Tensor | None = None
        if parallel.ep_size > 1:
            mine = slice(parallel.ep_rank * local, (parallel.ep_rank + 1) * local)
            self.expert_map = torch.full((config.num_experts,), -1, dtype=torch.int32)
            self.expert_map[mine] = torch.arange(local, dtype=torch.int32)

    def _expert_routing_tables(self) -> None:
        return None


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """Random experts; with `split`, gate and up have global scales of their own."""

    w13: cases.Linear  # [gate; up], or one matrix without a gate
    w2: cases.Linear
    scale_2: torch.Tensor  # (E, 2) or (E, 1)
    inputs: torch.Tensor  # (E, 2): of w13, of w2

    @staticmethod
    def make(experts: int = 4, *, gated: bool = True, split: bool = False) -> Checkpoint:
        rng = cases.generator(3)

        def spread(middle: float, *shape: int) -> torch.Tensor:
            return torch.from_numpy(middle * rng.uniform(0.6, 1.4, shape)).float()

        rows = 2 * INNER if gated else INNER
        w13 = cases.random_operand(rng, (experts, rows, H))
        w2 = cases.random_operand(rng, (experts, H, INNER))
        scale = spread(2.0**-7, experts, 1).expand(-1, 2 if gated else 1).clone()
        if split:
            scale[:, 1] = spread(2.0**-9, experts)
        inputs = torch.tensor([0.0017, 0.011]) * spread(1.0, experts, 2)
        return Checkpoint(w13, w2._replace(global_scale=spread(2.0**-8, experts)), scale, inputs)

    def weights(
        self, kind: str, backend: str, mine: slice = slice(None), **options: Any
    ) -> fp4lt.MoEWeights:
        """The numbers that vLLM means by them."""
        gated = self.scale_2.shape[1] == 2
        scale, inputs, down = self.scale_2, self.inputs, self.w2.global_scale
        if kind == COMPRESSED:
            # The file has divisors, and both vLLM and we take their reciprocals.
            scale, inputs, down = (t.reciprocal().reciprocal() for t in (scale, inputs, down))
        if kind == MODELOPT and gated:
            scale = scale[:, :1].expand(-1, 2)  # vLLM keeps gate's for both
        a1, a2 = inputs[mine].mT.contiguous()
        if backend == "flashinfer_cutlass":
            whole = inputs if kind == MODELOPT else inputs[mine]
            a1, a2 = whole.amax(dim=0)
        one = torch.ones(()) if gated else scale[mine, 0].contiguous()
        if gated:
            options["gate_up_scales"] = scale[mine].contiguous()
        return fp4lt.MoEWeights(
            fp4lt.NVFP4Tensor.from_linear_scales(self.w13.codes[mine], self.w13.scales[mine], one),
            fp4lt.NVFP4Tensor.from_linear_scales(
                self.w2.codes[mine], self.w2.scales[mine], down[mine].contiguous()
            ),
            order="gate_up" if gated else None,
            a1_scale=a1,
            a2_scale=a2,
            **options,
        )


def served(kind: str, config: Any, checkpoint: Checkpoint) -> tuple[Any, Any]:
    """A method of vLLM's with the checkpoint loaded, and its layer."""
    layer = Layer(config)
    local = config.num_local_experts
    start = config.moe_parallel_config.ep_rank * local
    mine = slice(start, start + local)
    if kind == MODELOPT:
        method = ModelOptNvFp4FusedMoE(ModelOptNvFp4Config("NVFP4", True), config)
    else:
        method = compressed.CompressedTensorsW4A4Nvfp4MoEMethod(config)
    method.create_weights(
        layer, local, H, INNER, torch.bfloat16, global_num_experts=config.num_experts
    )
    columns = checkpoint.scale_2.shape[1]
    given = checkpoint.inputs[:, :1].expand(-1, columns), checkpoint.inputs[:, 1]
    values = {
        "w13_weight_scale": checkpoint.w13.scales[mine],
        "w2_weight_scale": checkpoint.w2.scales[mine],
    }
    if kind == MODELOPT:
        every = slice(None) if method.use_global_sf else mine
        values |= {
            "w13_weight": checkpoint.w13.codes[mine],
            "w2_weight": checkpoint.w2.codes[mine],
            "w13_weight_scale_2": checkpoint.scale_2[mine],
            "w2_weight_scale_2": checkpoint.w2.global_scale[mine],
            "w13_input_scale": given[0][every],
            "w2_input_scale": given[1][every],
        }
    else:
        values |= {
            "w13_weight_packed": checkpoint.w13.codes[mine],
            "w2_weight_packed": checkpoint.w2.codes[mine],
            "w13_weight_global_scale": checkpoint.scale_2[mine].reciprocal(),
            "w2_weight_global_scale": checkpoint.w2.global_scale[mine].reciprocal(),
            "w13_input_global_scale": given[0][mine].reciprocal(),
            "w2_input_global_scale": given[1][mine].reciprocal(),
        }
    for name, value in values.items():
        parameter = getattr(layer, name)
        assert parameter.shape == value.shape, name
        parameter.data.copy_(value)
    method.process_weights_after_loading(layer)
    return method, layer
