# SPDX-License-Identifier: Apache-2.0
"""Makes SGLang importable on a machine without a GPU."""

from __future__ import annotations

from importlib import metadata

import pytest
import torch

_kept: list[torch.library.Library] = []


def prepare() -> None:
    """Define torchvision's operators, without which its wheel does not load beside a CPU torch."""
    if _kept or torch.cuda.is_available():
        return
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _kept.append(library)


def need_sglang() -> None:
    """Skip the test module where there is no SGLang."""
    # This folder's own name would pass for a package without files.
    try:
        metadata.version("sglang")
    except metadata.PackageNotFoundError:
        pytest.skip("needs sglang: make test-sglang", allow_module_level=True)
    prepare()
