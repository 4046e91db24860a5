// SPDX-License-Identifier: Apache-2.0
// Device side of operand.h.
#pragma once

#include "cuda/operand.h"
#include "cuda/rows.cuh"

namespace fp4lt::cuda {

// Blocks of 16 that a row is written in, those of padding included.
__device__ __forceinline__ int64_t blocks_of(const OperandRows& to) {
  return to.form == RowForm::kCodes ? padded_blocks(to.width / kBlock) : to.width / kBlock;
}

__device__ __forceinline__ uint8_t* scale_at(const OperandRows& to, int64_t row, int64_t block) {
  return to.scales + scale_offset(to.scale_row[row], block, padded_blocks(to.width / kBlock));
}

// 16-bit values of one block; not for kCodes.
__device__ __forceinline__ void store_halves(const OperandRows& to, int64_t row, int64_t block,
                                             const uint16_t (&h)[16]) {
  if (to.form == RowForm::kImage) {
    store_image(to.values, to.place[row], to.width, block, h);
    return;
  }
  uint16_t* at = static_cast<uint16_t*>(to.values) + row * to.width + block * kBlock;
  if (to.form == RowForm::kPrepared) {
    store_prepared(static_cast<uint16_t*>(to.values) + row * to.width, block, h);
    return;
  }
  uint32_t word[8];
  for (int i = 0; i < 8; ++i) word[i] = h[2 * i] | static_cast<uint32_t>(h[2 * i + 1]) << 16;
  auto* out = reinterpret_cast<uint4*>(at);
  out[0] = make_uint4(word[0], word[1], word[2], word[3]);
  out[1] = make_uint4(word[4], word[5], word[6], word[7]);
}

// A block of padding.
__device__ __forceinline__ void store_padding(const OperandRows& to, int64_t row, int64_t block) {
  if (to.form == RowForm::kCodes) {
    *scale_at(to, row, block) = 0;
  } else {
    const uint16_t zeros[16] = {};
    store_halves(to, row, block, zeros);
  }
}

// The products code * scale of one block in bf16, where all of them are exact.
__device__ __forceinline__ void block_products(const unsigned (&code)[16], uint8_t scale,
                                               uint16_t (&h)[16]) {
  const float s = decode_e4m3(scale);
  for (int i = 0; i < 16; ++i) {
    h[i] = __bfloat16_as_ushort(__float2bfloat16_rn(decode_e2m1(code[i]) * s));
  }
}

// A block of NVFP4: as codes, or as products, all of which are exact in bf16.
__device__ __forceinline__ void store_nvfp4(const OperandRows& to, int64_t row, int64_t block,
                                            const unsigned (&code)[16], uint8_t scale) {
  if (to.form == RowForm::kCodes) {
    auto* codes = reinterpret_cast<uint64_t*>(static_cast<uint8_t*>(to.values) +
                                              row * (to.width / 2) + block * (kBlock / 2));
    *codes = pack_codes(code);
    *scale_at(to, row, block) = scale;
    return;
  }
  uint16_t h[16];
  block_products(code, scale, h);
  store_halves(to, row, block, h);
}

// What does not change along a row.
struct RowFactors {
  float f[2];  // by class
  const float* bias;
};

__device__ __forceinline__ RowFactors factors_of(const Finish& p, int64_t row, int64_t expert) {
  float g = 1.0f;
  if (p.a_global != nullptr) g = p.a_global[p.row_index != nullptr ? p.row_index[row] : row];
  if (p.b_global != nullptr) g = __fmul_rn(g, p.b_global[expert * p.b_stride]);
  RowFactors r{{g, g}, nullptr};
  if (p.alpha != nullptr) {
    const float* alpha = p.alpha + expert * p.alpha_expert_stride;
    r.f[0] = __fmul_rn(g, alpha[0]);
    if (p.order != GateOrder::kNone) r.f[1] = __fmul_rn(g, alpha[1]);
  }
  if (p.bias != nullptr) r.bias = p.bias + expert * p.bias_expert_stride;
  return r;
}

__device__ __forceinline__ float finish(const RowFactors& r, int kind, int64_t n, float c) {
  const float y = __fmul_rn(r.f[kind], c);
  return r.bias != nullptr ? __fadd_rn(y, r.bias[n]) : y;
}

}  // namespace fp4lt::cuda
