# SPDX-License-Identifier: Apache-2.0
"""An engine's loaded tensors as MoEWeights.  Everything is shared, nothing is copied."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from fp4lt.block import MoEPlan, plan_moe
from fp4lt.errors import CheckpointError, ShapeError
from fp4lt.experts import MoEWeights
from fp4lt.problem import Activation, Order, Recipe
from fp4lt.tensor import NVFP4Tensor


class Stack(NamedTuple):
    """One of the two matrices of all local experts, as engines hold it.

    Attributes
    ----------
    codes : (E, N, K/2) uint8
    scales : (E, round_up(N, 128), round_up(K/16, 4)) float8_e4m3fn
        In 128x4 tiles.
    multiplier : (E,) or (E, 1) or (E, 2) float32
        Global scales; two columns are gate and up.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    multiplier: torch.Tensor


class Block(NamedTuple):
    """What a layer needs to run.

    Attributes
    ----------
    plan : MoEPlan
        For the layer's dtype; calls with another one make their own.
    """

    weights: MoEWeights
    recipe: Recipe
    plan: MoEPlan


def build_weights(
    w13: Stack,
    w2: Stack,
    *,
    order: Order | None,
    activation: Activation = "silu",
    expert_start: int = 0,
    num_experts: int | None = None,
    **options: Any,
) -> MoEWeights:
    """MoEWeights over an engine's tensors.

    Parameters
    ----------
    w13, w2 : Stack
    order : "gate_up", "up_gate", "interleaved" or None
    activation, expert_start, num_experts, **options
        As in :class:`fp4lt.MoEWeights`.
    """
    gated = order is not None
    columns = w13.multiplier.reshape(w13.multiplier.shape[0], -1)
    if columns.shape[1] not in ((1, 2) if gated else (1,)):
        raise ShapeError(
            f"global scales of w13 have shape {tuple(w13.multiplier.shape)}; (E,), (E, 1) or, for "
            "gate and up, (E, 2) is needed"
        )
    one = torch.ones((), dtype=torch.float32, device=w13.codes.device)
    if columns.shape[1] == 2:
        # The two stay apart and exact, so that w13 itself has no global scale.
        options["gate_up_scales"] = w13.multiplier
        shared = one
    else:
        shared = columns.reshape(-1)
    return MoEWeights(
        NVFP4Tensor.from_tiled_scales(w13.codes, w13.scales, shared),
        NVFP4Tensor.from_tiled_scales(w2.codes, w2.scales, w2.multiplier.reshape(-1)),
        order=order,
        activation=activation,
        expert_start=expert_start,
        num_experts=num_experts,
        **options,
    )


def plan_block(
    weights: MoEWeights, recipe: Recipe, backend: str, top_k: int, dtype: torch.dtype
) -> Block:
    """Choose the backend now, so that a refusal comes at start-up.

    Raises
    ------
    UnsupportedError
        With each backend's reason.
    """
    hidden = torch.empty(0, weights.hidden_size, dtype=dtype, device=weights.device)
    plan = plan_moe(hidden, weights, top_k=top_k, recipe=recipe, backend=backend)
    return Block(weights, recipe, plan)


def check_positive(what: str, scales: torch.Tensor | None) -> None:
    """Refuse global scales that are not finite and positive; a copy to the host.

    Raises
    ------
    CheckpointError
        Naming the first one.
    """
    if scales is None:
        return
    host = scales.detach().cpu()
    bad = ~(torch.isfinite(host) & (host > 0))
    if bool(bad.any()):
        where = [int(i) for i in torch.nonzero(torch.atleast_1d(bad))[0]]
        value = float(torch.atleast_1d(host)[tuple(where)])
        raise CheckpointError(
            f"{what}{where} is {value}; a global scale is finite and greater than 0. Is the tensor "
            "missing from the checkpoint?"
        )


def shared_scale(stored: torch.Tensor) -> torch.Tensor | None:
    """The static scale that all experts share: the largest that is stored.

    Parameters
    ----------
    stored : float32
        Multipliers of any number of experts and projections.  Engines fill in 1 where a checkpoint
        has none, so that 1 counts as absent.

    Returns
    -------
    () float32, or None
        None if there is no stored scale: each row then derives its own.
    """
    present = stored != 1
    if not bool(present.any()):
        return None
    return torch.where(present, stored, 0.0).amax().to(torch.float32)
