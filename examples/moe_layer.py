# SPDX-License-Identifier: Apache-2.0
"""Load a MoE layer from an NVFP4 checkpoint and run it.

``python examples/moe_layer.py [FOLDER [LAYER]]``; without arguments, the small checkpoint that the
tests use.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import fp4lt

here = Path(__file__).resolve().parent
folder = sys.argv[1] if len(sys.argv) > 1 else here.parent / "tests/data/checkpoints/modelopt"
weights = fp4lt.load_moe(folder, layer=int(sys.argv[2]) if len(sys.argv) > 2 else 0)
print(weights)

tokens, top_k = 4, 2
hidden = torch.randn(tokens, weights.hidden_size, dtype=torch.bfloat16)
scores = torch.rand(tokens, weights.num_local_experts).softmax(-1)
topk_weights, topk_ids = scores.topk(top_k)

y = fp4lt.moe(hidden, weights, topk_weights=topk_weights, topk_ids=topk_ids)
print(y.shape, y.dtype, float(y.float().norm()))
