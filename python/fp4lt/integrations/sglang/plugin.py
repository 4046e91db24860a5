# SPDX-License-Identifier: Apache-2.0
"""Registration with SGLang: look before touching, then the names, the runner and the hooks."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from fp4lt.errors import Error, UnsupportedError
from fp4lt.integrations.interface import Target, faults, version_fault, version_of
from fp4lt.integrations.options import ANY_VERSION, REQUIRE, Options, fall_back

logger = logging.getLogger(__name__)

TESTED: Final = "0.5.23"
WINDOW: Final = (TESTED, "0.6")
"""First version with registered runner cores that the tests run with, and the first refused one."""

_MOE: Final = "sglang.srt.layers.moe"
_QUANT: Final = "sglang.srt.layers.quantization"
METHOD: Final = f"{_QUANT}.modelopt_quant.ModelOptNvFp4FusedMoEMethod"
CONFIG: Final = f"{_QUANT}.compressed_tensors.compressed_tensors.CompressedTensorsConfig"
SCHEME: Final = (
    f"{_QUANT}.compressed_tensors.schemes.compressed_tensors_w4a4_nvfp4_moe"
    ".CompressedTensorsW4A4Nvfp4MoE"
)
RUNNER: Final = f"{_MOE}.moe_runner.runner.MoeRunner"
_WEIGHTS: Final = (
    "layer",
    "num_experts",
    "hidden_size",
    "intermediate_size_per_partition",
    "params_dtype",
)

TARGETS: Final = (
    # Called.
    Target("sglang.srt.arg_groups.choices.add_moe_runner_backend_choices"),
    Target("sglang.srt.arg_groups.choices.MOE_RUNNER_BACKEND_CHOICES"),
    Target(
        "sglang.srt.plugins.hook_registry.HookRegistry.register", ("target", "hook", "hook_type")
    ),
    Target(f"{_MOE}.moe_runner.runner.register_moe_runner_core", ("backend_name", "factory")),
    Target(f"{_MOE}.utils.resolve_moe_runner_backend", ("backend",)),
    Target(f"{_MOE}.utils.get_moe_runner_backend", ()),
    Target(f"{_MOE}.utils.get_moe_a2a_backend", ()),
    Target("sglang.srt.runtime_context.override_platform", ()),
    Target("sglang.srt.runtime_context.get_parallel", ()),
    Target("sglang.srt.runtime_context.get_exec", ()),
    Target("sglang.srt.layers.dp_attention.is_allocation_symmetric", ()),
    Target(
        "sglang.srt.distributed.device_communicators.pynccl_allocator.use_symmetric_memory",
        ("group_coordinator", "disabled"),
    ),
    Target(
        "sglang.srt.layers.utils.common.alias_or_bind_derived_param",
        ("module", "source_name", "derived_name", "derived_value"),
    ),
    Target("sglang.srt.layers.utils.common.copy_or_rebind_param", ("module", "name", "new_value")),
    Target(RUNNER, ("runner_backend", "config", "lora_enabled")),
    Target(f"{RUNNER}.run", ("dispatch_output", "quant_info", "lora_info")),
    Target(f"{_MOE}.token_dispatcher.standard.StandardCombineInput", ("hidden_states",)),
    # Overridden or replaced.
    Target(
        f"{_MOE}.moe_runner.base.DispatchMoeRunnerCore.run_from_dispatch",
        ("dispatch_output", "quant_info", "runner_config", "hooks"),
    ),
    Target(METHOD, ("quant_config",)),
    Target(f"{METHOD}.create_weights", _WEIGHTS),
    Target(f"{METHOD}.create_moe_runner", ("layer", "moe_runner_config")),
    Target(f"{METHOD}.process_weights_after_loading", ("layer",)),
    Target(f"{METHOD}.apply", ("layer", "dispatch_output")),
    Target(f"{METHOD}.load_up_proj_weight_first"),
    Target(f"{METHOD}.get_moe_runner_backend", ("layer",)),
    Target(SCHEME, ()),
    Target(f"{SCHEME}.requires_blackwell"),
    Target(f"{SCHEME}.create_weights", _WEIGHTS),
    Target(f"{SCHEME}.create_moe_runner", ("layer", "moe_runner_config")),
    Target(f"{SCHEME}.process_weights_after_loading", ("layer",)),
    Target(f"{SCHEME}.apply_weights", ("layer", "dispatch_output")),
    Target(f"{CONFIG}.get_moe_scheme", ("layer", "layer_name")),
    Target(f"{CONFIG}.get_scheme_dict", ("layer", "layer_name", "matched_target")),
    Target(f"{CONFIG}._add_fused_moe_to_target_scheme_map", ()),
    Target(f"{CONFIG}._is_fp4a4_nvfp4", ("weight_quant", "input_quant")),
    Target(f"{CONFIG}._is_fp4a16_nvfp4", ("weight_quant", "input_quant")),
)
"""All of SGLang that the adapter stands on."""

_done = False


def register_plugin() -> None:
    """Register names, runner and hooks, once a process.

    Raises
    ------
    UnsupportedError
        If this SGLang is outside the window or looks different.  SGLang logs it and goes on; our
        names are then unknown to it, so that ``--moe-runner-backend fp4lt`` fails.
    SystemExit
        In the same case with FP4LT_REQUIRE=1, since SGLang's loader catches everything else.
    """
    global _done
    if _done:
        return
    try:
        options = Options.read()
        _check(options)
        _register()
    except Error as error:
        if _required():
            raise SystemExit(f"fp4lt: {error} ({REQUIRE}=1)") from error
        raise
    _done = True


def _required() -> bool:
    try:
        return Options.read().require
    except Error:
        return True  # a variable of ours cannot be read: better loud


def _check(options: Options) -> None:
    outside = version_fault("sglang", *WINDOW)
    if outside is not None and not options.any_version:
        raise UnsupportedError(
            f"{outside}, for which this fp4lt was made (tested with {TESTED}); install a version "
            f"of one of the two that fits, or set {ANY_VERSION}=1 to try"
        )
    found = faults(TARGETS)
    if found:
        raise UnsupportedError(
            f"sglang {version_of('sglang')} does not look as fp4lt expects (tested with {TESTED}): "
            f"{'; '.join(found)}. Install sglang {TESTED}, or a newer fp4lt"
        )


def _register() -> None:
    from sglang.srt.arg_groups import choices
    from sglang.srt.layers.moe.moe_runner import register_moe_runner_core
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from fp4lt.integrations.sglang.compressed_tensors import choose_scheme
    from fp4lt.integrations.sglang.modelopt import ModelOptNvFp4FusedMoEMethod
    from fp4lt.integrations.sglang.names import RECIPES, TAKE_OVER, taken_over
    from fp4lt.integrations.sglang.runner import Fp4ltRunnerCore

    replaced = taken_over()
    for name in RECIPES:
        if name not in choices.MOE_RUNNER_BACKEND_CHOICES:
            choices.add_moe_runner_backend_choices([name])
        register_moe_runner_core(name, partial(Fp4ltRunnerCore, name=name))
    HookRegistry.register(METHOD, ModelOptNvFp4FusedMoEMethod, HookType.REPLACE)
    HookRegistry.register(f"{CONFIG}.get_moe_scheme", choose_scheme, HookType.AROUND)
    HookRegistry.register(f"{RUNNER}.__init__", watch_runner, HookType.AROUND)
    logger.info(
        "fp4lt is registered with sglang %s: --moe-runner-backend %s%s",
        version_of("sglang"),
        ", ".join(RECIPES),
        f"; {TAKE_OVER} gives it the layers of {', '.join(replaced)} too" if replaced else "",
    )


def watch_runner(
    original: Callable[..., None],
    runner: Any,
    runner_backend: Any,
    config: Any,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Around ``MoeRunner.__init__``: say which layers somebody else computes in our place."""
    from fp4lt.integrations.sglang.limits import describe
    from fp4lt.integrations.sglang.names import RECIPES, in_force

    original(runner, runner_backend, config, *args, **kwargs)
    where = describe(config.layer)
    if runner_backend.value in RECIPES:
        if runner.lora_enabled:
            raise UnsupportedError(f"fp4lt cannot serve {where}: LoRA adapters on experts")
    elif in_force() is not None:
        method = type(getattr(config.layer, "quant_method", None)).__name__
        fall_back(
            logger,
            f"fp4lt does not serve {where}: its weights belong to {method}, and SGLang's runner "
            f"{runner_backend.value} computes it",
        )
