# SPDX-License-Identifier: Apache-2.0
"""From a loaded layer's parameters to what the runner needs.

Parameters are handed on as they are, never as copies: an update of the weights in place, as SGLang
makes it, reaches us and the CUDA graphs that hold their addresses.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from sglang.srt.layers.utils.common import alias_or_bind_derived_param, copy_or_rebind_param
from sglang.srt.runtime_context import get_server_args

from fp4lt.integrations.options import Options, choose_recipe
from fp4lt.integrations.sglang.limits import ACTIVATIONS, describe, swiglu
from fp4lt.integrations.sglang.names import wanted_recipe
from fp4lt.integrations.sglang.runner import Fp4ltQuantInfo
from fp4lt.integrations.weights import Stack, build_weights, check_positive, plan_block
from fp4lt.layout import tile_scales
from fp4lt.problem import Order

logger = logging.getLogger(__name__)
_reported: set[str] = set()


def tile_in_place(layer: Any, linear: str, tiled: str) -> torch.Tensor:
    """Bring block scales into 128x4 tiles, in their own memory where that needs no padding.

    A reload writes row-major scales there again, and brings us here again.
    """
    values = tile_scales(getattr(layer, linear).data)
    alias_or_bind_derived_param(layer, linear, tiled, values)
    bound: torch.Tensor = getattr(layer, tiled)
    return bound


def keep_scale(layer: Any, name: str, value: torch.Tensor | None) -> torch.Tensor | None:
    """A derived scale under an address that survives reloads."""
    if value is None:
        return None
    copy_or_rebind_param(layer, name, value)
    kept: torch.Tensor = getattr(layer, name)
    return kept


def bind(
    layer: Any,
    name: str,
    kind: str,
    w13: Stack,
    w2: Stack,
    *,
    order: Order | None,
    a1_scale: torch.Tensor | None,
    a2_scale: torch.Tensor | None,
    weight_only: bool,
) -> Fp4ltQuantInfo:
    """Check a loaded layer, choose recipe and backend, and log once what serves it.

    Parameters
    ----------
    layer : FusedMoE
    name : str
        The ``--moe-runner-backend`` in force.
    kind : str
        Checkpoint format, for the log.
    w13, w2 : Stack
    order, a1_scale, a2_scale
        As in :class:`fp4lt.MoEWeights`.
    weight_only : bool
        Whether the checkpoint leaves activations in 16 bits.
    """
    config = layer.moe_runner_config
    where = describe(layer)
    if getattr(get_server_args(), "load_format", None) != "dummy":
        check_positive(f"{where}: global scales of w13", w13.multiplier)
        check_positive(f"{where}: global scales of w2", w2.multiplier)
        check_positive(f"{where}: input scale of w13", a1_scale)
        check_positive(f"{where}: input scale of w2", a2_scale)
    weights = build_weights(
        w13,
        w2,
        order=order,
        activation=ACTIVATIONS[config.activation],
        a1_scale=a1_scale,
        a2_scale=a2_scale,
        **swiglu(config),
    )
    recipe = choose_recipe(wanted_recipe(name), weights.device, weight_only=weight_only)
    backend = Options.read().backend
    dtype = layer.params_dtype
    if dtype not in (torch.bfloat16, torch.float16):
        dtype = torch.bfloat16
    block = plan_block(weights, recipe, backend, config.top_k or 1, dtype)
    report(
        where,
        f"{kind}, {block.plan.problem} on {weights.device} by fp4lt's backend "
        f"{block.plan.backend.name}, activation scales "
        f"{_scales(recipe, a1_scale)} and {_scales(recipe, a2_scale)}",
    )
    return Fp4ltQuantInfo(block=block)


def report(where: str, what: str) -> None:
    """Log what serves a layer; at INFO the first of its kind, the others at DEBUG."""
    level = logging.DEBUG if what in _reported else logging.INFO
    _reported.add(what)
    logger.log(level, "fp4lt serves %s and others like it: %s", where, what)


def _scales(recipe: str, scale: torch.Tensor | None) -> str:
    if recipe == "w4a16":
        return "none"
    return "per row" if scale is None else "shared" if scale.ndim == 0 else "per expert"
