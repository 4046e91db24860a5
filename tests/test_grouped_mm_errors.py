# SPDX-License-Identifier: Apache-2.0
"""What grouped_mm refuses: the class of the error, its essential words, and no write to out=."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import fp4lt
from fp4lt import errors

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
M, E, N, K = 6, 3, 8, 32
NAN = float("nan")

Arguments = dict[str, Any]


def randn(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)


def nvfp4(*shape: int) -> fp4lt.NVFP4Tensor:
    return fp4lt.quantize(randn(*shape))


def meta(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def good() -> Arguments:
    return {
        "a": randn(M, K),
        "b": nvfp4(E, N, K).mT,
        "offs": torch.tensor([2, 2, 6]),
        "out": torch.full((M, N), 7.0, dtype=BF16),
    }


def dense() -> Arguments:
    return {**good(), "b": randn(E, N, K).mT}


def overlapping_rows() -> torch.Tensor:
    return torch.zeros(64, dtype=BF16).as_strided((M, N), (N - 1, 1))


def out_inside(name: str) -> Arguments:
    """out= in the memory of one of the inputs."""
    memory = torch.ones(4096, dtype=torch.uint8)
    out = memory[1024:].view(BF16)[: M * N].view(M, N)
    if name == "a":
        return {"a": memory.view(BF16)[: M * 256].view(M, 256)[:, :K], "out": out}
    if name == "b":
        return {"a": randn(M, K), "b": memory.view(BF16)[: E * N * K].view(E, N, K).mT, "out": out}
    values = memory.view(FP32 if name != "offs" else torch.int64)[
        1024 // (8 if name == "offs" else 4) :
    ]
    if name == "bias":
        return {"bias": values[: E * N].view(E, N), "out": out}
    if name == "offs":
        values[:E] = torch.tensor([2, 2, 6])
    return {name: values[:E], "out": out}


def nvfp4_in(memory: torch.Tensor) -> fp4lt.NVFP4Tensor:
    w = nvfp4(E, N, K)
    codes = memory[: w.codes.numel()].view(w.codes.shape)
    return fp4lt.NVFP4Tensor(codes.copy_(w.codes), w.scales, w.global_scale).mT


def out_inside_codes() -> Arguments:
    memory = torch.zeros(4096, dtype=torch.uint8)
    return {"b": nvfp4_in(memory), "out": memory[256:].view(BF16)[: M * N].view(M, N)}


S, D, L, A, V, U = (
    errors.ShapeError,
    errors.DTypeError,
    errors.LayoutError,
    errors.ArgumentError,
    errors.DeviceError,
    errors.UnsupportedError,
)

NVFP4_WEIGHTS: dict[str, tuple[Callable[[], Arguments], type[errors.Error], str]] = {
    # shapes of the operands
    "K differs": (lambda: {"a": randn(M, 48)}, S, r"K=48.*K=32.*\(3, 32, 8\)"),
    "K differs, nvfp4": (lambda: {"a": nvfp4(M, 48)}, S, "K=48.*K=32"),
    "a is 3-D": (lambda: {"a": randn(1, M, K)}, S, r"a has shape \(1, 6, 32\).*2-D"),
    "a is 1-D": (lambda: {"a": randn(K)}, S, r"a has shape \(32,\).*2-D"),
    "a is 3-D, nvfp4": (lambda: {"a": nvfp4(E, N, K)}, S, r"a has shape \(3, 8, 32\).*2-D"),
    "b is 2-D": (lambda: {"b": nvfp4(N, K).mT}, S, r"b has shape \(32, 8\).*3-D"),
    "no experts": (lambda: {"b": nvfp4(0, N, K).mT, "offs": torch.zeros(0).int()}, S, "at least 1"),
    "no columns": (lambda: {"b": nvfp4(E, 0, K).mT}, S, "at least 1"),
    # layouts of the operands
    "b without mT": (lambda: {"b": nvfp4(E, N, K)}, L, r"\(3, 8, 32\).*b\.mT"),
    "b without mT, N = K": (lambda: {"b": nvfp4(E, K, K)}, L, r"\(3, 32, 32\).*b\.mT"),
    "a transposed": (lambda: {"a": randn(K, M).T}, L, r"strides \(1, 6\).*contiguous"),
    "a transposed, nvfp4": (lambda: {"a": nvfp4(K, 64).mT}, L, "a is transposed"),
    "a with gaps": (lambda: {"a": randn(M, 2 * K)[:, ::2]}, L, r"strides \(64, 2\)"),
    # types of the operands
    "a is fp64": (lambda: {"a": randn(M, K, dtype=torch.float64)}, D, "a is float64.*bfloat16"),
    "a is int8": (lambda: {"a": randn(M, K, dtype=torch.int8)}, D, "a is int8"),
    "a is a list": (lambda: {"a": [[1.0] * K] * M}, A, "a is a list"),
    "b is None": (lambda: {"b": None}, A, "b is a NoneType"),
    "w4a16 of fp32": (
        lambda: {"a": randn(M, K, dtype=FP32), "recipe": "w4a16"},
        D, "w4a16.*float32.*bfloat16, float16",
    ),
    "w4a16 of nvfp4": (lambda: {"a": nvfp4(M, K), "recipe": "w4a16"}, A, "w4a16.*w4a4"),
    # options
    "recipe": (lambda: {"recipe": "w8a8"}, A, "'w8a8'.*'w4a4', 'w4a16'"),
    "backend": (lambda: {"backend": "cutlass"}, A, r"'cutlass'.*'auto'.*'cpu'"),
    "out_dtype": (lambda: {"out_dtype": torch.float64, "out": None}, D, "float64.*float32"),
    "out_dtype is integer": (lambda: {"out_dtype": torch.int8}, D, "int8"),
    # offsets
    "offs decrease": (lambda: {"offs": torch.tensor([4, 2, 6])}, A, r"offs\[1\] is 2, less than 4"),
    "offs are counts": (lambda: {"offs": torch.tensor([3, 1, 2])}, A, "cumsum"),
    "offs pass M": (lambda: {"offs": torch.tensor([2, 2, 7])}, A, r"offs\[-1\] is 7.*6 rows"),
    "offs are huge": (lambda: {"offs": torch.tensor([2, 2, 2**62])}, A, f"{2**62}.*6 rows"),
    "offs wrap": (lambda: {"offs": torch.tensor([2**62, -(2**62), 6])}, A, r"offs\[1\]"),
    "offs are negative": (lambda: {"offs": torch.tensor([-1, 2, 6])}, A, r"offs\[0\] is -1"),
    "offs are too short": (lambda: {"offs": torch.tensor([2, 6])}, S, r"\(2,\).*\(3,\)"),
    "offs with a zero": (lambda: {"offs": torch.tensor([0, 2, 2, 6])}, S, r"\(4,\).*\(3,\)"),
    "offs are 2-D": (lambda: {"offs": torch.tensor([[2, 2, 6]])}, S, r"\(1, 3\)"),
    "offs are floats": (lambda: {"offs": torch.tensor([2.0, 2, 6])}, D, "float32.*int32, int64"),
    "offs are int16": (lambda: {"offs": torch.tensor([2, 2, 6]).short()}, D, "int16"),
    "offs are a list": (lambda: {"offs": [2, 2, 6]}, A, "offs is a list"),
    # a_scale
    "a_scale, w4a16": (lambda: {"a_scale": 1.0, "recipe": "w4a16"}, A, "a_scale.*w4a16"),
    "a_scale, nvfp4": (lambda: {"a": nvfp4(M, K), "a_scale": 1.0}, A, "a_scale.*nvfp4 x nvfp4"),
    "a_scale is 0": (lambda: {"a_scale": 0.0}, A, "a_scale is 0.0.*greater than 0"),
    "a_scale < 0": (lambda: {"a_scale": torch.tensor([1, -2.0, 1])}, A, r"a_scale\[1\] is -2\.0"),
    "a_scale is NaN": (lambda: {"a_scale": torch.tensor(NAN)}, A, "a_scale is nan"),
    "a_scale is inf": (lambda: {"a_scale": float("inf")}, A, "a_scale is inf"),
    "a_scale per row": (lambda: {"a_scale": torch.ones(M)}, S, r"a_scale.*\(6,\).*\(3,\)"),
    "a_scale is fp64": (lambda: {"a_scale": torch.ones(E).double()}, D, "a_scale is float64"),
    # alpha and bias
    "alpha is too long": (lambda: {"alpha": torch.ones(4)}, S, r"alpha.*\(4,\).*\(3,\)"),
    "alpha is 2-D": (lambda: {"alpha": torch.ones(E, 1)}, S, r"alpha.*\(3, 1\)"),
    "alpha is bf16": (lambda: {"alpha": torch.ones(E).bfloat16()}, D, "alpha is bfloat16"),
    "alpha is int64": (lambda: {"alpha": torch.ones(E).long()}, D, "alpha is int64"),
    "bias is (N,)": (lambda: {"bias": torch.ones(N)}, S, r"bias.*\(8,\).*\(3, 8\)"),
    "bias is (E, N - 1)": (lambda: {"bias": torch.ones(E, N - 1)}, S, r"bias.*\(3, 7\)"),
    "bias is int64": (lambda: {"bias": torch.ones(E, N).long()}, D, "bias is int64"),
    "bias is fp64": (lambda: {"bias": torch.ones(E, N).double()}, D, "bias is float64"),
    # out
    "out is too short": (lambda: {"out": randn(5, N)}, S, r"out=.*\(5, 8\).*\(6, 8\)"),
    "out is too wide": (lambda: {"out": randn(M, 9)}, S, r"out=.*\(6, 9\).*\(6, 8\)"),
    "out is 3-D": (lambda: {"out": randn(1, M, N)}, S, r"out=.*\(1, 6, 8\)"),
    "out is int32": (lambda: {"out": torch.ones(M, N).int()}, D, "int32"),
    "out against out_dtype": (
        lambda: {"out_dtype": FP32}, D, "out= is bfloat16.*result is float32"
    ),
    "out in columns": (lambda: {"out": randn(N, M).T}, L, r"out=.*strides \(1, 6\)"),
    "out with gaps": (lambda: {"out": randn(M, 2 * N)[:, ::2]}, L, r"out=.*strides \(16, 2\)"),
    "out overlaps itself": (lambda: {"out": overlapping_rows()}, L, r"strides \(7, 1\).*overlap"),
    "out is one row": (lambda: {"out": randn(1, N).expand(M, N)}, L, r"strides \(0, 1\).*overlap"),
    "out overlaps a": (lambda: out_inside("a"), L, "out= overlaps an input"),
    "out overlaps the codes": (out_inside_codes, L, "out= overlaps an input"),
    "out overlaps offs": (lambda: out_inside("offs"), L, "out= overlaps an input"),
    "out overlaps bias": (lambda: out_inside("bias"), L, "out= overlaps an input"),
    "out overlaps a_scale": (lambda: out_inside("a_scale"), L, "out= overlaps an input"),
    # devices
    "a elsewhere": (lambda: {"a": meta(M, K)}, V, "a is on meta.*b is on cpu"),
    "b elsewhere": (lambda: {"b": nvfp4(E, N, K).to("meta").mT}, V, "a is on cpu.*b is on meta"),
    "a and b elsewhere": (
        lambda: {"a": meta(M, K), "b": nvfp4(E, N, K).to("meta").mT}, U, "cpu:.*on meta"
    ),
    "bias elsewhere": (lambda: {"bias": meta(E, N)}, V, "bias is on meta.*on cpu"),
    "alpha elsewhere": (lambda: {"alpha": meta(E, dtype=FP32)}, V, "alpha is on meta"),
    "a_scale elsewhere": (lambda: {"a_scale": meta(E, dtype=FP32)}, V, "a_scale is on meta"),
    "out elsewhere": (lambda: {"out": meta(M, N)}, V, "out= is on meta"),
    "offs elsewhere": (lambda: {"offs": meta(E, dtype=torch.int32)}, V, "offs.* on meta"),
}  # fmt: skip

DENSE_WEIGHTS: dict[str, tuple[Callable[[], Arguments], type[errors.Error], str]] = {
    "K is 24": (lambda: {"a": randn(M, 24), "b": randn(E, N, 24).mT}, S, "K=24.*16.*zeros"),
    "K is 0": (lambda: {"a": randn(M, 0), "b": randn(E, N, 0).mT}, S, "K=0"),
    "K differs": (lambda: {"a": randn(M, 48)}, S, "K=48.*K=32"),
    "b is 2-D": (lambda: {"b": randn(N, K).mT}, S, r"b has shape \(32, 8\).*3-D"),
    "b without mT": (lambda: {"b": randn(E, N, K)}, S, r"K=32.*K=8.*\(3, 8, 32\)"),
    "b without mT, N = K": (
        lambda: {"b": randn(E, K, K), "out": randn(M, K)}, L, r"strides \(1024, 32, 1\).*\.mT"
    ),
    "K with gaps": (
        lambda: {"b": randn(E, N, 2 * K)[..., ::2].mT}, L, r"strides \(512, 2, 64\).*contiguous"
    ),
    "b is fp32": (lambda: {"b": randn(E, N, K, dtype=FP32).mT}, D, "b is float32.*bfloat16"),
    "b is uint8": (lambda: {"b": torch.zeros(E, N, K).byte().mT}, D, "b is uint8"),
    "a is fp16": (lambda: {"a": randn(M, K, dtype=FP16)}, D, "b is bfloat16 but a is float16"),
    "a is fp32": (lambda: {"a": randn(M, K, dtype=FP32)}, D, "b is bfloat16 but a is float32"),
    "a is nvfp4": (lambda: {"a": nvfp4(M, K)}, D, "b is bfloat16 but a is nvfp4"),
    "a_scale": (lambda: {"a_scale": 1.0}, A, "a_scale.*bfloat16 x bfloat16"),
    "recipe": (lambda: {"recipe": "bf16"}, A, "'bf16'"),
    "out overlaps a": (lambda: out_inside("a"), L, "out= overlaps an input"),
    "out overlaps b": (lambda: out_inside("b"), L, "out= overlaps an input"),
}  # fmt: skip


def refuse(arguments: Arguments, error: type[errors.Error], words: str) -> None:
    out = arguments["out"]
    before = None if out is None or out.device.type == "meta" else out.clone()
    with pytest.raises(errors.Error) as caught:
        fp4lt.grouped_mm(**arguments)
    assert type(caught.value) is error
    assert re.search(words, str(caught.value)), str(caught.value)
    if before is not None:
        assert torch.equal(out, before)


@pytest.mark.parametrize("name", NVFP4_WEIGHTS)
def test_refused_with_nvfp4_weights(name: str) -> None:
    changes, error, words = NVFP4_WEIGHTS[name]
    refuse({**good(), **changes()}, error, words)


@pytest.mark.parametrize("name", DENSE_WEIGHTS)
def test_refused_with_dense_weights(name: str) -> None:
    changes, error, words = DENSE_WEIGHTS[name]
    refuse({**dense(), **changes()}, error, words)


def test_what_the_cases_start_from_is_accepted() -> None:
    for arguments in (good(), dense()):
        assert fp4lt.grouped_mm(**arguments) is arguments["out"]
        assert not bool((arguments["out"] == 7).all())


# ---- gradients


def wants_grad(name: str) -> Arguments:
    arguments = dense() if name == "b" else good()
    if name == "weights' global scale":
        w = nvfp4(E, N, K)
        g = w.global_scale.clone().requires_grad_()
        arguments["b"] = fp4lt.NVFP4Tensor(w.codes, w.scales, g).mT
    elif name == "b":
        arguments["b"] = arguments["b"].requires_grad_()
    else:
        value = {"alpha": torch.ones(E), "a_scale": torch.ones(E), "bias": torch.ones(E, N)}
        arguments[name] = value.get(name, arguments.get(name)).requires_grad_()  # type: ignore[union-attr]
    return arguments


@pytest.mark.parametrize(
    "name", ["a", "b", "weights' global scale", "bias", "alpha", "a_scale", "out"]
)
def test_gradients_are_refused(name: str) -> None:
    refuse(wants_grad(name), errors.ArgumentError, "requires grad.*detach.*no_grad")
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            arguments = wants_grad(name)
            y = fp4lt.grouped_mm(**arguments)
            assert y is arguments["out"]
            assert not bool((y == 7).all())


def test_offsets_whose_differences_wrap() -> None:
    w = fp4lt.quantize(torch.randn(2, 8, 32))
    x = torch.randn(4, 32)
    for offs in ([2**63 - 1, -(2**63)], [5, 4], [-1, 4], [2**62, 2**62]):
        with pytest.raises(errors.ArgumentError, match=r"offs\[-?\d\]"):
            fp4lt.grouped_mm(x, w.mT, offs=torch.tensor(offs))


@pytest.mark.parametrize("value", [True, "1", [1.0, 2.0], 1e300, float("nan"), 1j])
def test_factors_that_are_no_numbers(value: Any) -> None:
    w = fp4lt.quantize(torch.randn(2, 8, 32))
    x, offs = torch.randn(4, 32), torch.tensor([2, 4])
    for name in ("alpha", "a_scale"):
        with pytest.raises(errors.ArgumentError, match=name):
            fp4lt.grouped_mm(x, w.mT, offs=offs, **{name: value})
    y = fp4lt.grouped_mm(x, w.mT, offs=offs, alpha=np.float32(2))
    assert torch.equal(y, fp4lt.grouped_mm(x, w.mT, offs=offs, alpha=2))
