// SPDX-License-Identifier: Apache-2.0
// What the row-wise kernels share: loading 16 neighbours as fp32, the codec of one block, maxima
// over a block of threads, and the order in which the fused kernel wants its operand.
#pragma once

#include "core/nvfp4.h"
#include "core/views.h"
#include "cuda/fused/gemm.h"
#include "cuda/ptx.cuh"

namespace fp4lt::cuda {

// 16 values from `at` (elements of `type`) on.
__device__ __forceinline__ void load_block(const void* x, DType type, int64_t at, float (&v)[16]) {
  if (type == DType::kF32) {
    const auto* from = static_cast<const float*>(x) + at;
    for (int i = 0; i < 16; ++i) v[i] = from[i];
  } else if (type == DType::kBF16) {
    const auto* from = static_cast<const __nv_bfloat16*>(x) + at;
    for (int i = 0; i < 16; ++i) v[i] = __bfloat162float(from[i]);
  } else {
    const auto* from = static_cast<const __half*>(x) + at;
    for (int i = 0; i < 16; ++i) v[i] = __half2float(from[i]);
  }
}

// Largest finite magnitude of the 16.
__device__ __forceinline__ float finite_amax(const float (&v)[16]) {
  float best = 0.0f;
  for (int i = 0; i < 16; ++i) {
    const float m = magnitude(v[i]);
    if (is_finite(m) && m > best) best = m;
  }
  return best;
}

// numerics.md, section 2, for one block: the scale byte; codes into `code`.
__device__ __forceinline__ uint8_t quantize_block(const float (&v)[16], float g,
                                                  unsigned (&code)[16]) {
  float largest = 0.0f;
  bool nan = false;
  for (int i = 0; i < 16; ++i) {
    const float m = magnitude(v[i]);
    nan |= is_nan(m);
    largest = m > largest ? m : largest;
  }
  if (nan) {
    for (int i = 0; i < 16; ++i) code[i] = 0;
    return kScaleNan;
  }
  const uint8_t scale = encode_scale(largest, g);
  const float step = decode_e4m3(scale) * g;
  for (int i = 0; i < 16; ++i) {
    // The sign is v's own: where scale times g underflows to 0, 0 / 0 is a NaN of any sign.
    code[i] = float_bits(v[i]) >> 28 & 8u;
    if (scale != 0) code[i] |= encode_e2m1(v[i] / step) & 7u;
  }
  return scale;
}

// Largest value over the block of threads, given to all; `scratch` holds 33 floats.
__device__ __forceinline__ float block_max(float v, float* scratch) {
  for (int offset = 16; offset > 0; offset /= 2) {
    v = fmaxf(v, __shfl_xor_sync(0xFFFFFFFFu, v, offset));
  }
  const int warps = blockDim.x / 32;
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = v;
  __syncthreads();
  if (threadIdx.x < 32) {
    v = static_cast<int>(threadIdx.x) < warps ? scratch[threadIdx.x] : 0.0f;
    for (int offset = 16; offset > 0; offset /= 2) {
      v = fmaxf(v, __shfl_xor_sync(0xFFFFFFFFu, v, offset));
    }
    if (threadIdx.x == 0) scratch[32] = v;
  }
  __syncthreads();
  return scratch[32];
}

// The pairs of eight neighbours, in the order of place() in fused/dequant.cuh.
__device__ __forceinline__ void pairs_of(const uint16_t (&h)[16], int half, uint32_t (&pair)[4]) {
  for (int i = 0; i < 4; ++i) {
    pair[i] = h[half * 8 + i] | static_cast<uint32_t>(h[half * 8 + i + 4]) << 16;
  }
}

// Block `b` of a row for mma.sync (fused/prepared.h).
__device__ __forceinline__ void store_prepared(uint16_t* row, int64_t b, const uint16_t (&h)[16]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t pair[4];
    pairs_of(h, half, pair);
    *reinterpret_cast<uint4*>(reinterpret_cast<uint32_t*>(row) + mma_pair(b * 2 + half, 0)) =
        make_uint4(pair[0], pair[1], pair[2], pair[3]);
  }
}

// Block `b` of the row at `place` of an image for wgmma.
__device__ __forceinline__ void store_image(void* image, int64_t place, int64_t padded_k, int64_t b,
                                            const uint16_t (&h)[16]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t pair[4];
    pairs_of(h, half, pair);
    for (int i = 0; i < 4; ++i) {
      static_cast<uint32_t*>(image)[wgmma_pair(place, padded_k, b * 2 + half, i)] = pair[i];
    }
  }
}

__device__ __forceinline__ uint64_t pack_codes(const unsigned (&code)[16]) {
  uint64_t packed = 0;
  for (int i = 0; i < 16; ++i) packed |= static_cast<uint64_t>(code[i]) << (4 * i);
  return packed;
}

}  // namespace fp4lt::cuda
