# SPDX-License-Identifier: Apache-2.0
"""quantize and dequantize: between ordinary tensors and NVFP4Tensor."""

from __future__ import annotations

import torch

from fp4lt._interop import as_tensor, tracing
from fp4lt.codec import GlobalScaleArg, is_per_row, quantize_parts
from fp4lt.errors import ArgumentError
from fp4lt.tensor import NVFP4Tensor


def quantize(x: torch.Tensor, *, global_scale: GlobalScaleArg = None) -> NVFP4Tensor:
    """Round a matrix or a stack of matrices to NVFP4.

    With ``g`` the global scale and ``b`` a block of 16 neighbours along K::

        g        = max|x| / 2688                   unless given; 1 where x is all zero
        scale[b] = e4m3(max|x[b]| / (6 g))         nearest even, at most 448
        code     = e2m1(x / (scale[b] g))          nearest, ties to the even code, at most 6

    Parameters
    ----------
    x : (M, K) or (E, N, K) float32, float16 or bfloat16
        K is a positive multiple of 16 and contiguous; other strides are honoured.
    global_scale : None, "row", float, or float32 tensor of shape (), (E,) for 3-D or (M,) for 2-D
        ``g``: None derives one per tensor (2-D) or per expert (3-D), "row" one per row of a 2-D
        `x`; a number or a tensor is taken as given, and values beyond 2688 g saturate.

    Returns
    -------
    NVFP4Tensor
        Of x's shape; the padding of its scales is zero.

    Raises
    ------
    ShapeError, DTypeError, LayoutError, ArgumentError

    Notes
    -----
    Every device gives the same bytes.  A block of zeros has scale 0; a block with a NaN has the NaN
    scale and touches no other; an infinity saturates and takes no part in a derived ``g``.  The
    arithmetic, operation by operation, is in docs/numerics.md, section 2.
    """
    if not tracing(x, global_scale if isinstance(global_scale, torch.Tensor) else None):
        return NVFP4Tensor._make(*quantize_parts(x, global_scale))
    g = None if isinstance(global_scale, str) else as_tensor(global_scale, x.device)
    return NVFP4Tensor._make(*torch.ops.fp4lt.quantize(x, g, is_per_row(global_scale)))


def dequantize(t: NVFP4Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values of an NVFP4 tensor: ``code * (scale * global)`` in fp32, then one rounding to `dtype`.

    Parameters
    ----------
    t : NVFP4Tensor
    dtype : torch.dtype
        float32, float16 or bfloat16.

    Returns
    -------
    torch.Tensor of t's logical shape
        A block with the NaN scale is NaN.
    """
    if not isinstance(t, NVFP4Tensor):
        raise ArgumentError(f"dequantize: t is a {type(t).__name__}; an NVFP4Tensor is needed")
    return t.dequantize(dtype)
