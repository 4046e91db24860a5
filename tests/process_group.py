# SPDX-License-Identifier: Apache-2.0
"""Real processes in a process group, which run functions of the test modules."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

PATIENCE = 120.0  # seconds for an answer; far more than any test needs


def _serve(
    rank: int, world: int, backend: str, store: str, timeout: float, connection: Connection
) -> None:
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend,
        store=torch._C._distributed_c10d.FileStore(store, world),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=timeout),
    )
    connection.send((True, None))
    while True:
        task = connection.recv()
        if task is None:
            break
        function, arguments = task
        try:
            connection.send((True, function(**arguments)))
        except Exception as error:
            kind = type(error).__name__
            connection.send((False, (kind, str(error), traceback.format_exc())))
    # Without destroy_process_group(): a rank may be gone, and the processes end anyway.
    connection.close()
    os._exit(0)


class ProcessGroup:
    """`world` processes, started once; collectives wait `timeout` s.  With nccl, a device each."""

    def __init__(
        self, world: int, folder: Path, timeout: float = 60.0, backend: str = "gloo"
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self.world = world
        self.processes, self.connections = [], []
        for rank in range(world):
            mine, theirs = context.Pipe()
            arguments = (rank, world, backend, str(folder / "store"), timeout, theirs)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.connections.append(mine)
        for rank in range(world):
            assert self._answer(rank)[0]

    def _answer(self, rank: int) -> tuple[bool, Any]:
        if not self.connections[rank].poll(PATIENCE):
            raise AssertionError(f"rank {rank} hangs: no answer in {PATIENCE:.0f} s")
        ok, value = self.connections[rank].recv()
        return bool(ok), value

    def start(self, who: int, function: Callable[..., Any], /, **arguments: Any) -> None:
        """Have one rank run `function`, which is of a module that can be imported."""
        self.connections[who].send((function, arguments))

    def finish(self, rank: int) -> tuple[bool, Any]:
        """True and the result, or False and the error's class, text and traceback."""
        return self._answer(rank)

    def run(self, function: Callable[..., Any], /, **arguments: Any) -> list[Any]:
        """Results of ``function(rank=..., world=..., **arguments)``, of every rank."""
        answers = self.answers(function, **arguments)
        for rank, (ok, value) in enumerate(answers):
            assert ok, f"rank {rank}: {value[2]}"
        return [value for _, value in answers]

    def answers(self, function: Callable[..., Any], /, **arguments: Any) -> list[tuple[bool, Any]]:
        """As :meth:`run`, with what :meth:`finish` gives for each rank."""
        for rank in range(self.world):
            self.start(rank, function, rank=rank, world=self.world, **arguments)
        return [self.finish(rank) for rank in range(self.world)]

    def close(self) -> None:
        """End the processes."""
        for connection in self.connections:
            with suppress(OSError):  # it has ended already
                connection.send(None)
        for process in self.processes:
            process.join(10)
            if process.is_alive():
                process.kill()
