// SPDX-License-Identifier: Apache-2.0
// Where block scales lie: tiles of 128 rows by 4 blocks, as cuBLASLt's VEC16_UE4M3 wants them.
// This is the only statement of that order; CPU code, device code and tests all use it.
#pragma once

#include <cstdint>

#include "core/macros.h"

namespace fp4lt {

constexpr int kTileRows = 128;
constexpr int kTileBlocks = 4;
constexpr int kTileBytes = kTileRows * kTileBlocks;

FP4LT_HD constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
FP4LT_HD constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

// Blocks of one padded row of scales, for a matrix with `blocks` = K / 16.
FP4LT_HD constexpr int64_t padded_blocks(int64_t blocks) { return round_up(blocks, kTileBlocks); }

// Bytes of one matrix' scales, padding included.
FP4LT_HD constexpr int64_t scale_bytes(int64_t rows, int64_t blocks) {
  return round_up(rows, kTileRows) * padded_blocks(blocks);
}

// Byte offset of the scale of `row` and `block`; `padded` = padded_blocks(K / 16).
// Inside a tile, row r is in line r % 32, and the four quarters r / 32 lie side by side there.
FP4LT_HD constexpr int64_t scale_offset(int64_t row, int64_t block, int64_t padded) {
  const int64_t tile = (row / kTileRows) * (padded / kTileBlocks) + block / kTileBlocks;
  const int64_t r = row % kTileRows;
  return tile * kTileBytes + (r % 32) * 16 + (r / 32) * 4 + block % kTileBlocks;
}

// In a packed activation each expert's rows begin a tile.  The tiles of expert e, whose rows begin
// at `start`, come from here on: a place that needs no sum over the experts before, and that no
// other expert reaches, since floor(a + b) >= floor(a) + floor(b).
FP4LT_HD constexpr int64_t first_tile(int64_t start, int64_t expert) {
  return start / kTileRows + expert;
}

// Rows of tiles of such an activation.
FP4LT_HD constexpr int64_t packed_tiles(int64_t rows, int64_t experts) {
  return rows / kTileRows + experts;
}

static_assert(scale_offset(0, 0, 4) == 0 && scale_offset(127, 3, 4) == kTileBytes - 1);
static_assert(scale_offset(33, 1, 4) == 16 + 4 + 1);
static_assert(scale_offset(128, 5, 8) == 3 * kTileBytes + 1);

}  // namespace fp4lt
