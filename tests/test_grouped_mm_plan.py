# SPDX-License-Identifier: Apache-2.0
"""Plans of grouped_mm: cached, readable, good for any number of rows, and for nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_grouped_mm import KINDS, extras, make

import fp4lt
from fp4lt import errors
from fp4lt.backends import BACKENDS, refusals
from fp4lt.gemm import GroupedMMPlan
from fp4lt.testing import cases


def plan_of(kind: str, rows: int = 4, **options: Any) -> GroupedMMPlan:
    case = make(kind, 60, rows, 3, 8, 32)
    return fp4lt.plan_grouped_mm(case.a, case.b, recipe=case.recipe, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_problem_gives_the_same_plan(kind: str) -> None:
    plan = plan_of(kind)
    assert plan_of(kind) is plan
    assert plan_of(kind, rows=9) is plan
    assert plan_of(kind, out_dtype=torch.float32, rows=0) is plan_of(kind, out_dtype=torch.float32)
    others = [dtype for dtype in (torch.float32, torch.float16) if dtype != plan.problem.out_dtype]
    assert plan_of(kind, out_dtype=others[0]) is not plan
    case = make(kind, 60, 4, 3, 9, 32)
    assert fp4lt.plan_grouped_mm(case.a, case.b, recipe=case.recipe) is not plan


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_says_what_it_is_for(kind: str) -> None:
    names = {None: "nvfp4", torch.float16: "float16", torch.bfloat16: "bfloat16"}
    weights, dtype, recipe = KINDS[kind]
    a = names.get(dtype, "float32")
    out = "bfloat16" if dtype is None else a
    tail = f"nvfp4 -> {out} {recipe}" if weights == "nvfp4" else f"{a} -> {out}"
    plan = plan_of(kind)
    assert repr(plan) == f"GroupedMMPlan(grouped_mm E=3 N=8 K=32 {a} x {tail}, backend='cpu', cpu)"
    assert str(plan.problem) in repr(plan)


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_runs_any_number_of_rows(kind: str) -> None:
    plan = plan_of(kind, out_dtype=torch.float32)
    for counts in ((4, 0, 0), (0, 0, 0), (1, 70, 2), (0, 1, 0)):
        case, options = make(kind, 61, sum(counts), 3, 8, 32), extras(61, 3, 8)
        offs = cases.offsets(counts)
        y = plan.run(case.a, case.b, offs=offs, **options)
        case.want(counts, **options).check_exact(y)
        out = torch.empty_like(y)
        assert plan.run(case.a, case.b, offs=offs, out=out, **options) is out
        assert torch.equal(out, y)


OTHERS = [
    ("nvfp4", 2, 8, 32, "E=2"),
    ("nvfp4", 3, 9, 32, "N=9"),
    ("nvfp4", 3, 8, 48, "K=48"),
    ("w4a4-bf16", 3, 8, 32, "bfloat16 x nvfp4"),
    ("plain-fp16", 3, 8, 32, "float16 x float16"),
]


@pytest.mark.parametrize(("kind", "experts", "n", "k", "words"), OTHERS)
def test_a_plan_refuses_other_operands(kind: str, experts: int, n: int, k: int, words: str) -> None:
    case = make(kind, 62, 4, experts, n, k)
    offs = cases.offsets((4, 0, 0)[:experts])
    with pytest.raises(errors.ArgumentError, match=f"this plan is for grouped_mm.*{words}"):
        plan_of("nvfp4").run(case.a, case.b, offs=offs)


def test_a_plan_refuses_another_output_type() -> None:
    case, out = make("nvfp4", 63, 4, 3, 8, 32), torch.full((4, 8), 7.0)
    with pytest.raises(errors.DTypeError, match="out= is float32, but the result is bfloat16"):
        plan_of("nvfp4").run(case.a, case.b, offs=cases.offsets((4, 0, 0)), out=out)
    assert bool((out == 7).all())


def test_a_plan_takes_its_output_type_from_out() -> None:
    out = torch.empty(4, 8, dtype=torch.float16)
    assert plan_of("nvfp4", out=out).problem.out_dtype == torch.float16
    assert plan_of("nvfp4", out=out, out_dtype=torch.float32).problem.out_dtype == torch.float32


def test_refusals_name_every_backend() -> None:
    problem = plan_of("nvfp4").problem
    here, elsewhere = (refusals(problem, torch.device(name)) for name in ("cpu", "meta"))
    assert list(here) == [backend.name for backend in BACKENDS]
    assert here["cpu"] is None
    assert all(reason and "meta" in reason for reason in elsewhere.values())
