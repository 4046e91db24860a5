# SPDX-License-Identifier: Apache-2.0
"""Timers.  One interface, so that a device timer can stand beside the wall clock."""

from __future__ import annotations

import gc
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

Call = Callable[[], object]
Prepare = Callable[[int], Call]
"""Makes call number i; whatever it does (drawing a routing, say) is not timed."""


@dataclass(frozen=True)
class Samples:
    """Durations of single calls, in microseconds, in the order they were made.

    Attributes
    ----------
    us : tuple of float
        A sample may be the mean over a group of calls.
    preemptions : int or None
        How often, during all of them, the system took a CPU from one of this process's threads to
        run something else; None where the timer does not know.
    group : int or None
        Where each sample is a mean: it is over calls 0 to ``group - 1``.
    """

    us: tuple[float, ...]
    preemptions: int | None = None
    group: int | None = None

    def __post_init__(self) -> None:
        if not self.us:
            raise ValueError("no samples; at least one timed call is needed")

    @property
    def n(self) -> int:
        """Number of samples."""
        return len(self.us)

    @property
    def calls(self) -> range:
        """Numbers of the calls that were timed, all of them equally often."""
        return range(self.group or self.n)

    @property
    def median(self) -> float:
        """Median duration, us."""
        return self.percentile(50)

    def percentile(self, q: float) -> float:
        """Interpolated percentile, us."""
        return float(np.percentile(np.asarray(self.us), q))


class Timer(Protocol):
    """Measures how long calls take."""

    @property
    def description(self) -> str:
        """What is measured and how, for the report's header."""
        ...

    def measure(self, prepare: Prepare) -> Samples:
        """Time calls 0, 1, ... after warming up; the timer decides how many."""
        ...


@dataclass(frozen=True)
class WallClock:
    """``time.perf_counter_ns`` around one call at a time.

    Attributes
    ----------
    flush_bytes : int
        Size of the buffer that is written, then read, before each timed call to push the weights
        out of the caches.  0 measures warm caches.
    warmup : int
        Calls before the first timed one.
    repeats : int
        Timed calls wanted.
    min_time : float
        Go on until the timed calls add up to this many seconds, up to ``max_repeats``.
    max_time : float
        Stop after this many seconds, flushing included, even short of ``repeats``, though not
        before 3 calls.
    """

    flush_bytes: int
    warmup: int = 1
    repeats: int = 10
    min_time: float = 0.3
    max_repeats: int = 50
    max_time: float = float("inf")

    def __post_init__(self) -> None:
        if self.repeats < 1 or self.warmup < 0 or self.min_time < 0 or self.flush_bytes < 0:
            raise ValueError(
                f"need repeats >= 1 and warmup, min_time, flush_bytes >= 0, got {self.repeats}, "
                f"{self.warmup}, {self.min_time}, {self.flush_bytes}"
            )

    @property
    def description(self) -> str:
        """What is measured and how."""
        state = (
            f"cold: {self.flush_bytes / 2**20:.0f} MiB written and read before each call"
            if self.flush_bytes
            else "warm: caches left as the previous call left them"
        )
        return f"perf_counter around one call; {state}"

    def _wants_more(self, calls: int, seconds: float, spent: float) -> bool:
        if calls < min(3, self.repeats):
            return True
        if spent >= self.max_time:
            return False
        return calls < self.repeats or (seconds < self.min_time and calls < self.max_repeats)

    def measure(self, prepare: Prepare) -> Samples:
        """Time calls numbered from 0; warm-up calls carry the numbers below 0."""
        buffer = torch.zeros(self.flush_bytes // 8, dtype=torch.int64)
        for i in range(-self.warmup, 0):
            prepare(i)()
        us: list[float] = []
        total = 0.0
        preemptions = 0
        collecting = gc.isenabled()
        gc.disable()
        try:
            began = time.perf_counter_ns()
            while self._wants_more(len(us), total, (time.perf_counter_ns() - began) / 1e9):
                call = prepare(len(us))
                if self.flush_bytes:
                    buffer.fill_(len(us))
                    # Read it too: dirty lines would be written back on the contender's time.
                    buffer.sum()
                before = _preemptions()
                start = time.perf_counter_ns()
                result = call()
                elapsed = time.perf_counter_ns() - start
                preemptions += _preemptions() - before
                del result  # freeing it is not part of the call
                us.append(elapsed / 1e3)
                total += elapsed / 1e9
        finally:
            if collecting:
                gc.enable()
        return Samples(tuple(us), preemptions)


def _preemptions() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


@dataclass(frozen=True)
class CudaGraph:
    """Replays of a CUDA graph of several calls, timed by events.

    The graph holds calls 0 to ``calls - 1`` one after the other, each with its own routing and the
    next copy of the weights, so that weights come from memory though nothing is flushed.

    Attributes
    ----------
    calls : int
        Calls in the graph.
    repeats : int
        Timed replays wanted.
    min_time : float
        Go on until the timed replays add up to this many seconds, up to ``max_repeats``.
    max_time : float
        Stop after this many seconds of replays even short of ``repeats``, though not before 3.
    warm : bool
        Only for the description: there is but one copy of the weights.
    """

    calls: int = 16
    repeats: int = 20
    min_time: float = 0.1
    max_repeats: int = 200
    max_time: float = float("inf")
    warmup: int = 2
    warm: bool = False

    @property
    def description(self) -> str:
        """What is measured and how."""
        state = (
            "warm: one copy of the weights"
            if self.warm
            else "cold: copies of the weights, as many as each title says, in turn"
        )
        return (
            f"events around replays of a CUDA graph of {self.calls} calls with a routing each; a "
            f"sample is a replay / {self.calls}, without the host's launch overhead; {state}"
        )

    def measure(self, prepare: Prepare) -> Samples:
        """Time replays; every call is made outside the graph first."""
        prepared = [prepare(i) for i in range(self.calls)]
        for call in prepared:
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in prepared:
                call()
        for _ in range(self.warmup):
            graph.replay()
        us: list[float] = []
        while self._wants_more(us):
            us.append(event_seconds(graph.replay) * 1e6 / self.calls)
        return Samples(tuple(us), group=self.calls)

    def _wants_more(self, us: list[float]) -> bool:
        if len(us) < min(3, self.repeats):
            return True
        if sum(us) * self.calls >= self.max_time * 1e6:
            return False
        if len(us) < self.repeats:
            return True
        return sum(us) * self.calls < self.min_time * 1e6 and len(us) < self.max_repeats


def event_seconds(call: Callable[[], object]) -> float:
    """Seconds between events before and after what ``call`` enqueues."""
    event: Any = torch.cuda.Event  # untyped in some versions
    start, end = event(enable_timing=True), event(enable_timing=True)
    start.record()
    call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3
