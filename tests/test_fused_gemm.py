# SPDX-License-Identifier: Apache-2.0
"""The codec and grouped_mm on CUDA: the CPU's bytes, exact bits, and bounds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import fp4lt
from fp4lt.backends import fused
from fp4lt.layout import tile_scales, untile_scales
from fp4lt.problem import Operand
from fp4lt.testing import bounds, cases, oracle

pytestmark = pytest.mark.gpu

OUT_TYPES = (torch.float32, torch.bfloat16, torch.float16)
KINDS: dict[str, tuple[torch.dtype | None, Any]] = {
    "nvfp4": (None, "w4a4"),
    "w4a4-fp32": (torch.float32, "w4a4"),
    "w4a4-bf16": (torch.bfloat16, "w4a4"),
    "w4a16-bf16": (torch.bfloat16, "w4a16"),
    "w4a16-fp16": (torch.float16, "w4a16"),
}


def to_gpu(a: Operand) -> Operand:
    return a.to("cuda")


def weights(rng: np.random.Generator, shape: tuple[int, ...], exact: bool) -> fp4lt.NVFP4Tensor:
    make = cases.exact_operand if exact else cases.random_operand
    return fp4lt.NVFP4Tensor.from_linear_scales(*make(rng, shape))


def activations(rng: np.random.Generator, kind: str, rows: int, k: int, exact: bool) -> Operand:
    dtype, recipe = KINDS[kind]
    if dtype is None:
        return weights(rng, (rows, k), exact)
    if not exact:
        return cases.random_matrix(rng, (rows, k), dtype)
    if recipe == "w4a16":
        return cases.exact_matrix(rng, (rows, k), dtype)
    # Exactly what NVFP4 holds under a derived scale of 2^-6: block maxima of 6 s, one of 6 * 448.
    values = torch.from_numpy(rng.integers(0, 8, (rows, k // 16, 16)))
    table = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    x = table[values]
    x[..., 0] = 6.0
    return (x.reshape(rows, k) * 448 * 2.0**-6).to(dtype)


def same_bytes(a: fp4lt.NVFP4Tensor, b: fp4lt.NVFP4Tensor) -> None:
    assert torch.equal(a.codes.cpu(), b.codes.cpu())
    assert torch.equal(a.scales.view(torch.uint8).cpu(), b.scales.view(torch.uint8).cpu())
    assert torch.equal(a.global_scale.cpu(), b.global_scale.cpu())


@pytest.mark.parametrize("dtype", OUT_TYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 16), (129, 80), (300, 1040), (0, 32)], ids=str)
@pytest.mark.parametrize("g", [None, "row", 1e-3, 2.0**-126, 3e38], ids=str)
def test_codec_gives_the_cpus_bytes(shape: tuple[int, int], dtype: torch.dtype, g: Any) -> None:
    rng = np.random.default_rng(shape[1])
    bits = rng.integers(0, 2**32, shape, np.uint64).astype(np.uint32)
    x = torch.from_numpy(bits.view(np.float32).copy())
    x[::3] = torch.randn(x[::3].shape)
    x[::5] = 0.0
    x = x.to(dtype)
    want = fp4lt.quantize(x, global_scale=g)
    got = fp4lt.quantize(x.cuda(), global_scale=g)
    same_bytes(got, want)
    for kind in OUT_TYPES:
        bounds.assert_bitwise(got.dequantize(kind).cpu(), want.dequantize(kind))


def test_codec_of_stacks_and_tiles() -> None:
    x = torch.randn(5, 200, 96) * torch.tensor([1.0, 0.0, 1e-3, 50.0, 1e9]).reshape(5, 1, 1)
    same_bytes(fp4lt.quantize(x.cuda()), fp4lt.quantize(x))
    g = torch.rand(5) + 0.1
    same_bytes(fp4lt.quantize(x.cuda(), global_scale=g.cuda()), fp4lt.quantize(x, global_scale=g))
    view = x[:, 3:77:2]
    same_bytes(fp4lt.quantize(x.cuda()[:, 3:77:2]), fp4lt.quantize(view))
    linear = torch.randint(0, 256, (3, 130, 10), dtype=torch.uint8)
    tiled = tile_scales(linear.cuda())
    assert torch.equal(tiled.cpu(), tile_scales(linear))
    assert torch.equal(untile_scales(tiled, 130, 10).cpu(), linear)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [16, 48, 80, 256, 272, 720, 1040, 2064, 7168])
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
            y = fp4lt.grouped_mm(
                to_gpu(a), w.to("cuda").mT, offs=offs.cuda(), out_dtype=out_dtype, **options
            )
            want.check_exact(y.cpu())
        if k > 1040:
            break


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [16, 336, 1504, 2880])
def test_random_inputs_stay_in_bounds(kind: str, k: int) -> None:
    rng = cases.generator(k)
    counts = (5, 0, 33, 70)
    w = weights(rng, (4, 96, k), exact=False)
    a = activations(rng, kind, sum(counts), k, exact=False)
    bias = torch.from_numpy(rng.standard_normal((4, 96)).astype(np.float32))
    alpha = torch.tensor([0.5, 2.0, 1.0, 3.0])
    options: dict[str, Any] = {"recipe": KINDS[kind][1]}
    if kind.startswith("w4a4"):
        options["a_scale"] = torch.tensor([0.01, 0.02, 0.03, 0.04])
    offs = cases.offsets(counts, torch.int64)
    want = oracle.grouped_mm(a, w.mT, offs=offs, bias=bias, alpha=alpha, **options)
    moved: dict[str, Any] = {
        n: v.cuda() if isinstance(v, torch.Tensor) else v for n, v in options.items()
    }
    for out_dtype in OUT_TYPES:
        y = fp4lt.grouped_mm(
            to_gpu(a),
            w.to("cuda").mT,
            offs=offs.cuda(),
            bias=bias.cuda(),
            alpha=alpha.cuda(),
            out_dtype=out_dtype,
            **moved,
        )
        want.check(y.cpu(), fused.depth(k, "w4a4"))


def test_adversarial_sum() -> None:
    a, b = cases.adversarial(7168)
    left, right = (fp4lt.NVFP4Tensor.from_linear_scales(*side) for side in (a, b))
    w = fp4lt.NVFP4Tensor(right.codes[None], right.scales[None], right.global_scale)
    offs = torch.tensor([1])
    want = oracle.grouped_mm(left, w.mT, offs=offs)
    y = fp4lt.grouped_mm(
        left.to("cuda"), w.to("cuda").mT, offs=offs.cuda(), out_dtype=torch.float32
    )
    want.check(y.cpu(), fused.depth(7168, "w4a4"))


def test_all_products() -> None:
    """Every code under every scale, against a single one."""
    every = fp4lt.NVFP4Tensor.from_linear_scales(*cases.all_products_operand())
    w = fp4lt.NVFP4Tensor(every.codes[None], every.scales[None], every.global_scale)
    for dtype in (torch.bfloat16, torch.float16):
        x = torch.eye(16, dtype=dtype)
        y = fp4lt.grouped_mm(
            x.cuda(),
            w.to("cuda").mT,
            offs=torch.tensor([16]).cuda(),
            recipe="w4a16",
            out_dtype=torch.float32,
        )
        bounds.assert_bitwise(y.cpu(), every.dequantize().mT, signed_zeros=False)


def test_nan_scale_of_a_weight_reaches_its_column_only() -> None:
    w = weights(cases.generator(3), (1, 40, 96), exact=True)
    scales = untile_scales(w.scales.view(torch.uint8), 40, 6)
    scales[0, 17, 4] = 0x7F
    broken = fp4lt.NVFP4Tensor.from_linear_scales(w.codes, scales, w.global_scale)
    x = torch.ones(3, 96, dtype=torch.bfloat16)
    offs = torch.tensor([3]).cuda()
    y = fp4lt.grouped_mm(x.cuda(), broken.to("cuda").mT, offs=offs, recipe="w4a16").cpu()
    want = fp4lt.grouped_mm(x.cuda(), w.to("cuda").mT, offs=offs, recipe="w4a16").cpu()
    assert bool(y[:, 17].isnan().all())
    keep = torch.arange(40) != 17
    bounds.assert_bitwise(y[:, keep], want[:, keep])


@pytest.mark.parametrize("kind", ["w4a4-bf16", "w4a16-bf16"])
def test_rows_past_the_end_are_left_alone(kind: str) -> None:
    rng = cases.generator(9)
    w = weights(rng, (3, 48, 80), exact=True).to("cuda")
    x = activations(rng, kind, 12, 80, exact=True).to("cuda")
    assert isinstance(x, torch.Tensor)
    x[7:] = float("nan")
    out = torch.full((12, 48), 5.0, dtype=torch.bfloat16, device="cuda")
    offs = torch.tensor([2, 2, 7], dtype=torch.int32, device="cuda")
    fp4lt.grouped_mm(x, w.mT, offs=offs, recipe=KINDS[kind][1], out=out)
    assert bool((out[7:] == 5.0).all())
    assert not bool(out[:7].isnan().any())
    host = fp4lt.grouped_mm(x, w.mT, offs=offs.cpu(), recipe=KINDS[kind][1])
    bounds.assert_bitwise(host[:7].cpu(), out[:7].cpu())


def test_odd_storage_offsets() -> None:
    rng = cases.generator(11)
    w = weights(rng, (2, 40, 80), exact=True).to("cuda")
    buffer = torch.zeros(7 * 83 + 3, dtype=torch.bfloat16, device="cuda")
    x = buffer[3:].view(7, 83)[:, 1:81]
    x.copy_(cases.exact_matrix(rng, (7, 80)))
    offs = torch.tensor([3, 7], device="cuda")
    y = fp4lt.grouped_mm(x, w.mT, offs=offs, recipe="w4a16")
    want = fp4lt.grouped_mm(x.contiguous(), w.mT, offs=offs, recipe="w4a16")
    bounds.assert_bitwise(y.cpu(), want.cpu())
    codes = torch.zeros(w.codes.numel() + 1, dtype=torch.uint8, device="cuda")[1:]
    odd = fp4lt.NVFP4Tensor(codes.view(w.codes.shape), w.scales, w.global_scale)
    with pytest.raises(fp4lt.errors.ArgumentError, match="multiples of 8"):
        fp4lt.grouped_mm(x, odd.mT, offs=offs, recipe="w4a16")


def test_more_than_two_gib_of_codes() -> None:
    """The last expert of a stack of 2.3 GiB is the only one that is not zero."""
    experts, n, k = 600, 2048, 4096
    w = fp4lt.NVFP4Tensor(
        torch.zeros(experts, n, k // 2, dtype=torch.uint8, device="cuda"),
        torch.zeros(experts, n, k // 16, dtype=torch.uint8, device="cuda").view(
            torch.float8_e4m3fn
        ),
        torch.ones((), device="cuda"),
    )
    w.codes[-1] = 0x22
    w.scales.view(torch.uint8)[-1] = 0x38
    x = torch.ones(600, k, dtype=torch.bfloat16, device="cuda")
    offs = torch.arange(1, 601, device="cuda")
    y = fp4lt.grouped_mm(x, w.mT, offs=offs, recipe="w4a16", out_dtype=torch.float32)
    assert int(y[:-1].count_nonzero()) == 0
    assert bool((y[-1] == k).all())
