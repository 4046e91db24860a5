# SPDX-License-Identifier: Apache-2.0
"""Reports from the field about shapes and sizes, past 2^31 too.  See test_field_reports."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_field_reports import EVERYWHERE, GPU, Machine
from test_field_reports_moe import check_sum, linear_block, sparse_stack, tensor_shards
from test_grouped_mm import Case as Product, make, nvfp4
from test_moe import Case, same

import fp4lt
from fp4lt import _C, errors
from fp4lt.problem import Recipe
from fp4lt.testing import cases, oracle

# E, H, I, k: every number of experts, and every intermediate size, that a report names.
SHAPES = [
    (1, 2880, 64, 1),
    (3, 2688, 1856, 2),
    (40, 2880, 352, 4),
    (60, 2688, 464, 4),
    (8, 2880, 720, 4),
    (60, 2880, 96, 4),
    (3, 2688, 928, 6),
    (512, 2688, 160, 10),
    (896, 2880, 64, 16),
    (512, 2560, 640, 10),
]


def sparse_block(
    sizes: tuple[int, int, int, int], tokens: int, recipe: str, experts: list[int]
) -> Case:
    """A random block whose tokens go to a few of the experts; all others are zero."""
    E, H, inner, k = sizes
    rng = cases.generator(E + H + inner)

    def stack(n: int, columns: int) -> fp4lt.NVFP4Tensor:
        live = {e: cases.random_operand(rng, (n, columns)) for e in experts}
        small = {e: x._replace(global_scale=x.global_scale / 64) for e, x in live.items()}
        return sparse_stack((E, n, columns), small)

    split = torch.from_numpy(rng.uniform(0.2, 2.0, (E, 2)).astype(np.float32))
    weights = fp4lt.MoEWeights(
        stack(2 * inner, H), stack(H, inner), order="gate_up", gate_up_scales=split
    )
    hidden = cases.random_matrix(rng, (tokens, H)) / 4
    ids = torch.from_numpy(rng.choice([*experts, -1], (tokens, k)))
    ids[:, 0] = torch.from_numpy(np.resize(experts, tokens))
    r = torch.from_numpy(rng.uniform(0.1, 1.0, (tokens, k)).astype(np.float32))
    return Case(hidden, weights, cases.Routing(r, ids), recipe)  # type: ignore[arg-type]


@EVERYWHERE
@pytest.mark.parametrize("recipe", ["w4a4", "w4a16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes_of_the_field(
    machine: Machine, shape: tuple[int, int, int, int], recipe: str
) -> None:
    """Rows 13, 36, 39, 40 and 47 name these: refused, wrong, or illegal addresses.

    The first and the last expert have weights; every stage is judged.
    """
    case = sparse_block(shape, 3, recipe, sorted({0, shape[0] - 1}))
    trace = machine.check(case)
    same(machine.run(case), trace.y.cpu())


@EVERYWHERE
@pytest.mark.parametrize("tokens", [1, 7])
def test_row_39_many_experts(machine: Machine, tokens: int) -> None:
    """Row 39 (flashinfer #5446): 512 experts of H = 2560 and I = 640 read illegal addresses."""
    machine.check(sparse_block((512, 2560, 640, 10), tokens, "w4a4", [0, 255, 511]))


@pytest.mark.gpu
def test_row_39_many_experts_and_tokens() -> None:
    """Row 39 (flashinfer #5446), 4096 tokens: as each token alone, which the oracle has judged."""
    case = sparse_block((512, 2560, 640, 10), 4096, "w4a4", [0, 255, 511])
    whole = GPU.run(case)
    for t in (0, 1, 2047, 4095):
        routing = cases.Routing(*(r[t : t + 1] for r in case.routing))
        alone = case._replace(hidden=case.hidden[t : t + 1], routing=routing)
        judged = GPU.check(alone).y.cpu()
        same(whole[t : t + 1], judged)


@EVERYWHERE
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_row_47_slices_of_1856(machine: Machine, ranks: int) -> None:
    """Row 47 (flashinfer #4653, #5122; TRT-LLM #10331): H = 2688 with slices of I = 1856 was
    refused or wrong."""
    case = linear_block((3, 2, 2688, 1856, 2))
    check_sum(machine, case, tensor_shards(case, ranks))


def test_row_47_a_slice_that_cuts_a_block() -> None:
    """Row 47: an eighth of 1856 is 232, which would cut a block of 16: refused by name."""
    codes = torch.zeros(2, 2688, 116, dtype=torch.uint8)
    scales = torch.zeros(2, 2688, 14, dtype=torch.uint8)
    with pytest.raises(errors.ShapeError, match="K=232; K must be a positive multiple of 16"):
        fp4lt.NVFP4Tensor.from_linear_scales(codes, scales, torch.ones(()))
    w13, w2 = (torch.zeros(shape, dtype=torch.bfloat16) for shape in ((1, 464, 32), (1, 32, 232)))
    with pytest.raises(errors.ShapeError, match="I=232; it must be a multiple of 16"):
        fp4lt.MoEWeights(w13, w2, order="gate_up")
    with pytest.raises(errors.ShapeError, match="K=232 must be a positive multiple of 16"):
        fp4lt.quantize(w2)


# ---- past 2^31


@EVERYWHERE
def test_row_49_rows_further_apart_than_2_31(machine: Machine) -> None:
    """Row 49 (vllm #34507, #53390; sglang #4727; flashinfer #2642): offsets overflowed 32 bits.

    The last rows of input and output begin past 2^31 elements; what lies between is not touched.
    """
    stride, rows = 2**29 + 24, 5
    case = make("w4a16-bf16", 49, rows, 2, 40, 64)
    assert isinstance(case.a, torch.Tensor)
    memory = torch.empty(5 * stride, dtype=torch.bfloat16, device=machine.device)
    x = memory.as_strided((rows, 64), (stride, 1))
    x.copy_(case.a)
    out = memory.as_strided((rows, 40), (stride, 1), stride // 2)[: rows - 1]
    w = machine.put(case.b)
    want = case.want((2, 2))
    for recipe in ("w4a16", "w4a4"):
        out.fill_(float("nan"))
        fp4lt.grouped_mm(
            x[:4], w, offs=torch.tensor([2, 4]), out=out, recipe=recipe, backend=machine.backend
        )
        if recipe == "w4a16":
            want.check_exact(out.cpu())
    y = fp4lt.grouped_mm(x, w, offs=torch.tensor([2, 5]), recipe="w4a16", backend=machine.backend)
    case.want((2, 3)).check_exact(y.cpu())
    q, plain = (
        fp4lt.quantize(t.to(machine.device), global_scale="row").to("cpu") for t in (x, case.a)
    )
    assert torch.equal(q.codes, plain.codes)


def test_row_49_offsets_of_scales() -> None:
    """Row 49: the place of a scale past 2^31, and past 2^40, bytes."""
    rng = cases.generator(49)
    for padded in (4, 180, 448):
        rows = np.concatenate([rng.integers(0, 2**32, 200), 2 ** np.arange(20, 38)])
        for row, block in zip(rows.tolist(), rng.integers(0, padded, len(rows)), strict=True):
            want = int(oracle.tile_offset(row, int(block), padded))
            assert _C.scale_offset(row=row, block=int(block), padded=padded) == want


def long_product(device: str) -> tuple[torch.Tensor, fp4lt.NVFP4Tensor, list[int]]:
    """More than 2^31 results: rows of one value each, and a weight row that is -1 or 1."""
    rows, n = 2**17 + 8, 2**14
    x = torch.zeros(rows, 16, dtype=torch.bfloat16, device=device)
    x[:, 3] = (torch.arange(rows, device=device) % 251).bfloat16()
    codes = torch.zeros(2, n, 8, dtype=torch.uint8, device=device)
    codes[:, :, 1] = 0x20
    codes[:, 1::2, 1] = 0xA0
    scales = torch.full((2, n, 4), 0x38, dtype=torch.uint8, device=device)
    w = fp4lt.NVFP4Tensor.from_tiled_scales(codes, scales, torch.ones((), device=device))
    return x, w, [rows - 3, rows]


@pytest.mark.slow
@EVERYWHERE
def test_row_49_more_than_2_31_results(machine: Machine) -> None:
    """Row 49: 131080 rows of 16384 results, each of them compared."""
    x, w, ends = long_product(machine.device)
    offs = torch.tensor(ends)
    y = fp4lt.grouped_mm(x, w.mT, offs=offs, recipe="w4a16", backend=machine.backend)
    assert y.numel() > 2**31
    sign = torch.ones(y.shape[1], dtype=torch.bfloat16, device=machine.device)
    sign[1::2] = -1
    for at in range(0, len(y), 4096):
        assert torch.equal(y[at : at + 4096], x[at : at + 4096, 3:4] * sign)


@pytest.mark.gpu
def test_row_49_more_than_2_31_intermediates() -> None:
    """Row 49: T * k * 2I past 2^31, as in vllm #53390.  Each row is as in a batch of its own."""
    case = linear_block((9, 4, 64, 4096, 2))
    tokens = 2**17 + 9
    assert tokens * 2 * 8192 > 2**31
    whole = case._replace(
        hidden=case.hidden.repeat(tokens // 9 + 1, 1)[:tokens],
        routing=cases.Routing(*(r.repeat(tokens // 9 + 1, 1)[:tokens] for r in case.routing)),
    )
    y, want = GPU.run(whole), GPU.run(case)
    for at in range(9):
        same(y[at::9], want[at : at + 1].expand(y[at::9].shape))


@EVERYWHERE
def test_row_50_stacks_past_4_gib(machine: Machine) -> None:
    """Row 50 (flashinfer #4706; axolotl #3865; aiter #3818, #4848; FlyDSL #879): stacks of more
    than 2 or 4 GiB.  5 GiB of codes, of which the last expert's are not zero."""
    experts, n, k = 512, 10240, 2048
    if machine.device == "cuda" and torch.cuda.mem_get_info()[0] < 8 * 2**30:
        pytest.skip("needs 8 GiB of free device memory")
    linear = cases.exact_operand(cases.generator(50), (n, k))
    w = machine.put(sparse_stack((experts, n, k), {experts - 1: linear}))
    assert w.codes.numel() > 2**32
    # What the oracle is asked about: the last columns, whose codes lie past 2^32.
    tail = cases.Linear(linear.codes[None, -128:], linear.scales[None, -128:], linear.global_scale)
    offs = torch.full((experts,), 2)
    offs[-1] = 5
    recipes: tuple[Recipe, ...] = ("w4a4", "w4a16")
    for recipe in recipes:
        a = make(f"{recipe}-bf16", 50, 5, 1, 16, k).a
        assert isinstance(a, torch.Tensor)
        x = a.to(machine.device)
        y = fp4lt.grouped_mm(
            x, w.mT, offs=offs, recipe=recipe, out_dtype=torch.float32, backend=machine.backend
        )
        assert not bool(y[:2].any())
        want = Product(a[2:], nvfp4(tail).mT, recipe, recipe).want((3,))
        want.check_exact(y[2:, -128:].cpu())


@EVERYWHERE
def test_row_52_weights_are_taken_k_contiguous(machine: Machine) -> None:
    """Row 52 (pytorch #188198, #198126): the library below multiplied one of the layouts only.

    Ours is that one; a stack that is not transposed, or not contiguous along K, is refused.
    """
    case = make("w4a16-bf16", 52, 3, 2, 64, 64)
    machine.check_exact(case, (1, 2))
    offs = torch.tensor([1, 3])
    a, b = machine.put(case.a), machine.put(case.b)
    with pytest.raises(errors.LayoutError, match=r"stored as \(E, N, K\).*pass its transpose"):
        fp4lt.grouped_mm(a, b.mT, offs=offs, recipe="w4a16")
    dense = torch.zeros(2, 64, 64, dtype=torch.bfloat16, device=machine.device)
    with pytest.raises(errors.LayoutError, match="must be contiguous: store weights as"):
        fp4lt.grouped_mm(a, dense, offs=offs)
