# SPDX-License-Identifier: Apache-2.0
"""Write or check python/fp4lt/_C.pyi, the types of the compiled module.

``python tools/stubs.py`` writes it from the installed module; ``--check`` exits with 1 where the
committed file differs.  The module has the same surface with and without CUDA, so one file serves
every build.
"""

from __future__ import annotations

import argparse
import difflib
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STUB = ROOT / "python" / "fp4lt" / "_C.pyi"


def _plain_enums(text: str) -> str:
    """Enum classes with their values, in place of the annotations and dunders of the generator."""
    from fp4lt import _C

    for name in (
        "Activation",
        "ActivationForm",
        "CudaDataType",
        "DType",
        "GateOrder",
        "GlobalScale",
        "LoopedWeights",
        "RowForm",
    ):
        members = "".join(f"    {m.name} = {m.value}\n" for m in getattr(_C, name))
        pattern = rf"class {name}\(enum\.IntEnum\):\n(?:(?: .*)?\n)+?(?=\S)"
        text, count = re.subn(pattern, f"class {name}(enum.IntEnum):\n{members}\n", text)
        if count != 1:
            raise SystemExit(f"tools/stubs.py: no enum {name} in the generated stub")
    return text


def generate() -> str:
    """The stub of the installed ``fp4lt._C``, formatted like the rest of the code."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pybind11_stubgen", "fp4lt._C", "-o", folder]
        # From elsewhere, so that the installed package is described and not the source tree.
        subprocess.run(command, check=True, cwd=folder, stdout=subprocess.DEVNULL)
        text = (Path(folder) / "fp4lt" / "_C.pyi").read_text()
    text = _plain_enums(text)
    ruff = [sys.executable, "-m", "ruff", "--config", str(ROOT / "pyproject.toml")]
    for step in (
        ["check", "--fix-only", "--quiet", "--select", "I,UP,F401,RUF022"],
        ["format", "--quiet"],
    ):
        command = [*ruff, *step, "--stdin-filename", str(STUB), "-"]
        text = subprocess.run(
            command, input=text, check=True, capture_output=True, text=True
        ).stdout
    return text


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    arguments = parser.parse_args()
    text = generate()
    if not arguments.check:
        STUB.write_text(text)
        return 0
    old = STUB.read_text() if STUB.exists() else ""
    diff = list(difflib.unified_diff(old.splitlines(), text.splitlines(), "committed", "built"))
    print("\n".join(diff))
    return 1 if diff else 0


if __name__ == "__main__":
    sys.exit(main())
