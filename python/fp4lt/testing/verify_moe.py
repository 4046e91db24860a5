# SPDX-License-Identifier: Apache-2.0
"""Checks of a backend's MoE block, each stage fed with the backend's own input to it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from fp4lt.experts import MoEWeights
from fp4lt.problem import Recipe
from fp4lt.tensor import NVFP4Tensor
from fp4lt.testing import bounds, cases, oracle
from fp4lt.testing.targets import Check, RefusedError, Target, store


class Block(NamedTuple):
    """A call of the block."""

    name: str
    hidden: torch.Tensor
    weights: MoEWeights
    routing: cases.Routing
    recipe: Recipe
    on_input: bool

    def calls(self, target: Target) -> tuple[Callable[[], torch.Tensor], Callable[[], Any]]:
        """The block and its trace on a target."""
        return target.block(
            self.hidden,
            self.weights,
            self.recipe,
            **self.routing._asdict(),
            router_weight_on_input=self.on_input,
        )

    def check(self, target: Target) -> int:
        """Judge each stage, and require the block itself to give the trace's bits."""
        run, trace = self.calls(target)
        stages, w = trace(), self.weights
        both = isinstance(w.w13, NVFP4Tensor) and self.recipe == "w4a4"
        sums = "w4a4" if both else "w4a16"
        oracle.check_moe_trace(
            stages,
            w,
            self.hidden,
            *self.routing,
            self.recipe,
            target.depth(w.hidden_size, sums),
            target.depth(w.intermediate_size, sums),
            router_weight_on_input=self.on_input,
        )
        bounds.assert_bitwise(
            run(), stages.y, name=f"{self.name}: y of the block, not of the trace"
        )
        rows, inner = len(stages.rows_token), w.intermediate_size
        return int(rows * (w.hidden_size + inner) + stages.h.numel() + stages.z.numel())


def make(
    name: str,
    *,
    T: int = 9,
    E: int = 4,
    H: int = 80,
    inner: int = 48,
    top_k: int = 3,
    dtype: torch.dtype = torch.bfloat16,
    recipe: Recipe = "w4a4",
    dense: bool = False,
    order: Any = "gate_up",
    activation: Any = "silu",
    router: str = "uniform",
    experts: int | None = None,
    split: bool = True,
    biases: bool = False,
    static: bool = False,
    on_input: bool = False,
    limit: bool = False,
    poison: bool = False,
) -> Block:
    """A block whose gates lie where activations bend, and whose fp16 results are finite.

    With `experts` the weights are those of experts 2 to 2 + E of so many.  With `split` gate and up
    have global scales of their own, far apart.
    """
    rng = cases.generator(H + inner + T)
    rows = inner if order is None else 2 * inner

    def spread(middle: float) -> torch.Tensor:
        return torch.from_numpy((middle * rng.uniform(0.6, 1.4, E)).astype(np.float32))

    def weight(shape: tuple[int, ...], middle: float) -> Any:
        # Sums of K terms: their size grows with the root of K.
        middle *= (80 / shape[-1]) ** 0.5
        if dense:
            return cases.random_matrix(rng, shape, dtype) * (64 * middle)
        return store(cases.random_operand(rng, shape)._replace(global_scale=spread(middle)))

    options: dict[str, Any] = {}
    if biases:
        options["w13_bias"] = torch.from_numpy(rng.standard_normal((E, rows)).astype(np.float32))
        options["w2_bias"] = torch.from_numpy(rng.standard_normal((E, H)).astype(np.float32))
    if split and order is not None:
        options["gate_up_scales"] = torch.stack([spread(1.0), spread(0.3)], dim=1)
    if static:
        options |= {"a1_scale": spread(0.0017), "a2_scale": torch.tensor(0.011)}
    if limit:
        options["swiglu_limit"] = spread(2.5)
    if experts is not None:
        options |= {"expert_start": 2, "num_experts": experts}
    weights = MoEWeights(
        weight((E, rows, H), 2.0**-7),
        weight((E, H, inner), 2.0**-8),
        order=order,
        activation=activation,
        **options,
    )
    hidden = cases.random_matrix(rng, (T, H), dtype) / 4
    if poison:
        hidden[1, H // 2], hidden[T - 1, 3] = float("nan"), float("-inf")
    routing = cases.ROUTERS[router](rng, T, experts or E, top_k)
    # Weights that add up to 1 would all be 1 for top-1, and hide whether they were applied.
    factor = torch.from_numpy(rng.uniform(0.4, 2.5, (T, 1)).astype(np.float32))
    routing = routing._replace(topk_weights=routing.topk_weights * factor)
    return Block(name, hidden, weights, routing, recipe, on_input)


HALF: Final = torch.float16
BLOCKS: Final[dict[str, dict[str, Any]]] = {
    "gate_up, two scales": {},
    "up_gate, two scales": {"order": "up_gate"},
    "interleaved, two scales": {"order": "interleaved"},
    "w4a16 in bf16, up_gate": {"recipe": "w4a16", "order": "up_gate"},
    "w4a16 in fp16, interleaved": {"recipe": "w4a16", "order": "interleaved", "dtype": HALF},
    "fp32 hidden states": {"dtype": torch.float32},
    "bf16 weights": {"dense": True, "recipe": "w4a16"},
    "fp16 weights": {"dense": True, "recipe": "w4a16", "dtype": HALF, "order": "up_gate"},
    "experts 2 to 5 of 9, ids of others and -1": {"experts": 9, "router": "out_of_range"},
    "a third of the slots is -1": {"router": "missing", "recipe": "w4a16"},
    "the same expert twice": {"router": "duplicates"},
    "static scales": {"static": True},
    "static scales, experts 2 to 5 of 9": {"static": True, "experts": 9, "dtype": HALF},
    "swigluoai, biases, interleaved": {
        "activation": "swigluoai",
        "biases": True,
        "order": "interleaved",
    },
    "swigluoai, w4a16, limits": {"activation": "swigluoai", "limit": True, "recipe": "w4a16"},
    "silu with limits, biases": {"limit": True, "biases": True},
    "gelu": {"activation": "gelu"},
    "gelu_tanh": {"activation": "gelu_tanh", "order": "up_gate"},
    "relu2 without a gate": {"activation": "relu2", "order": None},
    "relu2 without a gate, w4a16, biases": {
        "activation": "relu2",
        "order": None,
        "recipe": "w4a16",
        "biases": True,
    },
    "router weight on the input, top-1": {"top_k": 1, "on_input": True},
    "no token": {"T": 0},
    "one token, 8 of 64 experts": {"T": 1, "E": 64, "top_k": 8},
    "45 and 17 blocks": {"H": 720, "inner": 272},
    "NaN and inf in two tokens": {"poison": True},
}
LARGE: Final[dict[str, dict[str, Any]]] = {
    "129 tokens": {"T": 129, "E": 3, "top_k": 2},
    "H = 2880, I = 1440, biases": {
        "H": 2880,
        "inner": 1440,
        "T": 3,
        "top_k": 2,
        "order": "interleaved",
        "activation": "swigluoai",
        "biases": True,
    },
    "H = 7168, I = 256": {"H": 7168, "inner": 256, "T": 4, "top_k": 2},
    "H = 7168, I = 256, w4a16": {
        "H": 7168,
        "inner": 256,
        "T": 4,
        "top_k": 2,
        "recipe": "w4a16",
    },
}


def repeatable(target: Target, *, alone: bool) -> int:
    """The same bits again; and, if `alone`, for each token by itself and beside a NaN."""
    compared = 0
    recipes: tuple[Recipe, ...] = ("w4a4", "w4a16")
    for recipe in recipes:
        block = make(recipe, T=33, H=720, inner=272, router="missing", recipe=recipe)
        try:
            y = block.calls(target)[0]()
        except RefusedError as reason:
            target.skipped.append(str(reason))
            continue
        again = block.calls(target)[0]()
        bounds.assert_bitwise(again, y, name=f"{recipe}, second run")
        compared += y.numel()
        for token in (0, 1, 17, 32) if alone else ():
            part = slice(token, token + 1)
            routing = cases.Routing(*(t[part] for t in block.routing))
            one = block._replace(hidden=block.hidden[part], routing=routing)
            got = one.calls(target)[0]()
            bounds.assert_bitwise(got, y[part], name=f"{recipe}, token {token} alone")
            compared += got.numel()
        broken = block.hidden.clone()
        broken[5, 9] = float("nan")
        got = block._replace(hidden=broken).calls(target)[0]()
        others = torch.arange(33) != 5
        bounds.assert_bitwise(got[others], y[others], name=f"{recipe}, tokens beside a NaN")
        compared += got.numel()
    return compared


def _run(target: Target, name: str, spec: dict[str, Any]) -> int:
    return make(name, **spec).check(target)


def checks(target: Target, *, quick: bool, alone: bool) -> list[Check]:
    """Checks of the MoE block; arguments as in ``verify_gemm``."""
    found = [
        Check(f"moe: {name}", partial(_run, target, name, spec))
        for name, spec in (BLOCKS if quick else BLOCKS | LARGE).items()
    ]
    name = (
        "moe: the same bits again, and for a token alone" if alone else "moe: the same bits again"
    )
    return [*found, Check(name, lambda: repeatable(target, alone=alone))]
