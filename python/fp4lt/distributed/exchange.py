# SPDX-License-Identifier: Apache-2.0
"""Who sends which rows to whom.

A token is sent once to each rank that holds one of its experts, whatever number of them, with its
(k,) ids, those of other ranks' experts replaced by -1.  Both sides list slots in the same order,
that of the rows and then of j, so results need no labels on their way back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from fp4lt.distributed.ranks import Ranks

Combine = Literal["exact", "partial"]


@dataclass(frozen=True, eq=False)
class Exchange:
    """The routing of one call, agreed on by all ranks; T and the tokens are this rank's own.

    U rows with S slots are sent, U' rows with S' slots are received.  With combine="exact" what
    comes back is a row per slot, with "partial" a row per row sent.

    Attributes
    ----------
    tokens, top_k : int
    dtype : torch.dtype
        Of the hidden states.
    rows_sent, rows_received : tuple of int
        Rows of x by rank.
    results_sent, results_received : tuple of int
        Rows of results by rank: sent back for rows_received, received for rows_sent.
    token : (U,) int64
        Which token each sent row is.
    slot_row : (T, k) int64, on CUDA int32
        Row of the received results to add for each slot, or -1.
    weights : (T, k) float32, optional
        What those rows are multiplied by; None for 1.
    input_weights : (T,) float32, optional
        Router weights that x is multiplied by before it is sent.
    local_row : (S',) int64, optional
        The received row of each slot; None if rows are taken as they are.
    local_ids : (S', 1) or (U', k) int32
        Global ids, -1 for nothing.
    local_weights : float32, of that shape
    """

    tokens: int
    top_k: int
    dtype: torch.dtype
    rows_sent: tuple[int, ...]
    rows_received: tuple[int, ...]
    results_sent: tuple[int, ...]
    results_received: tuple[int, ...]
    token: torch.Tensor
    slot_row: torch.Tensor
    weights: torch.Tensor | None
    input_weights: torch.Tensor | None
    local_row: torch.Tensor | None
    local_ids: torch.Tensor
    local_weights: torch.Tensor

    def bytes_sent(self, rank: int, hidden_size: int) -> tuple[int, int]:
        """Bytes of x and of results that `rank`, which is this one, sends to others."""
        x = sum(self.rows_sent) - self.rows_sent[rank]
        z = sum(self.results_sent) - self.results_sent[rank]
        return x * hidden_size * self.dtype.itemsize, z * hidden_size * 4


@dataclass(frozen=True, eq=False)
class Outgoing:
    """One rank's half of an exchange, before the others' is known.

    Attributes
    ----------
    token : (U,) int64
        Sorted by rank, then by token.
    ids : (U, k) int32
        -1 where the expert is not the receiving rank's.
    counts : (2, ranks) int64
        Rows, and slots, for each rank.
    """

    token: torch.Tensor
    ids: torch.Tensor
    counts: torch.Tensor


def outgoing(topk_ids: torch.Tensor, owner: torch.Tensor, ranks: int) -> Outgoing:
    """Sort the slots by rank.

    Parameters
    ----------
    topk_ids : (T, k) integer
        Those outside of [0, num_experts) go nowhere.
    owner : (num_experts,) int64
        The rank that has each expert.
    ranks : int
    """
    ids = topk_ids.to(torch.int64)
    known = (ids >= 0) & (ids < len(owner))
    target = torch.where(known, owner[ids.where(known, 0)], ranks)
    wanted = torch.zeros(len(ids), ranks + 1, dtype=torch.bool, device=ids.device)
    wanted.scatter_(1, target, True)
    rank, token = wanted[:, :ranks].T.nonzero().unbind(1)
    sent = torch.where(target[token] == rank[:, None], ids[token], -1).to(torch.int32)
    slots = torch.bincount(target.flatten(), minlength=ranks + 1)[:ranks]
    return Outgoing(token, sent, torch.stack([wanted[:, :ranks].sum(0), slots]))


def complete(
    ranks: Ranks,
    mine: Outgoing,
    counts: torch.Tensor,
    topk_weights: torch.Tensor,
    *,
    dtype: torch.dtype,
    combine: Combine,
    on_input: bool,
) -> Exchange:
    """Send the ids, and for "partial" the weights, to where their rows will go.

    Parameters
    ----------
    counts : (ranks, 2, ranks) int64, in host memory
        Every rank's :attr:`Outgoing.counts`.
    topk_weights : (T, k) float32
    """
    tokens, k = topk_weights.shape
    partial = combine == "partial"
    rows_sent, slots_sent = counts[ranks.rank].tolist()
    rows_received, slots_received = counts[:, 0, ranks.rank], counts[:, 1, ranks.rank]
    labels = mine.ids
    if partial:
        # Their bits, beside the ids.
        labels = torch.cat([labels, topk_weights[mine.token].view(torch.int32)], dim=1)
    labels = ranks.swap(labels.contiguous(), rows_sent, rows_received.tolist())

    where = mine.ids >= 0
    if partial:
        # A rank's sum takes the place of the first slot that is in it.
        results = len(mine.token)
        at = mine.token, where.to(torch.int8).argmax(1)
        received_row, ids = None, labels[:, :k].contiguous()
        weights = labels[:, k:].contiguous().view(torch.float32)
    else:
        row, slot = where.nonzero().unbind(1)
        results = len(row)
        at = mine.token[row], slot
        taken = labels >= 0
        received_row, ids = taken.nonzero()[:, 0], labels[taken][:, None]
        weights = torch.ones(ids.shape, dtype=torch.float32, device=ids.device)
    if on_input:
        weights = torch.ones_like(weights)
    kind = torch.int32 if ids.is_cuda else torch.int64
    slot_row = torch.full((tokens, k), -1, dtype=kind, device=ids.device)
    slot_row[at] = torch.arange(results, dtype=kind, device=ids.device)
    return Exchange(
        tokens=tokens,
        top_k=k,
        dtype=dtype,
        rows_sent=tuple(rows_sent),
        rows_received=tuple(rows_received.tolist()),
        results_sent=tuple((rows_received if partial else slots_received).tolist()),
        results_received=tuple(rows_sent if partial else slots_sent),
        token=mine.token,
        slot_row=slot_row,
        weights=None if partial or on_input else topk_weights.contiguous(),
        input_weights=topk_weights[:, 0].contiguous() if on_input else None,
        local_row=received_row,
        local_ids=ids,
        local_weights=weights,
    )
