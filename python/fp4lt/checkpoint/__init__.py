# SPDX-License-Identifier: Apache-2.0
"""MoE layers out of quantized checkpoints: ModelOpt and compressed-tensors NVFP4, or bf16/fp16.

``names`` knows how tensors are called, ``files`` opens safetensors, ``config`` reads what the JSON
files beside them claim, ``load`` checks and stacks.  docs/checkpoints.md describes the formats.
"""

from __future__ import annotations

from fp4lt.checkpoint.load import load_moe

__all__ = ["load_moe"]
