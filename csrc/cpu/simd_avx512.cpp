// SPDX-License-Identifier: Apache-2.0
// AVX-512 with VNNI: the GEMM's inner loops; the codec is the AVX2 table's.
#include <immintrin.h>

#include <cmath>
#include <cstring>

#include "core/nvfp4.h"
#include "cpu/simd_tables.h"

namespace fp4lt {
namespace {

// 8 rows of 8 64-bit words to 8 words of 8 rows.
inline void transpose8(__m512i v[8]) {
  __m512i t[8];
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm512_unpacklo_epi64(v[i], v[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi64(v[i], v[i + 1]);
  }
  for (int odd = 0; odd < 2; ++odd) {
    const __m512i a = _mm512_shuffle_i64x2(t[odd], t[odd + 2], 0x88);
    const __m512i b = _mm512_shuffle_i64x2(t[odd], t[odd + 2], 0xDD);
    const __m512i c = _mm512_shuffle_i64x2(t[odd + 4], t[odd + 6], 0x88);
    const __m512i d = _mm512_shuffle_i64x2(t[odd + 4], t[odd + 6], 0xDD);
    v[odd] = _mm512_shuffle_i64x2(a, c, 0x88);
    v[odd + 2] = _mm512_shuffle_i64x2(b, d, 0x88);
    v[odd + 4] = _mm512_shuffle_i64x2(a, c, 0xDD);
    v[odd + 6] = _mm512_shuffle_i64x2(b, d, 0xDD);
  }
}

// 16 rows of 16 32-bit words to 16 words of 16 rows.
inline void transpose16(__m512i v[16]) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
  }
  // u[4 * q + j]: words j, j + 4, j + 8, j + 12 of rows 4 q to 4 q + 3, one word a 128-bit lane.
  __m512i u[16];
  for (int q = 0; q < 16; q += 4) {
    u[q] = _mm512_unpacklo_epi64(t[q], t[q + 2]);
    u[q + 1] = _mm512_unpackhi_epi64(t[q], t[q + 2]);
    u[q + 2] = _mm512_unpacklo_epi64(t[q + 1], t[q + 3]);
    u[q + 3] = _mm512_unpackhi_epi64(t[q + 1], t[q + 3]);
  }
  for (int j = 0; j < 4; ++j) {
    const __m512i a = _mm512_shuffle_i64x2(u[j], u[j + 4], 0x88);
    const __m512i b = _mm512_shuffle_i64x2(u[j], u[j + 4], 0xDD);
    const __m512i c = _mm512_shuffle_i64x2(u[j + 8], u[j + 12], 0x88);
    const __m512i d = _mm512_shuffle_i64x2(u[j + 8], u[j + 12], 0xDD);
    v[j] = _mm512_shuffle_i64x2(a, c, 0x88);
    v[j + 4] = _mm512_shuffle_i64x2(b, d, 0x88);
    v[j + 8] = _mm512_shuffle_i64x2(a, c, 0xDD);
    v[j + 12] = _mm512_shuffle_i64x2(b, d, 0xDD);
  }
}

void decode_scales(const uint8_t* lines, int blocks, float* out) {
  // Word (row, quarter) of a line holds 4 blocks; columns go by quarter first.
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  for (int b = 0; b < blocks; b += 4, lines += 512, out += 4 * kCols) {
    const __m512i words = _mm512_permutexvar_epi32(order, _mm512_loadu_si512(lines));
    for (int i = 0; i < 4; ++i) {
      const __m512i byte =
          _mm512_and_si512(_mm512_srli_epi32(words, 8 * i), _mm512_set1_epi32(0x7F));
      // Shifted by 7, a byte is an fp16 whose exponent is 8 too small; the conversion handles its
      // denormals, which are e4m3's own.
      const __m512 v = _mm512_mul_ps(
          _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_slli_epi32(byte, 7))), _mm512_set1_ps(256));
      const __mmask16 nan = _mm512_cmpeq_epi32_mask(byte, _mm512_set1_epi32(kScaleNan));
      _mm512_storeu_ps(out + i * kCols, _mm512_mask_mov_ps(v, nan, _mm512_set1_ps(NAN)));
    }
  }
}

// vpdpbusd wants one unsigned operand, so the weights are stored as value * 2 + 12, and
// Int8Rows::offset takes 12 * sum(activations) away again.  A block is 256 bytes: the even k of 16
// columns, then the odd k, 8 bytes a column.
void unpack_int8(const uint8_t* const* rows, int blocks, int8_t* out) {
  const __m512i table = _mm512_broadcast_i32x4(
      _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
  const __m512i mask = _mm512_set1_epi8(15);
  for (int half = 0; half < 2; ++half) {
    for (int b = 0; b < blocks; b += 8) {  // a block is one 64-bit word of a row
      const int count = blocks - b < 8 ? blocks - b : 8;
      const __mmask8 valid = static_cast<__mmask8>((1u << count) - 1);
      __m512i v[8];
      for (int i = 0; i < 8; ++i) {
        v[i] = _mm512_maskz_loadu_epi64(valid, rows[half * 8 + i] + b * (kBlock / 2));
      }
      transpose8(v);
      for (int i = 0; i < count; ++i) {
        int8_t* to = out + (b + i) * 256 + half * 64;
        const __m512i low = _mm512_and_si512(v[i], mask);
        const __m512i high = _mm512_and_si512(_mm512_srli_epi16(v[i], 4), mask);
        _mm512_storeu_si512(to, _mm512_shuffle_epi8(table, low));
        _mm512_storeu_si512(to + 128, _mm512_shuffle_epi8(table, high));
      }
    }
  }
}

inline __m512i broadcast8(const int8_t* p) {
  int64_t v;
  std::memcpy(&v, p, 8);
  return _mm512_set1_epi64(v);
}

template <int R>
void dot_int8_rows(const Int8Rows& a, int64_t row, const int8_t* weights, const float* scales,
                   int blocks, float* out) {
  const __m512i evens =
      _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i odds = _mm512_add_epi32(evens, _mm512_set1_epi32(1));
  __m512 acc[R];
  for (int r = 0; r < R; ++r) acc[r] = _mm512_setzero_ps();
  for (int b = 0; b < blocks; ++b) {
    const int8_t* w = weights + b * 256;
    const __m512i even0 = _mm512_loadu_si512(w), even1 = _mm512_loadu_si512(w + 64);
    const __m512i odd0 = _mm512_loadu_si512(w + 128), odd1 = _mm512_loadu_si512(w + 192);
    const __m512 scale = _mm512_loadu_ps(scales + b * kCols);
    for (int r = 0; r < R; ++r) {
      const int64_t at = (row + r) * a.stride + b;
      const __m512i x_even = broadcast8(a.codes + at * kBlock);
      const __m512i x_odd = broadcast8(a.codes + at * kBlock + 8);
      // Each column has two partial sums; the offset goes into the first.
      const __m512i offset = _mm512_maskz_set1_epi32(0x5555, a.offset[at]);
      const __m512i s0 =
          _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(offset, even0, x_even), odd0, x_odd);
      const __m512i s1 =
          _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(offset, even1, x_even), odd1, x_odd);
      const __m512i sum = _mm512_add_epi32(_mm512_permutex2var_epi32(s0, evens, s1),
                                           _mm512_permutex2var_epi32(s0, odds, s1));
      acc[r] = _mm512_fmadd_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(sum), scale),
                               _mm512_set1_ps(a.scale[at]), acc[r]);
    }
  }
  for (int r = 0; r < R; ++r) _mm512_storeu_ps(out + r * kCols, acc[r]);
}

void dot_int8(const Int8Rows& a, int rows, const int8_t* weights, const float* scales, int blocks,
              float* out) {
  int r = 0;
  for (; r + 4 <= rows; r += 4) dot_int8_rows<4>(a, r, weights, scales, blocks, out + r * kCols);
  for (; r + 2 <= rows; r += 2) dot_int8_rows<2>(a, r, weights, scales, blocks, out + r * kCols);
  if (r < rows) dot_int8_rows<1>(a, r, weights, scales, blocks, out + r * kCols);
}

void unpack_float(const uint8_t* const* rows, const float* scales, int blocks, float* out) {
  const __m512 table = _mm512_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f,
                                      -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f);
  for (int b = 0; b < blocks; b += 8) {  // 64 bytes: 16 words of 8 codes, two to a block
    const int count = blocks - b < 8 ? blocks - b : 8;
    const __mmask16 valid = static_cast<__mmask16>((1u << (2 * count)) - 1);
    __m512i word[16];
    for (int i = 0; i < 16; ++i) {
      word[i] = _mm512_maskz_loadu_epi32(valid, rows[i] + b * (kBlock / 2));
    }
    transpose16(word);
    for (int i = 0; i < 2 * count; ++i) {
      const __m512 scale = _mm512_loadu_ps(scales + (b + i / 2) * kCols);
      float* to = out + (b * kBlock + i * 8) * kCols;
      __m512i codes = word[i];
      for (int k = 0; k < 8; ++k) {
        // The permutation looks at the low four bits of each lane only.
        _mm512_storeu_ps(to + k * kCols, _mm512_mul_ps(_mm512_permutexvar_ps(codes, table), scale));
        codes = _mm512_srli_epi32(codes, 4);
      }
    }
  }
}

void unpack_half(const uint16_t* const* rows, DType type, int blocks, float* out) {
  for (int b = 0; b < blocks; ++b) {
    __m512i v[16];
    for (int i = 0; i < 16; ++i) {
      const __m256i h = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(rows[i] + b * kBlock));
      v[i] = type == DType::kF16 ? _mm512_castps_si512(_mm512_cvtph_ps(h))
                                 : _mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16);
    }
    transpose16(v);
    for (int i = 0; i < 16; ++i) _mm512_storeu_si512(out + (b * kBlock + i) * kCols, v[i]);
  }
}

template <int R>
void dot_float_rows(const float* a, int64_t stride, const float* weights, int blocks, float* out) {
  __m512 acc[R];
  for (int r = 0; r < R; ++r) acc[r] = _mm512_setzero_ps();
  for (int b = 0; b < blocks; ++b) {
    __m512 sum[R];
    for (int r = 0; r < R; ++r) sum[r] = _mm512_setzero_ps();
    for (int k = b * kBlock; k < (b + 1) * kBlock; ++k) {
      const __m512 w = _mm512_loadu_ps(weights + k * kCols);
      for (int r = 0; r < R; ++r) {
        sum[r] = _mm512_fmadd_ps(_mm512_set1_ps(a[r * stride + k]), w, sum[r]);
      }
    }
    for (int r = 0; r < R; ++r) acc[r] = _mm512_add_ps(acc[r], sum[r]);
  }
  for (int r = 0; r < R; ++r) _mm512_storeu_ps(out + r * kCols, acc[r]);
}

void dot_float(const float* a, int64_t stride, int rows, const float* weights, int blocks,
               float* out) {
  int r = 0;
  const auto step = [&](auto kernel, int count) {
    for (; r + count <= rows; r += count) {
      kernel(a + r * stride, stride, weights, blocks, out + r * kCols);
    }
  };
  step(dot_float_rows<8>, 8);
  step(dot_float_rows<4>, 4);
  step(dot_float_rows<2>, 2);
  step(dot_float_rows<1>, 1);
}

void add(const float* x, int64_t n, float* out) {
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    _mm512_storeu_ps(out + i, _mm512_add_ps(_mm512_loadu_ps(out + i), _mm512_loadu_ps(x + i)));
  }
  for (; i < n; ++i) out[i] += x[i];
}

}  // namespace

const SimdKernels& avx512_kernels() {
  static const SimdKernels table = [] {
    SimdKernels t = avx2_kernels();
    t.name = "avx512";
    t.decode_scales = decode_scales;
    t.unpack_int8 = unpack_int8;
    t.unpack_float = unpack_float;
    t.unpack_half = unpack_half;
    t.dot_int8 = dot_int8;
    t.dot_float = dot_float;
    t.add = add;
    return t;
  }();
  return table;
}

}  // namespace fp4lt
