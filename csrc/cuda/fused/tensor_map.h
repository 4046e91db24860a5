// SPDX-License-Identifier: Apache-2.0
// The copy engine's view of weight codes.
#pragma once

#include <cuda.h>

#include "core/views.h"

namespace fp4lt::cuda {

// Codes as (expert, row, byte), read in boxes of `box_rows` rows of 128 bytes under the 128-byte
// swizzle: 16-byte chunk c of row r lies at chunk c ^ r % 8.  Rows past `n` read as zeros.  Rows
// and experts lie at multiples of 16 bytes, experts not in one place.
CUtensorMap code_map(const Nvfp4View& b, int64_t n, int64_t row_bytes, int box_rows);

}  // namespace fp4lt::cuda
