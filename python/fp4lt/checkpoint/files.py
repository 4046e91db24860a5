# SPDX-License-Identifier: Apache-2.0
"""Where a checkpoint's tensors lie: one safetensors file, or shards with or without an index.

Files are memory-mapped and opened when first needed, so that loading a layer touches that layer's
bytes and a few headers, whatever the size of the model.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Final

import torch

from fp4lt.errors import CheckpointError, UnsupportedError

INDEX: Final = "model.safetensors.index.json"


class TensorSource:
    """The tensors of a checkpoint by name; a context manager that owns the open files.

    Attributes
    ----------
    where : dict of str to Path
        File of every tensor.
    folder : Path
        Where configuration files are looked for.
    title : str
        The file or folder as messages call it.
    """

    def __init__(self, path: Path) -> None:
        self._safetensors = _import_safetensors()
        self._stack = ExitStack()
        self._open: dict[Path, Any] = {}
        self.title = str(path)
        self.folder = path if path.is_dir() else path.parent
        self._index: Path | None = None
        self.where: dict[str, Path] = {}
        with ExitStack() as undo:
            undo.callback(self._stack.close)
            self.where = self._locate(path)
            undo.pop_all()

    def __enter__(self) -> TensorSource:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._open.clear()
        self._stack.close()

    def settle(self, names: Iterable[str]) -> None:
        """Make sure that each of these tensors is in its file, and in no other file with them.

        Without an index every header has been read already, and duplicates were found then.
        """
        if self._index is None:
            return
        shards: dict[Path, set[str]] = {}
        for name in sorted(names):
            shards.setdefault(self.where[name], set()).add(name)
        wanted = set().union(*shards.values())
        held = {
            file: wanted.intersection(self._handle(file, min(mapped)).keys())
            for file, mapped in shards.items()
        }
        for file, mapped in shards.items():
            for name in sorted(mapped - held[file]):
                raise CheckpointError(
                    f"load_moe: {self._index} says that {name} is in {file.name}, but {file} does "
                    "not hold it; index and shards are of different versions"
                )
        for file, mapped in shards.items():
            for name in sorted(held[file] - mapped):
                raise _duplicate(name, self.where[name], file)

    def spec(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Read dtype (safetensors' name, e.g. ``F8_E4M3``) and shape from the header alone."""
        part = self._handle(self.where[name], name).get_slice(name)
        return str(part.get_dtype()), tuple(part.get_shape())

    def read(self, name: str, *index: int | slice) -> torch.Tensor:
        """One tensor on the CPU, or a part of it by index.

        A part is a view of the mapped file, so that nothing beside it is read.
        """
        file = self.where[name]
        try:
            handle = self._handle(file, name)
            value: torch.Tensor = (
                handle.get_slice(name)[index] if index else handle.get_tensor(name)
            )
        except (self._safetensors.SafetensorError, OSError, RuntimeError) as error:
            raise CheckpointError(f"load_moe: cannot read {name} from {file}: {error}") from error
        return value

    def _locate(self, path: Path) -> dict[str, Path]:
        if path.is_file():
            if path.suffix != ".safetensors":
                raise CheckpointError(
                    f"load_moe: {path} is no .safetensors file; pass one, or the folder of a "
                    "checkpoint (other formats are not read)"
                )
            return self._from_headers([path])
        if not path.is_dir():
            raise CheckpointError(f"load_moe: {path} does not exist; pass a file or a folder")
        if (path / INDEX).is_file():
            self._index = path / INDEX
            return _read_index(self._index)
        files = sorted(path.glob("*.safetensors"))
        if not files:
            raise CheckpointError(
                f"load_moe: no .safetensors file in folder {path}; a checkpoint folder holds "
                f"model.safetensors, or shards with {INDEX}"
            )
        return self._from_headers(files)

    def _from_headers(self, files: list[Path]) -> dict[str, Path]:
        where: dict[str, Path] = {}
        for file in files:
            for name in self._handle(file).keys():  # noqa: SIM118 (a file, not a dict)
                if where.setdefault(name, file) != file:
                    raise _duplicate(name, where[name], file)
        return where

    def _handle(self, file: Path, name: str = "tensors") -> Any:
        """Open a file at its first use, which is for the sake of ``name``."""
        if file not in self._open:
            if not file.is_file():
                raise CheckpointError(
                    f"load_moe: {self._index or self.title} puts {name} into {file.name}, but "
                    f"{file} does not exist; download the missing shard"
                )
            try:
                opened = self._safetensors.safe_open(file, framework="pt", device="cpu")
                self._open[file] = self._stack.enter_context(opened)
            except (self._safetensors.SafetensorError, OSError, ValueError) as error:
                raise CheckpointError(
                    f"load_moe: cannot open {file} ({file.stat().st_size} bytes), it is damaged or "
                    f"cut short: {error}; download it again"
                ) from error
        return self._open[file]


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object, refusing repeated keys, which the json module would quietly drop."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"), object_pairs_hook=_unique)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"load_moe: cannot read {file}: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(
            f"load_moe: {file} holds a JSON {type(value).__name__}; need an object"
        )
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for key, item in pairs:
        if key in value:
            raise ValueError(f"{key} stands there twice, as {value[key]!r} and as {item!r}")
        value[key] = item
    return value


def _read_index(file: Path) -> dict[str, Path]:
    shards = read_json(file).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
        raise CheckpointError(
            f"load_moe: {file} has no weight_map from tensor names to file names; need one"
        )
    return {name: file.parent / shard for name, shard in shards.items()}


def _duplicate(name: str, first: Path, second: Path) -> CheckpointError:
    return CheckpointError(
        f"load_moe: tensor {name} is both in {first} and in {second}; which one counts is unknown, "
        "remove one"
    )


def _import_safetensors() -> ModuleType:
    try:
        import safetensors
    except ImportError as error:
        raise UnsupportedError(
            "load_moe: reading checkpoints needs safetensors, which is not installed; "
            "pip install fp4lt[checkpoints]"
        ) from error
    return safetensors
