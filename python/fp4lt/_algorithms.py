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
import tempfile
import warnings
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

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
    """The file, there or not; None where it is switched off."""
    environ = os.environ if environ is None else environ
    named = environ.get(VARIABLE)
    if named is not None:
        return Path(named) if named else None
    base = environ.get("XDG_CACHE_HOME") or str(
        Path(environ.get("HOME", "~")).expanduser() / ".cache"
    )
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
        document = json.loads(file.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        return _ignore(file, f"it cannot be read ({error})")
    if not isinstance(document, dict) or not isinstance(document.get("entries"), dict):
        return _ignore(file, "it is no file of tuned algorithms")
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

    Readers see the old file or the new one; two writers at once lose nothing of each other's.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    with Path(f"{file}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        merged = load(file) | dict(entries)
        document = {
            "schema_version": SCHEMA_VERSION,
            "entries": {name: _format(tuned) for name, tuned in sorted(merged.items())},
        }
        handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=file.name)
        try:
            with os.fdopen(handle, "w") as out:
                json.dump(document, out, indent=1)
            Path(temporary).replace(file)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise


def _ignore(file: Path, why: str) -> dict[str, Tuned]:
    warnings.warn(
        f"{file} is ignored: {why}; run python -m fp4lt tune to write a new one", stacklevel=3
    )
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
    except (KeyError, TypeError, ValueError):
        return None
    return tuned if good else None
