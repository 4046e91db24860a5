# SPDX-License-Identifier: Apache-2.0
"""Arguments and comparisons that the tests of operators and of torch.compile share."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

import fp4lt
from fp4lt import MoEWeights, NVFP4Tensor

E, N, K, M = 3, 40, 64, 7
H, INTER, T = 64, 32, 5


def rand(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def rate(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(9)) + 0.5


def offsets(*ends: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(ends, dtype=dtype)


def packed(*shape: int, seed: int = 1) -> NVFP4Tensor:
    return fp4lt.quantize(rand(*shape, seed=seed))


def routing(tokens: int = T, top_k: int = 2, experts: int = 5) -> dict[str, Any]:
    g = torch.Generator().manual_seed(tokens)
    return {
        "topk_weights": torch.rand(tokens, top_k, generator=g),
        "topk_ids": torch.randint(-1, experts, (tokens, top_k), generator=g),
    }


def full_weights() -> MoEWeights:
    """Every optional part given."""
    return MoEWeights(
        packed(E, 2 * INTER, H),
        packed(E, H, INTER, seed=2),
        order="up_gate",
        activation="swigluoai",
        gate_up_scales=rate(E, 2),
        w13_bias=rand(E, 2 * INTER),
        w2_bias=rand(E, H),
        a1_scale=rate(E) / 100,
        a2_scale=0.02,
        swiglu_alpha=1.5,
        swiglu_beta=rate(E),
        swiglu_limit=5.0,
        expert_start=1,
        num_experts=5,
    )


def dense_weights() -> MoEWeights:
    w13, w2 = rand(E, INTER, H).bfloat16(), rand(E, H, INTER).bfloat16()
    return MoEWeights(w13, w2, order=None, activation="relu2")


def parts(x: NVFP4Tensor | torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """As operators take it; bytes, since opcheck's schema test cannot compare float8."""
    if isinstance(x, torch.Tensor):
        return x, None, None
    return x.codes, x.scales.view(torch.uint8), x.global_scale


def assert_same(got: Any, want: Any) -> None:
    """The same structure, types and strides, and the same bytes."""
    found, structure = pytree.tree_flatten(got)
    expected, wanted = pytree.tree_flatten(want)
    assert structure == wanted
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        if b is not None:
            assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
            raw = [t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
            assert torch.equal(*raw)


W = packed(E, N, K)
X = rand(M, K)
X_ROWS = fp4lt.quantize(X, global_scale="row")
OFFS = offsets(2, 2, M)
EXTRAS = (rand(E, N, dtype=torch.float16), rate(E), rate() / 100)


BF16_HIDDEN = rand(T, H, dtype=torch.bfloat16)
ROUTE = routing()
WEIGHTS = full_weights()


def multiply(a: Any, w: Any, offs: torch.Tensor) -> torch.Tensor:
    return fp4lt.grouped_mm(a, w.mT, offs=offs)


def block(
    hidden: torch.Tensor, weights: MoEWeights, route: dict[str, Any], **options: Any
) -> torch.Tensor:
    return fp4lt.moe(hidden, weights, **route, **options)
