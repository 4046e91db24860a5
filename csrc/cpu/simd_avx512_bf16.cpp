// SPDX-License-Identifier: Apache-2.0
// AVX-512 with bf16 dot products, for bf16 activations; all else is the AVX-512 table's.
//
// vdpbf16ps adds two products to a lane as two fused multiply-adds, the upper one first, each
// rounded to nearest even: the order of kOrder, so these are dot_float's bits.  It differs in one
// thing: denormals count as zero.  No operand or partial sum here is denormal unless an activation
// is below 2^-111: products of one in [2^e, 2^(e+1)) with e2m1 values over kScaleUp are multiples
// of 2^(e-7-1-7), and so are their sums however they are rounded.  pack_bf16 finds rows with
// smaller ones, and they take the long way.
#include <cmath>

#include "cpu/simd_avx512.h"
#include "cpu/simd_tables.h"

namespace fp4lt {
namespace {

bool pack_bf16(const uint16_t* x, int blocks, uint16_t* out) {
  // Within 8 values: k and k + 4 share a 32-bit word.
  const __m512i order =
      _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15));
  constexpr short kLimit = (127 - 111) << 7;
  __mmask32 tiny = 0;
  for (int b = 0; b < blocks; b += 2) {
    const __mmask32 valid = blocks - b == 1 ? 0xFFFFu : 0xFFFFFFFFu;
    const __m512i v = _mm512_maskz_loadu_epi16(valid, x + b * kBlock);
    _mm512_mask_storeu_epi16(out + b * kBlock, valid, _mm512_shuffle_epi8(v, order));
    const __m512i magnitude = _mm512_and_si512(v, _mm512_set1_epi16(0x7FFF));
    // A zero wraps to the largest.
    tiny |= _mm512_cmplt_epu16_mask(_mm512_sub_epi16(magnitude, _mm512_set1_epi16(1)),
                                    _mm512_set1_epi16(kLimit - 1));
  }
  return tiny != 0;
}

inline __m512 dot(__m512 sum, __m512i w, __m512i x) {
  return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh&>(w), reinterpret_cast<__m512bh&>(x));
}

// The same where denormals count.
inline __m512 dot_long(__m512 sum, __m512i w, __m512i x) {
  const __m512i upper = _mm512_set1_epi32(INT32_MIN >> 15);
  sum = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(w, upper)),
                        _mm512_castsi512_ps(_mm512_and_si512(x, upper)), sum);
  return _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(w, 16)),
                         _mm512_castsi512_ps(_mm512_slli_epi32(x, 16)), sum);
}

// The e2m1 values over kScaleUp by code, twice: the permutation looks at the low five bits of a
// 16-bit field, and four are to count.
inline __m512i e2m1_values() {
  constexpr short kSign = INT16_MIN;
  static_assert(kScaleUp == 128.0f, "the exponents below are 7 less");
  return _mm512_broadcast_i64x4(_mm256_setr_epi16(0, 0x3B80, 0x3C00, 0x3C40, 0x3C80, 0x3CC0, 0x3D00,
                                                  0x3D40, kSign, kSign | 0x3B80, kSign | 0x3C00,
                                                  kSign | 0x3C40, kSign | 0x3C80, kSign | 0x3CC0,
                                                  kSign | 0x3D00, kSign | 0x3D40));
}

// The chains of one word of codes, which are those of k and k + 4 for k from 0 to 3 in a lane's two
// fields.
template <int R, __m512 (*Dot)(__m512, __m512i, __m512i)>
__attribute__((always_inline)) inline void dot_word(const uint16_t* x, __m512i codes, __m512i table,
                                                    __m512 (&sum)[R]) {
  for (int r = 0; r < R; ++r) sum[r] = _mm512_setzero_ps();
  for (int k = 0; k < 4; ++k, x += 2) {
    const __m512i w = _mm512_permutexvar_epi16(codes, table);
    for (int r = 0; r < R; ++r) sum[r] = Dot(sum[r], w, broadcast4(x + r * kRowStride));
    codes = _mm512_srli_epi16(codes, 4);
  }
}

template <int R, __m512 (*Dot)(__m512, __m512i, __m512i)>
inline void dot_rows(int row, const Bf16Rows& a, const uint32_t* weights, const float* scales,
                     int blocks, float* out) {
  const __m512i table = e2m1_values();
  const uint16_t* x = a.values + row * kRowStride;
  __m512 acc[R];
  for (int r = 0; r < R; ++r) acc[r] = _mm512_setzero_ps();
  for (int b = 0; b < blocks; ++b, x += kBlock, weights += kBlockWords) {
    __m512 lower[R], upper[R];
    dot_word<R, Dot>(x, _mm512_loadu_si512(weights), table, lower);
    dot_word<R, Dot>(x + 8, _mm512_loadu_si512(weights + kCols), table, upper);
    const __m512 scale = _mm512_loadu_ps(scales + b * kCols);
    for (int r = 0; r < R; ++r) {
      acc[r] = _mm512_fmadd_ps(_mm512_add_ps(lower[r], upper[r]), scale, acc[r]);
    }
  }
  for (int r = 0; r < R; ++r) _mm512_storeu_ps(out + (row + r) * kCols, acc[r]);
}

template <int R>
struct DotBf16 {
  static void run(int row, const Bf16Rows& a, const uint32_t* weights, const float* scales,
                  int blocks, float* out) {
    dot_rows<R, dot>(row, a, weights, scales, blocks, out);
  }
};

void dot_bf16(const Bf16Rows& a, int rows, const void* weights, const float* scales, int blocks,
              float* out) {
  const auto* codes = static_cast<const uint32_t*>(weights);
  for_row_groups<DotBf16>(rows, a, codes, scales, blocks, out);
  for (int r = 0; r < rows; ++r) {
    if (a.tiny[r] != 0) dot_rows<1, dot_long>(r, a, codes, scales, blocks, out);
  }
}

}  // namespace

bool bf16_dot_is_two_fmas() {
  uint32_t state = 1;
  const auto next = [&] { return state = state * 1664525u + 1013904223u; };
  for (int i = 0; i < 64; ++i) {
    alignas(64) uint32_t x[16], w[16], sum[16];
    for (int lane = 0; lane < 16; ++lane) {
      // Magnitudes from 2^-8 up to 2^8, the sum's up to 2^16: all of them meet.
      const auto half = [&] { return (next() >> 16 & 0x87FFu) + ((127u - 8u) << 7); };
      x[lane] = half() | half() << 16;
      w[lane] = half() | half() << 16;
      sum[lane] = (next() & 0x8FFFFFFFu) + ((127u - 16u) << 23);
    }
    const __m512i xv = _mm512_load_si512(x), wv = _mm512_load_si512(w);
    const __m512 sv = _mm512_load_ps(sum);
    if (_mm512_cmpneq_epi32_mask(_mm512_castps_si512(dot(sv, wv, xv)),
                                 _mm512_castps_si512(dot_long(sv, wv, xv))) != 0) {
      return false;
    }
  }
  return true;
}

const SimdKernels& avx512_bf16_kernels() {
  static const SimdKernels table = [] {
    SimdKernels t = avx512_kernels();
    t.name = "avx512_bf16";
    t.pack_bf16 = pack_bf16;
    t.dot_bf16 = dot_bf16;
    return t;
  }();
  return table;
}

}  // namespace fp4lt
