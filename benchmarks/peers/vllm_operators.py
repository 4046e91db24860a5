# SPDX-License-Identifier: Apache-2.0
"""vLLM's MoE operators: loading them, and the alignment that Marlin and Humming both use."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from benchmarks.peers import bundle

MARLIN_ARGUMENTS = 26  # of moe_wna16_marlin_gemm in the pinned version
ALIGN_ARGUMENTS = 8


class Slots(NamedTuple):
    """Token slots sorted by expert, each expert's padded to whole blocks."""

    sorted: torch.Tensor
    owners: torch.Tensor
    """Expert of each block."""
    padded: torch.Tensor
    """(1,): slots with padding."""
    block: int


def load() -> None:
    """Register the operators, and refuse signatures other than the pinned ones.

    Raises
    ------
    BundleError, OSError
    """
    if not hasattr(operators(), "moe_wna16_marlin_gemm"):
        torch.ops.load_library(str(bundle.operator_library()))
    wanted = {"moe_wna16_marlin_gemm": MARLIN_ARGUMENTS, "moe_align_block_size": ALIGN_ARGUMENTS}
    for name, count in wanted.items():
        schema = getattr(operators(), name).default._schema
        if len(schema.arguments) != count:
            raise bundle.BundleError(f"{name} has another signature than the pinned one: {schema}")


def operators() -> Any:
    """The namespace they are registered in."""
    return torch.ops._moe_C


def align(ids: torch.Tensor, experts: int, block: int) -> Slots:
    """Sort (T, k) int32 ids, with buffers as large as vLLM makes them."""
    slots = ids.numel()
    longest = slots + experts * (block - 1)
    if slots < experts:
        longest = min(slots * block, longest)
    given = {"dtype": torch.int32, "device": ids.device}
    order = torch.empty(longest, **given)  # type: ignore[call-overload]
    owners = torch.empty(-(-longest // block), **given)  # type: ignore[call-overload]
    padded = torch.empty(1, **given)  # type: ignore[call-overload]
    operators().moe_align_block_size(ids, experts, block, order, owners, padded, None, None)
    return Slots(order, owners, padded, block)
