# SPDX-License-Identifier: Apache-2.0
"""What a layer must give: the package's exact oracle on a few rows.

The oracle shares no code with any backend.  Its error norm is only a gate before timing; the
element-wise bounds and the exact inputs are the test suite's.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.layers import GemmLayer, Layer
from fp4lt.testing import oracle

MAX_TOKENS = 4
ELEMENTS = 80_000_000  # expert weights to expand for one recipe: a few seconds in NumPy


class Reference:
    """Expected rows of :meth:`check_batch` at any size, computed once per recipe when needed.

    For a MoE block the first tokens of the batch, for a GEMM every row of the first experts: as
    many as keep the work within some seconds, one at least.
    """

    def __init__(self, layer: Layer) -> None:
        self._layer = layer
        self._known: dict[str, npt.NDArray[np.float64]] = {}

    @property
    def tokens(self) -> int:
        """Tokens that are compared at most; for a GEMM, rows per expert."""
        largest = max(self._layer.sweep)
        if isinstance(self._layer, GemmLayer):
            return largest
        every = self._layer.weights.num_experts
        assert every is not None
        # Of an EP rank's tokens only this part of the slots is computed here.
        here = self._layer.top_k * self._layer.experts / every
        per_token = here * sum(n * k for n, k in self._layer.gemms)
        return min(largest, MAX_TOKENS, max(1, int(ELEMENTS / per_token)))

    @property
    def experts(self) -> int:
        """Experts of a GEMM that are compared."""
        ((n, k),) = self._layer.gemms
        return min(self._layer.experts, max(1, ELEMENTS // (n * k)))

    def shape(self, size: int) -> tuple[int, int]:
        """Shape of a whole result, (T, H) or (M, N)."""
        if isinstance(self._layer, GemmLayer):
            return self._layer.experts * size, self._layer.gemms[0][0]
        return size, self._layer.gemms[1][0]

    def expected(self, size: int, recipe: str) -> npt.NDArray[np.float64]:
        """Rows that :meth:`error` compares with, float64."""
        if recipe not in self._known:
            self._known[recipe] = self._compute(recipe)
        known = self._known[recipe]
        if isinstance(self._layer, GemmLayer):
            columns = known.shape[1]
            by_expert = known.reshape(self.experts, -1, columns)
            return by_expert[:, :size].reshape(-1, columns)
        return known[:size]

    def error(self, result: torch.Tensor, size: int, recipe: str) -> float:
        """Norm of the difference over the norm of the reference, over the rows compared.

        Where all that is expected is zero (no token has an expert here), anything else is infinite.
        """
        want = self.expected(size, recipe)
        got = result[: want.shape[0]].to("cpu", torch.float64).numpy()
        difference, norm = np.linalg.norm(got - want), np.linalg.norm(want)
        return float(difference / norm) if norm else (np.inf if difference else 0.0)

    def _compute(self, recipe: str) -> npt.NDArray[np.float64]:
        layer = self._layer
        if isinstance(layer, GemmLayer):
            batch, first = layer.check_batch(max(layer.sweep)), self.experts
            rows = sum(batch.rows[:first])
            weights, offs = layer.weights[:first].mT, batch.offs[:first]
            return oracle.grouped_mm(batch.x[:rows], weights, offs=offs, recipe=recipe).value
        head = layer.check_batch(self.tokens)
        routing = head.routing
        y = oracle.moe_reference(
            head.x,
            layer.weights,
            routing.weights,
            routing.ids,
            recipe,
            router_weight_on_input=layer.router_weight_on_input,
        )
        return y.astype(np.float64)
