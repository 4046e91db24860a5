# SPDX-License-Identifier: Apache-2.0
"""What lies between the GEMMs of a peer that brings none of its own.

On CUDA each function is one Triton kernel, so that no peer pays for a chain of torch's; elsewhere
it is plain torch, for tests.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch


def kernels() -> Any:
    """The Triton kernels; ImportError where there is no Triton."""
    return importlib.import_module("benchmarks.peers.glue_kernels")


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` of rows gate | up, (R, 2I) to (R, I); fp32 inside, rounded once."""
    if x.is_cuda:
        y = x.new_empty(x.shape[0], x.shape[1] // 2)
        kernels().silu_mul(x, y)
        return y
    gate, up = x.float().chunk(2, 1)
    return (torch.nn.functional.silu(gate) * up).to(x.dtype)


def weighted_sum(
    z: torch.Tensor, weights: torch.Tensor, rows: torch.Tensor | None = None
) -> torch.Tensor:
    """Sum each token's k rows of ``z`` (T * k, H) times ``weights`` (T, k): (T, H).

    ``rows`` (T * k,) says where a slot's row is; by default the slots are in order.
    """
    if z.is_cuda:
        y = z.new_empty(weights.shape[0], z.shape[1])
        kernels().weighted_sum(z, weights, rows, y)
        return y
    terms = (z if rows is None else z[rows.long()]).view(*weights.shape, -1)
    return (terms.float() * weights[..., None]).sum(1).to(z.dtype)
