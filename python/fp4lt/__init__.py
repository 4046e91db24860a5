# SPDX-License-Identifier: Apache-2.0
"""NVFP4 grouped GEMM for MoE experts, with one definition of the numbers on every machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fp4lt import errors, ops  # noqa: F401 - registers torch.ops.fp4lt
from fp4lt.block import moe, plan_moe
from fp4lt.experts import MoEWeights
from fp4lt.gemm import grouped_mm, plan_grouped_mm
from fp4lt.rounding import dequantize, quantize
from fp4lt.tensor import NVFP4Tensor

if TYPE_CHECKING:
    from fp4lt.checkpoint import load_moe

__version__ = "0.1.0"

__all__ = [
    "MoEWeights",
    "NVFP4Tensor",
    "dequantize",
    "errors",
    "grouped_mm",
    "load_moe",
    "moe",
    "plan_grouped_mm",
    "plan_moe",
    "quantize",
]


def __getattr__(name: str) -> Any:
    # Reading checkpoints is not worth a part of everybody's import time.
    if name == "load_moe":
        from fp4lt.checkpoint import load_moe

        return load_moe
    raise AttributeError(f"module 'fp4lt' has no attribute {name!r}")
