# SPDX-License-Identifier: Apache-2.0
"""The third-party files that peers are loaded from: which, where, and whether they are the pinned.

``python -m benchmarks.peers.prepare`` fills a folder with three files; here they are checked
against the pinned digests and unpacked into a cache, where compiled kernels are kept too.
"""

from __future__ import annotations

import hashlib
import importlib
import io
import lzma
import os
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

# Not from elsewhere in benchmarks: fetching the bundle needs neither torch nor this package.
ROOT = Path(__file__).resolve().parents[2]
PREPARE = "python -m benchmarks.peers.prepare"


class BundleError(Exception):
    """Files that are missing or are not the pinned ones; the message says what to do."""


@dataclass(frozen=True)
class Wheel:
    """A pinned wheel on the package index."""

    requirement: str
    file: str
    size: int
    sha256: str


VLLM = Wheel(
    "vllm==0.33.0",
    "vllm-0.33.0-cp38-abi3-manylinux_2_28_x86_64.whl",
    336_361_138,
    "4b6bdec4ab269990bf70d45a3c1e94c3760a27064513760193b26d6f0da883aa",
)
HUMMING = Wheel(
    "humming-kernels==0.1.20",
    "humming_kernels-0.1.20-cp310-abi3-manylinux_2_28_x86_64.whl",
    616_445,
    "d4747cae223f81bb8d18bee766a5f41e67484a65bd665534fdbc8dc7adabd7c1",
)

# Of vLLM's wheel only two parts are kept: its MoE operators, and the triton_kernels it vendors.
OPERATORS_MEMBER = "vllm/_moe_C_stable_libtorch.abi3.so"
OPERATORS_FILE = "_moe_C_stable_libtorch.abi3.so.xz"
OPERATORS_BYTES = 45_654_776
OPERATORS_SHA256 = "99682a5814b3081de7e4e95cc2c1cf1ba8f6139514ac4c5563dbad16c229a4c0"
TRITON_ROOT = "vllm/third_party/"
TRITON_PACKAGE = "vllm/third_party/triton_kernels/"
TRITON_FILE = "triton_kernels_vllm0330.zip"
TRITON_DIGEST = "084f18538b7da3a9c92815a97b9989a93757649ac6dffe72ed81fa42020f5342"
FILES = (OPERATORS_FILE, TRITON_FILE, HUMMING.file)


def folder() -> Path:
    """Where the bundle is: ``FP4LT_PEERS``, or ``.peers`` in the repository's root."""
    return Path(os.environ.get("FP4LT_PEERS", ROOT / ".peers"))


def cache_folder() -> Path:
    """Where files are unpacked and compiled kernels kept: ``FP4LT_PEERS_CACHE``, or a temporary."""
    given = os.environ.get("FP4LT_PEERS_CACHE")
    return Path(given or Path(tempfile.gettempdir()) / f"fp4lt-peers-{os.getuid()}")


def set_cache_variables() -> None:
    """Let compilers keep their kernels in the cache, unless the user has said where.

    The driver's part works only before CUDA is initialized.
    """
    cache = cache_folder()
    os.environ.setdefault("CUDA_CACHE_PATH", str(cache / "driver"))
    os.environ.setdefault("CUDA_CACHE_MAXSIZE", str(4 << 30))
    os.environ.setdefault("TRITON_CACHE_DIR", str(cache / "triton"))
    os.environ.setdefault("HUMMING_CACHE_DIR", str(cache / "humming"))


def sha256(data: bytes) -> str:
    """Hex digest."""
    return hashlib.sha256(data).hexdigest()


def zip_digest(data: bytes) -> str:
    """Hex digest of a zip's names and contents, whatever their order and compression."""
    digest = hashlib.sha256()
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        for name in sorted(n for n in archive.namelist() if not n.endswith("/")):
            digest.update(f"{name} {sha256(archive.read(name))}\n".encode())
    return digest.hexdigest()


def require(what: str, digest: str, pinned: str) -> None:
    """Refuse contents that are not the pinned ones."""
    if digest != pinned:
        raise BundleError(
            f"{what} has SHA-256 {digest[:16]}..., and {pinned[:16]}... is pinned; delete it and "
            f"run `{PREPARE}`"
        )


def read(source: Path, file: str) -> bytes:
    """Contents of one of the bundle's files, unchecked."""
    try:
        return (source / file).read_bytes()
    except OSError as error:
        raise BundleError(
            f"{source} has no {file} ({error.strerror}): fetch the peers with `{PREPARE}`, or name "
            "their folder in FP4LT_PEERS"
        ) from error


def operators(source: Path) -> bytes:
    """vLLM's operator library, expanded and checked."""
    packed = read(source, OPERATORS_FILE)
    try:
        data = lzma.LZMADecompressor().decompress(packed, max_length=OPERATORS_BYTES + 1)
    except lzma.LZMAError as error:
        raise BundleError(
            f"{source / OPERATORS_FILE}: {error}; delete it and run `{PREPARE}`"
        ) from error
    require(str(source / OPERATORS_FILE), sha256(data), OPERATORS_SHA256)
    return data


def archives(source: Path) -> tuple[bytes, bytes]:
    """The two Python packages, triton_kernels and humming, checked."""
    triton, humming = read(source, TRITON_FILE), read(source, HUMMING.file)
    try:
        digest = zip_digest(triton)
    except zipfile.BadZipFile as error:
        raise BundleError(
            f"{source / TRITON_FILE}: {error}; delete it and run `{PREPARE}`"
        ) from error
    require(str(source / TRITON_FILE), digest, TRITON_DIGEST)
    require(str(source / HUMMING.file), sha256(humming), HUMMING.sha256)
    return triton, humming


def verify(source: Path) -> None:
    """Check all files.

    Raises
    ------
    BundleError
    """
    archives(source)
    operators(source)


def write(path: Path, data: bytes) -> None:
    """Write a file so that it is there whole or not at all."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_bytes(data)
    temporary.replace(path)


def _own_cache() -> Path:
    """The cache folder, which nobody else can have put code into."""
    cache = cache_folder()
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    facts = cache.stat()
    if facts.st_uid != os.getuid() or facts.st_mode & 0o022:
        raise BundleError(
            f"{cache} can be written by others, and code is loaded from it; name another folder in "
            "FP4LT_PEERS_CACHE"
        )
    return cache


def operator_library() -> Path:
    """vLLM's MoE operators as a library that can be loaded, expanded on the first call."""
    path = _own_cache() / f"moe_operators_{OPERATORS_SHA256[:12]}.so"
    if not path.exists() or sha256(path.read_bytes()) != OPERATORS_SHA256:
        write(path, operators(folder()))
    return path


def site() -> Path:
    """A folder with the Python packages, unpacked on the first call."""
    path = _own_cache() / f"site_{TRITON_DIGEST[:12]}_{HUMMING.sha256[:12]}"
    if not path.is_dir():
        with tempfile.TemporaryDirectory(dir=path.parent) as name:
            staged = Path(name) / "site"
            for data in archives(folder()):
                with zipfile.ZipFile(io.BytesIO(data)) as archive:
                    archive.extractall(staged)
            # Unpacking a zip drops the mode, and Humming runs this program.
            (staged / "humming/_native/x86_64/nvrtc_compile").chmod(0o755)
            if not path.is_dir():
                staged.rename(path)
    return path


def load_package(name: str) -> ModuleType:
    """Import ``humming`` or ``triton_kernels`` from the bundle."""
    place = site()
    if str(place) not in sys.path:
        sys.path.insert(0, str(place))
    module = importlib.import_module(name)
    found = Path(module.__file__ or "")
    if not found.is_relative_to(place):
        raise BundleError(f"{name} was imported from {found.parent} already, not from the bundle")
    return module
