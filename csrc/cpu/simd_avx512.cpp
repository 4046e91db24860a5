// SPDX-License-Identifier: Apache-2.0
// AVX-512 with VNNI: the GEMM's inner loops; the codec is the AVX2 table's.
#include "cpu/simd_avx512.h"

#include <cmath>

#include "cpu/simd_tables.h"

namespace fp4lt {
namespace {

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
    v[j + 8] = _mm512_shuffle_i64x2(a, c, 0xDD);
    v[j + 4] = _mm512_shuffle_i64x2(b, d, 0x88);
    v[j + 12] = _mm512_shuffle_i64x2(b, d, 0xDD);
  }
}

// Most scales: shifted by 20, a byte is an fp32 whose exponent is 120 too small, and kScaleUp makes
// it 127.
inline __m512 decode_plain(__m512i bits) {
  return _mm512_castsi512_ps(_mm512_add_epi32(bits, _mm512_set1_epi32(127 << 23)));
}

// Any scale.  e4m3's denormals, m/8 2^-6, would be fp32's, and arithmetic on those is slow: here
// they become 2 (1 + m/8), less 2.
inline __m512 decode_any(__m512i bits) {
  const __mmask16 nan = _mm512_cmpeq_epi32_mask(bits, _mm512_set1_epi32(0x7F << 20));
  const __mmask16 denormal = _mm512_testn_epi32_mask(bits, _mm512_set1_epi32(0x78 << 20));
  const __m512 raised = _mm512_castsi512_ps(_mm512_or_si512(bits, _mm512_set1_epi32(128 << 23)));
  const __m512 v = _mm512_mask_sub_ps(decode_plain(bits), denormal, raised, _mm512_set1_ps(2.0f));
  return _mm512_mask_mov_ps(v, nan, _mm512_set1_ps(NAN));
}

void decode_scales(const uint8_t* lines, int blocks, float* out) {
  // Word (row, quarter) of a line holds 4 blocks; columns go by quarter first.
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const __m512i field = _mm512_set1_epi32(0x7F << 20);
  for (int b = 0; b < blocks; b += 4, lines += 512, out += 4 * kCols) {
    const __m512i words = _mm512_permutexvar_epi32(order, _mm512_loadu_si512(lines));
    const __m512i bits[4] = {_mm512_and_si512(_mm512_slli_epi32(words, 20), field),
                             _mm512_and_si512(_mm512_slli_epi32(words, 12), field),
                             _mm512_and_si512(_mm512_slli_epi32(words, 4), field),
                             _mm512_and_si512(_mm512_srli_epi32(words, 4), field)};
    const __m512i magnitude = _mm512_and_si512(words, _mm512_set1_epi8(0x7F));
    const __mmask64 special = _mm512_testn_epi8_mask(words, _mm512_set1_epi8(0x78)) |
                              _mm512_cmpeq_epi8_mask(magnitude, _mm512_set1_epi8(kScaleNan));
    if (special == 0) {
      for (int i = 0; i < 4; ++i) _mm512_storeu_ps(out + i * kCols, decode_plain(bits[i]));
    } else {
      for (int i = 0; i < 4; ++i) _mm512_storeu_ps(out + i * kCols, decode_any(bits[i]));
    }
  }
}

// The codes stay codes: decoding them in registers costs less than writing eight times the bytes.
void unpack_codes(const uint8_t* const* rows, int blocks, void* out) {
  auto* to = static_cast<uint32_t*>(out);
  for (int b = 0; b < blocks; b += 8) {
    const int count = blocks - b < 8 ? blocks - b : 8;
    const __mmask16 valid = static_cast<__mmask16>((1u << (2 * count)) - 1);
    __m512i word[16];
    for (int i = 0; i < 16; ++i) {
      word[i] = _mm512_maskz_loadu_epi32(valid, rows[i] + b * (kBlock / 2));
    }
    transpose16(word);
    for (int i = 0; i < 16; ++i) _mm512_storeu_si512(to + b * kBlockWords + i * kCols, word[i]);
  }
}

template <int R>
struct DotInt8 {
  static void run(int row, const Int8Rows& a, const uint32_t* weights, const float* scales,
                  int blocks, float* out) {
    // vpdpbusd wants one unsigned operand, so the weights become value * 2 + 12, and
    // Int8Rows::offset takes 12 * sum(activations) away again.
    const __m512i table = _mm512_broadcast_i32x4(
        _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
    const __m512i mask = _mm512_set1_epi8(15);
    const int8_t* codes = a.codes + row * kChunkBlocks * kBlock;
    const int32_t* offset = a.offset + row * kChunkBlocks;
    const float* a_scale = a.scale + row * kChunkBlocks;
    __m512 acc[R];
    for (int r = 0; r < R; ++r) acc[r] = _mm512_setzero_ps();
    for (int b = 0; b < blocks; ++b) {
      const __m512i low = _mm512_loadu_si512(weights + b * kBlockWords);
      const __m512i high = _mm512_loadu_si512(weights + b * kBlockWords + kCols);
      // Of 16 columns the even k below 8, the even ones from 8 on, and the odd ones likewise.
      const __m512i w[4] = {
          _mm512_shuffle_epi8(table, _mm512_and_si512(low, mask)),
          _mm512_shuffle_epi8(table, _mm512_and_si512(high, mask)),
          _mm512_shuffle_epi8(table, _mm512_and_si512(_mm512_srli_epi16(low, 4), mask)),
          _mm512_shuffle_epi8(table, _mm512_and_si512(_mm512_srli_epi16(high, 4), mask))};
      const __m512 scale = _mm512_loadu_ps(scales + b * kCols);
      for (int r = 0; r < R; ++r) {
        const int8_t* x = codes + (r * kChunkBlocks + b) * kBlock;
        __m512i sum = _mm512_set1_epi32(offset[r * kChunkBlocks + b]);
        for (int i = 0; i < 4; ++i) sum = _mm512_dpbusd_epi32(sum, w[i], broadcast4(x + 4 * i));
        acc[r] = _mm512_fmadd_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(sum), scale),
                                 _mm512_set1_ps(a_scale[r * kChunkBlocks + b]), acc[r]);
      }
    }
    for (int r = 0; r < R; ++r) _mm512_storeu_ps(out + (row + r) * kCols, acc[r]);
  }
};

void dot_int8(const Int8Rows& a, int rows, const void* weights, const float* scales, int blocks,
              float* out) {
  for_row_groups<DotInt8>(rows, a, static_cast<const uint32_t*>(weights), scales, blocks, out);
}

// The chains of one word of codes.  The permutation looks at the low four bits of a lane only.
template <int R>
__attribute__((always_inline)) inline void dot_word(const float* x, __m512i low, __m512 table,
                                                    __m512 (&sum)[R]) {
  for (int r = 0; r < R; ++r) sum[r] = _mm512_setzero_ps();
  __m512i high = _mm512_srli_epi32(low, 16);
  for (int k = 0; k < 4; ++k, x += 2) {
    const __m512 w1 = _mm512_permutexvar_ps(high, table);
    const __m512 w0 = _mm512_permutexvar_ps(low, table);
    for (int r = 0; r < R; ++r) {
      sum[r] = _mm512_fmadd_ps(_mm512_set1_ps(x[r * kRowStride]), w1, sum[r]);
      sum[r] = _mm512_fmadd_ps(_mm512_set1_ps(x[r * kRowStride + 1]), w0, sum[r]);
    }
    low = _mm512_srli_epi32(low, 4);
    high = _mm512_srli_epi32(high, 4);
  }
}

template <int R>
struct DotFloat {
  static void run(int row, const float* a, const uint32_t* weights, const float* scales, int blocks,
                  float* out) {
    const __m512 table =
        _mm512_mul_ps(_mm512_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f,
                                     -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f),
                      _mm512_set1_ps(1 / kScaleUp));
    const float* x = a + row * kRowStride;
    __m512 acc[R];
    for (int r = 0; r < R; ++r) acc[r] = _mm512_setzero_ps();
    for (int b = 0; b < blocks; ++b, x += kBlock, weights += kBlockWords) {
      __m512 lower[R], upper[R];
      dot_word(x, _mm512_loadu_si512(weights), table, lower);
      dot_word(x + 8, _mm512_loadu_si512(weights + kCols), table, upper);
      const __m512 scale = _mm512_loadu_ps(scales + b * kCols);
      for (int r = 0; r < R; ++r) {
        acc[r] = _mm512_fmadd_ps(_mm512_add_ps(lower[r], upper[r]), scale, acc[r]);
      }
    }
    for (int r = 0; r < R; ++r) _mm512_storeu_ps(out + (row + r) * kCols, acc[r]);
  }
};

void dot_float(const float* a, int rows, const void* weights, const float* scales, int blocks,
               float* out) {
  for_row_groups<DotFloat>(rows, a, static_cast<const uint32_t*>(weights), scales, blocks, out);
}

void unpack_dense(const uint16_t* const* rows, DType type, int blocks, float* out) {
  for (int b = 0; b < blocks; ++b) {
    __m512i v[16];
    for (int i = 0; i < 16; ++i) {
      const __m256i h = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(rows[i] + b * kBlock));
      v[i] = type == DType::kF16 ? _mm512_castps_si512(_mm512_cvtph_ps(h))
                                 : _mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16);
    }
    transpose16(v);
    for (int i = 0; i < 16; ++i) {
      _mm512_storeu_si512(out + (b * kBlock + place_of(i)) * kCols, v[i]);
    }
  }
}

// The chains of eight weights.
template <int R>
__attribute__((always_inline)) inline void dot_half(const float* x, const float* weights,
                                                    __m512 (&sum)[R]) {
  for (int r = 0; r < R; ++r) sum[r] = _mm512_setzero_ps();
  for (int k = 0; k < 8; ++k) {
    const __m512 w = _mm512_loadu_ps(weights + k * kCols);
    for (int r = 0; r < R; ++r) {
      sum[r] = _mm512_fmadd_ps(_mm512_set1_ps(x[r * kRowStride + k]), w, sum[r]);
    }
  }
}

template <int R>
struct DotDense {
  static void run(int row, const float* a, const float* weights, int blocks, float* out) {
    const float* x = a + row * kRowStride;
    __m512 acc[R];
    for (int r = 0; r < R; ++r) acc[r] = _mm512_setzero_ps();
    for (int b = 0; b < blocks; ++b, x += kBlock, weights += kBlock * kCols) {
      __m512 lower[R], upper[R];
      dot_half(x, weights, lower);
      dot_half(x + 8, weights + 8 * kCols, upper);
      for (int r = 0; r < R; ++r) acc[r] = _mm512_add_ps(acc[r], _mm512_add_ps(lower[r], upper[r]));
    }
    for (int r = 0; r < R; ++r) _mm512_storeu_ps(out + (row + r) * kCols, acc[r]);
  }
};

void dot_dense(const float* a, int rows, const float* weights, int blocks, float* out) {
  for_row_groups<DotDense>(rows, a, weights, blocks, out);
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
    t.unpack_int8 = unpack_codes;
    t.unpack_float = unpack_codes;
    t.unpack_dense = unpack_dense;
    t.dot_int8 = dot_int8;
    t.dot_float = dot_float;
    t.dot_dense = dot_dense;
    t.add = add;
    return t;
  }();
  return table;
}

}  // namespace fp4lt
