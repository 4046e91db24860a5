# SPDX-License-Identifier: Apache-2.0
"""Fetch what the peers need: ``python -m benchmarks.peers.prepare`` from the repository's root.

Two pinned wheels (337 MB) are downloaded by pip to a temporary folder, checked against their
SHA-256, and cut down to about 39 MB in ``.peers``.  Needs neither torch nor a GPU.  A second run
checks the folder and downloads nothing.  Nothing fetched here may be committed or passed on.
"""

from __future__ import annotations

import argparse
import io
import lzma
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.peers import bundle
from benchmarks.peers.bundle import HUMMING, VLLM, BundleError, Wheel

PLATFORMS = ("manylinux_2_28_x86_64", "manylinux2014_x86_64")


def prepare(target: Path, wheels: Path | None = None) -> bool:
    """Fill ``target`` with the bundle.

    Parameters
    ----------
    target : Path
        Made if it is not there.
    wheels : Path, optional
        A folder that may hold the wheels already.

    Returns
    -------
    bool
        False if the folder was complete and nothing had to be done.

    Raises
    ------
    BundleError
        If a wheel cannot be had, or is not the pinned one.
    """
    try:
        bundle.verify(target)
    except BundleError:
        target.mkdir(parents=True, exist_ok=True)
    else:
        return False
    with tempfile.TemporaryDirectory(prefix="fp4lt-peers-") as name:
        scratch = Path(name)
        bundle.write(target / HUMMING.file, _wheel(HUMMING, scratch, wheels).read_bytes())
        vllm = _wheel(VLLM, scratch, wheels)
        bundle.write(target / bundle.TRITON_FILE, triton_kernels(vllm))
        print("compressing vLLM's operators (about a minute)", flush=True)
        bundle.write(target / bundle.OPERATORS_FILE, operators(vllm))
    bundle.verify(target)
    return True


def _wheel(wheel: Wheel, scratch: Path, wheels: Path | None) -> Path:
    path = (wheels or scratch) / wheel.file
    if not path.exists():
        path = scratch / wheel.file
        print(f"downloading {wheel.requirement} ({wheel.size / 1e6:.1f} MB)", flush=True)
        requirements = scratch / f"{wheel.file}.txt"
        requirements.write_text(f"{wheel.requirement} --hash=sha256:{wheel.sha256}\n")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        # For the GPU machine's Python, whatever this one is.
        command += ["--only-binary=:all:", "--python-version", "3.12", "--implementation", "cp"]
        command += [argument for name in PLATFORMS for argument in ("--platform", name)]
        command += ["--require-hashes", "-d", str(scratch), "-r", str(requirements)]
        if subprocess.run(command, check=False).returncode or not path.exists():
            raise BundleError(f"pip could not download {wheel.requirement} as {wheel.file}")
    bundle.require(str(path), bundle.sha256(path.read_bytes()), wheel.sha256)
    return path


def operators(wheel: Path) -> bytes:
    """vLLM's MoE operators out of its wheel, compressed harder than the wheel does."""
    with zipfile.ZipFile(wheel) as archive:
        data = archive.read(bundle.OPERATORS_MEMBER)
    bundle.require(bundle.OPERATORS_MEMBER, bundle.sha256(data), bundle.OPERATORS_SHA256)
    return lzma.compress(data, preset=9 | lzma.PRESET_EXTREME)


def triton_kernels(wheel: Path) -> bytes:
    """A zip of the triton_kernels package in vLLM's wheel."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(buffer, "w") as archive:
        names = [name for name in source.namelist() if name.startswith(bundle.TRITON_PACKAGE)]
        for name in sorted(name for name in names if name.endswith(".py")):
            info = zipfile.ZipInfo(name.removeprefix(bundle.TRITON_ROOT))
            archive.writestr(info, source.read(name), zipfile.ZIP_DEFLATED, 9)
    data = buffer.getvalue()
    bundle.require(bundle.TRITON_PACKAGE, bundle.zip_digest(data), bundle.TRITON_DIGEST)
    return data


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line: 0, or 1 with a line on stderr if the peers could not be fetched."""
    parser = argparse.ArgumentParser(
        prog=bundle.PREPARE, description="Fetch the peers that the benchmarks race."
    )
    parser.add_argument(
        "target",
        type=Path,
        nargs="?",
        default=bundle.folder(),
        help="folder to fill; default FP4LT_PEERS, or .peers in the repository",
    )
    parser.add_argument("--wheels", type=Path, help="a folder that may hold the wheels already")
    options = parser.parse_args(arguments)
    try:
        fresh = prepare(options.target, options.wheels)
    except (BundleError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    size = sum((options.target / file).stat().st_size for file in bundle.FILES)
    print(f"{options.target}: {size / 1e6:.1f} MB, {'ready' if fresh else 'complete already'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
