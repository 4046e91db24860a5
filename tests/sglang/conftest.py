# SPDX-License-Identifier: Apache-2.0
"""Makes SGLang importable on a machine without a GPU, where it is installed at all."""

from __future__ import annotations

from importlib import metadata

import torch


def _installed(package: str) -> bool:
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True


if _installed("sglang") and not torch.cuda.is_available():
    # torchvision's wheel does not load beside a CPU build of torch without the operators that it
    # would define itself.
    _VISION = torch.library.Library("torchvision", "DEF")
    for _name in ("nms", "qnms"):
        _VISION.define(_name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
