// SPDX-License-Identifier: Apache-2.0
// What the AVX2 files share, local to each.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "core/views.h"

namespace fp4lt {
namespace {

// Eight codes in 32-bit lanes (higher bits are ignored) to their values times a power of two.
inline __m256 decode8(__m256i codes, float factor = 1.0f) {
  const __m256 table = _mm256_mul_ps(_mm256_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f),
                                     _mm256_set1_ps(factor));
  const __m256i sign = _mm256_and_si256(_mm256_slli_epi32(codes, 28), _mm256_set1_epi32(INT32_MIN));
  return _mm256_xor_ps(_mm256_permutevar8x32_ps(table, codes), _mm256_castsi256_ps(sign));
}

inline __m256 widen8(const uint16_t* half, DType type) {
  const __m128i h = _mm_loadu_si128(reinterpret_cast<const __m128i*>(half));
  if (type == DType::kF16) return _mm256_cvtph_ps(h);
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
}

}  // namespace
}  // namespace fp4lt
