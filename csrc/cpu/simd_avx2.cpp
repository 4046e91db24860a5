// SPDX-License-Identifier: Apache-2.0
// AVX2 + FMA + F16C.  Columns lie in the lanes, so every column's sum is the scalar table's.
#include <immintrin.h>

#include <cstring>

#include "core/float16.h"
#include "core/nvfp4.h"
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

// Eight codes in 32-bit lanes (higher bits are ignored) to their values.
inline __m256 decode8(__m256i codes) {
  const __m256 table = _mm256_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f);
  const __m256i sign = _mm256_and_si256(_mm256_slli_epi32(codes, 28), _mm256_set1_epi32(INT32_MIN));
  return _mm256_xor_ps(_mm256_permutevar8x32_ps(table, codes), _mm256_castsi256_ps(sign));
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

inline __m256 widen8(const uint16_t* half, DType type) {
  const __m128i h = _mm_loadu_si128(reinterpret_cast<const __m128i*>(half));
  if (type == DType::kF16) return _mm256_cvtph_ps(h);
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
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

// Magnitudes of e4m3 bytes in 32-bit lanes.  Shifted by 7, a byte is an fp16 whose exponent is 8
// too small; the conversion handles its denormals, which are e4m3's own.
inline __m256 decode_e4m3x8(__m256i bytes) {
  const __m256i nan = _mm256_cmpeq_epi32(bytes, _mm256_set1_epi32(kScaleNan));
  const __m256i half = _mm256_slli_epi32(bytes, 7);
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(half, half), 0xD8);
  const __m256 v =
      _mm256_mul_ps(_mm256_cvtph_ps(_mm256_castsi256_si128(packed)), _mm256_set1_ps(256.0f));
  const __m256 quiet = _mm256_castsi256_ps(_mm256_set1_epi32(0x7FC00000));
  return _mm256_blendv_ps(v, quiet, _mm256_castsi256_ps(nan));
}

void decode_scales(const uint8_t* lines, int blocks, float* out) {
  for (int b = 0; b < blocks; b += 4, lines += 512, out += 4 * kCols) {
    // Word (row, quarter) of the line holds 4 blocks; columns go by quarter first.
    const auto* words = reinterpret_cast<const __m128i*>(lines);
    const __m128i r0 = _mm_loadu_si128(words), r1 = _mm_loadu_si128(words + 1);
    const __m128i r2 = _mm_loadu_si128(words + 2), r3 = _mm_loadu_si128(words + 3);
    const __m128i a = _mm_unpacklo_epi32(r0, r1), c = _mm_unpacklo_epi32(r2, r3);
    const __m128i d = _mm_unpackhi_epi32(r0, r1), e = _mm_unpackhi_epi32(r2, r3);
    const __m256i low = _mm256_set_m128i(_mm_unpackhi_epi64(a, c), _mm_unpacklo_epi64(a, c));
    const __m256i high = _mm256_set_m128i(_mm_unpackhi_epi64(d, e), _mm_unpacklo_epi64(d, e));
    const __m256i mask = _mm256_set1_epi32(0x7F);
    for (int i = 0; i < 4; ++i) {
      const __m128i shift = _mm_cvtsi32_si128(8 * i);
      const __m256i x = _mm256_and_si256(_mm256_srl_epi32(low, shift), mask);
      const __m256i y = _mm256_and_si256(_mm256_srl_epi32(high, shift), mask);
      _mm256_storeu_ps(out + i * kCols, decode_e4m3x8(x));
      _mm256_storeu_ps(out + i * kCols + 8, decode_e4m3x8(y));
    }
  }
}

// vpmaddubsw wants one unsigned operand, so the weights are stored as value * 2 + 12, and
// Int8Rows::offset takes 12 * sum(activations) away again.
//
// A block is 256 bytes: the even k of 16 columns, then the odd k, 8 bytes a column.  The columns
// stand in the order in which vphaddd brings two registers' sums back to 0, 1, ..., 7.
constexpr int kSlot[kCols] = {0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15};

void unpack_int8(const uint8_t* const* rows, int blocks, int8_t* out) {
  const __m256i table = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
  const __m256i mask = _mm256_set1_epi8(15);
  for (int col = 0; col < kCols; ++col) {
    int8_t* to = out + kSlot[col] * 8;
    for (int b = 0; b < blocks; b += 4) {
      const __m256i pairs =
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(rows[col] + b * (kBlock / 2)));
      const __m256i even = _mm256_shuffle_epi8(table, _mm256_and_si256(pairs, mask));
      const __m256i odd =
          _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(pairs, 4), mask));
      alignas(32) int64_t part[8];
      _mm256_store_si256(reinterpret_cast<__m256i*>(part), even);
      _mm256_store_si256(reinterpret_cast<__m256i*>(part + 4), odd);
      for (int i = 0; i < 4; ++i) {
        std::memcpy(to + (b + i) * 256, &part[i], 8);
        std::memcpy(to + (b + i) * 256 + 128, &part[4 + i], 8);
      }
    }
  }
}

inline __m256i load8(const int8_t* p) {
  int64_t v;
  std::memcpy(&v, p, 8);
  return _mm256_set1_epi64x(v);
}

template <int R>
void dot_int8_rows(const Int8Rows& a, int64_t row, const int8_t* weights, const float* scales,
                   int blocks, float* out) {
  const __m256i ones = _mm256_set1_epi16(1);
  __m256 acc[R][2];
  for (int r = 0; r < R; ++r) acc[r][0] = acc[r][1] = _mm256_setzero_ps();
  for (int b = 0; b < blocks; ++b) {
    const auto* w = reinterpret_cast<const __m256i*>(weights + b * 256);
    for (int half = 0; half < 2; ++half) {
      const __m256i even0 = _mm256_loadu_si256(w + 2 * half);
      const __m256i even1 = _mm256_loadu_si256(w + 2 * half + 1);
      const __m256i odd0 = _mm256_loadu_si256(w + 4 + 2 * half);
      const __m256i odd1 = _mm256_loadu_si256(w + 4 + 2 * half + 1);
      const __m256 scale = _mm256_loadu_ps(scales + b * kCols + 8 * half);
      for (int r = 0; r < R; ++r) {
        const int64_t at = (row + r) * a.stride + b;
        const __m256i x_even = load8(a.codes + at * kBlock);
        const __m256i x_odd = load8(a.codes + at * kBlock + 8);
        const __m256i offset = _mm256_set1_epi64x(static_cast<uint16_t>(a.offset[at]));
        const __m256i s0 =
            _mm256_add_epi16(offset, _mm256_add_epi16(_mm256_maddubs_epi16(even0, x_even),
                                                      _mm256_maddubs_epi16(odd0, x_odd)));
        const __m256i s1 =
            _mm256_add_epi16(offset, _mm256_add_epi16(_mm256_maddubs_epi16(even1, x_even),
                                                      _mm256_maddubs_epi16(odd1, x_odd)));
        const __m256i sum =
            _mm256_hadd_epi32(_mm256_madd_epi16(s0, ones), _mm256_madd_epi16(s1, ones));
        acc[r][half] = _mm256_fmadd_ps(_mm256_mul_ps(_mm256_cvtepi32_ps(sum), scale),
                                       _mm256_set1_ps(a.scale[at]), acc[r][half]);
      }
    }
  }
  for (int r = 0; r < R; ++r) {
    _mm256_storeu_ps(out + r * kCols, acc[r][0]);
    _mm256_storeu_ps(out + r * kCols + 8, acc[r][1]);
  }
}

void dot_int8(const Int8Rows& a, int rows, const int8_t* weights, const float* scales, int blocks,
              float* out) {
  int r = 0;
  for (; r + 2 <= rows; r += 2) dot_int8_rows<2>(a, r, weights, scales, blocks, out + r * kCols);
  if (r < rows) dot_int8_rows<1>(a, r, weights, scales, blocks, out + r * kCols);
}

// 8 rows of 8 32-bit words to 8 words of 8 rows.
inline void transpose8(__m256i v[8]) {
  __m256i t[8];
  for (int i = 0; i < 4; ++i) {
    t[2 * i] = _mm256_unpacklo_epi32(v[2 * i], v[2 * i + 1]);
    t[2 * i + 1] = _mm256_unpackhi_epi32(v[2 * i], v[2 * i + 1]);
  }
  __m256i u[8];
  for (int i = 0; i < 2; ++i) {
    u[4 * i] = _mm256_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    u[4 * i + 1] = _mm256_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    u[4 * i + 2] = _mm256_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    u[4 * i + 3] = _mm256_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    v[i] = _mm256_permute2x128_si256(u[i], u[i + 4], 0x20);
    v[i + 4] = _mm256_permute2x128_si256(u[i], u[i + 4], 0x31);
  }
}

void unpack_float(const uint8_t* const* rows, const float* scales, int blocks, float* out) {
  for (int half = 0; half < kCols; half += 8) {
    for (int b = 0; b < blocks; b += 4) {  // 32 bytes: 8 words of 8 codes
      __m256i word[8];
      for (int i = 0; i < 8; ++i) {
        word[i] =
            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(rows[half + i] + b * (kBlock / 2)));
      }
      transpose8(word);
      for (int i = 0; i < 8 && b + i / 2 < blocks; ++i) {
        const __m256 scale = _mm256_loadu_ps(scales + (b + i / 2) * kCols + half);
        float* to = out + (b * kBlock + i * 8) * kCols + half;
        __m256i codes = word[i];
        for (int k = 0; k < 8; ++k) {
          _mm256_storeu_ps(to + k * kCols, _mm256_mul_ps(decode8(codes), scale));
          codes = _mm256_srli_epi32(codes, 4);
        }
      }
    }
  }
}

void unpack_half(const uint16_t* const* rows, DType type, int blocks, float* out) {
  for (int half = 0; half < kCols; half += 8) {
    for (int k = 0; k < blocks * kBlock; k += 8) {
      __m256i v[8];
      for (int i = 0; i < 8; ++i) v[i] = _mm256_castps_si256(widen8(rows[half + i] + k, type));
      transpose8(v);
      for (int i = 0; i < 8; ++i) {
        _mm256_storeu_ps(out + (k + i) * kCols + half, _mm256_castsi256_ps(v[i]));
      }
    }
  }
}

template <int R>
void dot_float_rows(const float* a, int64_t stride, const float* weights, int blocks, float* out) {
  for (int r = 0; r < R; ++r) {
    _mm256_storeu_ps(out + r * kCols, _mm256_setzero_ps());
    _mm256_storeu_ps(out + r * kCols + 8, _mm256_setzero_ps());
  }
  for (int b = 0; b < blocks; ++b) {
    __m256 sum[R][2];
    for (int r = 0; r < R; ++r) sum[r][0] = sum[r][1] = _mm256_setzero_ps();
    for (int k = b * kBlock; k < (b + 1) * kBlock; ++k) {
      const __m256 w0 = _mm256_loadu_ps(weights + k * kCols);
      const __m256 w1 = _mm256_loadu_ps(weights + k * kCols + 8);
      for (int r = 0; r < R; ++r) {
        const __m256 x = _mm256_broadcast_ss(a + r * stride + k);
        sum[r][0] = _mm256_fmadd_ps(x, w0, sum[r][0]);
        sum[r][1] = _mm256_fmadd_ps(x, w1, sum[r][1]);
      }
    }
    for (int r = 0; r < R; ++r) {
      float* to = out + r * kCols;
      _mm256_storeu_ps(to, _mm256_add_ps(_mm256_loadu_ps(to), sum[r][0]));
      _mm256_storeu_ps(to + 8, _mm256_add_ps(_mm256_loadu_ps(to + 8), sum[r][1]));
    }
  }
}

void dot_float(const float* a, int64_t stride, int rows, const float* weights, int blocks,
               float* out) {
  int r = 0;
  for (; r + 4 <= rows; r += 4) {
    dot_float_rows<4>(a + r * stride, stride, weights, blocks, out + r * kCols);
  }
  for (; r + 2 <= rows; r += 2) {
    dot_float_rows<2>(a + r * stride, stride, weights, blocks, out + r * kCols);
  }
  if (r < rows) dot_float_rows<1>(a + r * stride, stride, weights, blocks, out + r * kCols);
}

void add(const float* x, int64_t n, float* out) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    _mm256_storeu_ps(out + i, _mm256_add_ps(_mm256_loadu_ps(out + i), _mm256_loadu_ps(x + i)));
  }
  for (; i < n; ++i) out[i] += x[i];
}

}  // namespace

const SimdKernels& avx2_kernels() {
  static const SimdKernels table = {
      "avx2",      amax,         quantize,    dequantize, widen,     narrow, decode_scales,
      unpack_int8, unpack_float, unpack_half, dot_int8,   dot_float, add,
  };
  return table;
}

}  // namespace fp4lt
