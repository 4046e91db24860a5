# SPDX-License-Identifier: Apache-2.0
"""Backend dequant: grouped_mm and moe through the looped shim on 16-bit tensor cores."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_fused_gemm import KINDS, OUT_TYPES, activations, to_gpu, weights
from test_fused_moe import FIELD_SHAPES, on_gpu
from test_moe import SHAPES, Case, covering, make

import fp4lt
from fp4lt.backends import looped
from fp4lt.problem import MoETrace
from fp4lt.testing import bounds, cases, oracle

pytestmark = pytest.mark.gpu

DENSE = {"bf16": torch.bfloat16, "fp16": torch.float16}


def run(a: Any, w: Any, offs: torch.Tensor, **options: Any) -> torch.Tensor:
    moved: dict[str, Any] = {
        n: v.cuda() if isinstance(v, torch.Tensor) else v for n, v in options.items()
    }
    return fp4lt.grouped_mm(to_gpu(a), w.to("cuda").mT, offs=offs, backend="dequant", **moved)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [16, 48, 80, 256, 1040, 7168])
@pytest.mark.parametrize("n", [1, 17, 129, 520])
def test_exact_inputs_give_exact_bits(kind: str, k: int, n: int) -> None:
    rng = cases.generator(k + n)
    for name in ("primes", "gaps", "tile_edges", "skewed", "empty"):
        counts = cases.GROUPS[name]
        w = weights(rng, (len(counts), n, k), exact=True)
        a = activations(rng, kind, sum(counts), k, exact=True)
        offs = cases.offsets(counts)
        options: dict[str, Any] = {"recipe": KINDS[kind][1]}
        want = oracle.grouped_mm(a, w.mT, offs=offs, **options)
        for out_dtype in OUT_TYPES:
            place = offs.cuda() if out_dtype == torch.float32 else offs
            want.check_exact(run(a, w, place, out_dtype=out_dtype, **options).cpu())
        if k > 256:
            break


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("k", [16, 336, 2048])
@pytest.mark.parametrize("n", [1, 17, 256])
def test_dense_weights(name: str, k: int, n: int) -> None:
    dtype = DENSE[name]
    rng = cases.generator(k)
    for counts in ((5, 0, 33, 70), (0, 1, 0, 2)):
        w = cases.random_matrix(rng, (4, n, k), dtype)
        a = cases.random_matrix(rng, (sum(counts), k), dtype)
        offs = cases.offsets(counts)
        want = oracle.grouped_mm(a, w.mT, offs=offs)
        for out_dtype in OUT_TYPES:
            want.check(run(a, w, offs, out_dtype=out_dtype).cpu(), looped.depth(k, "w4a16"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [16, 336, 2880])
def test_random_inputs_with_biases_factors_and_scales(kind: str, k: int) -> None:
    rng = cases.generator(k)
    counts = (5, 0, 33, 70)
    w = weights(rng, (4, 96, k), exact=False)
    a = activations(rng, kind, sum(counts), k, exact=False)
    bias = torch.from_numpy(rng.standard_normal((4, 96))).to(torch.float32)
    offs = cases.offsets(counts, torch.int64)
    rounded = kind.startswith("w4a4")
    for options in (
        {"bias": bias, "alpha": torch.tensor([0.5, 2.0, 1.0, 3.0])},
        {"alpha": torch.tensor([0.5, 2.0, 1.0, 3.0])},
        {"a_scale": torch.tensor([0.01, 0.02, 0.03, 0.04])} if rounded else {},
        {"a_scale": torch.tensor(0.02), "bias": bias} if rounded else {"bias": bias},
    ):
        given: dict[str, Any] = {"recipe": KINDS[kind][1], **options}
        want = oracle.grouped_mm(a, w.mT, offs=offs, **given)
        for out_dtype in OUT_TYPES:
            y = run(a, w, offs.cuda(), out_dtype=out_dtype, **given)
            want.check(y.cpu(), looped.depth(k, "w4a4"))


def test_many_slices_of_an_expert_are_the_whole() -> None:
    """Weights far larger than a slice: every row of the output, and its last ragged part."""
    rng = cases.generator(5)
    w = weights(rng, (2, 1352, 7168), exact=True)
    product = looped.Product(
        1352, 7168, fp4lt._C.LoopedWeights.EXPANDED, fp4lt._C.DType.BF16, fp4lt._C.DType.F32
    )
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    assert looped._slice_rows(product, l2) < 1352
    a = activations(rng, "w4a16-bf16", 5, 7168, exact=True)
    offs = cases.offsets((2, 3))
    want = oracle.grouped_mm(a, w.mT, offs=offs, recipe="w4a16")
    want.check_exact(run(a, w, offs, recipe="w4a16", out_dtype=torch.float32).cpu())


@pytest.mark.parametrize("out_dtype", OUT_TYPES)
def test_rows_past_the_end_are_left_alone(out_dtype: torch.dtype) -> None:
    rng = cases.generator(9)
    for n in (48, 43):
        w = weights(rng, (3, n, 80), exact=True).to("cuda")
        x = activations(rng, "w4a16-bf16", 12, 80, exact=True).to("cuda")
        assert isinstance(x, torch.Tensor)
        x[7:] = float("nan")
        out = torch.full((12, n), 5.0, dtype=out_dtype, device="cuda")
        offs = torch.tensor([2, 2, 7], dtype=torch.int32, device="cuda")
        fp4lt.grouped_mm(x, w.mT, offs=offs, recipe="w4a16", out=out, backend="dequant")
        assert bool((out[7:] == 5.0).all())
        assert not bool(out[:7].isnan().any())
        want = fp4lt.grouped_mm(x, w.mT, offs=offs, recipe="w4a16", out_dtype=out_dtype)
        bounds.assert_bitwise(out[:7].cpu(), want[:7].cpu())


def test_strided_and_misaligned_operands_and_outputs() -> None:
    rng = cases.generator(11)
    w = cases.exact_matrix(rng, (3, 40, 80)).cuda()
    buffer = torch.zeros(7 * 83 + 3, dtype=torch.bfloat16, device="cuda")
    x = buffer[3:].view(7, 83)[:, 1:81]
    x.copy_(cases.exact_matrix(rng, (7, 80)))
    offs = torch.tensor([3, 3, 7])
    want = torch.cat([x[:3] @ w[0].T, x[3:] @ w[2].T])
    wide = torch.full((14, 56), float("nan"), dtype=torch.bfloat16, device="cuda")
    for out in (wide[::2, 8:48], wide[::2, 3:43]):
        out.fill_(float("nan"))
        fp4lt.grouped_mm(x, w.mT, offs=offs, out=out, backend="dequant")
        bounds.assert_bitwise(out.cpu(), want.cpu(), signed_zeros=False)
        out.fill_(float("nan"))
        assert bool(wide.isnan().all())
    strided = torch.zeros(3, 40, 96, dtype=torch.bfloat16, device="cuda")[:, :, 16:]
    strided.copy_(w)
    y = fp4lt.grouped_mm(x, strided.mT, offs=offs, backend="dequant")
    bounds.assert_bitwise(y.cpu(), want.cpu(), signed_zeros=False)
    same = w[:1].expand(3, 40, 80)
    y = fp4lt.grouped_mm(x, same.mT, offs=offs, backend="dequant")
    bounds.assert_bitwise(y.cpu(), (x @ w[0].T).cpu(), signed_zeros=False)
    row = w[:, :1].expand(3, 40, 80)
    with pytest.raises(fp4lt.errors.LayoutError, match="rows overlap"):
        fp4lt.grouped_mm(x, row.mT, offs=offs, backend="dequant")


def test_offsets_from_the_device_are_checked() -> None:
    x = torch.zeros(4, 32, dtype=torch.bfloat16, device="cuda")
    w = torch.zeros(3, 16, 32, dtype=torch.bfloat16, device="cuda")
    for offs in ([2, 1, 4], [1, 2, 5], [-1, 2, 3]):
        with pytest.raises(fp4lt.errors.ArgumentError, match=r"must not decrease.*4 rows"):
            fp4lt.grouped_mm(x, w.mT, offs=torch.tensor(offs).cuda(), backend="dequant")


# ---- the block


def trace_of(case: Case) -> MoETrace:
    k = case.routing.topk_ids.shape[1]
    plan = fp4lt.plan_moe(case.hidden, case.weights, top_k=k, recipe=case.recipe, backend="dequant")
    return plan.trace(case.hidden, case.weights, **case.arguments())


def check(case: Case, trace: MoETrace) -> None:
    w = case.weights
    oracle.check_moe_trace(
        trace,
        w,
        case.hidden,
        *case.routing,
        case.recipe,
        looped.depth(w.hidden_size, case.recipe),
        looped.depth(w.intermediate_size, case.recipe),
        router_weight_on_input=case.on_input,
    )


@pytest.mark.parametrize("sentence", [*covering(), *SHAPES])
def test_every_stage(sentence: str) -> None:
    case = make(sentence)
    gpu = on_gpu(case)
    trace = trace_of(gpu)
    check(case, trace)
    bounds.assert_bitwise(gpu.run(backend="dequant").cpu(), trace.y)


@pytest.mark.parametrize("shape", FIELD_SHAPES[1:5], ids=str)
@pytest.mark.parametrize("recipe", ["w4a4", "w4a16", "dense"])
def test_field_shapes(shape: tuple[int, int, int, int], recipe: str) -> None:
    experts, hidden, inner, k = shape
    case = make(f"E{experts} H{hidden} I{inner} k{k} T7 {recipe} split biases")
    check(case, trace_of(on_gpu(case)))


@pytest.mark.parametrize("sentence", ["", "w4a16 biases", "fp32 static", "dense"])
def test_out_is_strided_and_poisoned(sentence: str) -> None:
    case = on_gpu(make(f"{sentence} T11 H80"))
    want = case.run(backend="dequant")
    buffer = torch.full((24, 100), float("nan"), dtype=want.dtype, device="cuda")
    view = buffer[1:23:2, 8:88]
    case.run(out=view, backend="dequant")
    bounds.assert_bitwise(view.cpu(), want.cpu())
    view.fill_(float("nan"))
    assert bool(buffer.isnan().all())
