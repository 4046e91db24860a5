# SPDX-License-Identifier: Apache-2.0
"""``python -m fp4lt verify``: every usable backend against the exact oracle, on this machine."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import torch

import fp4lt
from fp4lt import _C, errors
from fp4lt.rounding import quantize
from fp4lt.testing import verify_codec, verify_gemm, verify_moe
from fp4lt.testing.targets import Check, RefusedError, Target, find_depth, find_targets

SCHEMA_VERSION: Final = 1

BATCH_DEPENDENT: Final = frozenset({"cublaslt", "cublaslt_grouped", "dequant"})
"""Backends whose library may sum in another order for another batch: only runs repeat."""

Show = Callable[[str], None]


@dataclass
class Result:
    """One check: ``status`` is "ok", "failed" or "refused"; ``values`` were compared."""

    name: str
    status: str
    values: int
    seconds: float
    message: str = ""


@dataclass
class Section:
    """The checks of one backend, or of the codec, on one device."""

    name: str
    device: str
    refusal: str | None = None
    about: str = ""
    checks: list[Result] = field(default_factory=list)


@dataclass
class Report:
    """What was checked."""

    versions: dict[str, str]
    quick: bool
    sections: list[Section] = field(default_factory=list)
    seconds: float = 0.0

    def count(self, status: str) -> int:
        """Checks of a status."""
        return sum(check.status == status for part in self.sections for check in part.checks)

    @property
    def ok(self) -> bool:
        """Whether some backend was checked and nothing failed."""
        checked = any(
            check.status == "ok"
            for part in self.sections
            for check in part.checks
            if part.name != "codec"
        )
        return checked and self.count("failed") == 0

    def summary(self) -> str:
        """One line of counts."""
        values = sum(check.values for part in self.sections for check in part.checks)
        failed, refused = self.count("failed"), self.count("refused")
        total = self.count("ok") + failed + refused
        parts = [f"{self.count('ok')} ok"]
        parts += [f"{failed} FAILED"] if failed else []
        parts += [f"{refused} refused"] if refused else []
        if not self.ok and not failed:
            parts.append("no backend was checked")
        return f"{total} checks: {', '.join(parts)}; {values} values, {self.seconds:.1f} s"

    def to_json(self) -> dict[str, Any]:
        """The report as JSON takes it."""
        counts = {status: self.count(status) for status in ("ok", "failed", "refused")}
        return {"schema_version": SCHEMA_VERSION, "ok": self.ok, "counts": counts, **asdict(self)}


def run_check(check: Check, skipped: list[str]) -> Result:
    """Run one check; anything that it raises is its result.

    `skipped` collects refusals of parts of the check; a check of which nothing is left is refused.
    """
    skipped.clear()
    start = time.perf_counter()
    status, values, message = "ok", 0, ""
    try:
        values = check.run()
    except RefusedError as reason:
        status, message = "refused", str(reason)
    except AssertionError as error:
        status, message = "failed", str(error)
    except Exception as error:
        # A backend that breaks down is as wrong as one that errs, and the other checks still count.
        status, message = "failed", f"{type(error).__name__}: {error}"
    if status == "ok" and skipped:
        reasons = "; ".join(dict.fromkeys(skipped))
        status, message = ("ok", f"in part: {reasons}") if values else ("refused", reasons)
    return Result(check.name, status, values, time.perf_counter() - start, message)


def _with_table(table: str, check: Check) -> Check:
    """The check with another CPU kernel table in use."""

    def run() -> int:
        before = _C.selected_cpu_kernels()
        _C.select_cpu_kernels(table)
        try:
            return check.run()
        finally:
            _C.select_cpu_kernels(before)

    return Check(f"{table} kernels: {check.name}", run)


def other_tables(checks: Sequence[Check], names: Sequence[str]) -> list[Check]:
    """The checks of `names` again, with each CPU kernel table that is not in use."""
    sample = [check for check in checks if check.name in names]
    tables = [name for name in _C.cpu_kernels() if name != _C.selected_cpu_kernels()]
    return [_with_table(table, check) for table in tables for check in sample]


CODEC_SAMPLE: Final = (
    "specials: ties, NaN, inf, zero blocks, denormals",
    "block scales at the midpoints of e4m3",
    "dequantize: 16 codes x 127 scales",
    "every bfloat16 value",
)
BACKEND_SAMPLE: Final = (
    "exact sums, K = 720",
    "exact sums, N = 129",
    "random values within the bound, K = 272",
    "16 codes x 127 scales, each product as is",
    "moe: gate_up, two scales",
    "moe: w4a16 in fp16, interleaved",
)


def codec_checks(device: torch.device, *, quick: bool) -> list[Check]:
    """Checks of the codec, on the CPU with every kernel table."""
    found = verify_codec.checks(device, quick=quick)
    return found + (other_tables(found, CODEC_SAMPLE) if device.type == "cpu" else [])


def backend_checks(target: Target, *, quick: bool) -> list[Check]:
    """Checks of a backend, on the CPU with every kernel table."""
    alone = target.backend.name not in BATCH_DEPENDENT
    found = verify_gemm.checks(target, quick=quick, alone=alone)
    found += verify_moe.checks(target, quick=quick, alone=alone)
    return found + (other_tables(found, BACKEND_SAMPLE) if target.device.type == "cpu" else [])


def _codec_refusal(device: torch.device) -> str | None:
    try:
        quantize(torch.ones(1, 16, device=device))
    except errors.Error as error:
        return str(error)
    return None


def _about(target: Target) -> str:
    depths = ", ".join(f"{find_depth(target.backend, 7168, s)} {s}" for s in ("w4a4", "w4a16"))
    where = torch.cuda.get_device_name(target.device) if target.device.type == "cuda" else ""
    if target.device.type == "cpu":
        where = f"{_C.selected_cpu_kernels()} kernels, {torch.get_num_threads()} threads"
    return f"{where}; depth at K = 7168: {depths}"


def verify(
    backend: str | None = None, *, quick: bool = False, show: Show = lambda line: None
) -> Report:
    """Run the checks of every usable backend on every device, and of the codec there.

    Parameters
    ----------
    backend : str, optional
        Check this one only.
    quick : bool
        Leave out the larger shapes.
    show : callable
        Takes each line of the report as it comes.
    """
    versions = {
        "fp4lt": fp4lt.__version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "platform": platform.platform(),
    }
    report = Report(versions, quick)
    show(", ".join(f"{name} {version}" for name, version in versions.items()))
    start = time.perf_counter()
    targets, refused = find_targets(None if backend is None else [backend])
    for name, device, reason in refused:
        report.sections.append(Section(name, device, reason))
        show(f"{name} on {device}: not checked: {reason}")
    for place in dict.fromkeys(target.device for target in targets):
        part = Section("codec", str(place), _codec_refusal(place))
        report.sections.append(part)
        checks = codec_checks(place, quick=quick) if part.refusal is None else []
        _run_section(part, checks, [], show)
    for target in targets:
        part = Section(target.backend.name, str(target.device), about=_about(target))
        report.sections.append(part)
        _run_section(part, backend_checks(target, quick=quick), target.skipped, show)
    report.seconds = time.perf_counter() - start
    show(report.summary())
    return report


def _run_section(part: Section, checks: list[Check], skipped: list[str], show: Show) -> None:
    if part.refusal is not None:
        show(f"{part.name} on {part.device}: not checked: {part.refusal}")
        return
    show(f"{part.name} on {part.device}{f' ({part.about})' if part.about else ''}")
    width = max((len(check.name) for check in checks), default=0)
    seen = set()
    for check in checks:
        result = run_check(check, skipped)
        part.checks.append(result)
        status = "FAILED" if result.status == "failed" else result.status
        line = f"  {status:<8}{result.name:<{width}}  {result.values:>8} values  "
        show(f"{line}{result.seconds:6.2f} s")
        # What is refused in part is refused in many checks; once is enough.
        if result.message and (result.status, result.message) not in seen:
            show(f"          {result.message}")
        if result.status == "ok":
            seen.add((result.status, result.message))


def main(backend: str | None, *, quick: bool, as_json: bool) -> int:
    """Print the report, line by line or as one JSON document; returns the exit code."""
    if as_json:
        report = verify(backend, quick=quick)
        print(json.dumps(report.to_json(), indent=2))
    else:
        report = verify(backend, quick=quick, show=lambda line: print(line, flush=True))
    return 0 if report.ok else 1
