# SPDX-License-Identifier: Apache-2.0
"""What a peer is: whether it can run, weights in its own layout, the block and its two GEMMs.

Shape letters: T tokens, k experts a token, H hidden, I intermediate, E experts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch

from benchmarks.accounting import WeightFormat
from benchmarks.peers import bundle, glue
from benchmarks.peers.weights import Weights

Tensors = tuple[torch.Tensor | None, ...]


class Shape(NamedTuple):
    """What a peer may refuse."""

    experts: int
    hidden: int
    intermediate: int
    top_k: int

    @property
    def w13(self) -> tuple[int, int]:
        """(N, K)."""
        return 2 * self.intermediate, self.hidden

    @property
    def w2(self) -> tuple[int, int]:
        """(N, K)."""
        return self.hidden, self.intermediate


class Inputs(NamedTuple):
    """One call: ``x`` (T, H) bf16, ``ids`` (T, k) int32, ``weights`` (T, k) float32.

    ``logits`` (T, E) float32 only for a peer that routes by itself: softmax over the top k gives
    ``weights``.
    """

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    logits: torch.Tensor | None = None

    @property
    def slots(self) -> int:
        """T * k."""
        return self.ids.numel()


class Block(ABC):
    """A MoE block whose weights are in a peer's own layout.

    :meth:`run` is the whole block.  Its stages are public so that each GEMM can be timed apart.
    ``copy`` picks one of ``copies`` equal sets of weights at addresses of their own.
    """

    def __init__(self, weights: Weights, copies: int) -> None:
        self.experts = weights.experts
        self.hidden = weights.hidden
        self.intermediate = weights.intermediate
        self.copies = copies

    def inputs(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> Inputs:
        """Bring a call's routing into the form that the peer is given by its own engine."""
        return Inputs(x, ids.to(torch.int32).contiguous(), weights.float().contiguous())

    def run(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, copy: int = 0
    ) -> torch.Tensor:
        """The block of x (T, H), ids (T, k), weights (T, k): (T, H) bf16."""
        return self.block(self.inputs(x, ids, weights), copy)

    def block(self, call: Inputs, copy: int = 0) -> torch.Tensor:
        """As :meth:`run`, from inputs in the peer's own form."""
        plan = self.plan(call)
        u = self.activate(self.gemm1(call, plan, copy))
        return self.combine(call, plan, self.gemm2(call, plan, u, copy))

    @abstractmethod
    def plan(self, call: Inputs) -> Any:
        """Sort the token slots by expert."""

    @abstractmethod
    def gemm1(self, call: Inputs, plan: Any, copy: int = 0) -> torch.Tensor:
        """Gate and up of every slot: (T * k, 2I) bf16."""

    def activate(self, h: torch.Tensor) -> torch.Tensor:
        """(T * k, 2I) to (T * k, I)."""
        return glue.silu_mul(h)

    @abstractmethod
    def gemm2(self, call: Inputs, plan: Any, u: torch.Tensor, copy: int = 0) -> torch.Tensor:
        """Down projection of u (T * k, I); what :meth:`combine` takes."""

    @abstractmethod
    def combine(self, call: Inputs, plan: Any, z: torch.Tensor) -> torch.Tensor:
        """Sum over each token's experts: (T, H) bf16."""

    def dense(self, expert: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The float32 matrices that a converted format stores; None if they are the layer's."""
        del expert
        return None


class Peer(ABC):
    """Somebody else's implementation."""

    name: ClassVar[str]
    weight_format: ClassVar[WeightFormat] = "nvfp4"
    limit: ClassVar[float] = 8e-3
    """Largest norm-wise relative error.

    Gate, up, u, z and the sum are rounded to bf16, and the reference's own u is: six roundings of
    1.7e-3 each come to 4.1e-3, and this is twice that.
    """

    def __init__(self) -> None:
        self._reason: str | None = None
        self._loaded = False

    def available(self, device: torch.device) -> str | None:
        """Why it cannot run on this machine, or None; its code is loaded by the first call."""
        if device.type != "cuda":
            return f"needs an NVIDIA GPU; this run is on {device}"
        if not self._loaded:
            try:
                self.load()
            except bundle.BundleError as error:
                self._reason = str(error)
            except Exception as error:  # somebody else's import can fail in any way
                self._reason = f"could not be loaded: {type(error).__name__}: {error}"
            self._loaded = True
        return self._reason

    @abstractmethod
    def load(self) -> None:
        """Import or link what is needed; raise what is missing."""

    def refusal(self, shape: Shape) -> str | None:
        """Why it does not take blocks of this shape, or None."""
        del shape
        return None

    @abstractmethod
    def prepare(
        self, weights: Weights, *, tokens: Sequence[int], top_k: int, copies: int = 1
    ) -> Block:
        """Bring weights into the peer's layout.

        Parameters
        ----------
        weights : Weights
        tokens : sequence of int
            The T to come: some peers choose and compile kernels for them.
        top_k : int
        copies : int
            Equal sets of weights to make.

        Returns
        -------
        Block
        """


def clones(first: Tensors, copies: int) -> list[Tensors]:
    """``first`` and as many equal sets as make ``copies``."""
    more = (tuple(None if t is None else t.clone() for t in first) for _ in range(copies - 1))
    return [first, *more]
