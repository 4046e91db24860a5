# SPDX-License-Identifier: Apache-2.0
"""A peer's reference: the block in fp32 on the layer's device, from weights as the peer holds them.

The exact oracle knows NVFP4 only, and takes seconds a token on the host.  This one takes a format
that was converted at its word, and looks at tokens from all over the batch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.layers import MoELayer

TOKENS = 16
Dense = Callable[[int], tuple[torch.Tensor, torch.Tensor] | None]
"""From expert to its (N, K) float32 matrices, the gate's rows first."""


class DenseReference:
    """Compares rows of a plain SwiGLU block.

    Parameters
    ----------
    layer : MoELayer
    dense : callable
    """

    def __init__(self, layer: MoELayer, dense: Dense) -> None:
        self._layer = layer
        self._dense = dense

    def tokens(self, size: int) -> torch.Tensor:
        """Which tokens are compared: the first, the last, and some between."""
        return torch.linspace(0, size - 1, min(size, TOKENS)).round().long()

    def expected(self, size: int) -> torch.Tensor:
        """(len(tokens), H) float32; u is rounded to bf16, as W4A16 says, and nothing else is."""
        batch = self._layer.check_batch(size)
        chosen = self.tokens(size).to(self._layer.device)
        x = batch.x[chosen].float()
        ids, weights = batch.routing.ids[chosen], batch.routing.weights[chosen]
        y = torch.zeros_like(x)
        for expert in ids.unique().tolist():
            matrices = self._dense(expert)
            assert matrices is not None
            w13, w2 = matrices
            token, slot = (ids == expert).nonzero(as_tuple=True)
            gate, up = torch.mm(x[token], w13.t()).chunk(2, 1)
            u = (torch.nn.functional.silu(gate) * up).bfloat16().float()
            y.index_add_(0, token, torch.mm(u, w2.t()) * weights[token, slot, None])
        return y

    def error(self, result: torch.Tensor, size: int, recipe: str) -> float:
        """Norm of the difference over the norm of what is expected."""
        del recipe
        want = self.expected(size)
        got = result[self.tokens(size).to(result.device)].float()
        return float((got - want).norm() / want.norm())
