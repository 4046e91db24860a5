# SPDX-License-Identifier: Apache-2.0
"""SGLang's own FusedMoE on the CPU: built, loaded by its own loader, and run.

Importing this loads fp4lt's plug-in the way SGLang's processes do.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

import fp4lt
from fp4lt.backends import cpu
from fp4lt.testing import bounds, cases, oracle

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from sglang.srt.plugins import load_plugins

    load_plugins()

    import sglang.srt.layers.moe.token_dispatcher.standard as standard_dispatcher
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
    from sglang.srt.layers.moe.topk import StandardTopKOutput
    from sglang.srt.layers.moe.utils import MoeA2ABackend, resolve_moe_runner_backend
    from sglang.srt.layers.quantization.compressed_tensors.compressed_tensors import (
        CompressedTensorsConfig,
    )
    from sglang.srt.layers.quantization.modelopt_quant import ModelOptFp4Config
    from sglang.srt.runtime_context import (
        get_context,
        get_flags,
        get_parallel,
        override_platform,
    )

# Where the map from global to local experts goes; SGLang would take a GPU for granted.
standard_dispatcher.get_device = lambda *_, **__: "cpu"

DATA = Path(__file__).resolve().parent.parent / "data" / "checkpoints"
MODELOPT, COMPRESSED = "modelopt", "compressed_tensors"
PREFIX = "model.layers.0.mlp.experts"


class Place(NamedTuple):
    """A rank in expert and tensor parallelism."""

    ep_size: int = 1
    ep_rank: int = 0
    tp_size: int = 1
    tp_rank: int = 0

    def __str__(self) -> str:
        return f"ep{self.ep_rank}of{self.ep_size}_tp{self.tp_rank}of{self.tp_size}"


PLACES = [
    Place(),
    Place(2, 0),
    Place(2, 1),
    Place(1, 0, 2, 0),
    Place(1, 0, 2, 1),
    Place(2, 1, 2, 1),
]


ONE = Place()


@contextlib.contextmanager
def server(
    backend: str = "fp4lt", place: Place = ONE, *, a2a: str = "none", blackwell: bool = False
) -> Iterator[None]:
    """What SGLang's layers ask about the process that they are in."""
    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        enter(override_platform(is_blackwell=blackwell))
        enter(get_context().override_server_args(model_path="dummy"))
        enter(
            get_flags().moe.override(
                runner_backend=resolve_moe_runner_backend(backend),
                a2a_backend=MoeA2ABackend(a2a),
                quantization=None,
            )
        )
        size = place.ep_size * place.tp_size
        enter(
            get_parallel().override(
                moe_ep_size=place.ep_size,
                moe_ep_rank=place.ep_rank,
                moe_tp_size=place.tp_size,
                moe_tp_rank=place.tp_rank,
                tp_size=size,
                tp_rank=0,
                attn_tp_size=size,
                attn_dp_size=1,
                tp_group=None,
            )
        )
        yield


def quant_config(kind: str) -> Any:
    """SGLang's config of one of the checkpoints in tests/data."""
    if kind == MODELOPT:
        return ModelOptFp4Config.from_config(
            json.loads((DATA / kind / "hf_quant_config.json").read_text())
        )
    stated = json.loads((DATA / kind / "config.json").read_text())
    return CompressedTensorsConfig.from_config(stated["quantization_config"])


def build(config: Any, experts: int, hidden: int, inner: int, **options: Any) -> Any:
    """A FusedMoE without weights, as a model makes it."""
    arguments = {"layer_id": 0, "top_k": 2, "params_dtype": torch.bfloat16, "prefix": PREFIX}
    return FusedMoE(
        num_experts=experts,
        hidden_size=hidden,
        intermediate_size=inner,
        quant_config=config,
        **(arguments | options),
    )


def load(layer: Any, tensors: dict[str, torch.Tensor], experts: int) -> None:
    """A checkpoint's tensors through the layer's loader, by the names that models map."""
    mapping = FusedMoE.make_expert_params_mapping("gate_proj", "down_proj", "up_proj", experts)
    parameters = dict(layer.named_parameters())
    loaded = 0
    for key, tensor in tensors.items():
        for parameter, weight, expert, shard in mapping:
            if weight not in key:
                continue
            name = key.replace(weight, parameter)
            target = parameters[name.rpartition(".")[2]]
            target.weight_loader(target, tensor, name, shard_id=shard, expert_id=expert)
            loaded += 1
    assert loaded == sum(".experts." in key for key in tensors)
    layer.quant_method.process_weights_after_loading(layer)


def forward(layer: Any, hidden: torch.Tensor, routing: cases.Routing) -> torch.Tensor:
    """The layer as a model calls it, with global expert ids."""
    topk = StandardTopKOutput(routing.topk_weights, routing.topk_ids, None)
    y: torch.Tensor = layer.forward(hidden, topk)
    return y


def check(
    layer: Any, weights: fp4lt.MoEWeights, hidden: torch.Tensor, routing: cases.Routing
) -> None:
    """The layer's output, bit by bit that of `weights`, and `weights`' stages by the oracle."""
    recipe = layer.fp4lt_quant_info.block.recipe
    on_input = layer.moe_runner_config.apply_router_weight_on_input
    arguments = routing._asdict() | {"router_weight_on_input": on_input}
    y = forward(layer, hidden, routing)
    plan = fp4lt.plan_moe(hidden, weights, top_k=routing.topk_ids.shape[1], recipe=recipe)
    trace = plan.trace(hidden, weights, **arguments)
    depths = (cpu.depth(k, recipe) for k in (weights.hidden_size, weights.intermediate_size))
    oracle.check_moe_trace(
        trace, weights, hidden, *routing, recipe, *depths, router_weight_on_input=on_input
    )
    bounds.assert_bitwise(y, trace.y, name="SGLang's output")


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """Random experts as a checkpoint of one format stores them, and as the numbers they mean.

    Gate and up have global scales of their own, far apart, in every expert.
    """

    kind: str
    hidden: int
    inner: int
    gate: list[cases.Linear]
    up: list[cases.Linear]
    down: list[cases.Linear]
    input_scales: np.ndarray[Any, np.dtype[np.float32]]  # (E, 2): of w13, of w2

    @staticmethod
    def make(kind: str, experts: int, hidden: int, inner: int, seed: int = 3) -> Checkpoint:
        rng = cases.generator(seed)

        def stack(rows: int, k: int, middle: float) -> list[cases.Linear]:
            scales = middle * rng.uniform(0.6, 1.4, experts)
            made = [cases.random_operand(rng, (rows, k)) for _ in range(experts)]
            return [
                one._replace(global_scale=torch.tensor(g, dtype=torch.float32))
                for one, g in zip(made, scales, strict=True)
            ]

        parts = (stack(inner, hidden, m) for m in (2.0**-7, 2.0**-9))
        inputs = np.array([0.0017, 0.011]) * rng.uniform(0.6, 1.4, (experts, 2))
        gate, up = parts
        down = stack(hidden, inner, 2.0**-8)
        return Checkpoint(kind, hidden, inner, gate, up, down, inputs.astype(np.float32))

    def tensors(self, *, gated: bool = True, inputs: bool = True) -> dict[str, torch.Tensor]:
        """The file's tensors; without `inputs` as a weight-only checkpoint."""
        found = {}
        projections = {"gate_proj": self.gate, "up_proj": self.up, "down_proj": self.down}
        for projection, stack in projections.items():
            if not gated and projection == "gate_proj":
                continue
            for expert, one in enumerate(stack):
                name = f"{PREFIX}.{expert}.{projection}."
                scale = torch.tensor(self.input_scales[expert, int(projection == "down_proj")])
                found[name + "weight_scale"] = one.scales
                if self.kind == MODELOPT:
                    found[name + "weight"] = one.codes
                    found[name + "weight_scale_2"] = one.global_scale
                    if inputs:
                        found[name + "input_scale"] = scale
                else:
                    found[name + "weight_packed"] = one.codes
                    found[name + "weight_global_scale"] = one.global_scale.reciprocal().reshape(1)
                    if inputs:
                        # Gate's and up's differ; the larger range is what both need.
                        smaller = projection == ("gate_proj", "up_proj")[expert % 2]
                        divisor = scale.reciprocal() * (2 if smaller else 1)
                        found[name + "input_global_scale"] = divisor.reshape(1)
        return found

    def weights(
        self, place: Place = ONE, *, gated: bool = True, inputs: bool = True, **options: Any
    ) -> fp4lt.MoEWeights:
        """A rank's experts, put together without SGLang."""
        experts, inner = len(self.gate), self.inner // place.tp_size
        count = experts // place.ep_size
        mine = slice(place.ep_rank * count, (place.ep_rank + 1) * count)
        part = slice(place.tp_rank * inner, (place.tp_rank + 1) * inner)

        def multiplier(stack: list[cases.Linear]) -> torch.Tensor:
            scales = torch.stack([one.global_scale for one in stack])
            return scales if self.kind == MODELOPT else scales.reciprocal().reciprocal()

        def half(stack: list[cases.Linear], name: str) -> torch.Tensor:
            return torch.stack([getattr(one, name)[part] for one in stack[mine]])

        def columns(name: str, per: int) -> torch.Tensor:
            cut = slice(part.start // per, part.stop // per)
            return torch.stack([getattr(one, name)[:, cut].contiguous() for one in self.down[mine]])

        halves = [self.gate, self.up] if gated else [self.up]
        codes, scales = (
            torch.cat([half(s, name).view(torch.uint8) for s in halves], dim=1)
            for name in ("codes", "scales")
        )
        if gated:
            one = torch.ones(())
            options["gate_up_scales"] = torch.stack([multiplier(s)[mine] for s in halves], dim=1)
        else:
            one = multiplier(self.up)[mine]
        if inputs:
            given = torch.from_numpy(self.input_scales)
            if self.kind == MODELOPT:
                given = given.amax(dim=0)  # all experts of all ranks share one
            else:
                given = given.reciprocal().reciprocal()[mine].mT.contiguous()
            options |= {"a1_scale": given[0], "a2_scale": given[1]}
        return fp4lt.MoEWeights(
            fp4lt.NVFP4Tensor.from_linear_scales(codes, scales, one),
            fp4lt.NVFP4Tensor.from_linear_scales(
                columns("codes", 2), columns("scales", 16), multiplier(self.down)[mine]
            ),
            order="gate_up" if gated else None,
            expert_start=place.ep_rank * count,
            num_experts=experts,
            **options,
        )


def inputs(
    tokens: int, hidden: int, experts: int, top_k: int = 2, router: str = "uniform", seed: int = 5
) -> tuple[torch.Tensor, cases.Routing]:
    """Hidden states and global routing."""
    rng = cases.generator(seed)
    x = cases.random_matrix(rng, (tokens, hidden)) / 4
    routing = cases.ROUTERS[router](rng, tokens, experts, top_k)
    return x, routing._replace(topk_ids=routing.topk_ids.to(torch.int32))


def served(
    checkpoint: Checkpoint,
    *,
    gated: bool = True,
    stored_inputs: bool = True,
    config: Any = None,
    **options: Any,
) -> Any:
    """A layer with the checkpoint loaded; to be run inside ``server()``."""
    config = quant_config(checkpoint.kind) if config is None else config
    experts = len(checkpoint.gate)
    layer = build(config, experts, checkpoint.hidden, checkpoint.inner, is_gated=gated, **options)
    load(layer, checkpoint.tensors(gated=gated, inputs=stored_inputs), experts)
    return layer
