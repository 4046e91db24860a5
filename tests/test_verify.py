# SPDX-License-Identifier: Apache-2.0
"""verify passes what is right, and each of its checks notices a backend that is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from wrong_backend import FAULTS, Wrong

import fp4lt
from fp4lt import _C, backends
from fp4lt.__main__ import main
from fp4lt.backends.cpu import CpuBackend, depth
from fp4lt.problem import GroupedProblem, MoEProblem
from fp4lt.tensor import NVFP4Tensor
from fp4lt.testing import targets, verify, verify_codec
from fp4lt.testing.targets import Check, RefusedError, Target


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Target]:
    """Puts a backend with a fault in the CPU backend's place."""

    def put(fault: str) -> Target:
        wrong = Wrong(fault)
        monkeypatch.setattr(backends, "BACKENDS", (wrong,))
        return Target(wrong, torch.device("cpu"))

    return put


def pick(target: Target, names: tuple[str, ...]) -> list[Check]:
    found = [c for c in verify.backend_checks(target, quick=True) if c.name in names]
    assert {check.name for check in found} == set(names)
    return found


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_noticed(fault: str, install: Callable[[str], Target]) -> None:
    """By every check that is there for it; the same check passes without the fault."""
    for name in FAULTS[fault]:
        target = install("")
        (check,) = pick(target, (name,))
        result = verify.run_check(check, target.skipped)
        assert (result.status, result.message) == ("ok", "")
        target = install(fault)
        (check,) = pick(target, (name,))
        result = verify.run_check(check, target.skipped)
        assert result.status == "failed", name
        assert result.message


# ---- the command


def test_quick_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--quick"]) == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert "FAILED" not in text
    assert f"{_C.selected_cpu_kernels()} kernels" in text
    assert any(line.startswith("codec on cpu") for line in lines)
    assert any(line.startswith("cpu on cpu (") for line in lines)
    shown = [line for line in lines if line.startswith("  ok")]
    assert lines[-1].startswith(f"{len(shown)} checks: {len(shown)} ok; ")
    for table in _C.cpu_kernels():
        assert table in text


def few(target: Target, *, quick: bool) -> list[Check]:
    found = ORIGINAL(target, quick=quick)
    return [c for c in found if c.name in ("exact sums, K = 16", "moe: no token")]


ORIGINAL = verify.backend_checks


@pytest.fixture
def few_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two checks of a backend and none of the codec: enough to see what is printed."""
    monkeypatch.setattr(verify, "backend_checks", few)
    monkeypatch.setattr(verify, "codec_checks", lambda device, quick: [])


def test_wrong_backend_fails_the_command(
    install: Callable[[str], Target], few_checks: None, capsys: pytest.CaptureFixture[str]
) -> None:
    install("doubles one expert")
    assert main(["verify"]) == 1
    text = capsys.readouterr().out
    lines = text.splitlines()
    (at,) = (i for i, line in enumerate(lines) if line.startswith("  FAILED"))
    assert "exact sums, K = 16" in lines[at]
    assert "nvfp4 x nvfp4, groups (3, 0, 5), (E, K, N) (3, 16, 37), y[3, 0]: got" in lines[at + 1]
    assert lines[-1].startswith("2 checks: 1 ok, 1 FAILED; ")


def test_backend_that_raises_fails_and_the_rest_is_still_checked(
    install: Callable[[str], Target], few_checks: None, capsys: pytest.CaptureFixture[str]
) -> None:
    install("breaks down")
    assert main(["verify"]) == 1
    text = capsys.readouterr().out
    assert "RuntimeError: out of luck" in text
    assert "2 checks: 1 ok, 1 FAILED" in text


@pytest.mark.parametrize("fault", ["", "doubles one expert"])
def test_json(
    fault: str,
    install: Callable[[str], Target],
    few_checks: None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    install(fault)
    code = main(["verify", "--json", "--backend", "cpu"])
    report = json.loads(capsys.readouterr().out)
    assert code == int(bool(fault))
    assert report["schema_version"] == verify.SCHEMA_VERSION
    assert report["ok"] is not bool(fault)
    assert report["counts"] == {"ok": 1 if fault else 2, "failed": int(bool(fault)), "refused": 0}
    section = report["sections"][-1]
    assert (section["name"], section["device"], section["refusal"]) == ("cpu", "cpu", None)
    statuses = {check["name"]: check["status"] for check in section["checks"]}
    assert statuses["exact sums, K = 16"] == ("failed" if fault else "ok")


def test_unknown_backend_exits_with_2() -> None:
    with pytest.raises(SystemExit) as info:
        main(["verify", "--backend", "nothing"])
    assert info.value.code == 2


class Absent(Wrong):
    """A backend that refuses some problems."""

    def __init__(self, refused: Callable[[GroupedProblem | MoEProblem], bool]) -> None:
        super().__init__()
        self.refused = refused

    def refusal(self, problem: GroupedProblem | MoEProblem, device: torch.device) -> str | None:
        return "no such hardware here" if self.refused(problem) else None


def test_nothing_to_check_is_a_failure(
    few_checks: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(backends, "BACKENDS", (Absent(lambda problem: True),))
    assert main(["verify"]) == 1
    text = capsys.readouterr().out
    assert "cpu on cpu: not checked: no such hardware here" in text
    assert "0 checks: 0 ok, no backend was checked" in text


def test_a_check_that_is_refused_is_no_failure(
    few_checks: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    absent = Absent(lambda problem: isinstance(problem, MoEProblem))
    monkeypatch.setattr(backends, "BACKENDS", (absent,))
    assert main(["verify"]) == 0
    text = capsys.readouterr().out
    assert "  refused moe: no token" in text
    assert "no such hardware here" in text
    assert "2 checks: 1 ok, 1 refused" in text


def test_all_checks_live_with_a_backend_of_few_formats(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left of each check is made, and the reason is shown once."""

    def refused(problem: GroupedProblem | MoEProblem) -> bool:
        if isinstance(problem, MoEProblem):
            return problem.w_format != "nvfp4"
        return problem.b_format != "nvfp4" or problem.a_format == "float32"

    monkeypatch.setattr(backends, "BACKENDS", (Absent(refused),))
    monkeypatch.setattr(verify, "codec_checks", lambda device, quick: [])
    shown: list[str] = []
    report = verify.verify("cpu", quick=True, show=shown.append)
    checks = {check.name: check for check in report.sections[-1].checks}
    assert report.ok
    assert {name for name, check in checks.items() if check.status == "refused"} == {
        "moe: bf16 weights",
        "moe: fp16 weights",
    }
    assert checks["exact sums, K = 16"].message == "in part: no such hardware here"
    # Five of eight kinds, of three output types, 8 rows and 37 columns each.
    assert checks["exact sums, K = 16"].values == 5 * 3 * 8 * 37
    assert sum("in part" in line for line in shown) == 1


# ---- parts


def test_results_of_checks() -> None:
    def fail() -> int:
        raise AssertionError("y[0]: got 1")

    def refuse() -> int:
        raise RefusedError("not here")

    skipped: list[str] = ["left over"]
    assert verify.run_check(Check("a", lambda: 3), skipped).status == "ok"
    assert verify.run_check(Check("a", fail), skipped).message == "y[0]: got 1"
    assert verify.run_check(Check("a", refuse), skipped).status == "refused"

    def partly(values: int) -> int:
        skipped.extend(["no bf16", "no bf16"])
        return values

    result = verify.run_check(Check("a", lambda: partly(5)), skipped)
    assert (result.status, result.message) == ("ok", "in part: no bf16")
    result = verify.run_check(Check("a", lambda: partly(0)), skipped)
    assert (result.status, result.message) == ("refused", "no bf16")


def test_depth_is_the_backends_own() -> None:
    class Method(CpuBackend):
        def depth(self, k: int, sums: str) -> int:
            return 7

    assert targets.find_depth(CpuBackend(), 2880, "w4a16") == depth(2880, "w4a16")
    assert targets.find_depth(Wrong(), 2880, "w4a4") == depth(2880, "w4a4")
    assert targets.find_depth(Method(), 2880, "w4a4") == 7
    assert targets.find_depth(object(), 2880, "w4a4") == 2880  # type: ignore[arg-type]


def test_kernel_tables_are_put_back(kernel_table: str) -> None:
    def fail() -> int:
        raise AssertionError(_C.selected_cpu_kernels())

    others = [name for name in _C.cpu_kernels() if name != kernel_table]
    found = verify.other_tables([Check("a", fail), Check("b", fail)], ["a"])
    assert [check.name for check in found] == [f"{name} kernels: a" for name in others]
    for name, check in zip(others, found, strict=True):
        assert verify.run_check(check, []).message == name
        assert _C.selected_cpu_kernels() == kernel_table


def test_samples_name_checks() -> None:
    codec = {check.name for check in verify_codec.checks(torch.device("cpu"), quick=True)}
    assert set(verify.CODEC_SAMPLE) <= codec
    target = Target(CpuBackend(), torch.device("cpu"))
    assert set(verify.BACKEND_SAMPLE) <= {c.name for c in ORIGINAL(target, quick=True)}


def test_full_has_all_that_quick_has_but_for_sizes() -> None:
    target = Target(CpuBackend(), torch.device("cpu"))
    quick = {check.name for check in ORIGINAL(target, quick=True)}
    full = {check.name for check in ORIGINAL(target, quick=False)}
    assert quick < full
    assert {"exact sums, K = 7168", "exact sums, K = 2880"} <= full - quick


@pytest.mark.parametrize("part", ["codes", "scales", "global_scale"])
def test_codec_checks_notice_a_wrong_byte(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = fp4lt.quantize

    def wrong(*arguments: Any, **options: Any) -> NVFP4Tensor:
        t = original(*arguments, **options)
        stored = getattr(t, part)
        flat = (stored if part == "global_scale" else stored.view(torch.uint8)).view(-1)
        flat[-1] = flat[-1] * 2 if part == "global_scale" else flat[-1] ^ 1
        return t

    monkeypatch.setattr(verify_codec, "quantize", wrong)
    for check in verify_codec.checks(torch.device("cpu"), quick=True):
        if not check.name.startswith("dequantize"):
            with pytest.raises(AssertionError, match=part.removesuffix("s")):
                check.run()
