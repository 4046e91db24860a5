# SPDX-License-Identifier: Apache-2.0
"""A process group, and the three things its ranks do together.

What one rank finds wrong has to reach all of them: a rank that raises alone leaves the others in a
collective until it times out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from fp4lt.errors import ArgumentError, DeviceError, DistributedError, UnsupportedError

R = TypeVar("R")


class Ranks:
    """The ranks of a group, with tensors on `device` (None if that is not known yet).

    Attributes
    ----------
    size, rank : int
        Of the group, not of the world.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device | None) -> None:
        if not dist.is_available():
            raise UnsupportedError("ExpertParallelMoE: this torch is built without distributed")
        if not dist.is_initialized():
            raise ArgumentError(
                "ExpertParallelMoE: there is no process group; call "
                "torch.distributed.init_process_group first (torchrun sets what it needs)"
            )
        self.group, self.device = group, device
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        if self.rank < 0:
            raise ArgumentError(
                f"ExpertParallelMoE: rank {dist.get_rank()} of the world is not in this group"
            )
        # "gloo", "nccl", or for one by device "cpu:gloo,cuda:nccl".
        self.backend = str(dist.get_backend_config(group))

    def require_served(self, device: torch.device) -> None:
        """Refuse a device whose tensors the group cannot send."""
        served = dict(part.split(":") for part in self.backend.split(",") if ":" in part)
        name = served.get(device.type, self.backend if not served else None)
        if name is None or (name == "nccl" and device.type != "cuda"):
            raise DeviceError(
                f"ExpertParallelMoE: the weights are on {device}, which a group with backend "
                f"{self.backend} does not serve; use gloo for the CPU and nccl for CUDA devices"
            )

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """Everybody's `values` (n,), n being the same for all: (size, n) in host memory."""
        every = values.new_empty(self.size, len(values))
        self._do("all_gather", lambda: dist.all_gather(list(every.unbind()), values, self.group))
        return every.cpu()

    def gather_objects(self, value: Any) -> list[Any]:
        """Everybody's `value`, pickled."""
        every: list[Any] = [None] * self.size
        # With nccl the bytes travel through the current device.
        cuda = self.device is not None and self.device.type == "cuda"
        with torch.cuda.device(self.device) if cuda else nullcontext():
            self._do("all_gather", lambda: dist.all_gather_object(every, value, self.group))
        return every

    def swap(
        self, rows: torch.Tensor, sent: Sequence[int], received: Sequence[int]
    ) -> torch.Tensor:
        """Send each rank its part of `rows`, in the order of the ranks; the parts for this one.

        `sent` and `received` are numbers of rows, one per rank.
        """
        result = rows.new_empty(sum(received), *rows.shape[1:])
        self._do(
            "all_to_all",
            lambda: dist.all_to_all_single(
                result, rows, list(received), list(sent), group=self.group
            ),
        )
        return result

    def _do(self, name: str, collective: Callable[[], R]) -> R:
        try:
            return collective()
        except RuntimeError as error:
            raise DistributedError(
                f"ExpertParallelMoE: {name} failed on rank {self.rank} of {self.size} "
                f"({self.backend}): {error}. Has another rank died, or did it raise or make "
                "another call? The wait for it ends after the timeout of the process group "
                "(init_process_group(timeout=...)); the group cannot be used any more"
            ) from error


def values_of(items: Sequence[Any]) -> str:
    """What each rank has, ranks that agree together: "2 on rank 0, 1; 4 on rank 3"."""
    holders: dict[str, list[str]] = {}
    for rank, item in enumerate(items):
        holders.setdefault(str(item), []).append(str(rank))
    return "; ".join(f"{item} on rank {', '.join(ranks)}" for item, ranks in holders.items())


def require_equal(name: str, items: Sequence[Any]) -> None:
    """Raise the same error on all ranks if they do not have the same."""
    if any(item != items[0] for item in items):
        raise DistributedError(
            f"ExpertParallelMoE: the ranks differ in {name}: {values_of(items)}; all must have the "
            "same"
        )


def raise_together(own: Exception | None, texts: Sequence[str | None]) -> None:
    """The rank's own error where it has one, else that of the first rank that has."""
    if own is not None:
        raise own
    for rank, text in enumerate(texts):
        if text is not None:
            raise DistributedError(f"ExpertParallelMoE: rank {rank} refused its input: {text}")
