# SPDX-License-Identifier: Apache-2.0
"""A real Qwen3-MoE checkpoint in SGLang's own model, one process a rank."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest
from sglang_on_cpu import need_sglang

need_sglang()

HERE = Path(__file__).resolve().parent
FOLDER = HERE.parent / "data" / "checkpoints" / "modelopt"


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@pytest.mark.parametrize(
    ("backend", "size", "ep"),
    [("fp4lt", 1, 1), ("fp4lt_w4a4", 2, 1), ("fp4lt_w4a16", 2, 2)],
    ids=["one", "tp2", "ep2"],
)
def test_from_the_command_line_to_the_moe_block(backend: str, size: int, ep: int) -> None:
    port = free_port()
    command = [sys.executable, str(HERE / "model_on_cpu.py"), str(FOLDER), backend]
    ranks = [
        subprocess.Popen(
            [*command, *(str(n) for n in (size, ep, rank, port))],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]
    for rank in ranks:
        output, _ = rank.communicate(timeout=300)
        assert rank.returncode == 0, output[-4000:]
        assert "equal (7, 256)" in output
        assert "fp4lt serves layer 0" in output
