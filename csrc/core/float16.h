// SPDX-License-Identifier: Apache-2.0
// fp16 and bf16 to fp32 and back by bit arithmetic, for code that may not assume any extension.
// Narrowing rounds to nearest even; fp16 overflows to infinity; a NaN stays a NaN.
#pragma once

#include "core/nvfp4.h"

namespace fp4lt {

FP4LT_HD float widen_bf16(uint16_t h) { return bits_float(static_cast<uint32_t>(h) << 16); }

FP4LT_HD float widen_f16(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
  const uint32_t m = h & 0x7FFFu;
  if (m >= 0x7C00u) return bits_float(sign | 0x7F800000u | (m & 0x3FFu) << 13);
  // Subnormals are small integers times 2^-24, exact in fp32.
  const float v =
      m < 0x400u ? static_cast<float>(m) * 0x1p-24f : bits_float((m << 13) + (112u << 23));
  return bits_float(float_bits(v) | sign);
}

FP4LT_HD uint16_t narrow_bf16(float x) {
  const uint32_t u = float_bits(x);
  if (is_nan(x)) return static_cast<uint16_t>(u >> 16 | 0x40u);
  return static_cast<uint16_t>((u + 0x7FFFu + (u >> 16 & 1u)) >> 16);
}

FP4LT_HD uint16_t narrow_f16(float x) {
  const uint32_t u = float_bits(x);
  const uint16_t sign = static_cast<uint16_t>(u >> 16 & 0x8000u);
  const uint32_t m = u & 0x7FFFFFFFu;
  if (m > 0x7F800000u) return static_cast<uint16_t>(sign | 0x7E00u | (m >> 13 & 0x3FFu));
  if (m >= 0x477FF000u) return static_cast<uint16_t>(sign | 0x7C00u);  // from 65520 on: infinity
  if (m < 0x38800000u) {
    // Below 2^-14 the step is 2^-24: adding 0.5 aligns it with fp32's last bit.
    return static_cast<uint16_t>(sign | (float_bits(bits_float(m) + 0.5f) - 0x3F000000u));
  }
  return static_cast<uint16_t>(sign | ((m + 0xFFFu + (m >> 13 & 1u) - (112u << 23)) >> 13));
}

}  // namespace fp4lt
