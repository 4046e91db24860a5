// SPDX-License-Identifier: Apache-2.0
// The inner loops of the CPU backend, one table of them per instruction set.
//
// Every table computes the same bits: the codec is elementwise IEEE arithmetic, and the products'
// order of summation is fixed (docs/numerics.md, "The CPU backend"), so that a table only chooses
// how many independent columns and rows it works on at once.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/views.h"

namespace fp4lt {

constexpr int kCols = 16;  // weight rows (output columns) of one tile
constexpr int kChunkBlocks =
    16;                       // blocks whose sums are chained before the pairwise tree takes over
constexpr int kRowTile = 64;  // activation rows that share one unpacked weight tile

// Rows of W4A4 activations, unpacked once per call.  Row r, block b of the strided arrays:
// codes[(r * stride + b) * 16]: twice the e2m1 values, the 8 even k first, then the 8 odd ones;
// offset[r * stride + b]: -12 times their sum, see dot_int8; scale: a quarter of the e4m3 scale.
struct Int8Rows {
  const int8_t* codes;
  const int16_t* offset;
  const float* scale;
  int64_t stride;  // blocks from one row to the next
};

struct SimdKernels {
  const char* name;

  // Largest finite magnitude of x[0..n), 0 where there is none.
  float (*amax)(const float* x, int64_t n);
  // Codec for one row (numerics.md 2 and 3); scales are linear here.
  void (*quantize)(const float* x, int64_t blocks, float g, uint8_t* codes, uint8_t* scales);
  void (*dequantize)(const uint8_t* codes, const uint8_t* scales, int64_t blocks, float g,
                     float* out);
  void (*widen)(const void* x, DType type, int64_t n, float* out);
  void (*narrow)(const float* x, int64_t n, DType type, void* out);

  // Scales of the kCols weight rows of one tile: out[block][col] = e4m3 of byte
  // lines[block / 4 * 512 + col % 4 * 16 + col / 4 * 4 + block % 4].
  void (*decode_scales)(const uint8_t* lines, int blocks, float* out);

  // Weights of kCols rows, kChunkBlocks blocks at most, from checkpoint order into the table's own
  // order.  Rows may be read up to the next multiple of 4 blocks; what lies there does not matter.
  // `out` has room for kCols * kChunkBlocks * 16 elements, those of decode_scales for 4 more
  // blocks.
  void (*unpack_int8)(const uint8_t* const* rows, int blocks, int8_t* out);
  // The same to fp32 products code * scale, out[k][kCols]; scales[block][kCols].
  void (*unpack_float)(const uint8_t* const* rows, const float* scales, int blocks, float* out);
  // fp16 or bf16 weights of kCols rows to the same order; nothing is read past `blocks` blocks.
  void (*unpack_half)(const uint16_t* const* rows, DType type, int blocks, float* out);

  // One chain: out[r][kCols] = the sum over `blocks` blocks of each exact block sum, in fp32, for
  // `rows` activation rows.  `scales` as above; `weights` as unpacked by this table.
  void (*dot_int8)(const Int8Rows& a, int rows, const int8_t* weights, const float* scales,
                   int blocks, float* out);
  // The same for fp32 operands, each block's sum being a chain of 16 fused multiply-adds from 0.
  // a[r * stride + k], weights[k][kCols].
  void (*dot_float)(const float* a, int64_t stride, int rows, const float* weights, int blocks,
                    float* out);
  // out += x, elementwise: the tree's step.
  void (*add)(const float* x, int64_t n, float* out);
};

// The table in use: the best that the processor runs, or what select_kernels() chose.
const SimdKernels& kernels();

// Every table that this processor runs, the best one last.
const std::vector<const SimdKernels*>& all_kernels();

// Makes every later call use the table `name`, "" for the best one again.
void select_kernels(const std::string& name);

}  // namespace fp4lt
