# SPDX-License-Identifier: Apache-2.0
"""Makes vLLM's Python importable on a machine without a GPU."""

from __future__ import annotations

from importlib import metadata

import pytest
import torch

_kept: list[torch.library.Library] = []


def need_vllm() -> None:
    """Skip the test module where there is no vLLM; else prepare what its imports need."""
    # This folder's own name would pass for a package without files.
    try:
        metadata.version("vllm")
    except metadata.PackageNotFoundError:
        pytest.skip("needs vllm: make test-vllm", allow_module_level=True)
    if _kept or torch.cuda.is_available():
        return
    # torchvision's wheel does not load beside a CPU torch without its own operators.
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _kept.append(library)
