# SPDX-License-Identifier: Apache-2.0
"""The runner core: SGLang's dispatched tokens through :func:`fp4lt.moe`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.distributed.device_communicators.pynccl_allocator import use_symmetric_memory
from sglang.srt.layers.dp_attention import is_allocation_symmetric
from sglang.srt.layers.moe.moe_runner.base import (
    DispatchMoeRunnerCore,
    MoeQuantInfo,
    MoeRunnerConfig,
)
from sglang.srt.layers.moe.token_dispatcher.standard import StandardCombineInput
from sglang.srt.layers.moe.utils import resolve_moe_runner_backend
from sglang.srt.runtime_context import get_parallel

from fp4lt.block import moe
from fp4lt.errors import UnsupportedError
from fp4lt.integrations.sglang.limits import describe, refusal
from fp4lt.integrations.weights import Block


@dataclass
class Fp4ltQuantInfo(MoeQuantInfo):
    """What a call needs of its layer.  ``block`` is None until the weights are loaded."""

    block: Block | None = None


class Fp4ltRunnerCore(DispatchMoeRunnerCore):
    """Runs the layers of one name.

    Experts come as local ids, -1 for experts of other ranks and for padding.  The routed scaling
    factor is in the router weights already, or the model applies it: not we.

    Raises
    ------
    UnsupportedError
        For a layer that fp4lt does not serve, when it is made.
    """

    def __init__(self, config: MoeRunnerConfig, name: str) -> None:
        super().__init__(config)
        self._backend = resolve_moe_runner_backend(name)
        reason = refusal(config)
        if reason is None and not _is_ours(config.layer):
            method = type(getattr(config.layer, "quant_method", None)).__name__
            reason = f"its weights belong to {method}; fp4lt serves ModelOpt and compressed-tensors"
        if reason is not None:
            raise UnsupportedError(
                f"fp4lt cannot serve {describe(config.layer)}: {reason}, or choose another "
                "--moe-runner-backend"
            )

    @property
    def runner_backend(self) -> Any:
        """The registered name."""
        return self._backend

    def run_from_dispatch(
        self,
        dispatch_output: Any,
        quant_info: Any,
        runner_config: MoeRunnerConfig,
        hooks: Any = None,
    ) -> StandardCombineInput:
        """The weighted sum of the local experts, (T, H) in the dtype of the hidden states."""
        if hooks is not None:
            raise UnsupportedError("fp4lt does not run LoRA adapters on experts")
        if dispatch_output.hidden_states_scale is not None:
            raise UnsupportedError(
                "fp4lt takes hidden states in 16 bits, but the dispatcher has quantized them; add "
                "--disable-flashinfer-cutlass-moe-fp4-allgather"
            )
        topk = dispatch_output.topk_output
        if not hasattr(topk, "topk_ids"):
            topk = topk.to_standard()
        hidden, block = dispatch_output.hidden_states, quant_info.block
        with use_symmetric_memory(get_parallel().tp_group, disabled=not is_allocation_symmetric()):
            out = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)
        moe(
            hidden,
            block.weights,
            topk_weights=topk.topk_weights,
            topk_ids=topk.topk_ids,
            recipe=block.recipe,
            router_weight_on_input=runner_config.apply_router_weight_on_input,
            out=out,
            backend=block.plan.backend.name,
        )
        return StandardCombineInput(hidden_states=out)


def _is_ours(layer: Any) -> bool:
    return any(
        getattr(owner, "served_by_fp4lt", False)
        for owner in (getattr(layer, "quant_method", None), getattr(layer, "scheme", None))
    )
