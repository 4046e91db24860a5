# SPDX-License-Identifier: Apache-2.0
"""Seeded routings.

A routing depends only on the seed and the number of the call, never on what was drawn before, so
every contender meets the same sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class Routing:
    """Which experts each token goes to.

    Attributes
    ----------
    ids : (T, k) int64
        Distinct within a row.
    weights : (T, k) float32
        Positive, each row sums to 1.
    """

    ids: torch.Tensor
    weights: torch.Tensor

    def head(self, tokens: int) -> Routing:
        """Return the routing of the first ``tokens`` tokens."""
        return Routing(self.ids[:tokens].contiguous(), self.weights[:tokens].contiguous())

    def rows_per_expert(self, experts: int) -> np.ndarray:
        """Count routed rows, (experts,) int64."""
        return np.bincount(self.ids.numpy().reshape(-1), minlength=experts)


def uniform(tokens: int, experts: int, top_k: int, *, seed: int, call: int) -> Routing:
    """Draw ``top_k`` distinct experts for each token, all sets equally likely.

    ``call`` may be negative, as the numbers of warm-up calls are.
    """
    if not 1 <= top_k <= experts:
        raise ValueError(f"top_k must be in [1, {experts}], the number of experts, got {top_k}")
    rng = np.random.default_rng([seed, tokens, call % 2**32])
    keys = rng.random((tokens, experts))
    ids = np.argsort(keys, axis=1, kind="stable")[:, :top_k].astype(np.int64)
    logits = rng.standard_normal((tokens, top_k))
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    return Routing(torch.from_numpy(ids), torch.from_numpy(weights.astype(np.float32)))
