// SPDX-License-Identifier: Apache-2.0
// AVX2 + FMA + F16C: the codec, elementwise IEEE arithmetic as the scalar table does it.
#include <cstring>

#include "core/float16.h"
#include "core/nvfp4.h"
#include "cpu/simd_avx2.h"
#include "cpu/simd_tables.h"

namespace fp4lt {
namespace {

inline __m256 abs_ps(__m256 x) {
  return _mm256_and_ps(x, _mm256_castsi256_ps(_mm256_set1_epi32(0x7FFFFFFF)));
}

inline float horizontal_max(__m256 x) {
  __m128 m = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  m = _mm_max_ps(m, _mm_movehl_ps(m, m));
  m = _mm_max_ss(m, _mm_movehdup_ps(m));
  return _mm_cvtss_f32(m);
}

float amax(const float* x, int64_t n) {
  const __m256 inf = _mm256_castsi256_ps(_mm256_set1_epi32(0x7F800000));
  __m256 best = _mm256_setzero_ps();
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m256 m = abs_ps(_mm256_loadu_ps(x + i));
    const __m256 finite = _mm256_cmp_ps(m, inf, _CMP_LT_OQ);
    best = _mm256_max_ps(best, _mm256_and_ps(m, finite));
  }
  float result = horizontal_max(best);
  for (; i < n; ++i) {
    const float m = magnitude(x[i]);
    if (is_finite(m) && m > result) result = m;
  }
  return result;
}

// encode_e2m1 of eight quotients; each comparison that holds is -1.
inline __m256i encode8(__m256 q) {
  const __m256 m = abs_ps(q);
  const auto above = [&](float limit) {
    return _mm256_castps_si256(_mm256_cmp_ps(m, _mm256_set1_ps(limit), _CMP_GT_OQ));
  };
  const auto from = [&](float limit) {
    return _mm256_castps_si256(_mm256_cmp_ps(m, _mm256_set1_ps(limit), _CMP_GE_OQ));
  };
  __m256i count = _mm256_add_epi32(above(0.25f), from(0.75f));
  count = _mm256_add_epi32(count, _mm256_add_epi32(above(1.25f), from(1.75f)));
  count = _mm256_add_epi32(count, _mm256_add_epi32(above(2.5f), from(3.5f)));
  count = _mm256_add_epi32(count, above(5.0f));
  return _mm256_sub_epi32(_mm256_setzero_si256(), count);
}

inline __m256i sign8(__m256 x) {
  return _mm256_and_si256(_mm256_srli_epi32(_mm256_castps_si256(x), 28), _mm256_set1_epi32(8));
}

void quantize(const float* x, int64_t blocks, float g, uint8_t* codes, uint8_t* scales) {
  for (int64_t b = 0; b < blocks; ++b, x += kBlock, codes += kBlock / 2) {
    const __m256 x0 = _mm256_loadu_ps(x);
    const __m256 x1 = _mm256_loadu_ps(x + 8);
    if (_mm256_movemask_ps(_mm256_cmp_ps(x0, x1, _CMP_UNORD_Q)) != 0) {
      scales[b] = kScaleNan;
      std::memset(codes, 0, kBlock / 2);
      continue;
    }
    scales[b] = encode_scale(horizontal_max(_mm256_max_ps(abs_ps(x0), abs_ps(x1))), g);
    __m256i c0 = sign8(x0);
    __m256i c1 = sign8(x1);
    if (scales[b] != 0) {  // under a scale of 0 only the sign remains
      const __m256 step = _mm256_set1_ps(decode_e4m3(scales[b]) * g);
      c0 = _mm256_or_si256(c0, encode8(_mm256_div_ps(x0, step)));
      c1 = _mm256_or_si256(c1, encode8(_mm256_div_ps(x1, step)));
    }
    // Pairs even + 16 * odd; packing interleaves the 128-bit lanes, the permutation undoes it.
    __m256i pairs = _mm256_madd_epi16(_mm256_packs_epi32(c0, c1), _mm256_set1_epi32(0x00100001));
    pairs = _mm256_permute4x64_epi64(pairs, 0xD8);
    const __m256i bytes = _mm256_shuffle_epi8(
        pairs, _mm256_set1_epi32(0x0C080400));  // the low byte of each 32-bit lane
    const int low = _mm256_extract_epi32(bytes, 0);
    const int high = _mm256_extract_epi32(bytes, 4);
    std::memcpy(codes, &low, 4);
    std::memcpy(codes + 4, &high, 4);
  }
}

void dequantize(const uint8_t* codes, const uint8_t* scales, int64_t blocks, float g, float* out) {
  const __m128i mask = _mm_set1_epi8(15);
  for (int64_t b = 0; b < blocks; ++b) {
    const __m128i pairs = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes + b * 8));
    const __m128i in_order = _mm_unpacklo_epi8(_mm_and_si128(pairs, mask),
                                               _mm_and_si128(_mm_srli_epi16(pairs, 4), mask));
    const __m256 step = _mm256_set1_ps(decode_e4m3(scales[b]) * g);
    const __m256 v0 = decode8(_mm256_cvtepu8_epi32(in_order));
    const __m256 v1 = decode8(_mm256_cvtepu8_epi32(_mm_srli_si128(in_order, 8)));
    _mm256_storeu_ps(out + b * kBlock, _mm256_mul_ps(v0, step));
    _mm256_storeu_ps(out + b * kBlock + 8, _mm256_mul_ps(v1, step));
  }
}

void widen(const void* x, DType type, int64_t n, float* out) {
  if (type == DType::kF32) {
    std::memcpy(out, x, static_cast<size_t>(n) * sizeof(float));
    return;
  }
  const auto* half = static_cast<const uint16_t*>(x);
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) _mm256_storeu_ps(out + i, widen8(half + i, type));
  for (; i < n; ++i) out[i] = type == DType::kF16 ? widen_f16(half[i]) : widen_bf16(half[i]);
}

inline __m128i narrow_bf16x8(__m256 v) {
  const __m256i u = _mm256_castps_si256(v);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF)));
  const __m256i quiet = _mm256_or_si256(u, _mm256_set1_epi32(0x400000));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
  const __m256i high = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(high, high), 0xD8);
  return _mm256_castsi256_si128(packed);
}

void narrow(const float* x, int64_t n, DType type, void* out) {
  if (type == DType::kF32) {
    std::memcpy(out, x, static_cast<size_t>(n) * sizeof(float));
    return;
  }
  auto* half = static_cast<uint16_t*>(out);
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m256 v = _mm256_loadu_ps(x + i);
    const __m128i h = type == DType::kF16
                          ? _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)
                          : narrow_bf16x8(v);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(half + i), h);
  }
  for (; i < n; ++i) half[i] = type == DType::kF16 ? narrow_f16(x[i]) : narrow_bf16(x[i]);
}

}  // namespace

void set_avx2_codec(SimdKernels& table) {
  table.amax = amax;
  table.quantize = quantize;
  table.dequantize = dequantize;
  table.widen = widen;
  table.narrow = narrow;
}

}  // namespace fp4lt
