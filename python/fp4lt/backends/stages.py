# SPDX-License-Identifier: Apache-2.0
"""What stands around the GEMMs of the CUDA backends: routing, operands, activation, combine."""

from __future__ import annotations

from typing import NamedTuple

import torch

from fp4lt import _C
from fp4lt._interop import (
    DTYPES,
    address,
    cuda_launch,
    dense_view,
    expert_parameter,
    nvfp4_view,
    row_strides,
)
from fp4lt.backends.cpu import ACTIVATION_KINDS, GATE_ORDERS
from fp4lt.formats import BLOCK
from fp4lt.layout import padded_scale_shape
from fp4lt.problem import MoECall, MoEProblem, Operand
from fp4lt.tensor import NVFP4Tensor

# Bytes of intermediates of one pass over the tokens: larger calls are cut, which changes no bit.
_PASS_BYTES = 1 << 32

NO_FINISH = _C.Finish(order=_C.GateOrder.NONE)
"""Sums that are results already."""


class Rows(NamedTuple):
    """Activations as a GEMM takes them, row by row; see csrc/cuda/operand.h."""

    form: _C.RowForm
    values: torch.Tensor
    """(rows, width) 16-bit, or codes (rows, K / 2) uint8."""
    global_scale: torch.Tensor | None
    """(rows,) float32."""
    scales: torch.Tensor | None = None
    """With codes: (tiles, bytes of a row of tiles) uint8, each expert's from its first tile on."""

    def target(
        self, scale_row: torch.Tensor | None = None, place: torch.Tensor | None = None
    ) -> _C.OperandRows:
        """Where a kernel writes them."""
        width = self.values.shape[1] * (2 if self.form == _C.RowForm.CODES else 1)
        return _C.OperandRows(
            form=self.form,
            values=address(self.values),
            width=width,
            scales=address(self.scales),
            scale_row=address(scale_row),
            place=address(place),
        )


class Places(NamedTuple):
    """Where each row's scales go, for operands of codes."""

    row: torch.Tensor
    """(rows,) int32: the row of the tiles."""
    tiles: int


class Image(NamedTuple):
    """Where rows go in an operand of form IMAGE; see csrc/cuda/quantize.h."""

    size: int
    """Most places there can be: groups of eight, an expert's rows together."""
    row_place: torch.Tensor | None = None
    """By routed row, int32."""
    starts: torch.Tensor | None = None
    """(E + 1,) int32: of sorted rows, where each expert's begin, and how many there are."""
    places: torch.Tensor | None = None
    """(E + 1,) int32, the first E: the places where they begin."""


def empty_rows(
    form: _C.RowForm,
    rows: int,
    k: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    scaled: bool,
    places: Places | None = None,
    image: Image | None = None,
) -> Rows:
    """Memory for an operand; ``scaled`` if its rows have global scales of their own."""
    g = torch.empty(rows, dtype=torch.float32, device=device) if scaled else None
    if form == _C.RowForm.CODES:
        assert places is not None
        codes = torch.empty(rows, k // 2, dtype=torch.uint8, device=device)
        lines, line = padded_scale_shape(places.tiles * 128, k)
        scales = torch.empty(lines // 128, line * 128, dtype=torch.uint8, device=device)
        return Rows(form, codes, g, scales)
    padded = BLOCK if form == _C.RowForm.PLAIN else _C.PREPARED_K
    width = -(-k // padded) * padded
    stored = rows if image is None else image.size
    return Rows(form, torch.empty(stored, width, dtype=dtype, device=device), g)


def prepare(
    x: Operand,
    rows: int,
    quantize: bool,
    *,
    form: _C.RowForm = _C.RowForm.PREPARED,
    given: torch.Tensor | None = None,
    index: torch.Tensor | None = None,
    source: torch.Tensor | None = None,
    count: int = 0,
    places: Places | None = None,
    image: Image | None = None,
) -> Rows:
    """Bring activations into the form of an operand; see csrc/cuda/quantize.h."""
    form = form if image is None else _C.RowForm.IMAGE
    k = x.shape[1]
    exact = quantize or isinstance(x, NVFP4Tensor)
    assert exact or isinstance(x, torch.Tensor)
    dtype = torch.bfloat16 if exact else x.dtype  # type: ignore[union-attr]
    out = empty_rows(form, rows, k, dtype, x.device, scaled=quantize, places=places, image=image)
    to = Image(0) if image is None else image
    if isinstance(x, NVFP4Tensor):
        view: _C.Nvfp4View | _C.DenseView = nvfp4_view(x.codes, x.scales, x.global_scale)
        out = out._replace(global_scale=x.global_scale.expand(rows).contiguous())
    else:
        view = dense_view("activations", x)
    _C.cuda_prepare(
        x=view,
        quantize=quantize,
        rows=rows,
        k=k,
        source=address(source),
        count=count,
        given=address(given),
        given_stride=given.stride(0) if given is not None and given.ndim else 0,
        scale_index=address(index),
        global_out=address(out.global_scale) if quantize else 0,
        out=out.target(None if places is None else places.row, to.row_place),
        starts=address(to.starts),
        places=address(to.places),
        experts=0 if to.places is None else to.places.shape[0] - 1,
        **cuda_launch(x.device),
    )
    return out


class Routes(NamedTuple):
    """Slots sorted by local expert."""

    rows: torch.Tensor
    """(1,) int32: routed rows."""
    token: torch.Tensor
    """(T * k,) int32, the first `rows` of them."""
    expert: torch.Tensor
    slot_row: torch.Tensor
    """(T, k) int32."""
    ends: torch.Tensor
    """(E,) int32: end offset of each expert's rows."""
    place: torch.Tensor
    """(T * k,) int32, the first `rows` of them: where each goes in an image; with a work list."""


def route(
    problem: MoEProblem,
    call: MoECall,
    blocks: torch.Tensor | None = None,
    block_count: torch.Tensor | None = None,
    block_rows: int = 8,
    flags: torch.Tensor | None = None,
) -> Routes:
    """Sort the slots, and make the fused kernel's work list if there is memory for one."""
    device = call.hidden.device
    ids = call.topk_ids.contiguous()
    slots = ids.numel()
    memory = torch.empty(4 * slots + 4 + problem.experts, dtype=torch.int32, device=device)
    rows, ends = memory[:1], memory[4 + 4 * slots :]
    token, expert, slot_row, place = memory[4 : 4 + 4 * slots].view(4, slots).unbind()
    _C.cuda_route(
        ids=address(ids),
        ids_are_64_bit=ids.dtype == torch.int64,
        tokens=ids.shape[0],
        top_k=ids.shape[1],
        expert_start=call.expert_start,
        experts=problem.experts,
        block_rows=block_rows,
        row_count=address(rows),
        row_token=address(token),
        row_expert=address(expert),
        slot_row=address(slot_row),
        ends=address(ends),
        row_place=address(place),
        blocks=address(blocks),
        block_count=address(block_count),
        flags=address(flags),
        **cuda_launch(device),
    )
    return Routes(rows, token, expert, slot_row.view(ids.shape), ends, place)


def passes(problem: MoEProblem, call: MoECall) -> list[MoECall]:
    """The call, cut by tokens so that its intermediates stay small."""
    width = 4 * call.w13.shape[1] + 2 * problem.intermediate + 6 * problem.hidden
    step = max(1, _PASS_BYTES // (width * problem.top_k))
    return [
        call._replace(
            hidden=call.hidden[t : t + step],
            topk_weights=call.topk_weights[t : t + step],
            topk_ids=call.topk_ids[t : t + step],
            out=call.out[t : t + step],
        )
        for t in range(0, call.hidden.shape[0], step)
    ]


def activate(
    problem: MoEProblem,
    call: MoECall,
    h: torch.Tensor,
    routes: Routes,
    *,
    kind: _C.ActivationForm | None = None,
    form: _C.RowForm = _C.RowForm.PREPARED,
    finish: _C.Finish = NO_FINISH,
    places: Places | None = None,
    image: Image | None = None,
) -> Rows:
    """Gate and up to w2's operand, or with ``kind=FLOAT`` to fp32."""
    form = form if image is None else _C.RowForm.IMAGE
    slots, device, given = h.shape[0], h.device, call.a2_scale
    if kind is None:
        kind = _C.ActivationForm.ROUNDED if problem.quantizes else _C.ActivationForm.HALF
    inner = problem.intermediate
    dtype = torch.bfloat16 if problem.quantizes else problem.dtype
    if kind == _C.ActivationForm.FLOAT:
        values = torch.empty(slots, inner, dtype=torch.float32, device=device)
        out = Rows(_C.RowForm.PLAIN, values, None)
    else:
        scaled = kind == _C.ActivationForm.ROUNDED
        out = empty_rows(
            form, slots, inner, dtype, device, scaled=scaled, places=places, image=image
        )
    _C.cuda_activate(
        h=address(h),
        h_row_stride=h.stride(0),
        finish=finish,
        row_count=address(routes.rows),
        row_expert=address(routes.expert),
        rows=slots,
        n=call.w13.shape[1],
        order=GATE_ORDERS[problem.order],
        kind=ACTIVATION_KINDS[problem.activation],
        alpha=expert_parameter(call.alpha),
        beta=expert_parameter(call.beta),
        limit=None if call.limit is None else expert_parameter(call.limit),
        form=kind,
        type=DTYPES[dtype],
        given=address(given),
        given_stride=given.stride(0) if given is not None and given.ndim else 0,
        global_out=address(out.global_scale),
        out=out.target(
            None if places is None else places.row, None if image is None else image.row_place
        ),
        **cuda_launch(device),
    )
    return out


def combine(
    problem: MoEProblem,
    call: MoECall,
    z: torch.Tensor,
    routes: Routes,
    finish: _C.Finish | None = None,
) -> None:
    """Write ``call.out``: the weighted sum of each token's rows of `z`, after `finish` if given."""
    weights = None if call.router_weight_on_input else call.topk_weights.contiguous()
    _C.cuda_combine(
        z=address(z),
        finish=NO_FINISH if finish is None else finish,
        row_expert=address(None if finish is None else routes.expert),
        slot_row=address(routes.slot_row),
        weights=address(weights),
        tokens=call.hidden.shape[0],
        top_k=problem.top_k,
        hidden=problem.hidden,
        out=address(call.out),
        out_type=DTYPES[call.out.dtype],
        out_row_stride=row_strides("out", call.out)[1],
        **cuda_launch(z.device),
    )


def scale_rows(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Rows times their router weight, rounded to their own type."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    weights = weights.contiguous()
    _C.cuda_scale_rows(
        x=dense_view("hidden", x),
        weights=address(weights),
        rows=x.shape[0],
        n=x.shape[1],
        out=address(out),
        **cuda_launch(x.device),
    )
    return out
