# SPDX-License-Identifier: Apache-2.0
"""The CPU backend with one of many faults, and the checks of verify that have to notice each."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch

from fp4lt.backends.cpu import CpuBackend
from fp4lt.problem import GroupedCall, GroupedProblem, MoECall, MoEProblem, MoETrace
from fp4lt.tensor import NVFP4Tensor


def counts_of(call: GroupedCall) -> list[tuple[int, int, int]]:
    """Expert, start and end of each group."""
    ends = [0, *call.ends.tolist()]
    return [(e, a, b) for e, (a, b) in enumerate(itertools.pairwise(ends)) if a < b]


class Wrong(CpuBackend):
    """The CPU backend with one of the faults below."""

    def __init__(self, fault: str = "") -> None:
        self.fault = fault
        self.calls = 0

    def grouped_mm(self, problem: GroupedProblem, call: GroupedCall) -> None:
        self.calls += 1
        change = GROUPED.get(self.fault)
        if self.fault == "drops the last block of an odd number" and problem.k // 16 % 2:
            call = call._replace(b=without_last_block(call.b))
        if self.fault == "breaks down":
            raise RuntimeError("out of luck")
        super().grouped_mm(problem, call)
        if change is not None:
            change(problem, call)
        if self.fault == "differs from run to run" and self.calls % 2:
            call.out[:1] = torch.nextafter(call.out[:1].float(), torch.tensor(9e9)).to(
                call.out.dtype
            )

    def moe(self, problem: MoEProblem, call: MoECall) -> None:
        super().moe(problem, call)
        if self.fault == "block differs from its trace":
            call.out[:1] *= 2
        if self.fault == "lets a token change the next" and len(call.out) > 1:
            call.out[1:] += 0 * call.out[:-1] + call.hidden[:-1, :1]

    def trace_moe(self, problem: MoEProblem, call: MoECall) -> MoETrace:
        change = CALLS.get(self.fault)
        trace = super().trace_moe(problem, call if change is None else change(call))
        if self.fault == "rounds h to bf16":
            return trace._replace(h=trace.h.bfloat16().float())
        if self.fault == "adds in another order":
            return trace._replace(y=trace.y.flip(0))
        return trace


def without_last_block(b: Any) -> Any:
    if not isinstance(b, NVFP4Tensor):
        return b
    codes = b.codes.clone()
    codes[..., -8:] = 0
    return NVFP4Tensor(codes, b.scales, b.global_scale)


def doubled(problem: GroupedProblem, call: GroupedCall) -> None:
    for expert, start, end in counts_of(call):
        if expert == problem.experts - 1:
            call.out[start:end] *= 2


def swapped(problem: GroupedProblem, call: GroupedCall) -> None:
    if problem.n > 1:
        call.out[:, :2] = call.out[:, :2].flip(1)


def ragged(problem: GroupedProblem, call: GroupedCall) -> None:
    if problem.n % 64:
        call.out[: int(call.ends[-1]), -(problem.n % 64) :] = 0


def one_column(problem: GroupedProblem, call: GroupedCall) -> None:
    if problem.n == 1:
        call.out[: int(call.ends[-1])] = 0


def second_tile(problem: GroupedProblem, call: GroupedCall) -> None:
    for _, start, end in counts_of(call):
        call.out[start + 128 : end] = 0


def writes_past_the_end(problem: GroupedProblem, call: GroupedCall) -> None:
    call.out[int(call.ends[-1]) :] = 0


def reads_padding(problem: GroupedProblem, call: GroupedCall) -> None:
    if isinstance(call.b, NVFP4Tensor):
        rows = call.b.codes.shape[1]
        if bool(call.b.scales.view(torch.uint8)[:, rows:].any()) and rows % 128 > 32:
            call.out[: int(call.ends[-1])] += 1


def spreads_nan(problem: GroupedProblem, call: GroupedCall) -> None:
    if bool(call.out[: int(call.ends[-1])].isnan().any()):
        call.out[: int(call.ends[-1])] = float("nan")


def depends_on_the_batch(problem: GroupedProblem, call: GroupedCall) -> None:
    if int(call.ends[-1]) > 1:
        row = call.out[:1].float()
        call.out[:1] = torch.nextafter(row, torch.full_like(row, 9e9)).to(call.out.dtype)


def loses_small_terms(problem: GroupedProblem, call: GroupedCall) -> None:
    if problem.k >= 720 and call.out.numel() == 1:
        call.out.fill_(2688.0**2)


def no_subnormal_scales(problem: GroupedProblem, call: GroupedCall) -> None:
    rows = call.out[: int(call.ends[-1])]
    rows[rows.abs() < 2.0**-7] = 0


def saturates_at_half(problem: GroupedProblem, call: GroupedCall) -> None:
    if call.a_scale is not None and call.a_scale.ndim:
        call.out[: int(call.ends[-1])] /= 2


GROUPED: dict[str, Callable[[GroupedProblem, GroupedCall], None]] = {
    "doubles one expert": doubled,
    "swaps two columns": swapped,
    "wrong past a multiple of 64": ragged,
    "wrong for one column": one_column,
    "wrong from row 128 of a group": second_tile,
    "writes past the end": writes_past_the_end,
    "reads padding": reads_padding,
    "spreads a NaN": spreads_nan,
    "depends on the batch": depends_on_the_batch,
    "loses small terms": loses_small_terms,
    "flushes small products": no_subnormal_scales,
    "mistakes scales of experts": saturates_at_half,
}


def flipped(call: MoECall) -> MoECall:
    scales = call.gate_up_scales
    return call._replace(gate_up_scales=None if scales is None else scales.flip(1).contiguous())


CALLS: dict[str, Callable[[MoECall], MoECall]] = {
    "swaps gate and up scales": flipped,
    "ignores the range of experts": lambda call: call._replace(expert_start=0),
    "forgets the second bias": lambda call: call._replace(w2_bias=None),
    "ignores limits": lambda call: call._replace(limit=None),
    "ignores the static scale": lambda call: call._replace(a2_scale=None),
    "weighs the output": lambda call: call._replace(router_weight_on_input=False),
    "forgets beta": lambda call: call._replace(beta=torch.tensor(0.0)),
}

FAULTS: dict[str, tuple[str, ...]] = {
    "doubles one expert": ("exact sums, K = 272", "random values within the bound, K = 16"),
    "swaps two columns": ("exact sums, N = 7", "copies through weights of one 1"),
    "wrong past a multiple of 64": ("exact sums, N = 65", "exact sums, N = 100"),
    "wrong for one column": ("exact sums, N = 1", "exact sums, K = 720, N = 1"),
    "wrong from row 128 of a group": ("exact sums, groups 127 128 129 0 1",),
    "writes past the end": ("strided rows; rows past the end are left alone",),
    "reads padding": ("scale padding is not read",),
    "spreads a NaN": ("NaN and inf stay in their rows",),
    "depends on the batch": ("the same bits again, and for a row alone",),
    "loses small terms": ("small terms beside a large one",),
    "flushes small products": ("16 codes x 127 scales, each product as is",),
    "mistakes scales of experts": ("static activation scales",),
    "drops the last block of an odd number": ("exact sums, K = 720", "exact sums, K = 48"),
    "differs from run to run": ("the same bits again, and for a row alone",),
    "breaks down": ("exact sums, K = 16",),
    "block differs from its trace": ("moe: gate_up, two scales",),
    "lets a token change the next": ("moe: the same bits again, and for a token alone",),
    "rounds h to bf16": ("moe: w4a16 in bf16, up_gate",),
    "adds in another order": ("moe: fp32 hidden states",),
    "swaps gate and up scales": ("moe: up_gate, two scales", "moe: interleaved, two scales"),
    "ignores the range of experts": ("moe: experts 2 to 5 of 9, ids of others and -1",),
    "forgets the second bias": ("moe: swigluoai, biases, interleaved",),
    "ignores limits": ("moe: silu with limits, biases", "moe: swigluoai, w4a16, limits"),
    "ignores the static scale": ("moe: static scales",),
    "weighs the output": ("moe: router weight on the input, top-1",),
    "forgets beta": ("moe: swigluoai, w4a16, limits",),
}
