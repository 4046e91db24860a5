// SPDX-License-Identifier: Apache-2.0
// What the AVX-512 tables share.  Everything here is local to the file that includes it: each is
// compiled with flags of its own, and no copy may stand in for another's.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "core/nvfp4.h"
#include "cpu/simd.h"

namespace fp4lt {
namespace {

// Unpacked codes: out[block][2][kCols], 32-bit words of eight codes, the first in the lowest bits.
constexpr int kBlockWords = 2 * kCols;
// Activations from one row of a chunk to the next.
constexpr int kRowStride = kChunkBlocks * kBlock;

inline __m512i broadcast4(const void* p) {
  int32_t v;
  std::memcpy(&v, p, 4);
  return _mm512_set1_epi32(v);
}

// Calls Rows<R>::run(first row, arguments...) so that `rows` rows are done, 8 at a time.
template <template <int> class Rows, class... Args>
inline void for_row_groups(int rows, const Args&... args) {
  int r = 0;
  for (; r + 8 <= rows; r += 8) Rows<8>::run(r, args...);
  switch (rows - r) {
    case 7:
      return Rows<7>::run(r, args...);
    case 6:
      return Rows<6>::run(r, args...);
    case 5:
      return Rows<5>::run(r, args...);
    case 4:
      return Rows<4>::run(r, args...);
    case 3:
      return Rows<3>::run(r, args...);
    case 2:
      return Rows<2>::run(r, args...);
    case 1:
      return Rows<1>::run(r, args...);
    default:
      return;
  }
}

}  // namespace
}  // namespace fp4lt
