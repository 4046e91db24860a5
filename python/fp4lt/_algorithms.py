# SPDX-License-Identifier: Apache-2.0
"""The file of tuned algorithms: which one cuBLASLt is to use for a product on a device.

One JSON file, by default in the user's cache folder.  It may be deleted at any time.  What cannot
be read is ignored with a warning: a plan then takes the library's own first choice.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import stat
import warnings
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from fp4lt.errors import UnsupportedError

VARIABLE: Final = "FP4LT_ALGORITHMS"
"""Environment variable that names the file to use; empty for none."""

SCHEMA_VERSION: Final = 1
_SIZE: Final = 64


class Tuned(NamedTuple):
    """An algorithm that was chosen by timing.

    Attributes
    ----------
    data : bytes
        As the library's own version takes it.
    microseconds : float
        Of one product, when it was chosen.
    about : str
        For reports.
    """

    data: bytes
    microseconds: float
    about: str


def path(environ: Mapping[str, str] | None = None) -> Path | None:
    """The file, there or not; None where it is switched off or there is no home folder for it."""
    environ = os.environ if environ is None else environ
    named = environ.get(VARIABLE)
    if named is not None:
        return Path(named) if named else None
    base = environ.get("XDG_CACHE_HOME")
    if not base:
        try:
            base = str(Path(environ.get("HOME") or "~").expanduser() / ".cache")
        except RuntimeError:  # a user without a name, as containers have them
            return None
    return Path(base) / "fp4lt" / "algorithms.json"


def key(device: str, version: int, product: str, bucket: int) -> str:
    """What an algorithm is good for: a device, a version of the library, a product, rows.

    Parameters
    ----------
    device : str
        Name and compute capability.
    version : int
        Of libcublasLt: the bytes mean something to it only.
    product : str
        Operands, output, N and K.
    bucket : int
        Rows of an expert, up to.
    """
    return f"{device} | libcublasLt {version} | {product} | rows <= {bucket}"


def load(file: Path | None) -> dict[str, Tuned]:
    """All entries; none, with a warning, where the file is damaged or of another kind."""
    if file is None:
        return {}
    try:
        document = _read(file)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        return _ignore(file, f"it cannot be read ({error})")
    if not isinstance(document, dict) or not isinstance(document.get("entries"), dict):
        return _ignore(file, "it is no file of tuned algorithms")
    if _is_newer(document):
        return _ignore(file, "it is of a newer fp4lt", f"set {VARIABLE} to another file")
    if document.get("schema_version") != SCHEMA_VERSION:
        return _ignore(file, f"its schema version is not {SCHEMA_VERSION}")
    entries = {}
    for name, value in document["entries"].items():
        tuned = _parse(value)
        if tuned is None:
            warnings.warn(f"{file}: the entry {name!r} is damaged and is ignored", stacklevel=2)
        else:
            entries[name] = tuned
    return entries


def store(file: Path, entries: Mapping[str, Tuned]) -> None:
    """Add entries to the file, replacing those of the same key.

    Readers see the old file or the new one; two writers at once lose nothing of each other's.  A
    file keeps its permissions, and a new one has those of any file of the user's.

    Raises
    ------
    UnsupportedError
        If a newer fp4lt wrote the file: it is left alone.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    with Path(f"{file}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        check_not_newer(file)
        merged = load(file) | dict(entries)
        document = {
            "schema_version": SCHEMA_VERSION,
            "entries": {name: _format(tuned) for name, tuned in sorted(merged.items())},
        }
        # The lock makes the name ours.
        temporary = Path(f"{file}.new")
        temporary.unlink(missing_ok=True)
        try:
            temporary.write_text(json.dumps(document, indent=1))
            if file.exists():
                temporary.chmod(stat.S_IMODE(file.stat().st_mode))
            temporary.replace(file)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def check_not_newer(file: Path) -> None:
    """Raise where :func:`store` would.

    Raises
    ------
    UnsupportedError
    """
    try:
        document = _read(file)
    except (OSError, ValueError, RecursionError):
        return
    if _is_newer(document):
        raise UnsupportedError(
            f"{file} has schema version {document['schema_version']}, this fp4lt writes "
            f"{SCHEMA_VERSION}, and it would lose what a newer one wrote: set {VARIABLE} to "
            "another file, or upgrade fp4lt"
        )


def _read(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8"))


def _is_newer(document: Any) -> bool:
    version = document.get("schema_version") if isinstance(document, dict) else None
    return isinstance(version, int) and version > SCHEMA_VERSION


def _ignore(
    file: Path, why: str, cure: str = "run python -m fp4lt tune to write a new one"
) -> dict[str, Tuned]:
    warnings.warn(f"{file} is ignored: {why}; {cure}", stacklevel=3)
    return {}


def _format(tuned: Tuned) -> dict[str, Any]:
    return {
        "algorithm": base64.b64encode(tuned.data).decode(),
        "check": zlib.crc32(tuned.data),
        "microseconds": round(tuned.microseconds, 3),
        "about": tuned.about,
    }


def _parse(value: Any) -> Tuned | None:
    try:
        data = base64.b64decode(value["algorithm"], validate=True)
        tuned = Tuned(data, float(value["microseconds"]), str(value["about"]))
        good = len(data) == _SIZE and zlib.crc32(data) == value["check"]
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    return tuned if good else None
