# SPDX-License-Identifier: Apache-2.0
"""ExpertParallelMoE: a MoE block whose experts are spread over the ranks of a process group."""

from __future__ import annotations

import itertools
from typing import Any, get_args

import torch
import torch.distributed as dist

from fp4lt._interop import (
    DTYPES,
    address,
    dense_view,
    dtype_name,
    kernel,
    require_dtype,
    row_strides,
    tracing,
)
from fp4lt.arguments import check_out, require_device
from fp4lt.block import cached_plan, moe_call, moe_problem
from fp4lt.distributed.exchange import Combine, Exchange, complete, outgoing
from fp4lt.distributed.ranks import Ranks, raise_together, require_equal, values_of
from fp4lt.errors import ArgumentError, DistributedError, ShapeError, UnsupportedError
from fp4lt.experts import MoEWeights
from fp4lt.problem import MoECall, Recipe, check_backend, check_recipe, format_name

_COMBINES = get_args(Combine)
_DTYPES = tuple(DTYPES)
_made = itertools.count()


def expert_range(num_experts: int, rank: int, size: int) -> range:
    """Experts of one rank when they are shared out evenly, the first ranks having one more.

    Raises
    ------
    ArgumentError
        If there are fewer experts than ranks, or no such rank.
    """
    if not 0 <= rank < size:
        raise ArgumentError(f"expert_range: rank={rank}, size={size}; need 0 <= rank < size")
    if num_experts < size:
        raise ArgumentError(
            f"expert_range: {num_experts} experts for {size} ranks; each rank needs at least one: "
            "use a smaller group"
        )
    each, more = divmod(num_experts, size)
    start = rank * each + min(rank, more)
    return range(start, start + each + (rank < more))


class ExpertParallelMoE:
    """:func:`fp4lt.moe` over the ranks of a process group, each with its own experts and tokens.

    Every rank calls it with the tokens that it owns, any number of them; a token goes to the ranks
    that hold its experts, and the results come back to be added up by its owner.  Creating one and
    calling one are collective: all ranks of the group do it, in the same order.

    Parameters
    ----------
    weights : MoEWeights
        This rank's experts, on its device, with ``expert_start`` and ``num_experts``.  The ranks'
        ranges must cover all experts once; their sizes may differ.
    group : torch.distributed.ProcessGroup, optional
        The world by default.  Its timeout is how long a rank waits for the others.
    recipe : "w4a4" or "w4a16"
    router_weight_on_input : bool
        As in :func:`fp4lt.moe`; for top-1 only.
    combine : "exact" or "partial"
        What travels back.  "exact": a float32 row for each of a token's slots, which its owner adds
        in the order of the slots, as one process would.  "partial": one float32 sum for each rank
        that a token went to; fewer bytes, another order of summation.
    backend : str
        Of the local computation; "auto" or a name.

    Raises
    ------
    DistributedError
        On every rank, where the ranks disagree or another one refused its arguments.
    ShapeError, DTypeError, DeviceError, ArgumentError
        On the rank whose arguments are wrong.

    Notes
    -----
    With "exact" a result has the bits of :func:`fp4lt.moe` in one process with all the experts,
    wherever the backend gives a row the same bits in any batch (``cpu``, ``fused``).  With
    "partial" it has them for k up to 2, and for a token whose slots on any one rank but the first
    are single, those on the first rank coming first.  docs/distributed.md has the reasons.
    """

    def __init__(
        self,
        weights: MoEWeights,
        *,
        group: dist.ProcessGroup | None = None,
        recipe: Recipe = "w4a4",
        router_weight_on_input: bool = False,
        combine: Combine = "exact",
        backend: str = "auto",
    ) -> None:
        known = isinstance(weights, MoEWeights)
        self.ranks = Ranks(group, weights.device if known else None)
        own, offer = _offer(self.ranks, weights, recipe, router_weight_on_input, combine, backend)
        every = self.ranks.gather_objects((None if own is None else str(own), *offer, next(_made)))
        raise_together(own, [item[0] for item in every])
        for name in every[0][1]:
            require_equal(name, [item[1][name] for item in every])
        # The same number on all ranks, greater than that of any object made before in this group.
        self._number = max(item[4] for item in every)
        while next(_made) < self._number:
            pass
        self.weights, self.recipe, self.backend = weights, recipe, backend
        self.router_weight_on_input, self.combine_mode = bool(router_weight_on_input), combine
        self._owner = _owners([item[2] for item in every], [item[3] for item in every], weights)

    def __repr__(self) -> str:
        r = self.ranks
        return (
            f"ExpertParallelMoE(rank {r.rank} of {r.size}, {r.backend}, {self.weights!r}, "
            f"recipe={self.recipe!r}, combine={self.combine_mode!r})"
        )

    def __call__(
        self,
        hidden: torch.Tensor,
        *,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run the block on this rank's tokens.

        Parameters
        ----------
        hidden : (T, H) bfloat16, float16 or float32
            T may differ from rank to rank and be 0; the dtype may not.
        topk_weights : (T, k) floating point
        topk_ids : (T, k) int32 or int64
            Global ids.  -1 and ids that no expert has contribute nothing; duplicates count.
        out : (T, H) of hidden's dtype, optional

        Returns
        -------
        (T, H) of hidden's dtype

        Raises
        ------
        DistributedError
            If another rank refused its input, has another k or dtype, is gone, or does not answer
            within the timeout of the group.
        ShapeError, DTypeError, LayoutError, DeviceError, ArgumentError, UnsupportedError
            If this rank's input is wrong: no row is sent then, and no rank computes.
        """
        exchange = self.plan(hidden, topk_weights=topk_weights, topk_ids=topk_ids, out=out)
        return self.run(exchange, hidden, out=out)

    def plan(
        self,
        hidden: torch.Tensor,
        *,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> Exchange:
        """Check the input and agree with the other ranks on who sends what; collective.

        Parameters and errors are those of a call.  Sizes come to the host, so this waits for the
        device and cannot be captured in a CUDA graph; :meth:`run` can be.
        """
        call: MoECall | None = None
        own: Exception | None = None
        size = self.ranks.size
        head = torch.zeros(4 + 2 * size, dtype=torch.int64, device=self.weights.device)
        mine = None
        try:
            call = self._check(hidden, topk_weights, topk_ids, out)
            mine = outgoing(call.topk_ids, self._owner, size)
            head[4:] = mine.counts.flatten()
            k, dtype = topk_ids.shape[1], _DTYPES.index(hidden.dtype)
        except Exception as error:  # any of them, since the other ranks are waiting
            own, k, dtype = error, 0, 0
        head[:4] = torch.tensor([own is not None, self._number, k, dtype], device=head.device)
        heads = self.ranks.gather(head)
        if heads[:, 0].any():
            texts = self.ranks.gather_objects(None if own is None else str(own))
            raise_together(own, texts)
        require_equal("which ExpertParallelMoE they call (by number)", heads[:, 1].tolist())
        require_equal("k, the columns of topk_ids", heads[:, 2].tolist())
        require_equal("hidden's dtype", [dtype_name(_DTYPES[i]) for i in heads[:, 3].tolist()])
        assert call is not None
        assert mine is not None
        return complete(
            self.ranks,
            mine,
            heads[:, 4:].reshape(size, 2, size),
            call.topk_weights,
            dtype=hidden.dtype,
            combine=self.combine_mode,
            on_input=self.router_weight_on_input,
        )

    def run(
        self, exchange: Exchange, hidden: torch.Tensor, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Send, compute, send back and add; collective, and never waits for the device.

        `exchange` may serve many calls.  `hidden` must be of the shape, dtype and device that it
        was planned for; ranks do not agree on that again, so an error here is this rank's alone.
        """
        self._check_planned(exchange, hidden, out)
        return self.combine(exchange, self.compute(exchange, self.dispatch(exchange, hidden)), out)

    def dispatch(self, exchange: Exchange, hidden: torch.Tensor) -> torch.Tensor:
        """First stage of :meth:`run`: the rows (U', H) that all ranks send to this one."""
        x = hidden.detach()
        if exchange.input_weights is not None:
            x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
            if x.numel():
                kernel("scale_rows", x.device)(
                    x=dense_view("hidden", hidden.detach()),
                    weights=address(exchange.input_weights),
                    rows=x.shape[0],
                    n=x.shape[1],
                    out=address(x),
                )
        # As words: not every backend sends bf16.
        words = x.index_select(0, exchange.token).view(torch.int32)
        return self.ranks.swap(words, exchange.rows_sent, exchange.rows_received).view(hidden.dtype)

    def compute(self, exchange: Exchange, rows: torch.Tensor) -> torch.Tensor:
        """Second stage: the local experts' float32 results, a row per slot or per row."""
        x = rows if exchange.local_row is None else rows.index_select(0, exchange.local_row)
        ids, weights = exchange.local_ids, exchange.local_weights
        problem = moe_problem(x, self.weights, weights, ids, self.recipe)
        backend = cached_plan(problem, x.device, self.backend).backend
        call = moe_call(problem, x, self.weights, weights, ids, False, None)
        z = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        backend.moe(problem, call._replace(out=z))
        return z

    def combine(
        self, exchange: Exchange, z: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Third stage: results to the tokens' owners, which add them up in the order of slots."""
        z = self.ranks.swap(z, exchange.results_sent, exchange.results_received)
        shape = (exchange.tokens, self.weights.hidden_size)
        if out is None:
            out = torch.empty(shape, dtype=exchange.dtype, device=z.device)
        if out.numel():
            kernel("combine", z.device)(
                z=address(z),
                slot_row=address(exchange.slot_row),
                weights=address(exchange.weights),
                tokens=exchange.tokens,
                top_k=exchange.top_k,
                hidden=shape[1],
                out=address(out),
                out_type=DTYPES[out.dtype],
                out_row_stride=row_strides("out", out)[1],
            )
        return out

    def _check(
        self,
        hidden: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        out: torch.Tensor | None,
    ) -> MoECall:
        """The arguments of a call, checked as :func:`fp4lt.moe` does it."""
        if tracing(hidden, topk_weights, topk_ids):
            raise UnsupportedError(
                "ExpertParallelMoE cannot be traced: its sizes depend on the routing; keep it out "
                "of the compiled region (torch.compiler.disable)"
            )
        problem = moe_problem(hidden, self.weights, topk_weights, topk_ids, self.recipe)
        cached_plan(problem, hidden.device, self.backend)  # is there a backend for it?
        on_input = self.router_weight_on_input
        return moe_call(problem, hidden, self.weights, topk_weights, topk_ids, on_input, out)

    def _check_planned(
        self, exchange: Exchange, hidden: torch.Tensor, out: torch.Tensor | None
    ) -> None:
        shape = (exchange.tokens, self.weights.hidden_size)
        if tuple(hidden.shape) != shape:
            raise ShapeError(
                f"ExpertParallelMoE: hidden has shape {tuple(hidden.shape)}, but the exchange is "
                f"for {shape}; plan again"
            )
        require_dtype("ExpertParallelMoE: hidden", hidden, (exchange.dtype,))
        require_device("ExpertParallelMoE: the exchange", exchange.token, hidden.device)
        if out is not None:
            what = "ExpertParallelMoE"
            check_out(what, out, shape, hidden.dtype, hidden.device, (hidden, exchange.weights))


def _offer(
    ranks: Ranks,
    weights: MoEWeights,
    recipe: str,
    router_weight_on_input: bool,
    combine: str,
    backend: str,
) -> tuple[Exception | None, tuple[dict[str, Any], int, int]]:
    """What is wrong with a rank's arguments, or else what all must have and its own experts."""
    what = "ExpertParallelMoE"
    try:
        if not isinstance(weights, MoEWeights):
            raise ArgumentError(
                f"{what}: weights is a {type(weights).__name__}; MoEWeights is needed"
            )
        ranks.require_served(weights.device)
        check_recipe(what, recipe)
        check_backend(what, backend)
        if combine not in _COMBINES:
            raise ArgumentError(f"{what}: combine={combine!r}; it must be one of {_COMBINES}")
    except ArgumentError as error:
        return error, ({}, 0, 0)
    agreed = {
        "H": weights.hidden_size,
        "I": weights.intermediate_size,
        "num_experts": weights.num_experts,
        "the format of the weights": format_name(weights.w13),
        "activation": weights.activation,
        "recipe": recipe,
        "router_weight_on_input": bool(router_weight_on_input),
        "combine": combine,
    }
    return None, (agreed, weights.expert_start, weights.num_local_experts)


def _owners(starts: list[int], counts: list[int], weights: MoEWeights) -> torch.Tensor:
    """Rank of each expert, if every expert has exactly one."""
    total = weights.num_experts
    assert total is not None
    owner: list[Any] = [None] * total
    ranges = [f"{a}:{a + n}" for a, n in zip(starts, counts, strict=True)]
    for rank, (start, count) in enumerate(zip(starts, counts, strict=True)):
        for expert in range(start, start + count):
            if owner[expert] is not None:
                raise DistributedError(
                    f"ExpertParallelMoE: expert {expert} is on rank {owner[expert]} and on rank "
                    f"{rank}; the ranks have experts {values_of(ranges)} of {total}. Give "
                    "MoEWeights its expert_start and num_experts"
                )
            owner[expert] = rank
    if None in owner:
        raise DistributedError(
            f"ExpertParallelMoE: expert {owner.index(None)} is on no rank; the ranks have experts "
            f"{values_of(ranges)} of {total}"
        )
    return torch.tensor(owner, dtype=torch.int64, device=weights.device)
