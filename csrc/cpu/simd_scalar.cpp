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
      *out++ = decode_e4m3(line[col % 4 * 16 + col / 4 * 4] & 0x7F);
    }
  }
}

// out[block][col][16]: twice the values, even k first, as the activations are.
void unpack_int8(const uint8_t* const* rows, int blocks, int8_t* out) {
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

void unpack_float(const uint8_t* const* rows, const float* scales, int blocks, float* out) {
  for (int b = 0; b < blocks; ++b) {
    for (int k = 0; k < kBlock; ++k) {
      for (int col = 0; col < kCols; ++col) {
        const unsigned pair = rows[col][b * (kBlock / 2) + k / 2];
        *out++ = decode_e2m1(k % 2 == 0 ? pair & 15u : pair >> 4) * scales[b * kCols + col];
      }
    }
  }
}

void unpack_half(const uint16_t* const* rows, DType type, int blocks, float* out) {
  for (int k = 0; k < blocks * kBlock; ++k) {
    for (int col = 0; col < kCols; ++col) {
      *out++ = type == DType::kF16 ? widen_f16(rows[col][k]) : widen_bf16(rows[col][k]);
    }
  }
}

void dot_int8(const Int8Rows& a, int rows, const int8_t* weights, const float* scales, int blocks,
              float* out) {
  for (int r = 0; r < rows; ++r, out += kCols) {
    std::memset(out, 0, kCols * sizeof(float));
    for (int b = 0; b < blocks; ++b) {
      const int8_t* x = a.codes + (r * a.stride + b) * kBlock;
      const float scale = a.scale[r * a.stride + b];
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

void dot_float(const float* a, int64_t stride, int rows, const float* weights, int blocks,
               float* out) {
  for (int r = 0; r < rows; ++r, out += kCols) {
    std::memset(out, 0, kCols * sizeof(float));
    for (int b = 0; b < blocks; ++b) {
      float sum[kCols] = {};
      for (int k = b * kBlock; k < (b + 1) * kBlock; ++k) {
        for (int col = 0; col < kCols; ++col) {
          sum[col] = std::fma(a[r * stride + k], weights[k * kCols + col], sum[col]);
        }
      }
      for (int col = 0; col < kCols; ++col) out[col] += sum[col];
    }
  }
}

void add(const float* x, int64_t n, float* out) {
  for (int64_t i = 0; i < n; ++i) out[i] += x[i];
}

}  // namespace

const SimdKernels& scalar_kernels() {
  static const SimdKernels table = {
      "scalar",    amax,         quantize,    dequantize, widen,     narrow, decode_scales,
      unpack_int8, unpack_float, unpack_half, dot_int8,   dot_float, add,
  };
  return table;
}

}  // namespace fp4lt
