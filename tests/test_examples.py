# SPDX-License-Identifier: Apache-2.0
"""The examples, and the one in the README, run as they stand."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize(
    "path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem
)
def test_example_runs(path: Path) -> None:
    if "transformers" in path.stem:
        need_transformers()
    done = subprocess.run([sys.executable, path], check=True, capture_output=True, text=True)
    assert done.stdout.startswith(("torch.Size", "MoEWeights", "MoE layers patched: 2"))


def need_transformers() -> None:
    # Not importorskip(): its warnings are errors here, and none of our business.
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed; make test-transformers does it")


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("mutation", ["order", "activation"])
def test_patched_experts_cannot_be_wrong(
    mutation: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The example's comparison sees gate and up swapped, and another activation."""
    need_transformers()
    example = load(ROOT / "examples" / "patch_transformers.py")
    wrong = {"order": "up_gate", "activation": "gelu"}[mutation]

    right = example.patch

    def patch(model: torch.nn.Module) -> int:
        count = int(right(model))
        for module in model.modules():
            if isinstance(module, example.Experts):
                module.weights = dataclasses.replace(module.weights, **{mutation: wrong})
        return count

    monkeypatch.setattr(example, "patch", patch)
    with pytest.raises(SystemExit, match="further off"):
        example.main()
    assert "MoE layers patched: 2" in capsys.readouterr().out


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_readme_example_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert blocks
    subprocess.run([sys.executable, "-c", blocks[0]], check=True, cwd=ROOT)


def test_example_of_expert_parallelism_runs(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "distributed.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (tmp_path / "example.py").write_text(block)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    # A file for each rank: on one pipe their lines can run into each other.
    logs = ["--log-dir", str(tmp_path / "logs"), "--redirects", "1"]
    command = [*launch, *logs, str(tmp_path / "example.py")]
    subprocess.run(command, check=True, capture_output=True, text=True)
    printed = sorted(path.read_text() for path in (tmp_path / "logs").rglob("stdout.log"))
    assert printed == [f"{r} torch.Size([{5 + r}, 128])\n" for r in (0, 1)]
