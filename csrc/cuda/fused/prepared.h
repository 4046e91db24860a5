// SPDX-License-Identifier: Apache-2.0
// The orders in which the fused kernels want activations: kPrepared and kImage of operand.h.
#pragma once

#include <cstdint>

#include "core/macros.h"

namespace fp4lt::cuda {

// Activations as the kernels want them: K padded with zeros to a multiple of kPreparedK.  A word of
// codes gives the pairs (0, 4), (1, 5), (2, 6), (3, 7) of eight neighbours (see dequant.cuh), and
// the four threads that share a row own 32 neighbours of each 128.
//
// kPrepared, for mma.sync: rows as they are; what a thread wants at once lies together: of each 128
// k its four pairs, 16 bytes, then the next thread's, for each of its four words.
//
// kImage: what wgmma reads from shared memory, as it lies there, so that one bulk copy brings it.
// Rows go in groups of eight, each expert's rows starting one (a row's number in this order is its
// `place`); a group is K / 8 core matrices, eight rows of 16 bytes: of the four threads, one pair.
constexpr int kPreparedK = 256;

// Where the pair of values `pair` and `pair` + 4 of the eight neighbours `eight` goes, counted in
// pairs: from the row's beginning in kPrepared, from the image's in kImage.
FP4LT_HD constexpr int64_t mma_pair(int64_t eight, int pair) {
  const int64_t thread = eight % 16 / 4, word = eight / 16 * 4 + eight % 4;
  return word * 16 + thread * 4 + pair;
}
FP4LT_HD constexpr int64_t wgmma_pair(int64_t place, int64_t padded_k, int64_t eight, int pair) {
  const int64_t thread = eight % 16 / 4, word = eight / 16 * 4 + eight % 4;
  const int64_t matrix = place / 8 * (padded_k / 8) + word * 4 + pair;
  return (matrix * 8 + place % 8) * 4 + thread;
}

}  // namespace fp4lt::cuda
