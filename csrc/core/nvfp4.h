// SPDX-License-Identifier: Apache-2.0
// The NVFP4 format: e2m1 codes, an e4m3 scale for each 16 of them, one fp32 global multiplier.
// docs/numerics.md is the contract; every rounding of the codec is stated here and nowhere else.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/macros.h"

namespace fp4lt {

constexpr int kBlock = 16;               // neighbours along K that share a scale
constexpr float kE2m1Max = 6.0f;         // largest magnitude of a code
constexpr float kE4m3Max = 448.0f;       // largest finite scale
constexpr float kRange = 2688.0f;        // their product: what a derived global scale maps amax to
constexpr float kMinGlobal = 0x1p-126f;  // a derived global scale stays a normal number
constexpr uint8_t kScaleNan = 0x7F;
constexpr uint8_t kScaleMax = 0x7E;
constexpr float kFloatMax = 3.402823466e+38f;

// The codes' values times two: integers, so that sums of products of codes are exact in int32.
constexpr int8_t kE2m1Doubled[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

FP4LT_HD uint32_t float_bits(float x) {
  uint32_t u;
  std::memcpy(&u, &x, sizeof u);
  return u;
}

FP4LT_HD float bits_float(uint32_t u) {
  float x;
  std::memcpy(&x, &u, sizeof x);
  return x;
}

FP4LT_HD float magnitude(float x) { return bits_float(float_bits(x) & 0x7FFFFFFFu); }
FP4LT_HD bool is_nan(float x) { return (float_bits(x) & 0x7FFFFFFFu) > 0x7F800000u; }
FP4LT_HD bool is_finite(float x) { return (float_bits(x) & 0x7FFFFFFFu) < 0x7F800000u; }

FP4LT_HD float decode_e2m1(unsigned code) {
  const unsigned m = code & 7u;
  // 0 and 0.5 are the subnormals; from 1 on: exponent m / 2, one bit of mantissa.
  const float v =
      m < 2 ? 0.5f * static_cast<float>(m) : bits_float(((m >> 1) + 126u) << 23 | (m & 1u) << 22);
  return bits_float(float_bits(v) | (code & 8u) << 28);
}

// The sign bit is honoured here, though no scale of ours ever has it.
FP4LT_HD float decode_e4m3(uint8_t byte) {
  const unsigned m = byte & 0x7Fu;
  const uint32_t sign = static_cast<uint32_t>(byte & 0x80u) << 24;
  if (m == 0x7Fu) return bits_float(0x7FC00000u | sign);
  const float v = m < 8 ? static_cast<float>(m) * 0x1p-9f : bits_float((m << 20) + (120u << 23));
  return bits_float(float_bits(v) | sign);
}

// `v` >= 0 and not NaN, or +infinity.  Nearest even, saturating at 448.
FP4LT_HD uint8_t encode_e4m3(float v) {
  if (v >= kE4m3Max) return kScaleMax;
  if (v < 0x1p-6f) {
    // Below the normal range the step is 2^-9.  Adding 2^23 leaves no fraction bits, so the sum
    // rounds v * 2^9 to the nearest even integer; 8 is the smallest normal, as it should be.
    const float shifted = v * 0x1p9f + 0x1p23f;
    return static_cast<uint8_t>(float_bits(shifted) & 0xFu);
  }
  const uint32_t u = float_bits(v);
  return static_cast<uint8_t>(((u + 0x7FFFFu + ((u >> 20) & 1u)) >> 20) - (120u << 3));
}

// `q` not NaN.  Nearest, ties to the even code, saturating at 6; the sign is kept, of zero too.
FP4LT_HD unsigned encode_e2m1(float q) {
  const float m = magnitude(q);
  // A tie belongs to the even neighbour: it is >= where the code above is even, > where it is odd.
  const unsigned code = (m > 0.25f) + (m >= 0.75f) + (m > 1.25f) + (m >= 1.75f) + (m > 2.5f) +
                        (m >= 3.5f) + (m > 5.0f);
  return code | (float_bits(q) >> 28 & 8u);
}

// The multiplier that maps `amax` (finite, >= 0) to the largest code at the largest scale.
FP4LT_HD float derive_global(float amax) {
  if (amax == 0.0f) return 1.0f;
  const float g = amax / kRange;
  return g < kMinGlobal ? kMinGlobal : g;
}

// The scale of a block whose largest magnitude is `amax` (an infinity counts as the largest finite
// number), under the global scale `g`.
FP4LT_HD uint8_t encode_scale(float amax, float g) {
  const float a = amax > kFloatMax ? kFloatMax : amax;
  return encode_e4m3(a / (kE2m1Max * g));
}

}  // namespace fp4lt
