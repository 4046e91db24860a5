# SPDX-License-Identifier: Apache-2.0
"""Reports from the field about values: zeros, ranges, scales, overflow.  See test_field_reports."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_field_reports import EVERYWHERE, PRODUCTS, Machine
from test_grouped_mm import OUT_TYPES, Case, lossless_rows, make, nvfp4
from test_grouped_mm_relations import assert_same

import fp4lt
from fp4lt import errors
from fp4lt.layout import untile_scales
from fp4lt.testing import bounds, cases, oracle


def stack_of(linear: cases.Linear) -> fp4lt.NVFP4Tensor:
    """One matrix as a stack of one expert."""
    return nvfp4(linear._replace(codes=linear.codes[None], scales=linear.scales[None]))


@EVERYWHERE
def test_row_19_a_block_of_zeros(machine: Machine) -> None:
    """Row 19 (Model-Optimizer #1397): a block of zeros was stored with a NaN scale."""
    x = cases.exact_matrix(cases.generator(19), (1, 40, 96))
    x[0, 7, 16:32] = 0.0
    w = fp4lt.quantize(x.to(machine.device)).to("cpu")
    assert int(untile_scales(w.scales.view(torch.uint8), 40, 6)[0, 7, 1]) == 0
    assert not bool(w.dequantize()[0, 7, 16:32].any())
    case = Case(cases.exact_matrix(cases.generator(20), (3, 96)), w.mT, "w4a16", "w4a16")
    case.want((3,)).check(machine.multiply(case, (3,)), machine.depth(96, "w4a16"))


@EVERYWHERE
@pytest.mark.parametrize("kind", PRODUCTS)
def test_row_21_an_expert_of_zeros(machine: Machine, kind: str) -> None:
    """Row 21 (vllm #42601; flashinfer #3592): a maximum of zero was divided by."""
    x = cases.exact_matrix(cases.generator(21), (4, 48, 64), torch.float32) * 7
    x[3] = 0.0
    w = fp4lt.quantize(x.to(machine.device)).to("cpu")
    assert float(w.global_scale[3]) == 1.0
    case = make(kind, 21, 8, 4, 48, 64)._replace(b=w.mT)
    y = machine.multiply(case, (2, 2, 2, 2), out_dtype=torch.float32)
    case.want((2, 2, 2, 2)).check(y, machine.depth(64, case.sums))
    assert torch.equal(y[6:], torch.zeros(2, 48))
    assert bool(y[:6].any())


@EVERYWHERE
@pytest.mark.parametrize("loud", [1e4, 65504.0, 3.3e38])
def test_row_22_values_beyond_the_range(machine: Machine, loud: float) -> None:
    """Row 22 (kekzl/imp #1544): without a global scale, blocks beyond 2688 were clipped.

    A derived scale reaches any of them; a given one saturates, as documented.
    """
    x = torch.ones(2, 32)
    x[0, 0], x[1, 17] = loud, -loud
    one = make("w4a4-fp32", 22, 2, 1, 24, 32)._replace(a=x)
    for scale in ("row", None):
        q = fp4lt.quantize(x.to(machine.device), global_scale=scale).dequantize().cpu()
        for got, want in ((q[0, 0], loud), (q[1, 17], -loud)):
            assert abs(float(got) - want) <= 2.0**-22 * loud
    y = machine.multiply(one, (2,))
    one.want((2,)).check(y, machine.depth(32, "w4a4"))
    q = fp4lt.quantize(x.to(machine.device), global_scale=1.0).dequantize().cpu()
    assert (float(q[0, 0]), float(q[1, 17])) == (2688.0, -2688.0)
    clipped = machine.multiply(one, (2,), a_scale=1.0)
    one.want((2,), a_scale=torch.tensor(1.0)).check(clipped, machine.depth(32, "w4a4"))


@EVERYWHERE
@pytest.mark.parametrize("dtype", OUT_TYPES, ids=str)
def test_row_23_the_result_does_not_follow_the_global_scale(
    machine: Machine, dtype: torch.dtype
) -> None:
    """Row 23 (flashinfer #3548): a global scale other than 1 multiplied the output by thousands.

    Values that are exact under all of these scales give the same bits under each of them.
    """
    rng = cases.generator(23)
    codes = rng.integers(0, 16, (6, 4, 16))
    codes[:, :, 5] |= 7  # a 6 in each block, whose scale is then 1 or 2
    blocks = rng.choice([1.0, 2.0], (6, 4, 1))
    x = torch.from_numpy(oracle.decode_e2m1(codes) * blocks).reshape(6, 64).to(dtype)
    case = make("w4a4-bf16", 23, 6, 2, 40, 64)._replace(a=x)
    want = case.want((2, 4), a_scale=torch.tensor(1.0))
    for scale in (1.0, 2.0**-7, 2.0**-3, 2.0**5):
        y = machine.multiply(case, (2, 4), a_scale=scale, out_dtype=torch.float32)
        want.check_exact(y, name=f"a_scale {scale}, y")
        w = fp4lt.quantize(x[None].to(machine.device), global_scale=scale).to("cpu")
        assert torch.equal(w.dequantize()[0], x.float())
    derived = machine.multiply(case, (2, 4), out_dtype=torch.float32)
    case.want((2, 4)).check(derived, machine.depth(64, "w4a4"))


@EVERYWHERE
def test_row_25_every_scale_byte(machine: Machine) -> None:
    """Row 25 (b12x #388): a subnormal scale byte was decoded too large.

    All 16 codes under all 256 bytes: values, NaN for 0x7F, and a refusal from 0x80 on.
    """
    codes = torch.from_numpy(oracle.pack(np.arange(16, dtype=np.uint8)[None]))

    def tensor(byte: int) -> fp4lt.NVFP4Tensor:
        scales = torch.tensor([[byte]], dtype=torch.uint8)
        parts = machine.put((codes, scales, torch.ones(())))
        return fp4lt.NVFP4Tensor.from_linear_scales(*parts).validate()

    for byte in range(256):
        if byte >= 0x80:
            with pytest.raises(errors.ArgumentError, match=f"row 0, block 0 is byte 0x{byte:02X}"):
                tensor(byte)
            continue
        values = oracle.decode_e2m1(np.arange(16)) * oracle.decode_e4m3(np.array(byte))
        bounds.assert_bitwise(tensor(byte).dequantize().cpu(), values[None], name=f"{byte:#x}")
    assert float(tensor(0x01).dequantize()[0, 2]) == 2.0**-9


@EVERYWHERE
def test_row_27_fp16_overflows(machine: Machine) -> None:
    """Row 27 (vllm #37135, #33560, #33461): large results in fp16 became NaN or garbage.

    They are infinite with their sign, as documented; other types hold them.
    """
    k = 4096
    scales = torch.full((2, k // 16), 0x7E, dtype=torch.uint8)
    codes = torch.tensor([[0x77], [0xFF]], dtype=torch.uint8).expand(2, k // 2).contiguous()
    loud = cases.Linear(codes, scales.view(torch.float8_e4m3fn), torch.ones(()))
    case = Case(nvfp4(loud), stack_of(loud).mT, "w4a4", "w4a4")
    y = machine.multiply(case, (2,), out_dtype=torch.float16)
    infinity = float("inf")
    assert y.tolist() == [[infinity, -infinity], [-infinity, infinity]]
    total = k * 2688.0**2
    for dtype in (torch.float32, torch.bfloat16):
        wide = machine.multiply(case, (2,), out_dtype=dtype)
        want = bounds.round_to(total * np.array([[1, -1], [-1, 1]]), dtype)
        case.want((2,)).check(wide, machine.depth(k, "w4a4"))
        if dtype == torch.bfloat16:
            bounds.assert_bitwise(wide, want)


@EVERYWHERE
def test_row_29_scales_of_powers_of_two(machine: Machine) -> None:
    """Row 29 (vllm #43557): which way a block scale rounds was not said.

    Ours is the nearest: a maximum of 6 * 2^n, and its neighbours in fp32, give 2^n.
    """
    peaks = [np.float32(6 * 2.0**n) for n in range(-9, 9)]
    for direction in (None, 0.0, np.inf):
        near = [p if direction is None else np.nextafter(p, np.float32(direction)) for p in peaks]
        x = torch.zeros(len(peaks), 16)
        x[:, 3] = torch.from_numpy(np.array(near, np.float32))
        q = fp4lt.quantize(x.to(machine.device), global_scale=1.0).to("cpu")
        scales = oracle.from_packed(q).scales[:, 0]
        assert oracle.decode_e4m3(scales).tolist() == [2.0**n for n in range(-9, 9)]
        assert oracle.from_packed(q).codes[:, 3].tolist() == [7] * len(peaks)


@EVERYWHERE
@pytest.mark.parametrize("kind", PRODUCTS)
def test_row_30_alpha_of_each_expert(machine: Machine, kind: str) -> None:
    """Row 30 (TE #2971): where FP4 was emulated, alpha was silently another."""
    alpha, counts = torch.tensor([1.0, 2.0, 4.0, 8.0]), (3, 1, 2, 70)
    case = make(kind, 30, 76, 4, 40, 96)
    machine.check_exact(case, counts, alpha=alpha)
    plain = machine.multiply(case, counts, out_dtype=torch.float32)
    each = alpha.repeat_interleave(torch.tensor(counts))[:, None]
    assert_same(machine.multiply(case, counts, out_dtype=torch.float32, alpha=alpha), each * plain)


@EVERYWHERE
def test_row_32_conventions_of_checkpoints(machine: Machine) -> None:
    """Row 32 (modular #6600; sglang #23625): nibbles were swapped, and a divisor multiplied."""
    codes = torch.full((16, 8), 0x21, dtype=torch.uint8)
    scales = torch.full((16, 1), 0x38, dtype=torch.uint8).view(torch.float8_e4m3fn)
    cls, stored = fp4lt.NVFP4Tensor, torch.tensor(0.25)
    multiplied = cls.from_modelopt(codes[None], scales[None], stored[None])
    divided = cls.from_compressed_tensors(codes[None], scales[None], stored[None])
    x = lossless_rows(cases.generator(32), 3, 16, torch.bfloat16)
    for w, g in ((multiplied, 0.25), (divided, 4.0)):
        row = machine.put(w).dequantize().cpu()[0, 0]
        assert row.tolist() == [0.5 * g, 1.0 * g] * 8
        y = machine.multiply(Case(x, w.mT, "w4a16", "w4a16"), (3,), out_dtype=torch.float32)
        want = (x.double() * row.double()).sum(1, keepdim=True).float().expand(3, 16)
        assert torch.equal(y, want)


@EVERYWHERE
@pytest.mark.parametrize("kind", ["w4a4-bf16", "w4a4-fp32", "w4a16-bf16", "w4a16-fp16"])
def test_row_34_infinity_and_nan_in_the_input(machine: Machine, kind: str) -> None:
    """Row 34: an infinity became NaN or large garbage, and reached other rows.

    w4a4 saturates it and w4a16 propagates it; a NaN shows in every column; both in their row only.
    """
    case = make(kind, 34, 6, 2, 40, 64)
    clean = machine.multiply(case, (3, 3), out_dtype=torch.float32)
    assert isinstance(case.a, torch.Tensor)
    case.a[2, 5], case.a[3, 7] = float("inf"), float("nan")
    y = machine.multiply(case, (3, 3), out_dtype=torch.float32)
    case.want((3, 3)).check_exact(y)
    others = [0, 1, 4, 5]
    assert_same(y[others], clean[others])
    assert bool(y[3].isnan().all())
    assert bool(y[2].isfinite().all()) == (case.sums == "w4a4")


@EVERYWHERE
@pytest.mark.parametrize("dtype", OUT_TYPES, ids=str)
@pytest.mark.parametrize("kind", PRODUCTS)
def test_row_59_bias_of_every_type(machine: Machine, kind: str, dtype: torch.dtype) -> None:
    """Row 59 (CUDALibrarySamples #274, #292, #303): a bias was not supported in some types."""
    bias = cases.random_matrix(cases.generator(59), (2, 40), dtype)
    machine.check_exact(make(kind, 59, 7, 2, 40, 64), (3, 4), bias=bias)
