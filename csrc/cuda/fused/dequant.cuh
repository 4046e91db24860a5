// SPDX-License-Identifier: Apache-2.0
// From checkpoint-order codes and e4m3 scales to operands of the tensor cores, by bit arithmetic.
//
// A 32-bit word holds eight codes, k = 0 .. 7 from the low nibble up.  Shifted left by 12, 8, 4 or
// 0 bits, the top nibbles of its 16-bit halves are the codes (0, 4), (1, 5), (2, 6), (3, 7).  A
// code is s ee m; put s into the sign, ee into the lowest bits of the exponent and m into the
// highest of the mantissa of a 16-bit float, and that float is the code's value times a power of
// two, also for the codes 0 and 0.5, which are denormal in both formats.
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

  static __device__ __forceinline__ uint32_t place(uint32_t q) {
    return (q & 0x80008000u) | (q >> 6 & 0x01C001C0u);
  }
  // Two e4m3 bytes, one in each half, to their scale factors.  As exponent and mantissa of a bf16
  // they are s * 2^-120; the way up takes two steps, since 2^238 is no bf16.
  static __device__ __forceinline__ uint32_t scales(uint32_t bytes) {
    const uint32_t v = bytes << 4;
    return ptx::multiply2(ptx::multiply2(v, 0x7F007F00u, __nv_bfloat16{}), 0x77007700u,
                          __nv_bfloat16{});
  }
};

template <>
struct Dequant<__half> {
  static constexpr float kUndo = 0x1p7f;

  static __device__ __forceinline__ uint32_t place(uint32_t q) {
    return (q & 0x80008000u) | (q >> 3 & 0x0E000E00u);
  }
  // As an fp16 the byte is s * 2^-8.
  static __device__ __forceinline__ uint32_t scales(uint32_t bytes) {
    return ptx::multiply2(bytes << 7, 0x78007800u, __half{});  // 2^15
  }
};

// Whether any of the bytes, all below 0x80, is the NaN 0x7F.
__device__ __forceinline__ bool has_nan_scale(uint4 bytes) {
  const uint32_t one = 0x01010101u;
  const uint32_t any = (bytes.x + one) | (bytes.y + one) | (bytes.z + one) | (bytes.w + one);
  return (any & 0x80808080u) != 0;
}

}  // namespace fp4lt::cuda
