# SPDX-License-Identifier: Apache-2.0
"""The examples, and the one in the README, run as they stand."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize(
    "path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem
)
def test_example_runs(path: Path) -> None:
    done = subprocess.run([sys.executable, path], check=True, capture_output=True, text=True)
    assert done.stdout.startswith(("torch.Size", "MoEWeights"))


def test_readme_example_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert blocks
    subprocess.run([sys.executable, "-c", blocks[0]], check=True, cwd=ROOT)
