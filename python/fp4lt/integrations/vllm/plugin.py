# SPDX-License-Identifier: Apache-2.0
"""Registration with vLLM: look before touching, then stand first in line for two backends."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from typing import Any, Final

from fp4lt.errors import ArgumentError, Error, UnsupportedError
from fp4lt.integrations.interface import Target, faults, version_fault, version_of
from fp4lt.integrations.options import ANY_VERSION, Options

logger = logging.getLogger(__name__)

TESTED: Final = "0.33.0"
WINDOW: Final = (TESTED, "0.34")
OFFER: Final = "FP4LT_VLLM"
"""When fp4lt is offered: ``explicit`` (by default), ``auto`` or ``off``."""

_MOE: Final = "vllm.model_executor.layers.fused_moe"
ORACLE: Final = f"{_MOE}.oracle.nvfp4"
MODULAR: Final = f"{_MOE}.modular_kernel.FusedMoEExpertsModular"

TARGETS: Final = (
    Target(f"{ORACLE}.backend_to_kernel_cls", ("backend",)),
    Target(f"{ORACLE}.select_nvfp4_moe_backend", ("config", "weight_key", "activation_key")),
    Target(f"{ORACLE}.NvFp4MoeBackend.FLASHINFER_CUTLASS"),
    Target(f"{ORACLE}.NvFp4MoeBackend.VLLM_CUTLASS"),
    Target(
        f"{MODULAR}.is_supported_config",
        ("cls", "moe_config", "weight_key", "activation_key", "activation_format"),
    ),
    Target(f"{MODULAR}._supports_quant_scheme", ("weight_key", "activation_key")),
    Target(f"{MODULAR}._supports_activation", ("activation",)),
    Target(f"{MODULAR}._supports_parallel_config", ("moe_parallel_config",)),
    Target(f"{MODULAR}._supports_current_device", ()),
    Target(f"{MODULAR}._supports_no_act_and_mul", ()),
    Target(f"{MODULAR}._supports_batch_invariance", ()),
    Target(f"{MODULAR}.expects_unquantized_inputs"),
    Target(f"{MODULAR}.process_weights_after_loading", ("layer",)),
    Target(f"{MODULAR}.finalize_weight_and_reduce_impl", ()),
    Target(
        f"{MODULAR}.workspace_shapes",
        (
            "M",
            "N",
            "K",
            "topk",
            "global_num_experts",
            "local_num_experts",
            "expert_tokens_meta",
            "activation",
        ),
    ),
    Target(
        f"{MODULAR}.apply",
        (
            "output",
            "hidden_states",
            "w1",
            "w2",
            "topk_weights",
            "topk_ids",
            "activation",
            "global_num_experts",
            "expert_map",
            "a1q_scale",
            "a2_scale",
            "workspace13",
            "workspace2",
            "expert_tokens_meta",
            "apply_router_weight_on_input",
        ),
    ),
    Target(f"{_MOE}.topk_weight_and_reduce.TopKWeightAndReduceNoOP", ()),
    Target(f"{_MOE}.activation.MoEActivation.SWIGLUOAI_UNINTERLEAVE"),
    Target("vllm.model_executor.layers.quantization.utils.quant_utils.kNvfp4Static"),
    Target("vllm.model_executor.layers.quantization.utils.quant_utils.kNvfp4Dynamic"),
    Target("vllm.platforms.current_platform"),
)
"""All of vLLM that the adapter stands on."""


def offer() -> str:
    """When fp4lt is offered.

    Raises
    ------
    ArgumentError
        If the variable is none of "explicit", "auto", "off".
    """
    value = os.environ.get(OFFER, "").strip().lower() or "explicit"
    value = {"0": "off", "1": "auto"}.get(value, value)
    if value not in ("explicit", "auto", "off"):
        raise ArgumentError(f"{OFFER}={value!r}; it must be explicit, auto or off")
    return value


def register_plugin() -> None:
    """Wrap the oracle's table of experts; a second time does nothing.

    Raises
    ------
    UnsupportedError
        With FP4LT_REQUIRE=1, if this vLLM is outside the window or looks different.  Otherwise
        that is logged as an error, and vLLM goes on without fp4lt.
    """
    if offer() == "off":
        return
    options = Options.read()
    try:
        _check(options)
    except Error as error:
        if options.require:
            raise
        logger.error("fp4lt is not offered: %s", error)
        return
    from vllm.model_executor.layers.fused_moe.oracle import nvfp4

    if hasattr(nvfp4.backend_to_kernel_cls, "__fp4lt__"):
        return
    nvfp4.backend_to_kernel_cls = first_in_line(nvfp4.backend_to_kernel_cls)
    logger.info(
        "fp4lt is offered to vllm %s for NVFP4 experts of --moe-backend flashinfer_cutlass and "
        "cutlass%s",
        version_of("vllm"),
        ", and for auto" if offer() == "auto" else "",
    )


def _check(options: Options) -> None:
    outside = version_fault("vllm", *WINDOW)
    if outside is not None and not options.any_version:
        raise UnsupportedError(
            f"{outside}, for which this fp4lt was made (tested with {TESTED}); install a version "
            f"of one of the two that fits, or set {ANY_VERSION}=1 to try"
        )
    found = faults(TARGETS)
    if found:
        raise UnsupportedError(
            f"vllm {version_of('vllm')} does not look as fp4lt expects (tested with {TESTED}): "
            f"{'; '.join(found)}. Install vllm {TESTED}, or a newer fp4lt"
        )


def first_in_line(original: Callable[[Any], list[type]]) -> Callable[[Any], list[type]]:
    """``backend_to_kernel_cls`` with our experts before those of the two CUTLASS backends.

    vLLM takes the first that supports a layer, and prepares the weights as the backend's own
    experts want them; each of ours reads one of the two layouts.
    """
    from vllm.model_executor.layers.fused_moe.oracle.nvfp4 import NvFp4MoeBackend

    from fp4lt.integrations.vllm.experts import CutlassLayoutExperts, FlashInferLayoutExperts

    ours = {
        NvFp4MoeBackend.FLASHINFER_CUTLASS: FlashInferLayoutExperts,
        NvFp4MoeBackend.VLLM_CUTLASS: CutlassLayoutExperts,
    }

    @functools.wraps(original)
    def wrapped(backend: Any) -> list[type]:
        theirs = list(original(backend))
        return [ours[backend], *theirs] if backend in ours else theirs

    wrapped.__fp4lt__ = True  # type: ignore[attr-defined]
    return wrapped
