# SPDX-License-Identifier: Apache-2.0
"""The plug-in in SGLang: found, registered, refused, loud."""

from __future__ import annotations

import argparse
import logging
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang_on_cpu import need_sglang

need_sglang()

import sglang_layer
from sglang.srt.layers.moe.fused_moe_triton import layer as layer_module
from sglang.srt.layers.moe.moe_runner.runner import _CUSTOM_RUNNER_CORE_FACTORIES, MoeRunner
from sglang.srt.layers.moe.topk import StandardTopKOutput
from sglang.srt.layers.moe.utils import resolve_moe_runner_backend
from sglang.srt.layers.quantization import modelopt_quant
from sglang.srt.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
)
from sglang.srt.layers.quantization.nvfp4_online import ModelOptNvFp4OnlineFusedMoEMethod
from sglang.srt.runtime_context import get_exec, get_parallel
from sglang.srt.server_args import ServerArgs
from sglang_layer import COMPRESSED, MODELOPT, Checkpoint, Place, forward, inputs, served, server

from fp4lt.errors import ArgumentError, CheckpointError, UnsupportedError
from fp4lt.integrations.interface import faults
from fp4lt.integrations.sglang import plugin, register
from fp4lt.integrations.sglang.modelopt import ModelOptNvFp4FusedMoEMethod

pytestmark = pytest.mark.filterwarnings("ignore")

NAMES = ("fp4lt", "fp4lt_w4a4", "fp4lt_w4a16")
SMALL = (4, 128, 64)


def small(kind: str = MODELOPT) -> Checkpoint:
    return Checkpoint.make(kind, *SMALL)


def test_sglang_found_and_ran_the_plugin() -> None:
    assert modelopt_quant.ModelOptNvFp4FusedMoEMethod is ModelOptNvFp4FusedMoEMethod
    # Modules that had imported the class before have ours too.
    assert layer_module.ModelOptNvFp4FusedMoEMethod is ModelOptNvFp4FusedMoEMethod
    assert CompressedTensorsConfig.get_moe_scheme.__wrapped__
    assert MoeRunner.__init__.__wrapped__
    assert set(NAMES) <= set(_CUSTOM_RUNNER_CORE_FACTORIES)
    register()  # a second time does nothing


@pytest.mark.parametrize("name", NAMES)
def test_the_command_line_takes_our_names(name: str) -> None:
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    command = ["--model-path", "x", "--moe-runner-backend", name]
    command += ["--speculative-moe-runner-backend", "triton"]
    assert parser.parse_args(command).moe_runner_backend == name


PARSE = """
    from sglang_on_cpu import prepare
    prepare()
    {before}
    from sglang.srt.plugins import load_plugins
    load_plugins()
    import argparse
    from sglang.srt.server_args import ServerArgs
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    print(parser.parse_args(["--model-path", "x", "--moe-runner-backend", "fp4lt"]).model_path)
"""


def parse(before: str = "", **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PARSE).format(before=before)],
        env=os.environ | environ,
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_fresh_process() -> None:
    done = parse()
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "x"


def test_without_the_plugin_the_name_is_unknown() -> None:
    """So a plug-in that did not load cannot go unnoticed."""
    done = parse(SGLANG_PLUGINS="another")
    assert done.returncode == 2
    assert "invalid choice: 'fp4lt'" in done.stderr


TOO_NEW = "import fp4lt.integrations.sglang.plugin as p; p.WINDOW = ('0.1', '0.2')"
CHANGED = (
    "import fp4lt.integrations.sglang.plugin as p; "
    "p.TARGETS += (p.Target(p.METHOD + '.apply', ('layer', 'tokens')),)"
)


@pytest.mark.parametrize(
    ("before", "message"),
    [(TOO_NEW, "is outside >=0.1,<0.2"), (CHANGED, "apply takes (layer, dispatch_output), not")],
)
def test_another_sglang_is_refused(before: str, message: str) -> None:
    done = parse(before)
    assert done.returncode == 2
    assert message in done.stderr
    assert "invalid choice: 'fp4lt'" in done.stderr

    # SGLang logs what a plug-in raises and goes on, unless it is told that we are required.
    done = parse(before, FP4LT_REQUIRE="1")
    assert done.returncode == 1
    assert done.stderr.strip().endswith("(FP4LT_REQUIRE=1)")
    assert "invalid choice" not in done.stderr


def test_any_version_can_be_tried() -> None:
    assert parse(TOO_NEW, FP4LT_ANY_VERSION="1").returncode == 0


def test_everything_that_is_hooked_is_there() -> None:
    assert faults(plugin.TARGETS) == []


def test_other_backends_are_left_alone() -> None:
    with server("flashinfer_cutlass", blackwell=True):
        method = modelopt_quant.ModelOptNvFp4FusedMoEMethod(sglang_layer.quant_config(MODELOPT))
        assert not method.served_by_fp4lt
        assert method.enable_flashinfer_cutlass_moe
    with server("triton"), pytest.raises(ValueError, match="does not support NVFP4"):
        modelopt_quant.ModelOptNvFp4FusedMoEMethod(sglang_layer.quant_config(MODELOPT))


@pytest.mark.parametrize("kind", [MODELOPT, COMPRESSED])
@pytest.mark.parametrize("theirs", ["auto", "marlin", "flashinfer_cutlass"])
def test_take_over(kind: str, theirs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layers of SGLang's own backend, under its own name."""
    monkeypatch.setenv("FP4LT_SGLANG_TAKE_OVER", theirs)
    checkpoint = small(kind)
    for place in (Place(), Place(2, 1)):
        with server(theirs, place, blackwell=theirs == "flashinfer_cutlass"):
            layer = served(checkpoint)
            assert layer.runner_backend.value == "fp4lt"
            sglang_layer.check(layer, checkpoint.weights(place), *inputs(6, 128, 4))


def test_take_over_of_another_layout_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP4LT_SGLANG_TAKE_OVER", "flashinfer_trtllm")
    with server("fp4lt"):
        served(small())  # our own name does not ask
    with server("triton"), pytest.raises(ArgumentError, match="it can name auto"):
        served(small())


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"no_combine": True}, "one row per expert and token"),
    ({"activation": "situ"}, "activation 'situ' is not among silu"),
    ({"activation": "gelu", "swiglu_limit": 7.0}, "a limit with activation 'gelu'"),
    ({"apply_router_weight_on_input": True}, "it is for top-1 only"),
    ({"with_bias": True}, "the experts have biases"),
]


@pytest.mark.parametrize("kind", [MODELOPT, COMPRESSED])
@pytest.mark.parametrize(("options", "message"), REFUSED, ids=lambda v: str(v)[:30])
def test_refused_when_the_layer_is_made(kind: str, options: dict[str, Any], message: str) -> None:
    with server(), pytest.raises(UnsupportedError, match=message) as caught:
        served(small(kind), **options)
    assert "layer 0 (model.layers.0.mlp.experts)" in str(caught.value)
    assert "--moe-runner-backend" in str(caught.value)


def test_refused_ways_to_run() -> None:
    for a2a in ("deepep", "flashinfer", "mooncake"):
        with server(a2a=a2a), pytest.raises(UnsupportedError, match=f"--moe-a2a-backend {a2a}"):
            served(small())
    dwdp = get_parallel().override(dwdp_size=2)
    with server(), dwdp, pytest.raises(UnsupportedError, match="DWDP"):
        served(small())
    for options in ({"cpu_offload_gb": 4}, {"offload_group_size": 2}):
        refused = pytest.raises(UnsupportedError, match="--cpu-offload-gb")
        with server(), refused, get_exec().offload.override(**options):
            served(small())
    uneven, halves = Checkpoint.make(MODELOPT, 4, 128, 48), server("fp4lt", Place(1, 0, 2, 0))
    with halves, pytest.raises(UnsupportedError, match="intermediate size per rank is 24"):
        served(uneven)
    with server(), pytest.raises(UnsupportedError, match="only with a gate"):
        served(small(COMPRESSED), gated=False, activation="relu2")
    with server(), pytest.raises(UnsupportedError, match="LoRA"):
        MoeRunner(served(small()).runner_backend, served(small()).moe_runner_config, True)


def test_another_quantization_is_refused() -> None:
    """Classes that SGLang derived from its own method before ours stood in its place."""

    class Method(ModelOptNvFp4OnlineFusedMoEMethod):  # type: ignore[misc]
        def __init__(self) -> None:
            self.quant_config = sglang_layer.quant_config(MODELOPT)

    assert not issubclass(ModelOptNvFp4OnlineFusedMoEMethod, ModelOptNvFp4FusedMoEMethod)
    with server():
        config = served(small()).moe_runner_config
        config.layer.quant_method = Method()
        backend = resolve_moe_runner_backend("fp4lt")
        with pytest.raises(UnsupportedError, match="its weights belong to Method"):
            MoeRunner(backend, config)


def test_layers_of_others_are_named(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unquantized layer under our backend's name runs on SGLang's Triton kernels."""
    with server(), caplog.at_level(logging.WARNING):
        sglang_layer.build(None, *SMALL)
    (record,) = [r for r in caplog.records if r.name.startswith("fp4lt")]
    assert "does not serve layer 0" in record.message
    assert "UnquantizedFusedMoEMethod, and SGLang's runner triton" in record.message

    monkeypatch.setenv("FP4LT_REQUIRE", "1")
    with server(), pytest.raises(UnsupportedError, match="FP4LT_REQUIRE=1 makes this an error"):
        sglang_layer.build(None, *SMALL)
    with server("triton"):
        sglang_layer.build(None, *SMALL)  # nobody asked for ours
    with server():
        served(small())


def test_one_line_says_what_serves_a_layer(caplog: pytest.LogCaptureFixture) -> None:
    from fp4lt.integrations.sglang import layer

    layer._reported.clear()
    with caplog.at_level(logging.INFO), server("fp4lt_w4a4"):
        for number in (0, 1, 2):
            served(small(), layer_id=number)
    lines = [r.message for r in caplog.records if r.name == layer.logger.name]
    assert lines == [
        "fp4lt serves layer 0 (model.layers.0.mlp.experts) and others like it: ModelOpt, moe E=4 "
        "H=128 I=64 top-2 bfloat16 x nvfp4 w4a4 silu gate_up on cpu by fp4lt's backend cpu, "
        "activation scales shared and shared"
    ]


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with server():
        assert served(small()).fp4lt_quant_info.block.recipe == "w4a16"
    monkeypatch.setenv("FP4LT_SERVING_RECIPE", "w4a4")
    with server():
        assert served(small()).fp4lt_quant_info.block.recipe == "w4a4"
    with server("fp4lt_w4a16"):  # the flag is stronger
        assert served(small()).fp4lt_quant_info.block.recipe == "w4a16"
    monkeypatch.setenv("FP4LT_SERVING_RECIPE", "w8a8")
    with server(), pytest.raises(ArgumentError, match="FP4LT_SERVING_RECIPE='w8a8'"):
        served(small())
    monkeypatch.delenv("FP4LT_SERVING_RECIPE")
    monkeypatch.setenv("FP4LT_SERVING_BACKEND", "fused")
    with server(), pytest.raises(UnsupportedError, match="fused: it needs a CUDA device"):
        served(small())


@pytest.mark.parametrize("kind", [MODELOPT, COMPRESSED])
def test_missing_global_scales_are_named(kind: str) -> None:
    checkpoint = small(kind)
    name = "weight_scale_2" if kind == MODELOPT else "weight_global_scale"
    tensors = checkpoint.tensors()
    key = f"{sglang_layer.PREFIX}.2.up_proj.{name}"
    tensors[key] = torch.full_like(tensors[key], float("nan"))
    with server():
        layer = sglang_layer.build(sglang_layer.quant_config(kind), *SMALL)
        with pytest.raises(CheckpointError, match=r"layer 0 .*\[2, 1\] is nan"):
            sglang_layer.load(layer, tensors, 4)


def test_quantized_tokens_are_refused() -> None:
    hidden, routing = inputs(6, 128, 4)
    with server():
        layer = served(small())
        topk = StandardTopKOutput(routing.topk_weights, routing.topk_ids, None)
        dispatched = layer.dispatcher.dispatch(hidden_states=hidden, topk_output=topk)
        quantized = dispatched._replace(hidden_states_scale=torch.zeros(1))
        with pytest.raises(UnsupportedError, match="--disable-flashinfer-cutlass"):
            layer.run_moe_core(quantized)
        with pytest.raises(UnsupportedError, match="LoRA"):
            layer.runner.runner_core.run_from_dispatch(
                dispatched, layer.fp4lt_quant_info, layer.moe_runner_config, hooks=object()
            )
        assert forward(layer, hidden, routing).shape == (6, 128)
