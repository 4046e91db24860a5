# SPDX-License-Identifier: Apache-2.0
"""Threads: torch's own where there are some, else a pool: bounded, shared, gone after a fork."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import fp4lt
from fp4lt import _C
from fp4lt.testing import cases


def problem(seed: int) -> tuple[torch.Tensor, fp4lt.NVFP4Tensor, torch.Tensor]:
    rng = cases.generator(seed)
    w = fp4lt.NVFP4Tensor.from_linear_scales(*cases.random_operand(rng, (4, 96, 512)))
    x = cases.random_matrix(rng, (50, 512))
    return x, w, cases.offsets([3, 0, 20, 27])


@pytest.fixture(params=["openmp", "pool"])
def threads_of(request: pytest.FixtureRequest) -> Iterator[str]:
    """Both kinds of threads, for a test that both have to pass."""
    _C.allow_openmp(request.param == "openmp")
    yield request.param
    _C.allow_openmp(True)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="no list of mapped files")
def test_the_openmp_runtime_of_the_process_is_used() -> None:
    names = re.findall(
        r"/(lib(?:gomp|iomp5|omp)[^/\n]*)$", Path("/proc/self/maps").read_text(), re.M
    )
    assert _C.openmp_in_use() == bool(names)
    _C.allow_openmp(False)
    assert not _C.openmp_in_use()
    _C.allow_openmp(True)
    code = "import torch, fp4lt; assert not fp4lt._C.openmp_in_use()"
    subprocess.run(
        [sys.executable, "-c", code], check=True, env={**os.environ, "FP4LT_OPENMP": "0"}
    )


@pytest.mark.usefixtures("two_threads")
def test_both_kinds_of_threads_give_the_same_bits() -> None:
    x, w, offs = problem(1)
    want = fp4lt.grouped_mm(x, w.mT, offs=offs)
    _C.allow_openmp(False)
    y = fp4lt.grouped_mm(x, w.mT, offs=offs)
    _C.allow_openmp(True)
    assert torch.equal(y, want)


def test_pool_is_bounded_by_torch() -> None:
    """In a process of its own: no helper for one thread, and never more than asked for."""
    code = """
import torch, fp4lt
from fp4lt import _C
_C.allow_openmp(False)
torch.set_num_threads(1)
w = fp4lt.quantize(torch.randn(2, 512, 256))
x = torch.randn(64, 256)
offs = torch.tensor([30, 64])
fp4lt.grouped_mm(x, w.mT, offs=offs)
assert _C.pool_size() == 0, _C.pool_size()
torch.set_num_threads(3)
for _ in range(20):
    fp4lt.grouped_mm(x, w.mT, offs=offs)
assert 0 < _C.pool_size() <= 2, _C.pool_size()
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.usefixtures("two_threads", "threads_of")
def test_callers_in_several_threads() -> None:
    problems = [problem(seed) for seed in range(4)]
    want = [fp4lt.grouped_mm(x, w.mT, offs=offs) for x, w, offs in problems]
    wrong: list[int] = []

    def work(i: int) -> None:
        x, w, offs = problems[i]
        results = (fp4lt.grouped_mm(x, w.mT, offs=offs) for _ in range(50))
        wrong.extend(i for y in results if not torch.equal(y, want[i]))

    workers = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.usefixtures("two_threads")
def test_child_of_a_fork_computes(threads_of: str) -> None:
    """The parent's threads do not exist in the child; it must neither hang nor differ."""
    x, w, offs = problem(0)
    want = fp4lt.grouped_mm(x, w.mT, offs=offs)
    assert threads_of == "openmp" or _C.pool_size() > 0
    child = os.fork()
    if child == 0:
        y = fp4lt.grouped_mm(x, w.mT, offs=offs)
        same = all(a.tolist() == b.tolist() for a, b in zip(y, want, strict=True))
        own = _C.pool_size() > 0 and not _C.openmp_in_use()
        os._exit(0 if same and own else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert torch.equal(fp4lt.grouped_mm(x, w.mT, offs=offs), want)


def test_unknown_kernel_table() -> None:
    with pytest.raises(fp4lt.errors.ArgumentError, match=r"no CPU kernels named 'mmx'.*scalar"):
        _C.select_cpu_kernels("mmx")
    assert _C.selected_cpu_kernels() == _C.cpu_kernels()[-1]
