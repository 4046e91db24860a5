# SPDX-License-Identifier: Apache-2.0
"""NVFP4Tensor: constructors, views, and the refusal of what does not fit."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree

import fp4lt
from fp4lt import _C, NVFP4Tensor, errors, formats
from fp4lt.layout import padded_scale_shape, tile_scales, untile_scales
from fp4lt.testing import cases, oracle_codec as oracle


def stack(experts: int = 3, n: int = 40, k: int = 96, seed: int = 0) -> NVFP4Tensor:
    return NVFP4Tensor.from_linear_scales(
        *cases.random_operand(cases.generator(seed), (experts, n, k))
    )


def same(a: NVFP4Tensor, b: NVFP4Tensor) -> bool:
    return (
        a.transposed == b.transposed
        and torch.equal(a.codes, b.codes)
        and torch.equal(a.scales.view(torch.uint8), b.scales.view(torch.uint8))
        and torch.equal(a.global_scale, b.global_scale)
    )


def test_constants_agree_with_the_compiled_ones() -> None:
    assert (formats.BLOCK, formats.TILE_ROWS, formats.TILE_BLOCKS, formats.RANGE) == (
        _C.BLOCK,
        _C.TILE_ROWS,
        _C.TILE_BLOCKS,
        _C.RANGE,
    )
    assert list(formats.E2M1_VALUES) == oracle.decode_e2m1(np.arange(16, dtype=np.uint8)).tolist()


@pytest.mark.parametrize("shape", [(1, 1), (127, 3), (128, 4), (129, 5), (300, 448)], ids=str)
def test_tile_order(shape: tuple[int, int]) -> None:
    rows, blocks = shape
    linear = torch.randint(0, 256, shape, dtype=torch.uint8)
    tiled = tile_scales(linear)
    np.testing.assert_array_equal(tiled.numpy(), oracle.tile(linear.numpy()))
    assert torch.equal(untile_scales(tiled, rows, blocks), linear)
    padded = padded_scale_shape(rows, blocks * 16)[1]
    for row, block in ((0, 0), (rows - 1, blocks - 1), (rows // 2, blocks // 3)):
        offset = _C.scale_offset(row, block, padded)
        assert offset == int(oracle.tile_offset(row, block, blocks))
        assert tiled.reshape(-1)[offset] == linear[row, block]


def test_tile_order_is_a_bijection_with_64_bit_offsets() -> None:
    offsets = [_C.scale_offset(r, b, 8) for r in range(256) for b in range(8)]
    assert sorted(offsets) == list(range(2048))
    # Row 2^24 of a matrix with K = 16384: past 2^31.
    assert _C.scale_offset(2**24, 0, 1024) == 2**34


def test_tiling_stacks_and_strides() -> None:
    linear = torch.randint(0, 256, (4, 130, 10), dtype=torch.uint8)
    for view in (linear, linear[::2], linear[:, 1:, :7], linear.mT):
        tiled = tile_scales(view)
        for e in range(view.shape[0]):
            assert torch.equal(tiled[e], tile_scales(view[e].contiguous()))
        assert torch.equal(untile_scales(tiled, *view.shape[1:]), view)


def test_nibble_order_and_conventions() -> None:
    # Byte 0x21: even k has code 1 (0.5), odd k code 2 (1.0).
    codes = torch.full((1, 8), 0x21, dtype=torch.uint8)
    scale = torch.full((1, 1), 0x40, dtype=torch.uint8)  # 2.0
    t = NVFP4Tensor.from_linear_scales(codes, scale, torch.tensor(0.25))
    assert t.dequantize().tolist() == [[0.25, 0.5] * 8]
    scale = scale.view(torch.float8_e4m3fn)
    t = NVFP4Tensor.from_modelopt(codes, scale, torch.tensor([0.25]))
    assert t.dequantize().tolist() == [[0.25, 0.5] * 8]
    t = NVFP4Tensor.from_compressed_tensors(codes, scale, torch.tensor([4.0]))
    assert t.dequantize().tolist() == [[0.25, 0.5] * 8]


def test_constructors_agree() -> None:
    raw = cases.random_operand(cases.generator(1), (3, 130, 80))
    linear = NVFP4Tensor.from_linear_scales(*raw)
    assert same(linear, NVFP4Tensor.from_tiled_scales(raw.codes, tile_scales(raw.scales), raw[2]))
    assert same(linear, NVFP4Tensor.from_modelopt(*raw))
    assert same(linear, NVFP4Tensor.from_modelopt(*raw[:2], raw[2].reshape(3, 1)))
    divisor = 1 / raw.global_scale
    other = NVFP4Tensor.from_compressed_tensors(*raw[:2], divisor.reshape(3, 1))
    assert torch.equal(other.global_scale, 1 / divisor)
    want = oracle.dequantize(raw.quantized())
    np.testing.assert_array_equal(linear.dequantize().numpy(), want)


def test_views_copy_nothing() -> None:
    t = stack()
    assert t.shape == (3, 40, 96)
    assert t.mT.shape == (3, 96, 40)
    assert t.mT.codes is t.codes
    assert same(t.mT.mT, t)
    assert t[1].shape == (40, 96)
    assert t[-1].global_scale == t.global_scale[2]
    assert t[1:].codes.data_ptr() == t.codes[1].data_ptr()
    assert t[::2].shape == (2, 40, 96)
    assert t.mT[0].transposed
    assert torch.equal(t.mT.dequantize(), t.dequantize().mT)
    assert torch.equal(t[::2].dequantize(), t.dequantize()[::2])
    assert len(t) == 3
    assert t.to("cpu") is t
    assert t.ndim == 3
    assert t.device == torch.device("cpu")


def test_stack_of_shared_global_scale() -> None:
    t = stack()
    shared = dataclasses.replace(t, global_scale=torch.tensor(0.5))
    assert torch.equal(shared[1].global_scale, torch.tensor(0.5))
    assert torch.equal(shared.dequantize()[2], shared[2].dequantize())


def test_frozen_and_shown() -> None:
    t = stack()
    with pytest.raises(dataclasses.FrozenInstanceError):
        t.codes = t.codes  # type: ignore[misc]
    assert repr(t) == "NVFP4Tensor(shape=(3, 40, 96), global_scale: 3 of them, device=cpu)"
    assert "transposed" in repr(t[0].mT)
    assert "shared" in repr(t[0])


def test_pytree_round_trip() -> None:
    t = stack().mT
    leaves, spec = pytree.tree_flatten({"w": t, "x": [t]})
    assert len(leaves) == 6
    back = pytree.tree_unflatten(leaves, spec)
    assert same(back["w"], t)
    doubled = pytree.tree_map(lambda leaf: leaf.to("meta"), t)
    assert doubled.shape == t.shape
    assert doubled.device.type == "meta"


def test_moves_to_another_device() -> None:
    t = stack().to("meta")
    assert {t.codes.device.type, t.scales.device.type, t.global_scale.device.type} == {"meta"}


def test_padding_may_hold_anything() -> None:
    t = stack()
    scales = t.scales.clone()
    flat = scales.view(torch.uint8).reshape(3, -1)
    row, block = np.meshgrid(np.arange(40), np.arange(6), indexing="ij")
    padding = np.ones(flat.shape[1], bool)
    padding[oracle.tile_offset(row, block, 6).reshape(-1)] = False
    flat[:, torch.from_numpy(padding)] = 0xFF
    poisoned = NVFP4Tensor.from_tiled_scales(t.codes, scales, t.global_scale)
    assert torch.equal(poisoned.dequantize(), t.dequantize())


def parts(**changes: Any) -> dict[str, Any]:
    t = stack()
    return {"codes": t.codes, "scales": t.scales, "global_scale": t.global_scale} | changes


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"codes": torch.zeros(3, 40, 48, dtype=torch.int8)}, errors.DTypeError, "int8"),
        ({"codes": torch.zeros(40, dtype=torch.uint8)}, errors.ShapeError, r"\(40,\)"),
        ({"codes": torch.zeros(3, 40, 12, dtype=torch.uint8)}, errors.ShapeError, "K=24"),
        ({"codes": torch.zeros(3, 40, 0, dtype=torch.uint8)}, errors.ShapeError, "K=0"),
        ({"codes": [1, 2]}, errors.ArgumentError, "list"),
        (
            {"codes": torch.zeros(3, 48, 40, dtype=torch.uint8).mT},
            errors.LayoutError,
            "strides",
        ),
        ({"scales": torch.zeros(3, 128, 8)}, errors.DTypeError, "float32"),
        (
            {"scales": torch.zeros(3, 40, 6).to(torch.float8_e4m3fn)},
            errors.ShapeError,
            "from_linear_scales",
        ),
        ({"global_scale": torch.ones(2)}, errors.ShapeError, r"\(2,\)"),
        ({"global_scale": torch.ones(3, dtype=torch.float64)}, errors.DTypeError, "float64"),
        ({"global_scale": torch.tensor([1.0, 0.0, 1.0])}, errors.ArgumentError, r"\[1\] is 0"),
        ({"global_scale": torch.tensor(float("inf"))}, errors.ArgumentError, "inf"),
        ({"global_scale": torch.ones(3, device="meta")}, errors.ArgumentError, "one device"),
    ],
)
def test_parts_that_do_not_fit(changes: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        NVFP4Tensor(**parts(**changes))


def test_sign_bits_of_scales_are_refused_by_place() -> None:
    raw = cases.random_operand(cases.generator(2), (3, 40, 96))
    scales = raw.scales.view(torch.uint8).clone()
    scales[2, 17, 4] = 0x85
    with pytest.raises(errors.ArgumentError, match="expert 2, row 17, block 4 is byte 0x85"):
        NVFP4Tensor.from_linear_scales(raw.codes, scales, raw.global_scale)
    with pytest.raises(errors.ArgumentError, match="row 17, block 4 is byte 0x85"):
        NVFP4Tensor.from_linear_scales(raw.codes[2], scales[2], raw.global_scale[2])
    unchecked = NVFP4Tensor._make(raw.codes, tile_scales(scales), raw.global_scale)
    with pytest.raises(errors.ArgumentError, match="0x85"):
        unchecked.validate()


def test_linear_scales_of_the_wrong_shape() -> None:
    raw = cases.random_operand(cases.generator(3), (40, 96))
    with pytest.raises(errors.ShapeError, match=r"need scales \(40, 6\).*\(40, 5\)"):
        NVFP4Tensor.from_linear_scales(raw.codes, raw.scales[:, :5], raw.global_scale)
    with pytest.raises(errors.DTypeError, match="float32"):
        NVFP4Tensor.from_linear_scales(raw.codes, torch.ones(40, 6), raw.global_scale)


@pytest.mark.parametrize("divisor", [0.0, float("inf"), float("nan"), -2.0])
def test_divisors_that_make_no_scale(divisor: float) -> None:
    raw = cases.random_operand(cases.generator(4), (40, 96))
    with pytest.raises(errors.ArgumentError, match="global_scale"):
        NVFP4Tensor.from_compressed_tensors(raw.codes, raw.scales, torch.tensor([divisor]))


def test_indexing_is_for_stacks() -> None:
    t = stack()
    with pytest.raises(errors.ShapeError, match=r"\(40, 96\)"):
        t[0][0]
    with pytest.raises(IndexError, match="expert 3 of a stack of 3"):
        t[3]
    with pytest.raises(errors.ArgumentError, match="int or a slice"):
        t[torch.tensor([0, 1])]  # type: ignore[index]
    assert list(iter(t))[2].shape == (40, 96)


@pytest.mark.parametrize("rows", [5, 200])
def test_untile_refuses_other_extents(rows: int) -> None:
    with pytest.raises(errors.ShapeError, match=f"{rows} rows of 4 blocks"):
        untile_scales(torch.zeros(128, 8, dtype=torch.uint8), rows, 4)


def test_quantized_activations_keep_a_scale_per_row() -> None:
    t = fp4lt.quantize(torch.randn(7, 32), global_scale="row")
    assert t.global_scale.shape == (7,)
    assert same(NVFP4Tensor(t.codes, t.scales, t.global_scale), t)


@pytest.mark.parametrize("target", [torch.float32, torch.bfloat16, torch.ones(2), None, True])
def test_to_takes_a_device_only(target: Any) -> None:
    with pytest.raises(errors.ArgumentError, match="takes a device"):
        stack().to(target)
    weights = fp4lt.MoEWeights(stack(3, 64, 96), stack(3, 96, 32), order="gate_up")
    with pytest.raises(errors.ArgumentError, match="takes a device"):
        weights.to(target)


def test_parts_that_a_pytree_function_spoilt_are_refused() -> None:
    t = stack()
    x = torch.randn(3, 96, dtype=torch.bfloat16)
    offs = torch.tensor([1, 2, 3])
    small = pytree.tree_map(lambda p: p[:, :1].contiguous() if p.ndim == 3 else p, t)
    with pytest.raises(errors.ShapeError, match="need tiled scales"):
        fp4lt.grouped_mm(x, small.mT, offs=offs)
    wide = pytree.tree_map(lambda p: p.float(), t)
    with pytest.raises(errors.DTypeError, match="codes is float32"):
        fp4lt.grouped_mm(x, wide.mT, offs=offs)
    weights = fp4lt.MoEWeights(stack(3, 64, 96), stack(3, 96, 32), order="gate_up")
    wide = pytree.tree_map(lambda p: p if p is None else p.float(), weights)
    with pytest.raises(errors.DTypeError, match="codes is float32"):
        fp4lt.moe(x, wide, topk_weights=torch.ones(3, 1), topk_ids=torch.zeros(3, 1).long())


def test_pickle_and_copy() -> None:
    t = stack().mT
    for other in (pickle.loads(pickle.dumps(t)), copy.deepcopy(t)):
        assert same(other, t)
    weights = fp4lt.MoEWeights(stack(3, 64, 96), stack(3, 96, 32), order="up_gate", expert_start=2)
    back = pickle.loads(pickle.dumps(weights))
    for name in ("w13", "w2"):
        assert same(getattr(back, name), getattr(weights, name))
    assert (back.order, back.expert_start, back.num_experts) == ("up_gate", 2, 5)
