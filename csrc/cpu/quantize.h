// SPDX-License-Identifier: Apache-2.0
// The codec over whole tensors, on the CPU (docs/numerics.md, sections 2 and 3).
#pragma once

#include "core/problem.h"
#include "core/views.h"

namespace fp4lt {

// Rounds (experts, rows, k) values to NVFP4.  k is a multiple of 16.
// `codes` is contiguous; `scales` is contiguous, tiled, and written whole: the padding is zero.
// The global scale of a row is global[expert * global_expert_stride + row * global_row_stride].
struct QuantizeArgs {
  DenseView x;
  int64_t experts, rows, k;
  GlobalScale mode;
  float* global;
  int64_t global_expert_stride, global_row_stride;
  uint8_t* codes;
  uint8_t* scales;
};
void quantize(const QuantizeArgs& args, int threads);

// The inverse: code * (scale * global) in fp32, then one rounding to `out_type`.
struct DequantizeArgs {
  Nvfp4View x;
  int64_t experts, rows, k;
  int64_t global_expert_stride, global_row_stride;
  void* out;  // contiguous
  DType out_type;
};
void dequantize(const DequantizeArgs& args, int threads);

// Block scales between row-major order and tiles, byte by byte.  Tiling zeroes the padding.
void tile_scales(const uint8_t* linear, int64_t experts, int64_t rows, int64_t blocks,
                 uint8_t* tiled);
void untile_scales(const uint8_t* tiled, int64_t experts, int64_t rows, int64_t blocks,
                   uint8_t* linear);

}  // namespace fp4lt
