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

ROOT = Path(__file__).parents[1]


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


def git_revision(root: Path = ROOT) -> str:
    """Short hash of the checkout, with ``-dirty`` when a tracked file was changed."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        head = git("rev-parse", "--short=12", "HEAD")
        return f"{head}-dirty" if git("status", "--porcelain", "-uno") else head
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def describe() -> dict[str, Any]:
    """Collect the header of a report; JSON-ready."""
    llc, llc_source = ceilings.last_level_cache()
    return {
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
