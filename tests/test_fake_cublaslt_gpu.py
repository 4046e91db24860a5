# SPDX-License-Identifier: Apache-2.0
"""The fake libcublasLt on a GPU: device memory, streams, captures and what kernels report."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import lt_cases
import lt_driver as lt
import native_libraries
import numpy as np
import pytest
import torch
from lt_driver import Lt, Matmul, i32

from fp4lt.testing import bounds, cases, oracle

pytestmark = pytest.mark.gpu


class OnDevice:
    """Bytes on the GPU with what :class:`lt_driver.Matmul` asks of an array."""

    def __init__(self, data: lt.U8) -> None:
        self.tensor = torch.from_numpy(data.copy()).cuda()
        self.size = data.size
        self.ctypes = SimpleNamespace(data=self.tensor.data_ptr())


@pytest.fixture(scope="module")
def library() -> Lt:
    if native_libraries.nvcc() is None:
        pytest.skip("no nvcc on this machine")
    torch.zeros(1, device="cuda")
    return Lt(native_libraries.fake_cublaslt(cuda=True))


@pytest.fixture
def fake(library: Lt) -> Lt:
    library.check()
    library.lib.fake_forget_reason()
    return library


def moved(matmul: Matmul) -> dict[str, Any]:
    """Move all memory of a plain NVFP4 matmul to the GPU; C and D stay one."""
    device: dict[str, Any] = {}
    for name in ("a", "b", "d", "alpha", "beta", "workspace"):
        array = matmul.data[name]
        assert array is not None
        device[name] = OnDevice(array)
    device["c"] = device["d"]
    matmul.data = device
    for attribute, array in zip((lt.A_SCALE, lt.B_SCALE), list(matmul.keep), strict=True):
        scales: Any = OnDevice(array)
        device[str(attribute)] = scales
        matmul.point(attribute, scales)
    torch.cuda.synchronize()
    return device


def outcome(matmul: Matmul, device: dict[str, Any]) -> Any:
    torch.cuda.synchronize()
    return lt_cases.result(
        SimpleNamespace(data={"d": device["d"].tensor.cpu().numpy()}, d=matmul.d)  # type: ignore[arg-type]
    )


def exact(rows: cases.Linear, weight: cases.Linear, factor: float) -> Any:
    return factor * (lt_cases.products(rows) @ lt_cases.products(weight).T)


@pytest.mark.parametrize("d_type", [lt.BF16, lt.F16, lt.F32])
@pytest.mark.parametrize(("m", "n", "k"), [(8, 1, 32), (264, 130, 160), (128, 2, 7168)])
def test_the_same_bits_as_the_oracle(fake: Lt, m: int, n: int, k: int, d_type: int) -> None:
    rng = cases.generator(m * n * k)
    weight, rows = cases.random_operand(rng, (m, k)), cases.random_operand(rng, (n, k))
    matmul = lt_cases.nvfp4(fake, weight, rows, d_type=d_type, alpha=2.0**-9)
    device = moved(matmul)
    stream = torch.cuda.Stream()
    matmul.stream = stream.cuda_stream
    assert matmul.run() == lt.OK, fake.reason()
    sums = oracle.exact_sum(lt_cases.products(rows), lt_cases.products(weight), nvfp4=True)
    want = bounds.round_to(sums.c * 2.0**-9, lt_cases.DTYPES[d_type])
    bounds.assert_bitwise(outcome(matmul, device), want, signed_zeros=False)
    assert fake.check() == lt.OK, fake.reason()


def test_captured_and_replayed(fake: Lt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_CUBLASLT_CAPTURE", "refuse")
    rng = cases.generator(9)
    weight, rows = cases.exact_operand(rng, (64, 96)), cases.exact_operand(rng, (5, 96))
    matmul = lt_cases.nvfp4(fake, weight, rows, d_type=lt.F32)
    device = moved(matmul)
    made = matmul.make()
    status, results = matmul.ask(made)
    assert status == lt.OK
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        matmul.stream = torch.cuda.current_stream().cuda_stream
        assert matmul.matmul(made, results[0].algo) == lt.OK, fake.reason()
    for alpha in (1.0, 4.0):
        device["alpha"].tensor.view(torch.float32).fill_(alpha)
        device["d"].tensor.fill_(0xFF)
        graph.replay()
        bounds.assert_bitwise(
            outcome(matmul, device), exact(rows, weight, alpha), signed_zeros=False
        )
    assert fake.check() == lt.OK, fake.reason()


def test_heuristic_breaks_a_capture() -> None:
    """In a process of its own: a broken capture leaves torch's allocator in doubt."""
    code = f"""
import torch, lt_cases, lt_driver as lt
from test_fake_cublaslt_gpu import moved
torch.zeros(1, device="cuda")
fake = lt.Lt({str(native_libraries.fake_cublaslt(cuda=True))!r})
matmul = lt_cases.small(fake)
moved(matmul)
made = matmul.make()
assert matmul.ask(made)[0] == lt.OK
graph = torch.cuda.CUDAGraph()
with torch.cuda.stream(torch.cuda.Stream()):
    graph.capture_begin()
    assert matmul.ask(made)[0] == lt.INTERNAL
    assert "asked during a capture" in fake.reason()
    try:
        graph.capture_end()
    except RuntimeError:
        print("broken")
"""
    environment = {"FAKE_CUBLASLT_CAPTURE": "refuse", "PYTHONPATH": str(native_libraries.TESTS)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.startswith("broken"), done.stderr


def test_what_kernels_read_is_told(fake: Lt) -> None:
    matmul = lt_cases.small(fake)
    matmul.keep[0][oracle.tile_offset(130, 1, 8)] = 0x90
    matmul.keep[1][oracle.tile_offset(5, 0, 8)] = 1
    moved(matmul)
    assert matmul.run() == lt.OK
    assert fake.check() == lt.FAILED
    assert "1 bytes of B's scale padding" in fake.reason()
    assert "1 signed scale bytes (from 0x80 on) of A" in fake.reason()


def test_memory_of_the_wrong_side(fake: Lt) -> None:
    for name in ("a", "b", "d", "alpha", "workspace"):
        matmul = lt_cases.small(fake)
        host = matmul.data[name]
        moved(matmul)
        matmul.data[name] = host
        assert matmul.run() == lt.INVALID
        assert "is not device memory" in fake.reason()
    matmul = lt_cases.small(fake)
    moved(matmul)
    matmul.desc[lt.POINTER_MODE] = i32(0)
    assert matmul.run() == lt.INVALID
    assert "is device memory, but POINTER_MODE is HOST" in fake.reason()


def test_a_workspace_for_two_at_once(fake: Lt) -> None:
    rng = cases.generator(2)
    weight, rows = cases.random_operand(rng, (512, 28672)), cases.random_operand(rng, (16, 28672))
    both = [lt_cases.nvfp4(fake, weight, rows) for _ in range(2)]
    devices = [moved(matmul) for matmul in both]
    asked = [matmul.make() for matmul in both]
    algos = [matmul.ask(made)[1][0].algo for matmul, made in zip(both, asked, strict=True)]
    streams = [torch.cuda.Stream() for _ in both]
    for shared in (False, True):
        if shared:
            both[1].data["workspace"] = devices[0]["workspace"]
        for matmul, made, algo, stream in zip(both, asked, algos, streams, strict=True):
            matmul.stream = stream.cuda_stream
            assert matmul.matmul(made, algo) == lt.OK, fake.reason()
        assert fake.check() == (lt.FAILED if shared else lt.OK)
    assert "matmuls whose workspace another one wrote to meanwhile" in fake.reason()


def _on_device(array: lt.U8, keep: list[Any]) -> Any:
    keep.append(OnDevice(array))
    return keep[-1]


def _pointers_on_device(array: lt.U8, by_address: dict[int, Any], keep: list[Any]) -> Any:
    """Move an array of host pointers, each to the GPU copy of what it pointed to."""
    addresses = [by_address[int(x)].tensor.data_ptr() for x in array.view(np.uint64)]
    return _on_device(np.array(addresses, np.uint64).view(np.uint8), keep)


@pytest.mark.parametrize("counts", [(3, 0, 5, 1), (129, 2)])
def test_groups(fake: Lt, counts: tuple[int, ...]) -> None:
    matmul, experts = lt_cases.grouped(fake, counts)
    keep: list[Any] = []
    arrays = [*matmul.keep[2:], *(group.out for group in experts)]
    by_address = {array.ctypes.data: _on_device(array, keep) for array in arrays}
    for attribute, array in zip((lt.A_SCALE, lt.B_SCALE), matmul.keep[:2], strict=True):
        matmul.point(attribute, _pointers_on_device(array, by_address, keep))
    for layout in (matmul.a, matmul.b, matmul.d):
        assert layout.arrays is not None
        rows, cols, ld = (_on_device(array, keep) for array in layout.arrays)
        layout.arrays = (rows, cols, ld)
    data: dict[str, Any] = dict(matmul.data)
    for name in ("a", "b", "d", "alpha"):
        data[name] = _pointers_on_device(data[name], by_address, keep)
    data["c"] = data["d"]
    data["beta"], data["workspace"] = (_on_device(data[x], keep) for x in ("beta", "workspace"))
    matmul.data = data
    assert matmul.run() == lt.OK, fake.reason()
    assert fake.check() == lt.OK, fake.reason()
    for group in experts:
        group.out = by_address[group.out.ctypes.data].tensor.cpu().numpy()
        want = bounds.round_to(exact(group.rows, group.weight, group.alpha), torch.bfloat16)
        bounds.assert_bitwise(lt_cases.group_result(group, 64), want, signed_zeros=False)
