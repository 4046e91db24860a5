// SPDX-License-Identifier: Apache-2.0
// The plain table: what each kernel computes, one element after the other.
#include <cmath>
#include <cstring>

#include "core/float16.h"
#include "core/nvfp4.h"
#include "cpu/simd_tables.h"

namespace fp4lt {
namespace {

float amax(const float* x, int64_t n) {
  float best = 0.0f;
  for (int64_t i = 0; i < n; ++i) {
    const float m = magnitude(x[i]);
    if (is_finite(m) && m > best) best = m;
  }
  return best;
}

void quantize(const float* x, int64_t blocks, float g, uint8_t* codes, uint8_t* scales) {
  for (int64_t b = 0; b < blocks; ++b, x += kBlock, codes += kBlock / 2) {
    float largest = 0.0f;
    bool has_nan = false;
    for (int i = 0; i < kBlock; ++i) {
      const float m = magnitude(x[i]);
      has_nan |= is_nan(m);
      largest = m > largest ? m : largest;
    }
    if (has_nan) {
      scales[b] = kScaleNan;
      std::memset(codes, 0, kBlock / 2);
      continue;
    }
    scales[b] = encode_scale(largest, g);
    const float step = decode_e4m3(scales[b]) * g;
    for (int i = 0; i < kBlock / 2; ++i) {
      unsigned pair = 0;
      for (int half = 0; half < 2; ++half) {
        const float v = x[2 * i + half];
        // Under a scale of 0 only the sign remains.  It is v's own: where scale times g underflows
        // to 0, the quotient of a zero is a NaN of any sign.
        unsigned code = float_bits(v) >> 28 & 8u;
        if (scales[b] != 0) code |= encode_e2m1(v / step) & 7u;
        pair |= code << (4 * half);
      }
      codes[i] = static_cast<uint8_t>(pair);
    }
  }
}

void dequantize(const uint8_t* codes, const uint8_t* scales, int64_t blocks, float g, float* out) {
  for (int64_t b = 0; b < blocks; ++b) {
    const float step = decode_e4m3(scales[b]) * g;
    for (int i = 0; i < kBlock / 2; ++i) {
      const unsigned pair = codes[b * (kBlock / 2) + i];
      out[b * kBlock + 2 * i] = decode_e2m1(pair & 15u) * step;
      out[b * kBlock + 2 * i + 1] = decode_e2m1(pair >> 4) * step;
    }
  }
}

void widen(const void* x, DType type, int64_t n, float* out) {
  const auto* half = static_cast<const uint16_t*>(x);
  switch (type) {
    case DType::kF32:
      std::memcpy(out, x, static_cast<size_t>(n) * sizeof(float));
      return;
    case DType::kF16:
      for (int64_t i = 0; i < n; ++i) out[i] = widen_f16(half[i]);
      return;
    case DType::kBF16:
      for (int64_t i = 0; i < n; ++i) out[i] = widen_bf16(half[i]);
      return;
  }
}

void narrow(const float* x, int64_t n, DType type, void* out) {
  auto* half = static_cast<uint16_t*>(out);
  switch (type) {
    case DType::kF32:
      std::memcpy(out, x, static_cast<size_t>(n) * sizeof(float));
      return;
    case DType::kF16:
      for (int64_t i = 0; i < n; ++i) half[i] = narrow_f16(x[i]);
      return;
    case DType::kBF16:
      for (int64_t i = 0; i < n; ++i) half[i] = narrow_bf16(x[i]);
      return;
  }
}

void decode_scales(const uint8_t* lines, int blocks, float* out) {
  for (int b = 0; b < blocks; ++b) {
    const uint8_t* line = lines + b / 4 * 512 + b % 4;
    // Magnitudes: weights' scales have no sign bit.
    for (int col = 0; col < kCols; ++col) {
      *out++ = kScaleUp * decode_e4m3(line[col % 4 * 16 + col / 4 * 4] & 0x7F);
    }
  }
}

void pack_int8(const uint8_t* codes, int blocks, int8_t* out, int32_t* offset) {
  for (int b = 0; b < blocks; ++b) {
    int sum = 0;
    for (int i = 0; i < kBlock / 2; ++i) {
      const unsigned pair = *codes++;
      out[i] = kE2m1Doubled[pair & 15u];
      out[i + kBlock / 2] = kE2m1Doubled[pair >> 4];
      sum += out[i] + out[i + kBlock / 2];
    }
    out += kBlock;
    offset[b] = -12 * sum;
  }
}

// out[block][col][16]: twice the values, even k first, as the activations are.
void unpack_int8(const uint8_t* const* rows, int blocks, void* unpacked) {
  auto* out = static_cast<int8_t*>(unpacked);
  for (int b = 0; b < blocks; ++b) {
    for (int col = 0; col < kCols; ++col) {
      const uint8_t* code = rows[col] + b * (kBlock / 2);
      for (int i = 0; i < kBlock / 2; ++i) {
        out[i] = kE2m1Doubled[code[i] & 15u];
        out[i + kBlock / 2] = kE2m1Doubled[code[i] >> 4];
      }
      out += kBlock;
    }
  }
}

void unpack_float(const uint8_t* const* rows, int blocks, void* unpacked) {
  auto* out = static_cast<float*>(unpacked);
  for (int b = 0; b < blocks; ++b) {
    for (const int k : kOrder) {
      for (int col = 0; col < kCols; ++col) {
        const unsigned pair = rows[col][b * (kBlock / 2) + k / 2];
        *out++ = decode_e2m1(k % 2 == 0 ? pair & 15u : pair >> 4) / kScaleUp;
      }
    }
  }
}

void unpack_dense(const uint16_t* const* rows, DType type, int blocks, float* out) {
  for (int b = 0; b < blocks; ++b) {
    for (const int k : kOrder) {
      for (int col = 0; col < kCols; ++col) {
        const uint16_t half = rows[col][b * kBlock + k];
        *out++ = type == DType::kF16 ? widen_f16(half) : widen_bf16(half);
      }
    }
  }
}

void dot_int8(const Int8Rows& a, int rows, const void* unpacked, const float* scales, int blocks,
              float* out) {
  const auto* weights = static_cast<const int8_t*>(unpacked);
  for (int r = 0; r < rows; ++r, out += kCols) {
    std::memset(out, 0, kCols * sizeof(float));
    for (int b = 0; b < blocks; ++b) {
      const int8_t* x = a.codes + (r * kChunkBlocks + b) * kBlock;
      const float scale = a.scale[r * kChunkBlocks + b];
      for (int col = 0; col < kCols; ++col) {
        const int8_t* w = weights + (b * kCols + col) * kBlock;
        int sum = 0;
        for (int i = 0; i < kBlock; ++i) sum += x[i] * w[i];
        // 12 bits times 4 bits times 4 bits: both products are exact, the addition rounds once.
        out[col] += static_cast<float>(sum) * scales[b * kCols + col] * scale;
      }
    }
  }
}

void dot(const float* a, int rows, const float* weights, const float* scales, int blocks,
         float* out) {
  for (int r = 0; r < rows; ++r, a += kChunkBlocks * kBlock, out += kCols) {
    std::memset(out, 0, kCols * sizeof(float));
    for (int b = 0; b < blocks; ++b) {
      float sum[2][kCols] = {};
      for (int i = 0; i < kBlock; ++i) {
        const int k = b * kBlock + i;
        for (int col = 0; col < kCols; ++col) {
          float& half = sum[i / 8][col];
          half = std::fma(a[k], weights[k * kCols + col], half);
        }
      }
      for (int col = 0; col < kCols; ++col) {
        const float scale = scales != nullptr ? scales[b * kCols + col] : 1.0f;
        out[col] = std::fma(sum[0][col] + sum[1][col], scale, out[col]);
      }
    }
  }
}

void dot_float(const float* a, int rows, const void* unpacked, const float* scales, int blocks,
               float* out) {
  dot(a, rows, static_cast<const float*>(unpacked), scales, blocks, out);
}

void dot_dense(const float* a, int rows, const float* weights, int blocks, float* out) {
  dot(a, rows, weights, nullptr, blocks, out);
}

void add(const float* x, int64_t n, float* out) {
  for (int64_t i = 0; i < n; ++i) out[i] += x[i];
}

}  // namespace

const SimdKernels& scalar_kernels() {
  static const SimdKernels table = [] {
    SimdKernels t{};
    t.name = "scalar";
    t.amax = amax;
    t.quantize = quantize;
    t.dequantize = dequantize;
    t.widen = widen;
    t.narrow = narrow;
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
