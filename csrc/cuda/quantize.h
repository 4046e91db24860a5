// SPDX-License-Identifier: Apache-2.0
// The codec over whole tensors on a CUDA device: the same interface and the same bytes as the CPU's
// (cpu/quantize.h), and operands from activations.
#pragma once

#include <variant>

#include "core/problem.h"
#include "core/views.h"
#include "cuda/operand.h"

namespace fp4lt::cuda {

struct QuantizeArgs {
  DenseView x;
  int64_t experts, rows, k;
  GlobalScale mode;
  float* global;
  int64_t global_expert_stride, global_row_stride;
  uint8_t* codes;   // contiguous, at a multiple of 8 bytes
  uint8_t* scales;  // contiguous, tiled; padding is written as zero
};
void quantize(int device, const QuantizeArgs& args, Stream stream);

struct DequantizeArgs {
  Nvfp4View x;
  int64_t experts, rows, k;
  int64_t global_expert_stride, global_row_stride;
  void* out;
  DType out_type;
};
void dequantize(int device, const DequantizeArgs& args, Stream stream);

// Block scales to tiles (padding zeroed) and back, byte by byte.
void tile_scales(int device, const uint8_t* linear, int64_t experts, int64_t rows, int64_t blocks,
                 uint8_t* tiled, Stream stream);
void untile_scales(int device, const uint8_t* tiled, int64_t experts, int64_t rows, int64_t blocks,
                   uint8_t* linear, Stream stream);

// Activations to an operand, row by row:
//   a dense 16-bit x, `quantize` false:  its values (not as codes)
//   a dense x, `quantize` true:          its NVFP4 rounding, as bf16 products or as codes
//   an NVFP4 x:                          the same of what it is
// Row i of the result is row source[i] of x, or i.  With `quantize`, its global scale is
// given[scale_index[i] * given_stride] (index 0 without scale_index), or derived when `given` is
// null; it is written to global_out[i].  With `count`, rows from *count on are left alone.
//
// In an image (kImage) row i goes to out.place[i].  Without out.place, rows are sorted: expert e's
// begin at starts[e] and place places[e], and starts[experts] is their number.
struct PrepareArgs {
  std::variant<Nvfp4View, DenseView> x;
  bool quantize;
  int64_t rows, k;
  const int* source;
  const int* count;
  const float* given;
  int64_t given_stride;
  const int* scale_index;
  float* global_out;
  OperandRows out;
  const int* starts;
  const int* places;
  int64_t experts;
};
void prepare(int device, const PrepareArgs& args, Stream stream);

}  // namespace fp4lt::cuda
