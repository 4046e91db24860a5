# SPDX-License-Identifier: Apache-2.0
"""Quantize a stack of experts and multiply rows that are sorted by expert."""

from __future__ import annotations

import torch

import fp4lt

experts, n, k = 8, 512, 1024
weights = torch.randn(experts, n, k, dtype=torch.bfloat16)
w = fp4lt.quantize(weights)  # 4.5 bits a weight, one global scale per expert

rows = torch.tensor([3, 0, 5, 1, 0, 0, 2, 5])  # rows of each expert; empty groups are fine
x = torch.randn(int(rows.sum()), k, dtype=torch.bfloat16)
offs = rows.cumsum(0).to(torch.int32)

y = fp4lt.grouped_mm(x, w.mT, offs=offs)  # W4A4: x is rounded to NVFP4, row by row
print(y.shape, y.dtype)

y16 = fp4lt.grouped_mm(x, w.mT, offs=offs, recipe="w4a16")  # W4A16: x as it is
exact = torch.cat(
    [part.double() @ w[e].dequantize().double().T for e, part in enumerate(x.split(rows.tolist()))]
)
print("w4a16 against float64:", float((y16 - exact).norm() / exact.norm()))
