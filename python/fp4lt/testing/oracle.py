# SPDX-License-Identifier: Apache-2.0
"""The oracle: an independent, readable statement of the numbers in plain NumPy.

One name for its parts: the codec (:mod:`~fp4lt.testing.oracle_codec`), the matrix product
(:mod:`~fp4lt.testing.oracle_gemm`), the MoE block (:mod:`~fp4lt.testing.oracle_moe`) and its
stage-by-stage check (:mod:`~fp4lt.testing.oracle_trace`).
"""

from __future__ import annotations

from fp4lt.testing.oracle_codec import (
    E2M1_TABLE,
    E4M3_TABLE,
    PackedTensor,
    Quantized,
    decode_e2m1,
    decode_e4m3,
    dequantize,
    derive_global,
    encode_e2m1,
    encode_e4m3,
    from_packed,
    pack,
    quantize,
    tile,
    tile_offset,
    to_packed,
    unpack,
    untile,
)
from fp4lt.testing.oracle_gemm import (
    Expected,
    Operand,
    Sums,
    exact_sum,
    exact_sum_int64,
    grouped_mm,
    product,
    quantize_rows,
)
from fp4lt.testing.oracle_moe import (
    PlainWeights,
    Routes,
    activate,
    combine,
    moe_reference,
    route,
)
from fp4lt.testing.oracle_trace import (
    check_activation,
    check_moe_trace,
    check_quantized,
    check_routing,
)

__all__ = [
    "E2M1_TABLE",
    "E4M3_TABLE",
    "Expected",
    "Operand",
    "PackedTensor",
    "PlainWeights",
    "Quantized",
    "Routes",
    "Sums",
    "activate",
    "check_activation",
    "check_moe_trace",
    "check_quantized",
    "check_routing",
    "combine",
    "decode_e2m1",
    "decode_e4m3",
    "dequantize",
    "derive_global",
    "encode_e2m1",
    "encode_e4m3",
    "exact_sum",
    "exact_sum_int64",
    "from_packed",
    "grouped_mm",
    "moe_reference",
    "pack",
    "product",
    "quantize",
    "quantize_rows",
    "route",
    "tile",
    "tile_offset",
    "to_packed",
    "unpack",
    "untile",
]
