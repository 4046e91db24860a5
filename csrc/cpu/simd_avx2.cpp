// SPDX-License-Identifier: Apache-2.0
// AVX2 + FMA + F16C: the GEMM's inner loops.  Columns lie in the lanes, so every column's sum is
// the scalar table's.
#include "cpu/simd_avx2.h"

#include <cstring>

#include "core/nvfp4.h"
#include "cpu/simd_tables.h"

namespace fp4lt {
namespace {

// kScaleUp times the magnitudes of e4m3 bytes in 32-bit lanes.  Shifted by 7, a byte is an fp16
// whose exponent is 8 too small; the conversion handles its denormals, which are e4m3's own.
inline __m256 decode_e4m3x8(__m256i bytes) {
  const __m256i nan = _mm256_cmpeq_epi32(bytes, _mm256_set1_epi32(kScaleNan));
  const __m256i half = _mm256_slli_epi32(bytes, 7);
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(half, half), 0xD8);
  const __m256 v = _mm256_mul_ps(_mm256_cvtph_ps(_mm256_castsi256_si128(packed)),
                                 _mm256_set1_ps(256.0f * kScaleUp));
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

inline __m256i doubled_e2m1() {
  return _mm256_broadcastsi128_si256(
      _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12));
}

// Four blocks at a time; the rest goes through a copy, since nothing may be read past a row's end.
void pack_int8(const uint8_t* codes, int blocks, int8_t* out, int32_t* offset) {
  const __m256i mask = _mm256_set1_epi8(15), bias = _mm256_set1_epi8(12);
  const __m256i zero = _mm256_setzero_si256();
  for (int b = 0; b < blocks; b += 4) {
    alignas(32) uint8_t rest[32] = {};
    alignas(32) int8_t values[64];
    alignas(32) int64_t sums[4];
    const int count = blocks - b < 4 ? blocks - b : 4;
    const uint8_t* from = codes + b * (kBlock / 2);
    if (count < 4)
      from = static_cast<uint8_t*>(std::memcpy(rest, from, static_cast<size_t>(count) * 8));
    const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    const __m256i even = _mm256_shuffle_epi8(doubled_e2m1(), _mm256_and_si256(pairs, mask));
    const __m256i odd =
        _mm256_shuffle_epi8(doubled_e2m1(), _mm256_and_si256(_mm256_srli_epi16(pairs, 4), mask));
    // A 64-bit lane is a block's half; raised by 12 the values have no sign, as vpsadbw wants.
    const __m256i sum = _mm256_add_epi64(_mm256_sad_epu8(_mm256_add_epi8(even, bias), zero),
                                         _mm256_sad_epu8(_mm256_add_epi8(odd, bias), zero));
    _mm256_store_si256(reinterpret_cast<__m256i*>(sums), sum);
    const __m256i low = _mm256_unpacklo_epi64(even, odd);   // blocks 0 and 2
    const __m256i high = _mm256_unpackhi_epi64(even, odd);  // blocks 1 and 3
    auto* to = reinterpret_cast<__m256i*>(values);
    _mm256_store_si256(to, _mm256_permute2x128_si256(low, high, 0x20));
    _mm256_store_si256(to + 1, _mm256_permute2x128_si256(low, high, 0x31));
    std::memcpy(out + b * kBlock, values, static_cast<size_t>(count) * kBlock);
    for (int i = 0; i < count; ++i) {
      offset[b + i] = -12 * (static_cast<int32_t>(sums[i]) - 12 * kBlock);
    }
  }
}

// vpmaddubsw wants one unsigned operand, so the weights are stored as value * 2 + 12, and
// Int8Rows::offset takes 12 * sum(activations) away again.
//
// A block is 256 bytes: the even k of 16 columns, then the odd k, 8 bytes a column.  The columns
// stand in the order in which vphaddd brings two registers' sums back to 0, 1, ..., 7.
constexpr int kSlot[kCols] = {0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15};

void unpack_int8(const uint8_t* const* rows, int blocks, void* unpacked) {
  auto* out = static_cast<int8_t*>(unpacked);
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
        const int64_t at = (row + r) * kChunkBlocks + b;
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

void dot_int8(const Int8Rows& a, int rows, const void* unpacked, const float* scales, int blocks,
              float* out) {
  const auto* weights = static_cast<const int8_t*>(unpacked);
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

void unpack_float(const uint8_t* const* rows, int blocks, void* unpacked) {
  auto* out = static_cast<float*>(unpacked);
  for (int half = 0; half < kCols; half += 8) {
    for (int b = 0; b < blocks; b += 4) {  // 32 bytes: 8 words of 8 codes
      __m256i word[8];
      for (int i = 0; i < 8; ++i) {
        word[i] =
            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(rows[half + i] + b * (kBlock / 2)));
      }
      transpose8(word);
      for (int i = 0; i < 8 && b + i / 2 < blocks; ++i) {
        float* to = out + (b * kBlock + i * 8) * kCols + half;
        __m256i codes = word[i];
        for (int k = 0; k < 8; ++k) {
          _mm256_storeu_ps(to + place_of(k) * kCols, decode8(codes, 1 / kScaleUp));
          codes = _mm256_srli_epi32(codes, 4);
        }
      }
    }
  }
}

void unpack_dense(const uint16_t* const* rows, DType type, int blocks, float* out) {
  for (int half = 0; half < kCols; half += 8) {
    for (int k = 0; k < blocks * kBlock; k += 8) {
      __m256i v[8];
      for (int i = 0; i < 8; ++i) v[i] = _mm256_castps_si256(widen8(rows[half + i] + k, type));
      transpose8(v);
      for (int i = 0; i < 8; ++i) {
        _mm256_storeu_ps(out + (k + place_of(i)) * kCols + half, _mm256_castsi256_ps(v[i]));
      }
    }
  }
}

template <int R>
void dot_rows(const float* a, const float* weights, const float* scales, int blocks, float* out) {
  constexpr int kStride = kChunkBlocks * kBlock;
  for (int r = 0; r < R; ++r) {
    _mm256_storeu_ps(out + r * kCols, _mm256_setzero_ps());
    _mm256_storeu_ps(out + r * kCols + 8, _mm256_setzero_ps());
  }
  for (int b = 0; b < blocks; ++b) {
    __m256 sum[R][2], lower[R][2];
    for (int half = 0; half < 2; ++half) {
      for (int r = 0; r < R; ++r) sum[r][0] = sum[r][1] = _mm256_setzero_ps();
      for (int k = b * kBlock + half * 8; k < b * kBlock + half * 8 + 8; ++k) {
        const __m256 w0 = _mm256_loadu_ps(weights + k * kCols);
        const __m256 w1 = _mm256_loadu_ps(weights + k * kCols + 8);
        for (int r = 0; r < R; ++r) {
          const __m256 x = _mm256_broadcast_ss(a + r * kStride + k);
          sum[r][0] = _mm256_fmadd_ps(x, w0, sum[r][0]);
          sum[r][1] = _mm256_fmadd_ps(x, w1, sum[r][1]);
        }
      }
      if (half == 0) std::memcpy(lower, sum, sizeof(sum));
    }
    for (int r = 0; r < R; ++r) {
      for (int i = 0; i < 2; ++i) {
        float* to = out + r * kCols + i * 8;
        const __m256 scale =
            scales != nullptr ? _mm256_loadu_ps(scales + b * kCols + i * 8) : _mm256_set1_ps(1.0f);
        const __m256 block = _mm256_add_ps(lower[r][i], sum[r][i]);
        _mm256_storeu_ps(to, _mm256_fmadd_ps(block, scale, _mm256_loadu_ps(to)));
      }
    }
  }
}

void dot(const float* a, int rows, const float* weights, const float* scales, int blocks,
         float* out) {
  int r = 0;
  const auto step = [&](auto kernel, int count) {
    for (; r + count <= rows; r += count) {
      kernel(a + r * kChunkBlocks * kBlock, weights, scales, blocks, out + r * kCols);
    }
  };
  step(dot_rows<4>, 4);
  step(dot_rows<2>, 2);
  step(dot_rows<1>, 1);
}

void dot_float(const float* a, int rows, const void* unpacked, const float* scales, int blocks,
               float* out) {
  dot(a, rows, static_cast<const float*>(unpacked), scales, blocks, out);
}

void dot_dense(const float* a, int rows, const float* weights, int blocks, float* out) {
  dot(a, rows, weights, nullptr, blocks, out);
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
  static const SimdKernels table = [] {
    SimdKernels t{};
    t.name = "avx2";
    set_avx2_codec(t);
    t.decode_scales = decode_scales;
    t.pack_int8 = pack_int8;
    t.unpack_int8 = unpack_int8;
    t.unpack_float = unpack_float;
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
