# SPDX-License-Identifier: Apache-2.0
"""The loop's own parts: row forms, scale tiles by expert, expansion, algorithms, FP4 refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import fp4lt
from fp4lt import _C, _library
from fp4lt._interop import address, cuda_launch
from fp4lt.backends import cublaslt, dequant, looped, looped_calls, stages
from fp4lt.errors import LibraryError
from fp4lt.layout import untile_scales
from fp4lt.problem import GroupedProblem, MoEProblem
from fp4lt.testing import bounds, cases

BF16 = torch.bfloat16


@pytest.mark.parametrize(
    ("rows", "bucket"), [(1, 1), (2, 2), (3, 4), (64, 64), (65, 128), (3000, 4096)]
)
def test_row_buckets(rows: int, bucket: int) -> None:
    assert _C.row_bucket(rows) == bucket
    assert bucket in looped.BUCKETS


@pytest.mark.parametrize(("n", "k"), [(4096, 7168), (512, 6144), (100, 16), (1352, 14336)])
def test_slices_are_equal_parts_that_fit(n: int, k: int) -> None:
    kinds = _C.LoopedWeights.EXPANDED, _C.DType.BF16, _C.DType.F32
    rows = looped._slice_rows(looped.Product(n, k, *kinds), 60 << 20)
    assert rows % 128 == 0
    assert rows == 128 or rows * k * 2 * looped.EXPANDED_STREAMS <= 30 << 20
    parts = -(-n // rows)
    assert parts * rows - n < 128 * parts


def test_packed_tiles_never_overlap() -> None:
    """Tiles that start at row / 128 + expert hold any counts side by side."""
    rng = np.random.default_rng(3)
    for _ in range(200):
        counts = rng.integers(0, 300, 12) * rng.integers(0, 2, 12)
        used = 0
        starts = np.concatenate([[0], np.cumsum(counts)])
        for expert, count in enumerate(counts):
            if count:
                first = int(starts[expert]) // 128 + expert
                assert first >= used
                used = first + -(-int(count) // 128)
        assert used <= _C.packed_tiles(int(starts[-1]), 12)


class Recorder:
    """A compiled loop that only says what it was given."""

    stream_bytes = 256

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def run(self, **given: Any) -> None:
        self.calls.append(given)


@pytest.mark.parametrize(("version", "streams"), [(130100, 1), (130101, 8)])
def test_streams_of_a_call(monkeypatch: pytest.MonkeyPatch, version: int, streams: int) -> None:
    """Where kernels side by side spoil results there is one stream, as with one expert."""
    monkeypatch.setattr(_library, "opened", lambda: SimpleNamespace(version=version))
    monkeypatch.setattr(looped, "cuda_launch", lambda _: {"device": 0, "stream": 0})
    monkeypatch.setenv(looped.TEST_CAPABILITY, "10.0")
    cpu = torch.device("cpu")
    gemm: Any = Recorder()
    kinds = _C.LoopedWeights.EXPANDED, _C.DType.BF16, _C.DType.F32
    looped.multiply(
        looped.Product(64, 64, *kinds),
        looped.Sizes(torch.arange(1, 13), 12, cpu),
        fp4lt.quantize(torch.ones(12, 64, 64)),
        torch.ones(12, 64, dtype=BF16),
        torch.empty(12, 64),
        gemm=gemm,
    )
    assert [call["streams"] for call in gemm.calls] == [streams]


def grouped(**changes: Any) -> GroupedProblem:
    given: dict[str, Any] = {
        "experts": 4,
        "n": 64,
        "k": 64,
        "a_format": "bfloat16",
        "b_format": "nvfp4",
        "out_dtype": BF16,
        "recipe": "w4a4",
    }
    return GroupedProblem(**(given | changes))


def test_refusals_without_a_cuda_device() -> None:
    for backend in (dequant.DequantBackend(), cublaslt.CublasLtBackend()):
        text = backend.refusal(grouped(), torch.device("cpu"))
        assert text == "it needs a CUDA device, and the tensors are on cpu"


@pytest.mark.parametrize("backend", [dequant.DequantBackend(), cublaslt.CublasLtBackend()])
def test_both_backends_ask_for_the_defects_of_the_library(
    monkeypatch: pytest.MonkeyPatch, backend: Any
) -> None:
    module = dequant if backend.name == "dequant" else cublaslt
    monkeypatch.setattr(module, "device_refusal", lambda *_: None)
    monkeypatch.setattr(_library, "opened", lambda: SimpleNamespace(version=130100))
    monkeypatch.setenv(looped.TEST_CAPABILITY, "10.0")
    monkeypatch.delenv("FP4LT_ACCEPT_TENSOR_MEMORY", raising=False)
    text = backend.refusal(grouped(), torch.device("cuda", 0))
    assert text is not None
    assert "Tensor Memory" in text
    monkeypatch.setenv("FP4LT_ACCEPT_TENSOR_MEMORY", "1")
    assert backend.refusal(grouped(), torch.device("cuda", 0)) is None


@pytest.mark.parametrize(
    ("problem", "words"),
    [
        (grouped(b_format="bfloat16"), "multiplies NVFP4 weights, and these are bfloat16"),
        (grouped(recipe="w4a16"), "NVFP4 by NVFP4; use recipe='w4a4'"),
        (grouped(k=48), "multiple of 64, and this is 48"),
        (grouped(k=96), "multiple of 64, and this is 96; pad codes and scales with zeros"),
        (grouped(k=192), None),
        (grouped(n=60), "multiple of 8, and these are 60"),
        (grouped(a_format="nvfp4"), None),
        (grouped(a_format="float32"), None),
        (MoEProblem(4, 64, 48, 2, BF16, "nvfp4", "w4a4", "gate_up", "silu"), "this is 48"),
        (MoEProblem(4, 64, 96, 2, BF16, "nvfp4", "w4a16", "gate_up", "silu"), "use recipe"),
        (MoEProblem(4, 64, 96, 2, BF16, "nvfp4", "w4a4", None, "relu2"), "this is 96"),
        (MoEProblem(4, 64, 128, 2, BF16, "nvfp4", "w4a4", None, "relu2"), None),
    ],
    ids=str,
)
def test_what_fp4_products_cannot_be(problem: Any, words: str | None) -> None:
    text = cublaslt._format_refusal(problem)
    assert text is None if words is None else text is not None and words in text


@pytest.mark.gpu
def test_fp4_needs_blackwell(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, device = cublaslt.CublasLtBackend(), torch.device("cuda", 0)
    monkeypatch.setenv(looped.TEST_CAPABILITY, "9.0")
    text = backend.refusal(grouped(), device)
    assert text == (
        "it needs FP4 tensor cores, compute capability 10.0 or later, and cuda:0 has 9.0"
    )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
@pytest.mark.parametrize("k", [16, 80, 4096])
def test_expansion_is_exact(dtype: torch.dtype, k: int) -> None:
    """Every code under every scale, NaN included, in slices with padding."""
    rng = cases.generator(k)
    rows = 131
    codes = torch.from_numpy(rng.integers(0, 256, (rows, k // 2), np.uint8))
    scales = torch.from_numpy(rng.permutation(rows * (k // 16)) % 128).to(torch.uint8)
    w = fp4lt.NVFP4Tensor.from_linear_scales(
        codes, scales.reshape(rows, k // 16), torch.tensor(1.0)
    )
    gpu = w.to("cuda")
    for row0, count, pad in ((0, 128, 0), (128, 3, 5), (0, 131, 5)):
        out = torch.full((count + pad, k), 7.0, dtype=dtype, device="cuda")
        _C.cuda_expand(
            codes=address(gpu.codes),
            scales=address(gpu.scales),
            row0=row0,
            rows=count,
            pad=pad,
            k=k,
            out=address(out),
            out_type=_C.DType.BF16 if dtype == BF16 else _C.DType.F16,
            **cuda_launch(out.device),
        )
        want = w.dequantize(torch.float32)[row0 : row0 + count]
        got = out[:count].cpu().to(torch.float32)
        assert torch.equal(got.isnan(), want.isnan())
        keep = ~want.isnan()
        assert torch.equal(got[keep], want[keep])
        assert not bool(out[count:].any())


@pytest.mark.gpu
def test_integers_go_to_the_device_by_value() -> None:
    values = torch.arange(1300) * 3
    out = torch.zeros(1300, dtype=torch.int32, device="cuda")
    launch = cuda_launch(out.device)
    _C.cuda_put_integers(values=address(values), count=1300, out=address(out), **launch)
    values.zero_()
    assert torch.equal(out.cpu(), (torch.arange(1300) * 3).to(torch.int32))


COUNTS = (0, 3, 128, 0, 129, 1, 300, 0, 127)


@pytest.mark.gpu
@pytest.mark.parametrize("k", [32, 96, 1056])
@pytest.mark.parametrize("source", ["dense", "nvfp4"])
def test_codes_with_each_experts_scales_in_tiles_of_their_own(k: int, source: str) -> None:
    """Codes are quantize()'s; an expert's tiles are what its rows alone would have, zeros too."""
    counts = torch.tensor(COUNTS)
    ends = counts.cumsum(0)
    rows = int(ends[-1])
    x = torch.randn(rows + 5, k)
    q = fp4lt.quantize(x, global_scale="row")
    a: Any = x.cuda() if source == "dense" else q.to("cuda")
    sizes = looped.Sizes(ends, rows, torch.device("cuda", 0))
    place = looped_calls._locate(sizes, True)
    assert place.tiles is not None
    want_expert = torch.repeat_interleave(torch.arange(len(counts)), counts)
    assert torch.equal(place.expert.cpu().to(torch.int64), want_expert)
    problem = grouped(k=k, a_format="float32" if source == "dense" else "nvfp4")
    got = looped_calls._grouped_rows(problem, a, sizes, True, None, place)
    assert isinstance(got, stages.Rows)
    assert got.scales is not None
    assert got.global_scale is not None
    looped_calls._clear(got.scales, sizes.device, rows, k)
    assert torch.equal(got.values.cpu(), q.codes[:rows])
    assert torch.equal(got.global_scale.cpu(), q.global_scale[:rows])
    tiles = got.scales.cpu()
    linear = untile_scales(q.scales.view(torch.uint8), rows + 5, k // 16)
    start = 0
    for expert, count in enumerate(COUNTS):
        if count == 0:
            continue
        own = fp4lt.NVFP4Tensor.from_linear_scales(
            q.codes[start : start + count], linear[start : start + count], torch.tensor(1.0)
        ).scales.view(torch.uint8)
        first = start // 128 + expert
        here = tiles[first : first + -(-count // 128)].reshape(own.shape)
        assert torch.equal(here, own)
        start += count


def make_gemm(n: int, k: int, out: _C.DType = _C.DType.F32) -> _C.LoopedGemm:
    product = looped.Product(n, k, _C.LoopedWeights.DENSE, _C.DType.BF16, out)
    return looped.compiled(product, 0, None)


@pytest.mark.gpu
def test_candidates_can_be_pinned_and_give_the_same_exact_bits() -> None:
    rng = cases.generator(31)
    n, k, rows = 256, 1024, 3
    w, x = cases.exact_matrix(rng, (1, n, k)).cuda(), cases.exact_matrix(rng, (rows, k)).cuda()
    want = x.float() @ w[0].float().T
    out = torch.empty(rows, n, device="cuda")
    gemm = make_gemm(n, k)
    view = _C.DenseView(data=address(w), type=_C.DType.BF16, expert_stride=n * k, row_stride=k)
    found = gemm.candidates(
        weights=view,
        rows=address(x),
        row_stride=k,
        row_scales=0,
        out=address(out),
        out_row_stride=n,
        row_count=4,
        count=8,
    )
    assert 1 <= len(found) <= 8
    assert len({a.data for a in found}) == len(found)
    for algorithm in found:
        assert "tile" in str(algorithm)
        gemm.pin(4, algorithm.data)
        out.fill_(float("nan"))
        product = looped.Product(n, k, _C.LoopedWeights.DENSE, _C.DType.BF16, _C.DType.F32)
        looped.multiply(product, looped.Sizes(torch.tensor([rows]), rows, w.device), w, x, out)
        bounds.assert_bitwise(out.cpu(), want.cpu(), signed_zeros=False)
    with pytest.raises(fp4lt.errors.ArgumentError, match="64 bytes, not 3"):
        gemm.pin(4, b"abc")


@pytest.mark.gpu
@pytest.mark.parametrize("out_dtype", [BF16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("rows", [1, 5, 130])
def test_the_real_library_knows_our_fp4_products_but_not_on_this_gpu(
    monkeypatch: pytest.MonkeyPatch, out_dtype: torch.dtype, rows: int
) -> None:
    """Before Blackwell a well-formed FP4 product is 15 NOT_SUPPORTED; 7 would be a wrong one."""
    if torch.cuda.get_device_capability() >= (10, 0):
        pytest.skip("this GPU has FP4")
    if _library.opened().version < 120800 or "cublas" not in _library.opened().path:
        pytest.skip("needs a real library of 12.8 or later")
    monkeypatch.setenv(looped.TEST_CAPABILITY, "10.0")
    monkeypatch.setenv("FP4LT_ACCEPT_TENSOR_MEMORY", "1")
    w = fp4lt.quantize(torch.randn(2, 256, 512)).to("cuda")
    x = torch.randn(rows, 512, dtype=BF16, device="cuda")
    for scale in (None, 0.01):
        with pytest.raises(
            LibraryError, match=r"(?s)AlgoGetHeuristic failed .*\(15\).*R_4F_E2M1.*VEC16_UE4M3"
        ):
            fp4lt.grouped_mm(
                x,
                w.mT,
                offs=torch.tensor([0, rows]),
                a_scale=scale,
                out_dtype=out_dtype,
                backend="cublaslt",
            )
