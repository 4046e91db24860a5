# SPDX-License-Identifier: Apache-2.0
"""Symptoms that users of NVFP4 kernels have reported in public, tried on every backend here.

One test a row of the list of reports, whose number is in its name; the thread named is where the
symptom was read, not a statement about that project today.  This file has groups of rows and scales
in memory; test_field_reports_*.py have numbers, the MoE block, shapes and sizes, graphs and
streams.  Numbers that are missing were never given, or are these:

    row  thread                  why there is nothing to try
     56  cutlass PR #3120        about an instruction's code generation on SM12x; what our device
                                 code rounds is compared byte by byte in test_fused_gemm.py
     57  flashinfer #2708, #2716 a race in another kernel; our 1000 repeats are in ..._runs.py
     64  rocm-libraries #11838   about an object of a ROCm library
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from test_grouped_mm import OUT_TYPES, Case, extras, make, nvfp4
from test_grouped_mm_poison import poison_padding
from test_grouped_mm_relations import assert_same, bits
from test_moe import Case as Block
from torch.utils import _pytree as pytree

import fp4lt
from fp4lt import errors
from fp4lt.backends import cpu, fused
from fp4lt.layout import padded_scale_shape
from fp4lt.problem import MoETrace
from fp4lt.testing import bounds, cases, oracle

PRODUCTS = ("nvfp4", "w4a4-bf16", "w4a4-fp32", "w4a16-bf16")


class Machine(NamedTuple):
    """A backend in its place; results come back to host memory."""

    device: str
    backend: str
    depth: Callable[[int, str], int]

    def put(self, value: Any) -> Any:
        return pytree.tree_map_only(torch.Tensor, lambda t: t.to(self.device), value)

    def multiply(self, case: Case, counts: Sequence[int], **options: Any) -> torch.Tensor:
        """grouped_mm; an `out` has to be on the device already."""
        moved = case._replace(a=self.put(case.a), b=self.put(case.b))
        out = options.pop("out", None)
        offs = cases.offsets(counts)
        options = self.put({"offs": offs} | options)
        return moved.run(counts, backend=self.backend, out=out, **options).cpu()

    def check_exact(self, case: Case, counts: Sequence[int], **options: Any) -> None:
        """Every output type, bit by bit."""
        want = case.want(counts, **options)
        for dtype in OUT_TYPES:
            y = self.multiply(case, counts, out_dtype=dtype, **options)
            want.check_exact(y[: sum(counts)], name=str(dtype))

    def _arguments(self, case: Block) -> tuple[torch.Tensor, fp4lt.MoEWeights, dict[str, Any]]:
        weights = case.weights.to(self.device)
        return self.put(case.hidden), weights, self.put(case.arguments())

    def run(self, case: Block, out: torch.Tensor | None = None) -> torch.Tensor:
        """moe; an `out` has to be on the device already."""
        hidden, weights, options = self._arguments(case)
        options |= {"recipe": case.recipe, "backend": self.backend, "out": out}
        return fp4lt.moe(hidden, weights, **options).cpu()

    def trace(self, case: Block) -> MoETrace:
        """Every stage."""
        hidden, weights, options = self._arguments(case)
        k = case.routing.topk_ids.shape[1]
        plan = fp4lt.plan_moe(hidden, weights, top_k=k, recipe=case.recipe, backend=self.backend)
        return plan.trace(hidden, weights, **options)

    def check(self, case: Block) -> MoETrace:
        """Judge every stage by the oracle."""
        w, trace = case.weights, self.trace(case)
        oracle.check_moe_trace(
            trace,
            w,
            case.hidden,
            *case.routing,
            case.recipe,
            self.depth(w.hidden_size, case.recipe),
            self.depth(w.intermediate_size, case.recipe),
            router_weight_on_input=case.on_input,
        )
        return trace


CPU = Machine("cpu", "cpu", cpu.depth)
GPU = Machine("cuda", "fused", fused.depth)
EVERYWHERE = pytest.mark.parametrize(
    "machine", [CPU, pytest.param(GPU, marks=pytest.mark.gpu)], ids=lambda m: m.backend
)


def poisoned(machine: Machine, rows: int, columns: int) -> torch.Tensor:
    """bf16 NaNs of a bit pattern that arithmetic does not make."""
    shape = (rows, columns)
    return torch.full(shape, 0x7FED, dtype=torch.int16, device=machine.device).view(torch.bfloat16)


# ---- empty, tiny and ragged groups


@EVERYWHERE
@pytest.mark.parametrize("counts", [(0, 3, 0, 1), (0, 0, 0, 0)], ids=str)
@pytest.mark.parametrize("kind", PRODUCTS)
def test_row_1_experts_without_rows(machine: Machine, kind: str, counts: tuple[int, ...]) -> None:
    """Row 1 (DeepGEMM #20): groups of no rows gave NaN.  They write nothing, the rest is right."""
    case, rows = make(kind, 1, 6, 4, 64, 128), sum(counts)
    out = poisoned(machine, 6, 64)
    y = machine.multiply(case, counts, out=out)
    case.want(counts).check_exact(y[:rows])
    assert bool((bits(y[rows:]) == 0x7FED).all())


@EVERYWHERE
@pytest.mark.parametrize("kind", ["w4a4-bf16", "w4a16-bf16"])
def test_row_2_every_small_number_of_rows(machine: Machine, kind: str) -> None:
    """Row 2 (DeepGEMM #268): fewer than 64 rows came out wrong.  Exact from 1 to 130 rows."""
    case = make(kind, 2, 130, 1, 128, 256)
    want = case.want((130,)).rounded(torch.float32)
    for rows in range(1, 131):
        part = case._replace(a=case.a[:rows])
        y = machine.multiply(part, (rows,), out_dtype=torch.float32)
        bounds.assert_bitwise(y, want[:rows], signed_zeros=False, name=f"{rows} rows, y")


@EVERYWHERE
@pytest.mark.parametrize("kind", PRODUCTS)
def test_row_4_another_shape_in_between(machine: Machine, kind: str) -> None:
    """Row 4 (flashinfer #1856): a cached plan made the next shape wrong."""
    small, large = (
        make(kind, k, rows, 1, 48, k, exact=False) for rows, k in ((5, 256), (200, 512))
    )
    first = machine.multiply(small, (5,), out_dtype=torch.float32)
    second = machine.multiply(large, (200,), out_dtype=torch.float32)
    assert_same(machine.multiply(small, (5,), out_dtype=torch.float32), first)
    for case, y in ((small, first), (large, second)):
        k = case.b.shape[1]
        case.want((len(y),)).check(y, machine.depth(k, case.sums))


@EVERYWHERE
@pytest.mark.parametrize("kind", PRODUCTS)
def test_row_5_groups_off_any_multiple(machine: Machine, kind: str) -> None:
    """Row 5 (MSLK #31, #63): group sizes beside the tile's multiple gave garbage."""
    counts = (1, 7, 127, 129, 0, 64)
    machine.check_exact(make(kind, 5, sum(counts), 6, 40, 512), counts, **extras(5, 6, 40))


@EVERYWHERE
@pytest.mark.parametrize("kind", PRODUCTS)
def test_row_6_splits_alpha_and_no_tokens(machine: Machine, kind: str) -> None:
    """Row 6 (TE #2966, #3045, #3175): odd splits failed, no tokens were refused, alpha was lost."""
    alpha = torch.tensor([0.5, 2.0, 1.0, 3.0])
    case = make(kind, 6, 65, 4, 48, 64)
    machine.check_exact(case, (33, 31, 0, 1), alpha=alpha)
    plain = machine.multiply(case, (33, 31, 0, 1), out_dtype=torch.float32)
    scaled = machine.multiply(case, (33, 31, 0, 1), out_dtype=torch.float32, alpha=alpha)
    assert not torch.equal(plain, scaled)
    none = make(kind, 6, 0, 4, 48, 64)
    assert tuple(machine.multiply(none, (0, 0, 0, 0), alpha=alpha).shape) == (0, 48)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_row_6_second_device() -> None:
    """Row 6 (TE #3175): a call was tied to device 0.  The tensors' device counts."""
    machine = GPU._replace(device="cuda:1")
    for kind in PRODUCTS:
        machine.check_exact(make(kind, 6, 65, 4, 48, 64), (33, 31, 0, 1))


@EVERYWHERE
def test_row_7_nothing_to_sum(machine: Machine) -> None:
    """Row 7 (cutlass #2674): an empty sum left accumulators as they were.  K = 0 is refused, and
    a sum of nothing but zero scales is zero over poison."""
    w = torch.zeros(2, 8, 0, dtype=torch.bfloat16, device=machine.device)
    x = torch.zeros(3, 0, dtype=torch.bfloat16, device=machine.device)
    with pytest.raises(errors.ShapeError, match="K=0; it must be a positive multiple of 16"):
        fp4lt.grouped_mm(x, w.mT, offs=torch.tensor([1, 3]))
    linear = cases.exact_operand(cases.generator(7), (2, 40, 96))
    silent = nvfp4(linear._replace(scales=torch.zeros_like(linear.scales)))
    for kind in PRODUCTS:
        case = make(kind, 7, 5, 2, 40, 96)._replace(b=silent.mT)
        y = machine.multiply(case, (2, 3), out=poisoned(machine, 5, 40))
        assert torch.equal(y, torch.zeros(5, 40, dtype=torch.bfloat16))


# ---- scales in memory


@EVERYWHERE
@pytest.mark.parametrize("rows", [1, 100, 129, 255])
def test_row_9_padding_of_scales(machine: Machine, rows: int) -> None:
    """Row 9 (vllm #30260, #37564; flashinfer #2861): stale bytes in the padding became NaN.

    Here memory is full of the NaN byte before scales are made, and padding full of it is not read.
    """
    case = make("w4a4-bf16", rows, rows, 1, 40, 80)
    size = int(np.prod(padded_scale_shape(rows, 80)))
    stale = [torch.full((size,), 0x7F, dtype=torch.uint8, device=machine.device) for _ in range(9)]
    del stale
    assert isinstance(case.a, torch.Tensor)
    q = fp4lt.quantize(case.a.to(machine.device), global_scale="row").to("cpu")
    want = oracle.to_packed(oracle.quantize_rows(case.a.float().numpy(), None))
    assert torch.equal(q.scales.view(torch.uint8), want.scales.view(torch.uint8))
    assert torch.equal(q.codes, want.codes)
    case = case._replace(a=poison_padding(q, 0x7F))
    assert isinstance(case.b, fp4lt.NVFP4Tensor)
    machine.check_exact(case._replace(b=poison_padding(case.b, 0x7F)), (rows,))


@EVERYWHERE
@pytest.mark.parametrize("kind", PRODUCTS)
def test_row_12_rows_that_are_not_ours(machine: Machine, kind: str) -> None:
    """Row 12 (flashinfer #1632, #3103, #3574): rows beside the valid ones, or between them, were
    written.  Here they lie behind the last group and in the gaps of a strided output."""
    case = make(kind, 12, 12, 3, 40, 64)
    buffer = poisoned(machine, 26, 56)
    y = machine.multiply(case, (2, 0, 5), out=buffer[1:25:2, 8:48])
    case.want((2, 0, 5)).check_exact(y[:7])
    buffer[1:15:2, 8:48] = poisoned(machine, 7, 40)
    assert bool((bits(buffer) == 0x7FED).all())


@EVERYWHERE
@pytest.mark.parametrize(("k", "n"), [(2880, 2880), (720, 2880), (2880, 720)])
@pytest.mark.parametrize("kind", ["w4a4-bf16", "w4a16-bf16"])
def test_row_13_hidden_size_2880(machine: Machine, kind: str, k: int, n: int) -> None:
    """Row 13 (vllm #35497; flashinfer #2848): scales were misaligned where 128 does not divide."""
    case = make(kind, 13, 5, 2, n, k)
    want = case.want((2, 3))
    want.check_exact(machine.multiply(case, (2, 3), out_dtype=torch.float32))


@EVERYWHERE
@pytest.mark.parametrize("kind", PRODUCTS)
@pytest.mark.parametrize("k", [1504, 192, 320, 384])
def test_rows_14_and_18_unusual_k(machine: Machine, k: int, kind: str) -> None:
    """Rows 14 (triton #10190) and 18 (aiter #2900): a scale mask was wrong at K = 1504, and K that
    256 does not divide was refused or wrong."""
    machine.check_exact(make(kind, k, 9, 2, 72, k), (4, 5), **extras(k, 2, 72))


@EVERYWHERE
def test_row_16_a_single_row(machine: Machine) -> None:
    """Row 16 (vllm #48491): scales of fewer than 128 rows were refused by the library below.

    Ours come padded, and unpadded ones are refused with the shape that is needed.
    """
    case = make("w4a4-bf16", 16, 1, 1, 24, 80)
    assert isinstance(case.a, torch.Tensor)
    q = fp4lt.quantize(case.a.to(machine.device), global_scale="row")
    assert tuple(q.scales.shape) == (128, 8)
    machine.check_exact(case._replace(a=q.to("cpu")), (1,))
    with pytest.raises(errors.ShapeError, match=r"need tiled scales \(128, 8\)"):
        fp4lt.NVFP4Tensor.from_tiled_scales(q.codes, q.scales[:1, :5], q.global_scale)
