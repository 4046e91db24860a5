# SPDX-License-Identifier: Apache-2.0
"""Record what PyTorch says to cuBLASLt for NVFP4, into tests/data/recorded.

``python tools/record_torch.py`` needs a CUDA device and a C++ compiler.  The GPU need not have FP4:
PyTorch then gets status 15 (NOT_SUPPORTED) from the heuristic and raises, after it has said all
that is of interest.  Each case runs in a process of its own, with ``tests/recorder`` preloaded; a
file holds a line about machine and case, then one line a call.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
RECORDED = ROOT / "tests" / "data" / "recorded"


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _operand(rows: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (rows, K/2) and tiled scales, all of them one, padding zero where it can be told."""
    codes = torch.full((rows, k // 2), 0x22, dtype=torch.uint8, device="cuda")
    padded = _round_up(rows, 128) * _round_up(k // 16, 4)
    scales = torch.full((padded,), 0x38, dtype=torch.uint8, device="cuda")
    return codes.view(torch.float4_e2m1fn_x2), scales.view(torch.float8_e4m3fn)


def _scaled_mm(m: int, n: int, k: int, dtype: torch.dtype, *, bias: bool = False) -> torch.Tensor:
    a, scale_a = _operand(m, k)
    b, scale_b = _operand(n, k)
    vector = torch.ones(n, dtype=dtype, device="cuda") if bias else None
    return torch._scaled_mm(a, b.t(), scale_a, scale_b, bias=vector, out_dtype=dtype)


def _functional(m: int, n: int, k: int, dtype: torch.dtype, *, scaled: bool) -> torch.Tensor:
    """``torch.nn.functional.scaled_mm``, with global scales or without."""
    names: Any = torch.nn.functional
    a, scale_a = _operand(m, k)
    b, scale_b = _operand(n, k)
    block, tensor = names.ScalingType.BlockWise1x16, names.ScalingType.TensorWise
    tiled, plain = names.SwizzleType.SWIZZLE_32_4_4, names.SwizzleType.NO_SWIZZLE
    one = torch.ones((), device="cuda")
    extra = int(scaled)
    recipe, swizzle = [block, tensor][: 1 + extra], [tiled, plain][: 1 + extra]
    result: torch.Tensor = names.scaled_mm(
        a,
        b.t(),
        [scale_a, one][: 1 + extra],
        recipe,
        [scale_b, one][: 1 + extra],
        recipe,
        swizzle_a=swizzle,
        swizzle_b=swizzle,
        output_dtype=dtype,
    )
    return result


CASES: dict[str, Callable[[], torch.Tensor]] = {
    "scaled_mm_bf16": lambda: _scaled_mm(128, 256, 512, torch.bfloat16),
    "scaled_mm_fp16": lambda: _scaled_mm(128, 256, 512, torch.float16),
    "scaled_mm_fp32": lambda: _scaled_mm(128, 256, 512, torch.float32),
    "scaled_mm_bias": lambda: _scaled_mm(128, 256, 512, torch.bfloat16, bias=True),
    "scaled_mm_one_row": lambda: _scaled_mm(1, 256, 512, torch.bfloat16),
    "functional": lambda: _functional(128, 256, 512, torch.bfloat16, scaled=False),
    "functional_global": lambda: _functional(128, 256, 512, torch.bfloat16, scaled=True),
}


def _run_case(name: str) -> None:
    """Run one case under the recorder; says as JSON how it ended."""
    torch.zeros(1, device="cuda")
    try:
        CASES[name]()
        torch.cuda.synchronize()
        ended = "returned"
    except (RuntimeError, TypeError, ValueError, AttributeError, NotImplementedError) as error:
        ended = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    print(json.dumps({"ended": ended}))


def _record(name: str, recorder: Path, folder: Path) -> str:
    """Record one case; returns a line for the user."""
    target = folder / f"{name}.jsonl"
    lines = target.with_suffix(".tmp")
    lines.unlink(missing_ok=True)
    environment = {"LD_PRELOAD": str(recorder), "RECORD_CUBLASLT_OUT": str(lines)}
    command = [sys.executable, str(Path(__file__)), "--case", name]
    done = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        return f"{name}: failed\n{done.stderr}"
    ended = json.loads(done.stdout.splitlines()[-1])["ended"]
    calls = lines.read_text() if lines.exists() else ""
    lines.unlink(missing_ok=True)
    if "GetHeuristic" not in calls:
        return f"{name}: cuBLASLt was not asked for a matmul ({ended}); nothing kept"
    about = {
        "case": name,
        "ended": ended,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cublaslt": _cublaslt_version(),
        "device": torch.cuda.get_device_name(),
        "capability": list(torch.cuda.get_device_capability()),
    }
    target.write_text(json.dumps({"about": about}) + "\n" + calls)
    return f"{name}: {calls.count(chr(10))} calls, {ended}"


def _cublaslt_version() -> int:
    """Version of the library that torch has mapped."""
    import ctypes

    for name in ("libcublasLt.so.13", "libcublasLt.so.12"):
        try:
            library = ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        except OSError:
            continue
        library.cublasLtGetVersion.restype = ctypes.c_size_t
        return int(library.cublasLtGetVersion())
    return 0


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=RECORDED, help="folder for the recordings")
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        _run_case(arguments.case)
        return 0
    if not torch.cuda.is_available():
        print("tools/record_torch.py: no CUDA device", file=sys.stderr)
        return 1
    build = [sys.executable, str(ROOT / "tests" / "native_libraries.py"), "recorder"]
    built = subprocess.run(build, check=True, capture_output=True, text=True).stdout.strip()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name in CASES:
        print(_record(name, Path(built), arguments.out), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
