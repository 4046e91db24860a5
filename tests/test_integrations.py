# SPDX-License-Identifier: Apache-2.0
"""What the serving adapters share: options, looking before touching, weights without copies."""

from __future__ import annotations

import logging
import subprocess
import sys
from importlib import metadata
from typing import Any

import pytest
import torch

import fp4lt
from fp4lt.errors import ArgumentError, CheckpointError, ShapeError, UnsupportedError
from fp4lt.integrations import interface, options
from fp4lt.integrations.interface import Target, faults
from fp4lt.integrations.weights import (
    Stack,
    build_weights,
    check_positive,
    plan_block,
    shared_scale,
)
from fp4lt.testing import bounds, cases

ENTRY_POINTS = [
    ("sglang.srt.plugins", "fp4lt.integrations.sglang:register"),
    ("vllm.general_plugins", "fp4lt.integrations.vllm:register"),
]


@pytest.mark.parametrize(("group", "value"), ENTRY_POINTS)
def test_entry_points_load_without_the_engine(group: str, value: str) -> None:
    (found,) = [e for e in metadata.entry_points(group=group) if e.name == "fp4lt"]
    assert found.value == value
    module, _, function = value.partition(":")
    code = f"import {module} as m, sys; assert callable(m.{function}); print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert not {"sglang", "vllm"} & {name.partition(".")[0] for name in done.split()}


# ---- options


def test_options_have_defaults() -> None:
    assert options.Options.read({}) == options.Options(None, "auto", False, False)
    given = {
        "FP4LT_SERVING_RECIPE": "W4A4",
        "FP4LT_SERVING_BACKEND": "fused",
        "FP4LT_REQUIRE": "1",
        "FP4LT_ANY_VERSION": "yes",
    }
    assert options.Options.read(given) == options.Options("w4a4", "fused", True, True)
    empty = dict.fromkeys(given, "")
    assert options.Options.read(empty) == options.Options.read({})


@pytest.mark.parametrize("name", ["FP4LT_SERVING_RECIPE", "FP4LT_REQUIRE", "FP4LT_ANY_VERSION"])
def test_options_that_are_none(name: str) -> None:
    with pytest.raises(ArgumentError, match=f"{name}='perhaps'; it must be"):
        options.Options.read({name: "perhaps"})


@pytest.mark.parametrize(
    ("device", "capability", "recipe"),
    [
        ("cpu", (0, 0), "w4a16"),
        ("cuda", (8, 0), "w4a16"),
        ("cuda", (9, 0), "w4a16"),
        ("cuda", (10, 0), "w4a4"),
        ("cuda", (12, 1), "w4a4"),
    ],
)
def test_the_recipe_follows_the_device(
    device: str, capability: tuple[int, int], recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    where = torch.device(device)
    assert options.choose_recipe(None, where, weight_only=False) == recipe
    assert options.choose_recipe(None, where, weight_only=True) == "w4a16"
    assert options.choose_recipe("w4a4", where, weight_only=True) == "w4a4"
    assert options.choose_recipe("w4a16", where, weight_only=False) == "w4a16"


def test_a_fallback_is_loud(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = logging.getLogger("fp4lt.test")
    options.fall_back(logger, "another kernel computes")
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    monkeypatch.setenv("FP4LT_REQUIRE", "1")
    with pytest.raises(UnsupportedError, match=r"another kernel computes \(FP4LT_REQUIRE=1"):
        options.fall_back(logger, "another kernel computes")


# ---- what an engine looks like


class Engine:
    """Something to look at."""

    def method(self, layer: int, tokens: int = 3, *rest: int, **more: int) -> None: ...

    def strict(self, layer: int, new: int) -> None: ...

    def keyword(self, layer: int, *, new: int) -> None: ...

    @property
    def value(self) -> int:
        return 1


HERE = f"{__name__}.Engine"


@pytest.mark.parametrize(
    ("path", "parameters", "fault"),
    [
        (f"{HERE}.method", ("layer",), None),
        (f"{HERE}.method", ("layer", "tokens"), None),
        (f"{HERE}.value", None, None),
        (HERE, (), None),
        (f"{HERE}.gone", None, "gone is not there"),
        ("fp4lt.gone.module", None, "is not there"),
        (f"{HERE}.method", ("tokens",), "takes (layer, tokens, rest, more), not (tokens)"),
        (f"{HERE}.method", ("layer", "tokens", "scale"), "not (layer, tokens, scale)"),
        (f"{HERE}.strict", ("layer",), "takes (layer, new), not (layer)"),
        (f"{HERE}.keyword", ("layer",), "takes (layer, new), not (layer)"),
        (f"{HERE}.value", ("layer",), "has no signature"),
    ],
)
def test_faults(path: str, parameters: tuple[str, ...] | None, fault: str | None) -> None:
    found = faults((Target(path, parameters),))
    assert len(found) == (fault is not None)
    assert fault is None or fault in found[0]


def test_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    for version, inside in [
        ("0.5.22", False),
        ("0.5.23", True),
        ("0.5.23.post1", True),
        ("0.5.100", True),
        ("0.5.24.dev3+g12", True),
        ("0.6.0", False),
        ("1.0", False),
        ("", False),
    ]:
        monkeypatch.setattr(interface, "version_of", lambda _, v=version: v)
        fault = interface.version_fault("engine", "0.5.23", "0.6")
        assert (fault is None) is inside, version
    assert fault == "engine (unknown version) is outside >=0.5.23,<0.6"


# ---- weights


def stacks(per: str) -> tuple[Stack, Stack, dict[str, Any]]:
    rng = cases.generator(2)
    made = []
    for shape in ((3, 96, 80), (3, 80, 48)):
        packed = cases.random_operand(rng, shape).packed()
        made.append(Stack(packed.codes, packed.scales, packed.global_scale))
    w13, w2 = made
    scales = torch.rand(3, 2) + 0.5
    if per == "two":
        return w13._replace(multiplier=scales), w2, {"gate_up_scales": scales}
    if per == "column":
        return w13._replace(multiplier=scales[:, :1]), w2, {}
    return w13, w2, {}


@pytest.mark.parametrize("per", ["one", "column", "two"])
def test_weights_are_shared(per: str) -> None:
    w13, w2, _ = stacks(per)
    w = build_weights(w13, w2, order="up_gate", a1_scale=torch.tensor(0.5), expert_start=3)
    assert isinstance(w.w13, fp4lt.NVFP4Tensor)
    assert isinstance(w.w2, fp4lt.NVFP4Tensor)
    for ours, theirs in ((w.w13, w13), (w.w2, w2)):
        assert ours.codes.data_ptr() == theirs.codes.data_ptr()
        assert ours.scales.data_ptr() == theirs.scales.data_ptr()
    scales = w.gate_up_scales if per == "two" else w.w13.global_scale
    assert scales is not None
    assert scales.data_ptr() == w13.multiplier.data_ptr()
    assert w.w2.global_scale.data_ptr() == w2.multiplier.data_ptr()


def test_a_scale_for_gate_and_up_needs_a_gate() -> None:
    w13, w2, _ = stacks("two")
    ungated = w13._replace(codes=w13.codes[:, :48], scales=w13.scales[:, :128])
    with pytest.raises(ShapeError, match=r"\(3, 2\)"):
        build_weights(ungated, w2, order=None, activation="relu2")


def test_a_plan_is_made_before_the_first_call() -> None:
    w13, w2, _ = stacks("two")
    weights = build_weights(w13, w2, order="gate_up")
    block = plan_block(weights, "w4a16", "auto", 2, torch.bfloat16)
    assert block.plan.backend.name == "cpu"
    hidden, ids = torch.randn(4, 80).to(torch.bfloat16), torch.tensor([[0, 2]]).expand(4, 2)
    routing: dict[str, Any] = {"topk_ids": ids, "topk_weights": torch.rand(4, 2)}
    want = fp4lt.moe(hidden, weights, recipe="w4a16", **routing)
    bounds.assert_bitwise(block.plan.run(hidden, weights, **routing), want)
    with pytest.raises(UnsupportedError, match="fused"):
        plan_block(weights, "w4a16", "fused", 2, torch.bfloat16)


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_global_scales_are_checked_wherever_they_are(bad: float) -> None:
    check_positive("scales", None)
    check_positive("scales", torch.tensor(0.25))
    with pytest.raises(CheckpointError, match=rf"layer 3: scales\[1, 0\] is {bad}"):
        check_positive("layer 3: scales", torch.tensor([[1.0, 1.0], [bad, 1.0]]))
    with pytest.raises(CheckpointError, match=rf"scale\[0\] is {bad}"):
        check_positive("scale", torch.tensor(bad))


def test_the_shared_scale_is_the_largest_that_is_stored() -> None:
    scale = shared_scale(torch.tensor([[0.25, 0.5], [1.0, 0.125]]))
    assert scale is not None
    assert scale.shape == ()
    assert float(scale) == 0.5
    assert shared_scale(torch.ones(4, 2)) is None
    large = shared_scale(torch.tensor([2.0, 1.0]))
    assert large is not None
    assert float(large) == 2.0
