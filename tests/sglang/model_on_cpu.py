# SPDX-License-Identifier: Apache-2.0
"""One rank of a real model, from SGLang's command line to the output of its MoE block.

SGLang parses the arguments, resolves and publishes them, makes the model and loads the checkpoint
with its own loader, as its scheduler processes do.  Attention is never run: on a CPU SGLang has
neither its rotary kernel nor its FP4 linear layers, so these two are stood in for.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import types
import warnings
from typing import Any

import torch
from sglang_on_cpu import prepare

import fp4lt
from fp4lt.testing import bounds

warnings.simplefilter("ignore")
prepare()


def stand_in() -> None:
    from sglang.srt.layers.moe.token_dispatcher import standard
    from sglang.srt.layers.quantization.modelopt_quant import ModelOptFp4LinearMethod

    package, ops = types.ModuleType("vllm"), types.ModuleType("vllm._custom_ops")
    ops.rotary_embedding = None  # type: ignore[attr-defined]
    sys.modules |= {"vllm": package, "vllm._custom_ops": ops}
    ModelOptFp4LinearMethod.process_weights_after_loading = lambda *_: None
    standard.get_device = lambda *_, **__: "cpu"


def load_model(folder: str, backend: str, size: int, ep: int, rank: int, port: int) -> Any:
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed.parallel_state import (
        init_distributed_environment,
        initialize_model_parallel,
    )
    from sglang.srt.layers.moe.utils import initialize_moe_config
    from sglang.srt.model_loader.loader import get_model_loader
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import prepare_server_args

    command = ["--model-path", folder, "--moe-runner-backend", backend, "--device", "cpu"]
    command += ["--skip-tokenizer-init", "--tp-size", str(size), "--ep-size", str(ep)]
    args = prepare_server_args(command)
    publish(args, role="scheduler", ranks=SpawnRanks(world_rank=rank, gpu_id=0))
    initialize_moe_config()
    init_distributed_environment(size, rank, f"tcp://127.0.0.1:{port}", rank, "gloo")
    initialize_model_parallel(backend="gloo")
    stand_in()
    config = ModelConfig.from_server_args(args)
    loader = get_model_loader(LoadConfig(), config)
    return loader.load_model(model_config=config, device_config=DeviceConfig("cpu"))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("backend")
    for name in ("size", "ep", "rank", "port"):
        parser.add_argument(name, type=int)
    args = parser.parse_args()
    block = load_model(**vars(args)).model.layers[0].mlp
    assert block.experts.runner_backend.value == args.backend

    hidden = torch.randn(7, 256, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    with torch.no_grad():
        y = block(hidden)
        topk = block.topk(hidden, block.gate(hidden)[0])
    tp = args.size // args.ep
    weights = fp4lt.load_moe(
        args.folder,
        ep_size=args.ep,
        ep_rank=args.rank // tp,
        tp_size=tp,
        tp_rank=args.rank % tp,
    )
    every = fp4lt.load_moe(args.folder)
    assert isinstance(every.a1_scale, torch.Tensor)
    assert isinstance(every.a2_scale, torch.Tensor)
    want = fp4lt.moe(
        hidden,
        dataclasses.replace(
            weights, a1_scale=every.a1_scale.amax(), a2_scale=every.a2_scale.amax()
        ),
        topk_weights=topk.topk_weights,
        topk_ids=topk.topk_ids,
        recipe="w4a4" if args.backend == "fp4lt_w4a4" else "w4a16",
    )
    # Qwen3's decoder layer adds the ranks' outputs up, not the block.
    bounds.assert_bitwise(y, want)
    assert bool((y != 0).any())
    print("equal", tuple(y.shape))


if __name__ == "__main__":
    main()
