# SPDX-License-Identifier: Apache-2.0
"""Routings: which experts the tokens of a call go to, drawn or from a recorded trace.

A routing depends only on the seed, the size and the number of the call, never on what was drawn
before, so every contender meets the same sequence.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

Ids = npt.NDArray[np.int64]
KINDS = "uniform, balanced, zipf[:S], one-hot or trace:FILE"


class RoutingError(ValueError):
    """A routing that cannot be made; the message says what is needed."""


@dataclass(frozen=True)
class Routing:
    """Which experts each token goes to.

    Attributes
    ----------
    ids : (T, k) int64
        Distinct within a row.
    weights : (T, k) float32
        Positive; each row sums to 1, but a lone weight (k = 1) is a sigmoid below 1.
    """

    ids: torch.Tensor
    weights: torch.Tensor

    def head(self, tokens: int) -> Routing:
        """Return the routing of the first ``tokens`` tokens."""
        return Routing(self.ids[:tokens].contiguous(), self.weights[:tokens].contiguous())

    def rows_per_expert(self, experts: int) -> Ids:
        """Count routed rows of the first ``experts`` experts, (experts,) int64."""
        return np.bincount(self.ids.numpy().reshape(-1), minlength=experts)[:experts]

    def to(self, device: torch.device) -> Routing:
        """Return it on ``device``."""
        return Routing(self.ids.to(device), self.weights.to(device))


class Draw(Protocol):
    """Chooses the experts of one call's tokens."""

    def __call__(self, tokens: int, experts: int, top_k: int, *, seed: int, call: int) -> Ids:
        """Return (tokens, top_k) ids, distinct within a row."""
        ...


@dataclass(frozen=True)
class Router:
    """A named way of routing.

    Attributes
    ----------
    name : str
        As on the command line.
    choose : Draw
    validate : callable
        Raises :class:`RoutingError` if it cannot route so many tokens to ``top_k`` of ``experts``.
    """

    name: str
    choose: Draw
    validate: Callable[[int, int, int], None] = lambda _tokens, _experts, _top_k: None

    def draw(self, tokens: int, experts: int, top_k: int, *, seed: int, call: int) -> Routing:
        """Route one call; ``call`` may be negative, as the numbers of warm-up calls are."""
        if not 1 <= top_k <= experts:
            raise ValueError(f"top_k must be in [1, {experts}], the number of experts, got {top_k}")
        ids = self.choose(tokens, experts, top_k, seed=seed, call=call)
        logits = _rng(seed, tokens, call, 1).standard_normal((tokens, top_k))
        if top_k == 1:
            weights = 1 / (1 + np.exp(-logits))
        else:
            weights = np.exp(logits - logits.max(axis=1, keepdims=True))
            weights /= weights.sum(axis=1, keepdims=True)
        return Routing(torch.from_numpy(ids), torch.from_numpy(weights.astype(np.float32)))


def _rng(seed: int, tokens: int, call: int, purpose: int = 0) -> np.random.Generator:
    return np.random.default_rng([seed, tokens, call % 2**32, purpose])


def _uniform(tokens: int, experts: int, top_k: int, *, seed: int, call: int) -> Ids:
    """All sets of experts are equally likely."""
    keys = _rng(seed, tokens, call).random((tokens, experts))
    return np.argsort(keys, axis=1, kind="stable")[:, :top_k].astype(np.int64)


def _balanced(tokens: int, experts: int, top_k: int, *, seed: int, call: int) -> Ids:
    """Deal the experts out in turn, in an order drawn for the call: counts differ by 1 at most."""
    order = _rng(seed, tokens, call).permutation(experts)
    return order[np.arange(tokens * top_k) % experts].reshape(tokens, top_k)


def _zipf(s: float, tokens: int, experts: int, top_k: int, *, seed: int, call: int) -> Ids:
    """The expert of rank r is drawn, without replacement, with a weight of r^-s.

    Ranks are drawn once for a seed: an expert that is popular stays so from call to call.
    """
    rank = np.random.default_rng([seed, experts]).permutation(experts) + 1
    gumbel = _rng(seed, tokens, call).gumbel(size=(tokens, experts))
    keys = s * np.log(rank) - gumbel
    return np.argsort(keys, axis=1, kind="stable")[:, :top_k].astype(np.int64)


def _one_hot(tokens: int, experts: int, top_k: int, *, seed: int, call: int) -> Ids:
    """All tokens of a call go to the same experts, drawn for the call."""
    chosen = _rng(seed, tokens, call).permutation(experts)[:top_k]
    return np.tile(chosen, (tokens, 1)).astype(np.int64)


UNIFORM = Router("uniform", _uniform)


def uniform(tokens: int, experts: int, top_k: int, *, seed: int, call: int) -> Routing:
    """Draw ``top_k`` distinct experts for each token, all sets equally likely."""
    return UNIFORM.draw(tokens, experts, top_k, seed=seed, call=call)


def parse(text: str) -> Router:
    """Make the router that the command line names.

    Raises
    ------
    RoutingError
        For an unknown kind, a bad exponent, or a trace file that does not hold one.
    """
    kind, colon, argument = text.partition(":")
    if kind == "zipf":
        return _parse_zipf(argument if colon else "1")
    if kind == "trace" and argument:
        return Trace.read(Path(argument)).router
    plain = {"uniform": _uniform, "balanced": _balanced, "one-hot": _one_hot}
    if colon or kind not in plain:
        raise RoutingError(f"no routing {text!r}; there are {KINDS}")
    return Router(kind, plain[kind])


def _parse_zipf(text: str) -> Router:
    try:
        s = float(text)
    except ValueError:
        s = math.nan
    if not 0 <= s <= 10:
        raise RoutingError(f"zipf's exponent must be a number from 0 to 10, got {text!r}")
    return Router(f"zipf:{s:g}", partial(_zipf, s))


@dataclass(frozen=True)
class Trace:
    """Recorded ids (T, k), in the order the tokens came.

    Call i with n tokens takes the tokens from i n on, beginning again at the end.
    """

    where: str
    ids: Ids

    @classmethod
    def read(cls, path: Path) -> Trace:
        """Read a ``.npy`` file, or JSON lines with the list of one token's ids each."""
        try:
            ids = _read_npy(path) if path.suffix == ".npy" else _read_lines(path)
        except OSError as error:
            raise RoutingError(f"trace {path}: {error.strerror or error}") from error
        if ids.ndim != 2 or not ids.size:
            raise RoutingError(f"trace {path}: need ids (T, k), got an array of shape {ids.shape}")
        if ids.min() < 0:
            token = int(np.nonzero((ids < 0).any(axis=1))[0][0])
            raise RoutingError(f"trace {path}: token {token} has a negative id: {_row(ids, token)}")
        ordered = np.sort(ids, axis=1)
        twice = np.nonzero((ordered[:, 1:] == ordered[:, :-1]).any(axis=1))[0]
        if twice.size:
            token = int(twice[0])
            raise RoutingError(f"trace {path}: token {token} has an id twice: {_row(ids, token)}")
        return cls(str(path), ids)

    @property
    def router(self) -> Router:
        """The trace as a router."""
        return Router(f"trace:{self.where}", self._choose, self._validate)

    def _validate(self, tokens: int, experts: int, top_k: int) -> None:
        have, k = self.ids.shape
        if k != top_k:
            raise RoutingError(
                f"trace {self.where} has {k} ids a token, the layer routes to {top_k}"
            )
        if self.ids.max() >= experts:
            token = int(np.nonzero((self.ids >= experts).any(axis=1))[0][0])
            raise RoutingError(
                f"trace {self.where}: token {token} goes to {_row(self.ids, token)}, and the layer "
                f"has experts 0 to {experts - 1}"
            )
        if tokens > have:
            raise RoutingError(f"trace {self.where} has {have} tokens, a call needs {tokens}")

    def _choose(self, tokens: int, experts: int, top_k: int, *, seed: int, call: int) -> Ids:
        del seed
        self._validate(tokens, experts, top_k)
        have = self.ids.shape[0]
        start = call * tokens % have
        return np.take(self.ids, np.arange(start, start + tokens), axis=0, mode="wrap")


def _row(ids: Ids, token: int) -> str:
    return str(ids[token].tolist())


def _read_npy(path: Path) -> Ids:
    try:
        ids = np.load(path, allow_pickle=False)
    except ValueError as error:
        raise RoutingError(f"trace {path}: not a .npy array of numbers: {error}") from error
    if not np.issubdtype(ids.dtype, np.integer):
        raise RoutingError(f"trace {path}: ids must be integers, got {ids.dtype}")
    return np.asarray(ids, dtype=np.int64)


def _read_lines(path: Path) -> Ids:
    rows: list[list[int]] = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise RoutingError(f"trace {path}: neither .npy nor text: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise RoutingError(f"trace {path}, line {number}: not JSON: {error}") from error
        if not isinstance(row, list) or any(type(i) is not int or abs(i) >= 2**31 for i in row):
            raise RoutingError(
                f"trace {path}, line {number}: need one token's ids like [3, 17], got {line[:60]}"
            )
        if rows and len(row) != len(rows[0]):
            raise RoutingError(
                f"trace {path}, line {number}: {len(row)} ids, the first token has {len(rows[0])}"
            )
        rows.append(row)
    return np.array(rows, dtype=np.int64)
