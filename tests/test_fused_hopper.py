# SPDX-License-Identifier: Apache-2.0
"""The fused kernel's wgmma form against its mma.sync form, which other tests judge: same bits."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch

import fp4lt
from fp4lt import _C
from fp4lt.backends import fused
from fp4lt.testing import bounds, cases

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _hopper() -> None:
    probe = weights(np.random.default_rng(0), (1, 128, 256))
    if fused._form(probe, torch.device("cuda:0")) != _C.RowForm.IMAGE:
        pytest.skip("the wgmma form needs compute capability 9.0 and code for sm_90a")


def weights(rng: np.random.Generator, shape: tuple[int, ...]) -> fp4lt.NVFP4Tensor:
    return fp4lt.NVFP4Tensor.from_linear_scales(*cases.random_operand(rng, shape)).to("cuda")


def by_mma(monkeypatch: pytest.MonkeyPatch, call: Any) -> torch.Tensor:
    with monkeypatch.context() as patch:
        patch.setattr(fused, "_form", lambda *_: _C.RowForm.PREPARED)
        result: torch.Tensor = call()
    return result


def offsets(rng: np.random.Generator, experts: int, rows: int) -> torch.Tensor:
    cuts = np.sort(rng.integers(0, rows + 1, experts - 1))
    return torch.tensor([*cuts, rows], dtype=torch.int32, device="cuda")


# One tile shared by many blocks of threads; ragged N; one range of K and several; more blocks of
# rows than one, of every size (8 to 128 rows).
@pytest.mark.parametrize("rows", [1, 7, 60, 250, 900, 2500])
@pytest.mark.parametrize(
    "shape",
    [(1, 128, 7168), (3, 200, 256), (40, 144, 768), (8, 1536, 2048), (5, 129, 1024), (16, 7, 512)],
    ids=str,
)
@pytest.mark.parametrize("kind", ["w4a16-bf16", "w4a16-fp16", "w4a4-bf16"])
def test_grouped_mm(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int, int], rows: int, kind: str
) -> None:
    rng = np.random.default_rng(rows)
    experts, n, k = shape
    w = weights(rng, shape)
    recipe: Any
    recipe, dtype = kind.split("-")
    x = cases.random_matrix(rng, (rows, k), getattr(torch, {"bf16": "bfloat16"}.get(dtype, "half")))
    x, offs = x.cuda(), offsets(rng, experts, rows)
    bias = torch.randn(experts, n, device="cuda")
    alpha = torch.rand(experts, device="cuda") + 0.5

    def call() -> torch.Tensor:
        out = torch.full((rows, n), float("nan"), device="cuda")
        fp4lt.grouped_mm(
            x, w.mT, offs=offs, bias=bias, alpha=alpha, recipe=recipe, out=out, backend="fused"
        )
        return out

    bounds.assert_bitwise(call().cpu(), by_mma(monkeypatch, call).cpu())


def test_nan_scales_and_every_scale_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(3)
    codes = torch.from_numpy(rng.integers(0, 256, (2, 256, 256), np.uint8))
    # All 128 bytes, the denormal ones and NaN among them, in every place of a tile.
    scales = torch.from_numpy(rng.permutation(np.arange(2 * 256 * 32) % 128).astype(np.uint8))
    scales = scales.reshape(2, 256, 32).view(torch.float8_e4m3fn)
    w = fp4lt.NVFP4Tensor.from_linear_scales(codes, scales, torch.tensor([1.0, 2.0])).to("cuda")
    x = torch.randn(20, 512, device="cuda", dtype=torch.bfloat16)
    x[3, 5] = float("nan")
    x[4, 6] = float("inf")
    offs = torch.tensor([9, 20], dtype=torch.int32, device="cuda")

    def call() -> torch.Tensor:
        return fp4lt.grouped_mm(
            x, w.mT, offs=offs, recipe="w4a16", out_dtype=torch.float32, backend="fused"
        )

    got, want = call().cpu(), by_mma(monkeypatch, call).cpu()
    assert torch.equal(got.isnan(), want.isnan())
    bounds.assert_bitwise(got.nan_to_num(), want.nan_to_num())


def block(
    rng: np.random.Generator, experts: int, hidden: int, inner: int, order: Any, extras: bool
) -> fp4lt.MoEWeights:
    more: dict[str, Any] = {}
    if extras:
        more = {
            "gate_up_scales": torch.rand(experts, 2, device="cuda") + 0.5,
            "w13_bias": torch.randn(experts, 2 * inner, device="cuda"),
            "w2_bias": torch.randn(experts, hidden, device="cuda"),
            "swiglu_limit": torch.rand(experts, device="cuda") + 0.5,
        }
    w13, w2 = weights(rng, (experts, 2 * inner, hidden)), weights(rng, (experts, hidden, inner))
    return fp4lt.MoEWeights(w13, w2, order=order, **more)


@pytest.mark.parametrize("tokens", [1, 5, 33, 200, 700])
@pytest.mark.parametrize(
    "shape", [(6, 512, 256, 2), (33, 2048, 768, 8), (4, 1024, 2048, 3)], ids=str
)
@pytest.mark.parametrize("order", ["gate_up", "up_gate", "interleaved"])
@pytest.mark.parametrize("recipe", ["w4a16", "w4a4"])
@pytest.mark.parametrize("extras", [False, True])
def test_moe(
    monkeypatch: pytest.MonkeyPatch,
    shape: tuple[int, int, int, int],
    tokens: int,
    order: str,
    recipe: Any,
    extras: bool,
) -> None:
    experts, hidden, inner, top_k = shape
    rng = np.random.default_rng(tokens)
    w = block(rng, experts, hidden, inner, order, extras)
    x = torch.randn(tokens, hidden, device="cuda").bfloat16()
    ids = torch.from_numpy(rng.integers(-1, experts, (tokens, top_k))).cuda()
    routing: Any = {"topk_ids": ids, "topk_weights": torch.rand(tokens, top_k, device="cuda")}

    def call() -> torch.Tensor:
        return fp4lt.moe(x, w, **routing, recipe=recipe, backend="fused")

    got = call()
    bounds.assert_bitwise(got.cpu(), by_mma(monkeypatch, call).cpu())
    # The activation in the epilogue, and in a kernel of its own.
    with monkeypatch.context() as patch:
        patch.setattr(fused, "_gates", lambda *_: False)
        bounds.assert_bitwise(call().cpu(), got.cpu())


def test_repeats_and_replays_of_shared_tiles() -> None:
    """Blocks of threads that share a tile hand their sums on through memory: never the old ones."""
    rng = np.random.default_rng(1)
    w = block(rng, 16, 2048, 512, "gate_up", extras=False)
    x = torch.randn(3, 2048, device="cuda").bfloat16()
    tw = torch.rand(3, 4, device="cuda")
    ids = torch.zeros(3, 4, dtype=torch.int32, device="cuda")
    out = torch.empty_like(x)

    def call() -> None:
        fp4lt.moe(x, w, topk_ids=ids, topk_weights=tw, recipe="w4a16", out=out, backend="fused")

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for i in range(200):
        ids.copy_(torch.from_numpy(rng.integers(0, 16, (3, 4))))
        x.copy_(torch.randn(3, 2048))
        out.fill_(float("nan"))
        graph.replay()
        replayed = out.clone()
        call()
        assert torch.equal(replayed, out), i


@pytest.mark.parametrize("cut", ["slice", "step", "expand"])
def test_views_of_weights(monkeypatch: pytest.MonkeyPatch, cut: str) -> None:
    """Experts from the middle, every other one, and one in several places."""
    rng = np.random.default_rng(5)
    w = weights(rng, (6, 256, 512))
    if cut == "expand":
        w = fp4lt.NVFP4Tensor(
            w.codes[:1].expand(3, -1, -1), w.scales[:1].expand(3, -1, -1), w.global_scale[:3]
        )
    else:
        w = w[1:4] if cut == "slice" else w[::2]
    x = torch.randn(21, 512, device="cuda").bfloat16()
    offs = torch.tensor([4, 9, 21], device="cuda", dtype=torch.int32)

    def call() -> torch.Tensor:
        return fp4lt.grouped_mm(x, w.mT, offs=offs, recipe="w4a16", backend="fused")

    bounds.assert_bitwise(call().cpu(), by_mma(monkeypatch, call).cpu())


@pytest.mark.parametrize(("hidden", "inner"), [(2880, 768), (512, 272)], ids=str)
@pytest.mark.parametrize("recipe", ["w4a16", "w4a4"])
def test_one_gemm_of_each_form(
    monkeypatch: pytest.MonkeyPatch, hidden: int, inner: int, recipe: Any
) -> None:
    rng = np.random.default_rng(7)
    w = block(rng, 5, hidden, inner, "gate_up", extras=True)
    x = torch.randn(90, hidden, device="cuda").bfloat16()
    ids = torch.from_numpy(rng.integers(-1, 5, (90, 3))).cuda()
    tw = torch.rand(90, 3, device="cuda")

    def call() -> torch.Tensor:
        return fp4lt.moe(x, w, topk_ids=ids, topk_weights=tw, recipe=recipe, backend="fused")

    bounds.assert_bitwise(call().cpu(), by_mma(monkeypatch, call).cpu())


def test_two_threads_on_one_stream() -> None:
    """Nobody's memory is given to the other between a call's allocations and its launches."""
    rng = np.random.default_rng(9)
    w = block(rng, 8, 1024, 512, "gate_up", extras=False)
    x = torch.randn(4, 1024, device="cuda").bfloat16()
    ids = torch.from_numpy(rng.integers(0, 8, (4, 3))).cuda()
    tw = torch.rand(4, 3, device="cuda")

    def call() -> torch.Tensor:
        return fp4lt.moe(x, w, topk_ids=ids, topk_weights=tw, recipe="w4a16", backend="fused")

    want = call()
    wrong: list[int] = []

    def repeat() -> None:
        wrong.extend(i for i in range(300) if not torch.equal(call(), want))

    threads = [threading.Thread(target=repeat) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
