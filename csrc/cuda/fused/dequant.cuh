// SPDX-License-Identifier: Apache-2.0
// From checkpoint-order codes and e4m3 scales to operands of the tensor cores, by bit arithmetic.
//
// A 32-bit word holds eight codes, k = 0 .. 7 from the low nibble up; its pairs are the codes
// (0, 4), (1, 5), (2, 6), (3, 7), one in each 16-bit half.  A code is s ee m; put s into the sign,
// ee into the lowest bits of the exponent and m into the highest of the mantissa of a 16-bit float,
// and that float is the code's value times a power of two, also for the codes 0 and 0.5, which are
// denormal in both formats.
//
//   bf16: value * 2^-126.  The scale becomes s * 2^118, the product is the true one * 2^-8.
//   fp16: value * 2^-14.   The scale becomes s * 2^7,   the product is the true one * 2^-7.
//
// Both products are exact (six significant bits, far from the formats' ends).  What is left of the
// power of two is undone once per output.
#pragma once

#include "core/nvfp4.h"
#include "cuda/ptx.cuh"

namespace fp4lt::cuda {

template <typename T>
struct Dequant;

template <>
struct Dequant<__nv_bfloat16> {
  static constexpr float kUndo = 0x1p8f;

  // The pairs of a word.  One multiplication puts both the sign and the other three bits in place,
  // since it adds two shifted copies that do not meet; it runs beside the logical operations, whose
  // pipe is the one that would fill up.
  static __device__ __forceinline__ void place(uint32_t word, uint32_t (&pair)[4]) {
    constexpr uint32_t kLow = (1u << 12) + (1u << 6), kHigh = (1u << 8) + (1u << 2);
    constexpr uint32_t kBits = 0x81C081C0u;
    const uint32_t upper = word >> 8;
    pair[0] = (word & 0x000F000Fu) * kLow & kBits;
    pair[1] = (word & 0x00F000F0u) * kHigh & kBits;
    pair[2] = (upper & 0x000F000Fu) * kLow & kBits;
    pair[3] = (upper & 0x00F000F0u) * kHigh & kBits;
  }
  // Two e4m3 bytes, one in each half, to their scale factors: any finite ones.  As exponent and
  // mantissa of a bf16 they are s * 2^-120; the way up takes two steps, since 2^238 is no bf16.
  static __device__ __forceinline__ uint32_t scales(uint32_t bytes) {
    const uint32_t v = bytes << 4;
    return ptx::multiply2(ptx::multiply2(v, 0x7F007F00u, __nv_bfloat16{}), 0x77007700u,
                          __nv_bfloat16{});
  }
  // The same for bytes of normal numbers: 238 more in the exponent.
  static __device__ __forceinline__ uint32_t normal_scales(uint32_t bytes) {
    return bytes * 16 + 0x77007700u;
  }
};

template <>
struct Dequant<__half> {
  static constexpr float kUndo = 0x1p7f;

  static __device__ __forceinline__ void place(uint32_t word, uint32_t (&pair)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t q = word << (12 - 4 * i);
      pair[i] = (q & 0x80008000u) | (q >> 3 & 0x0E000E00u);
    }
  }
  // As an fp16 the byte is s * 2^-8.
  static __device__ __forceinline__ uint32_t scales(uint32_t bytes) {
    return ptx::multiply2(bytes << 7, 0x78007800u, __half{});  // 2^15
  }
  static __device__ __forceinline__ uint32_t normal_scales(uint32_t bytes) { return scales(bytes); }
};

// Of two bytes below 0x80, one in each half: bits of 0x80808080 are set where one of them is the
// NaN 0x7F or below 15, which all denormal ones are.
__device__ __forceinline__ uint32_t unusual_scales(uint32_t bytes) {
  // The low half of each 16 bits is byte + 1, the high one 0x8E - byte.
  return bytes * (1u - 256u) + 0x8E018E01u;
}

}  // namespace fp4lt::cuda
