# SPDX-License-Identifier: Apache-2.0
"""What the numbers were measured on and with."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from benchmarks import ceilings
from fp4lt import _C

ROOT = Path(__file__).parents[1]
FALLBACK_BUDGET = 8 * 2**30


def cpu_model(path: Path = Path("/proc/cpuinfo")) -> str:
    """Name of the CPU, or of its architecture where the system does not say."""
    try:
        for line in path.read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def available_memory(path: Path = Path("/proc/meminfo")) -> int | None:
    """Bytes that can be allocated without swapping; None where the system does not say."""
    try:
        for line in path.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None


def memory_budget(device: torch.device) -> int:
    """Half of the free memory of ``device``, in bytes; 8 GiB where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] // 2
    free = available_memory()
    return FALLBACK_BUDGET if free is None else free // 2


def machine(facts: dict[str, Any]) -> str:
    """Name what a report was measured on, in one line."""
    if facts["gpu"] is not None:
        return f"{facts['gpu']['name']} (CC {facts['gpu']['compute_capability']})"
    return f"{facts['cpu']}, {facts['threads']} threads"


def git_revision(root: Path = ROOT) -> str:
    """Short hash of the checkout, with ``-dirty`` when a tracked file was changed.

    Where the tree was copied without its history, what ``FP4LT_GIT`` says.
    """

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        head = git("rev-parse", "--short=12", "HEAD")
        return f"{head}-dirty" if git("status", "--porcelain", "-uno") else head
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("FP4LT_GIT", "unknown")


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def describe_gpu(device: torch.device) -> dict[str, Any]:
    """Collect what a CUDA device is; JSON-ready."""
    index = torch.cuda.current_device() if device.index is None else device.index
    info = _C.cuda_device_info(index)
    return {
        "name": info.name,
        "compute_capability": f"{info.major}.{info.minor}",
        "multiprocessors": info.multiprocessors,
        "l2_bytes": info.l2_bytes,
        "memory_bytes": info.memory_bytes,
        "driver": _C.cuda_driver(),
        "torch_cuda": torch.version.cuda,
        "fp4lt_architectures": _C.cuda_architectures(),
    }


def describe(device: torch.device) -> dict[str, Any]:
    """Collect the header of a report; JSON-ready."""
    llc, llc_source = ceilings.last_level_cache()
    return {
        "device": str(device),
        "gpu": describe_gpu(device) if device.type == "cuda" else None,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "cpu": cpu_model(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "caches": ceilings.caches(),
        "llc_bytes": llc,
        "llc_source": llc_source,
        "load_average": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "cpus": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "fp4lt": _version("fp4lt"),
        "git": git_revision(),
    }
