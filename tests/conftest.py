# SPDX-License-Identifier: Apache-2.0
"""Fixtures shared by all tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from process_group import ProcessGroup

from fp4lt import _C

DATA = Path(__file__).parent / "data"

# Reproducible everywhere: the same examples in each run, however slow the machine.
settings.register_profile("fp4lt", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("fp4lt")


@pytest.fixture(params=_C.cpu_kernels())
def kernel_table(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each CPU kernel table that this processor runs, in use for the test."""
    name = str(request.param)
    _C.select_cpu_kernels(name)
    yield name
    _C.select_cpu_kernels("")


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Torch's thread count at 2 for the test, so that the pool is used on any machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", params=[2, 4], ids=lambda n: f"{n}ranks")
def group(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ProcessGroup]:
    """Processes in a gloo group, that outlive the tests which use them."""
    processes = ProcessGroup(request.param, tmp_path_factory.mktemp("group"))
    yield processes
    processes.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked ``gpu`` need a CUDA device."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="no CUDA device")
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(skip)
