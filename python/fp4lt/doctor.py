# SPDX-License-Identifier: Apache-2.0
"""``python -m fp4lt doctor``: what was built, found and chosen, and why each backend refuses.

Measures nothing and changes nothing.  A finding is an error when something that was asked for is
broken, and a note when the machine could do more, or something else, than one might expect.
"""

from __future__ import annotations

import os
import platform
import re
import warnings
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

import fp4lt
from fp4lt import _C, _hazards, _library, backends
from fp4lt._build import covers, record
from fp4lt.errors import Error
from fp4lt.testing import targets

SCHEMA_VERSION: Final = 1

TABLES: Final = {
    "avx2": ("avx2", "fma", "f16c"),
    "avx512": ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni"),
}
"""CPU kernel tables beside ``scalar``, and the processor features that each needs."""

BF16_TABLE: Final = ("avx512_bf16", (*TABLES["avx512"], "avx512_bf16"))
"""One that a processor with these features may still lack, if its bf16 units round otherwise."""

DRIVERS: Final = {12: "525", 13: "580"}
"""Oldest driver series that runs code of a CUDA major version."""


_DONE: Final = {
    "refuse": "refused",
    "drop": "such algorithms are not used",
    "avoid": "fp4lt's calls keep clear of it",
    "warn": "mind it",
}


@dataclass
class Finding:
    """``severity`` is "error" or "note"."""

    severity: str
    text: str


@dataclass
class Report:
    """Everything that doctor says; sizes in bytes, ``""`` or None where there is nothing."""

    versions: dict[str, str]
    build: dict[str, Any]
    cpu: dict[str, Any]
    cuda: dict[str, Any]
    cublaslt: dict[str, Any]
    backends: list[dict[str, Any]]
    default_device: str
    findings: list[Finding] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether nothing that was asked for is broken."""
        return all(finding.severity != "error" for finding in self.findings)

    def error(self, text: str) -> None:
        """Add an error."""
        self.findings.append(Finding("error", text))

    def note(self, text: str) -> None:
        """Add a note."""
        self.findings.append(Finding("note", text))

    def to_json(self) -> dict[str, Any]:
        """The report as JSON takes it."""
        return {"schema_version": SCHEMA_VERSION, "ok": self.ok, **asdict(self)}


def cpu_info(path: Path = Path("/proc/cpuinfo")) -> tuple[str, list[str]]:
    """Model name and feature flags of the processor; the machine's name and none if unknown."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        lines = []
    values: dict[str, str] = {}
    for line in lines:
        key, _, value = line.partition(":")
        values.setdefault(key.strip(), value.strip())
    flags = values.get("flags", values.get("Features", ""))
    return values.get("model name") or platform.machine(), flags.split()


def kernel_driver(path: Path = Path("/proc/driver/nvidia/version")) -> str:
    """Version of NVIDIA's kernel module, such as "580.95.05"; empty without one."""
    try:
        match = re.search(r"\s(\d+\.\d+(?:\.\d+)*)\s", path.read_text())
    except OSError:
        return ""
    return match[1] if match is not None else ""


def check_tables(tables: list[str], flags: list[str]) -> list[str]:
    """Errors about kernel tables that the processor could use but the build does not have."""
    if not tables:
        return ["the compiled module has no CPU kernels; reinstall fp4lt"]
    return [
        f"the processor has {', '.join(needed)}, but the compiled module has no {name} kernels "
        f"(it has {', '.join(tables)}), so the CPU backend is slower than it could be; reinstall "
        "fp4lt with a newer C++ compiler"
        for name, needed in TABLES.items()
        if name not in tables and set(needed) <= set(flags)
    ]


def check_bf16_table(tables: list[str], flags: list[str]) -> list[str]:
    """A note where the processor has bf16 units that the CPU backend does not use."""
    name, needed = BF16_TABLE
    if name in tables or not set(needed) <= set(flags):
        return []
    return [
        f"the processor has bf16 units, but the CPU backend does not use them (no {name} kernels): "
        "the compiler did not know them, or they round otherwise than the backend's sums do; "
        "w4a16 with bf16 activations is slower for it"
    ]


def check_cuda(cuda: dict[str, Any], torch_devices: int) -> list[str]:
    """Notes about device code, driver, devices and torch that do not fit together."""
    built, driver, kernel = cuda["built_with"], cuda["driver"], cuda["kernel_driver"]
    if not built:
        if torch_devices or kernel:
            return [
                "there is an NVIDIA driver, but this build has no device code; reinstall fp4lt "
                "where nvcc is found to have it"
            ]
        return []
    notes = []
    toolkit = tuple(int(part) for part in built.split("."))
    if driver:
        supported = tuple(int(part) for part in driver.split("."))
        if toolkit[0] > supported[0]:
            need = DRIVERS.get(toolkit[0])
            what = f"series {need} or later" if need else f"for CUDA {toolkit[0]}"
            notes.append(
                f"built with CUDA {built}, but the driver only knows CUDA {driver}, so no device "
                f"code will run; install a driver {what}, or reinstall with an older toolkit"
            )
        elif toolkit > supported:
            notes.append(
                f"built with CUDA {built} and the driver knows CUDA {driver}: fine for code as "
                "built, but the driver cannot compile PTX of the newer toolkit"
            )
    notes += [
        f"{device['device']} is {device['name']} of compute capability {device['capability']}, for "
        f"which this build has no code (it has {', '.join(cuda['architectures'])}); reinstall with "
        f"CUDAARCHS={device['capability'].replace('.', '')}"
        for device in cuda["devices"]
        if device["code"] is None
    ]
    if cuda["devices"] and not torch_devices:
        why = "is a build without CUDA" if not cuda["torch"] else "cannot use them"
        notes.append(f"there are CUDA devices, but this torch {why}: no tensor can be on one")
    elif driver and not cuda["devices"]:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        because = "" if visible is None else f" (CUDA_VISIBLE_DEVICES is {visible!r})"
        notes.append(f"there is a driver but no usable CUDA device{because}")
    return notes


def collect() -> Report:
    """Look at everything; only the libcublasLt that would be used is opened."""
    model, flags = cpu_info()
    tables = _C.cpu_kernels()
    affinity = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(0)
    wanted = {name for needed in (*TABLES.values(), BF16_TABLE[1]) for name in needed}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    report = Report(
        versions={
            "fp4lt": fp4lt.__version__,
            "torch": str(torch.__version__),
            "python": platform.python_version(),
            "numpy": np.__version__,
            "platform": platform.platform(),
        },
        build=record(),
        cpu={
            "model": model,
            "features": sorted(wanted & set(flags)),
            "kernels": tables,
            "selected": _C.selected_cpu_kernels(),
            "threads": torch.get_num_threads(),
            "processors": len(affinity) or os.cpu_count(),
        },
        cuda={
            "built_with": _C.cuda_built_with(),
            "architectures": _C.cuda_architectures().split(),
            "driver": _C.cuda_driver(),
            "kernel_driver": kernel_driver(),
            "torch": torch.version.cuda or "",
            "devices": [],
        },
        cublaslt={},
        backends=[],
        default_device=str(torch.get_default_device()),
    )
    for warning in caught:
        report.note(f"torch says: {warning.message}")
    for text in check_tables(tables, flags):
        report.error(text)
    for text in check_bf16_table(tables, flags):
        report.note(text)
    if report.cpu["threads"] > report.cpu["processors"]:
        report.note(
            f"torch has {report.cpu['threads']} threads on {report.cpu['processors']} processors; "
            "set OMP_NUM_THREADS or call torch.set_num_threads()"
        )
    _collect_devices(report)
    for text in check_cuda(report.cuda, torch_devices):
        report.note(text)
    _collect_library(report)
    _collect_backends(report)
    return report


def _collect_devices(report: Report) -> None:
    for index in range(_C.cuda_device_count()):
        try:
            info = _C.cuda_device_info(index)
        except Error as error:
            report.error(f"cuda:{index}: {error}")
            continue
        capability = (info.major, info.minor)
        code = [covers(name, capability) for name in report.cuda["architectures"]]
        report.cuda["devices"].append(
            {
                "device": f"cuda:{index}",
                "name": info.name,
                "capability": f"{info.major}.{info.minor}",
                "multiprocessors": info.multiprocessors,
                "memory": info.memory_bytes,
                "l2": info.l2_bytes,
                "code": next((how for how in ("as built", "PTX", "unknown") if how in code), None),
            }
        )


def _collect_library(report: Report) -> None:
    found: dict[str, Any] = {"path": "", "origin": "", "version": "", "absent": [], "hazards": []}
    report.cublaslt = found
    try:
        candidate = _library.find()
    except Error as error:
        report.error(str(error))
        return
    if candidate is None:
        return
    found |= candidate._asdict()
    try:
        library = _library.open_candidate(candidate)
    except Error as error:
        (report.error if candidate.origin == _library.VARIABLE else report.note)(str(error))
        return
    found |= {"path": library.path, "version": _library.version_name(library.version)}
    found["absent"] = library.absent
    for device in report.cuda["devices"]:
        for hazard in _hazards.hazards(library.version, device["capability"]):
            found["hazards"].append({"device": device["device"], **hazard._asdict()})
            report.note(
                f"libcublasLt {found['version']} on {device['device']} (compute capability "
                f"{device['capability']}): {hazard.text}: {_DONE[hazard.action]}; install "
                f"{hazard.cure}"
            )


def _collect_backends(report: Report) -> None:
    devices = [str(device) for device in targets.devices()]
    if report.default_device not in devices:
        devices.append(report.default_device)
    usable = False
    for backend in backends.BACKENDS:
        for device in devices:
            refused = targets.refusals(backend, torch.device(device))
            available = not all(refused.values())
            usable |= available and device == report.default_device
            report.backends.append(
                {
                    "name": backend.name,
                    "device": device,
                    "available": available,
                    "refusals": refused,
                }
            )
    if not usable:
        report.error(f"no backend can use torch's default device, {report.default_device}")


def render(report: Report) -> str:
    """The report as aligned text."""
    cpu, cuda = report.cpu, report.cuda
    kernels = ", ".join(
        f"{name} (in use)" if name == cpu["selected"] else name for name in cpu["kernels"]
    )
    built = "no device code in this build"
    if cuda["built_with"]:
        built = f"CUDA {cuda['built_with']} for {', '.join(cuda['architectures'])}"
    driver = ", ".join(
        part.format(value)
        for part, value in (("CUDA {}", cuda["driver"]), ("NVIDIA {}", cuda["kernel_driver"]))
        if value
    )
    sections = [
        ("Versions", list(report.versions.items())),
        ("Build", [("record", report.build["name"]), ("compiler", report.build["compiler"])]),
        (
            "CPU",
            [
                ("model", cpu["model"]),
                ("features", " ".join(cpu["features"]) or "none that matter"),
                ("kernels", kernels),
                ("threads", f"{cpu['threads']} on {cpu['processors']} processors"),
            ],
        ),
        (
            "CUDA",
            [
                ("built with", built),
                ("driver", driver or "none found"),
                ("torch", f"CUDA {cuda['torch']}" if cuda["torch"] else "a build without CUDA"),
                *(
                    [(d["device"], _device_line(d)) for d in cuda["devices"]]
                    or [("devices", "none")]
                ),
            ],
        ),
        ("libcublasLt", _library_lines(report.cublaslt)),
        (
            "Backends",
            [(f"{b['name']} on {b['device']}", _backend_line(b)) for b in report.backends],
        ),
    ]
    if report.findings:
        sections.append(("Findings", [(f.severity, f.text) for f in report.findings]))
    lines = []
    for title, rows in sections:
        width = max(12, *(len(name) for name, _ in rows))
        lines += [title, *(f"  {name:<{width}}  {value}" for name, value in rows)]
    return "\n".join(lines)


def _device_line(device: dict[str, Any]) -> str:
    return (
        f"{device['name']}, compute capability {device['capability']}, "
        f"{device['multiprocessors']} SMs, {device['memory'] / 2**30:.1f} GiB, "
        f"device code: {device['code'] or 'none'}"
    )


def _library_lines(found: dict[str, Any]) -> list[tuple[str, str]]:
    if not found["path"]:
        return [("file", "none found")]
    return [
        ("file", found["path"]),
        ("found by", found["origin"]),
        ("version", found["version"] or "unknown: it does not load"),
    ]


def _backend_line(backend: dict[str, Any]) -> str:
    refused = {name: text for name, text in backend["refusals"].items() if text is not None}
    if not refused:
        return "available"
    reasons = list(dict.fromkeys(refused.values()))
    if not backend["available"] and len(reasons) == 1:
        return f"refuses: {reasons[0]}"
    start = "available, but refuses " if backend["available"] else "refuses "
    return start + "; ".join(
        f"{', '.join(name for name, text in refused.items() if text == reason)}: {reason}"
        for reason in reasons
    )
