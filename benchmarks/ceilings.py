# SPDX-License-Identifier: Apache-2.0
"""The roofline of this machine, measured in the same run and with the same threads.

Each ceiling is the best of several plain methods and carries the name of the one that won: a
percentage above 100 then says which method a contender has beaten, not that physics has.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from benchmarks import timing
from fp4lt import _C
from fp4lt._interop import address, cuda_launch

FALLBACK_LLC = 64 * 2**20
_CACHE_ROOT = Path("/sys/devices/system/cpu/cpu0/cache")
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


def caches(root: Path = _CACHE_ROOT) -> dict[str, int]:
    """Bytes of each data or unified cache of CPU 0, by level: ``{"L1d": ..., "L3": ...}``."""
    return dict(filter(None, map(_cache, sorted(root.glob("index*")))))


def _cache(index: Path) -> tuple[str, int] | None:
    # A virtual machine may expose half of an entry.
    try:
        kind = (index / "type").read_text().strip()
        level = int((index / "level").read_text())
        size = (index / "size").read_text().strip()
        unit = size[-1] if size[-1] in _UNITS else ""
        bytes_ = int(size.removesuffix(unit)) * _UNITS.get(unit, 1)
    except (OSError, ValueError, IndexError):
        return None
    if kind == "Instruction":
        return None
    return f"L{level}{'d' if kind == 'Data' else ''}", bytes_


def last_level_cache(root: Path = _CACHE_ROOT) -> tuple[int, str]:
    """Size in bytes of the last cache before memory, and where that number is from."""
    found = caches(root)
    if not found:
        return FALLBACK_LLC, f"assumed, {root} tells nothing"
    last = max(found, key=lambda name: name[1:].rstrip("d"))
    return found[last], f"{last} according to {root}"


@dataclass(frozen=True)
class Ceiling:
    """A measured limit: ``value`` per second by ``method``, the best of ``candidates``."""

    value: float
    method: str
    candidates: dict[str, float] = field(default_factory=dict)

    @classmethod
    def best(cls, candidates: dict[str, float]) -> Ceiling:
        """Take the fastest method."""
        method = max(candidates, key=candidates.__getitem__)
        return cls(candidates[method], method, candidates)


def _seconds(call: Callable[[], object], repeats: int) -> float:
    call()
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best


def read_bandwidth(llc_bytes: int, threads: int, *, quick: bool = False) -> Ceiling:
    """Bytes per second of reading a buffer several times the last-level cache, once each.

    Best of torch.sum, torch.mv (a matrix-vector product is what decode does) and one
    numpy reduction per thread, each the fastest of a few passes.
    """
    size = min(max((4 if quick else 8) * llc_bytes, 128 * 2**20), 2**30)
    columns = 4096
    matrix = torch.ones(size // (4 * columns), columns)
    vector = torch.ones(columns)
    flat = matrix.view(-1)
    parts = np.array_split(flat.numpy().view(np.int64), threads)
    moved = matrix.numel() * 4
    repeats = 3 if quick else 8
    with ThreadPoolExecutor(threads) as pool:
        methods: dict[str, Callable[[], object]] = {
            "torch.sum fp32": flat.sum,
            "torch.mv fp32": lambda: torch.mv(matrix, vector),
            "numpy max int64 in threads": lambda: list(pool.map(np.max, parts)),
        }
        return Ceiling.best({name: moved / _seconds(f, repeats) for name, f in methods.items()})


def compute(*, quick: bool = False) -> Ceiling:
    """Floating-point operations per second of a square torch.mm, the best of fp32 and bf16."""
    n = 1024 if quick else 2048
    candidates: dict[str, float] = {}
    for dtype in (torch.float32, torch.bfloat16):
        a = torch.randn(n, n, dtype=torch.float32).to(dtype)
        b = torch.randn(n, n, dtype=torch.float32).to(dtype)
        seconds = _seconds(lambda a=a, b=b: torch.mm(a, b), 3)  # type: ignore[misc]
        name = str(dtype).removeprefix("torch.")
        candidates[f"torch.mm {name} {n}^3"] = 2 * n**3 / seconds
    return Ceiling.best(candidates)


def _device_seconds(call: Callable[[], object], repeats: int) -> float:
    return min([timing.event_seconds(call) for _ in range(repeats + 2)][2:])


def cuda_read_bandwidth(device: torch.device, *, quick: bool = False) -> Ceiling:
    """Bytes per second of a kernel that reads 4 GiB once and does nothing else."""
    size = 2**32
    buffer = torch.ones(size // 4, dtype=torch.int32, device=device)
    sink = torch.zeros(1, dtype=torch.int32, device=device)
    places = {"data": address(buffer), "sink": address(sink), "bytes": size}

    def read() -> None:
        _C.cuda_read_memory(**places, **cuda_launch(device))

    seconds = _device_seconds(read, 3 if quick else 10)
    return Ceiling.best({"reading 4 GiB": size / seconds})


def cuda_compute(device: torch.device, *, quick: bool = False) -> Ceiling:
    """Floating-point operations per second of a square bf16 torch.mm."""
    n = 8192
    a, b = (torch.randn(n, n, dtype=torch.bfloat16, device=device) for _ in range(2))
    seconds = _device_seconds(lambda: torch.mm(a, b), 3 if quick else 10)
    return Ceiling.best({f"torch.mm bfloat16 {n}^3": 2 * n**3 / seconds})
