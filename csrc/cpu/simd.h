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

constexpr int kCols = 16;         // weight rows (output columns) of one tile
constexpr int kChunkBlocks = 16;  // blocks whose sums are chained before the pairwise tree
constexpr int kRowTile = 64;      // activation rows that share one unpacked weight tile

// Bytes of an unpacked tile's chunk, in whatever order: one fp32 for each weight at most.
constexpr int kUnpackedBytes = kCols * kChunkBlocks * 16 * 4;

// The order in which a block's products are added where that addition rounds.  It is the one that
// the bf16 dot products of x86 have (the upper half of a lane first) when each lane holds one
// 16-bit field of two neighbouring words of four codes.
constexpr int kOrder[16] = {4, 0, 5, 1, 6, 2, 7, 3, 12, 8, 13, 9, 14, 10, 15, 11};
// Its inverse: where in the order k comes.
constexpr int place_of(int k) { return (k & 8) + 2 * (k & 3) + ((k & 4) == 0 ? 1 : 0); }

// Weights' scales are decoded kScaleUp times as large, and e2m1 values in floating point as many
// times smaller: the sum of a block without its scale then never overflows where the product does
// not. Both are powers of two, so nothing is rounded.
constexpr float kScaleUp = 128.0f;

// A chunk of W4A4 activations: row r, block b at index r * kChunkBlocks + b.
struct Int8Rows {
  const int8_t* codes;    // [..][16]: twice the e2m1 values, the 8 even k first, then the odd ones
  const int32_t* offset;  // -12 times their sum, see unpack_int8
  const float* scale;     // the e4m3 scale over 4 * kScaleUp
};

// A chunk of bf16 activations, in the order of pack_bf16.
struct Bf16Rows {
  const uint16_t* values;  // [row][kChunkBlocks][16]
  const uint8_t* tiny;     // [row]: what pack_bf16 said of it
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

  // Scales of the kCols weight rows of one tile: out[block][col] = kScaleUp * e4m3 of byte
  // lines[block / 4 * 512 + col % 4 * 16 + col / 4 * 4 + block % 4].  Blocks are decoded up to the
  // next multiple of 4.
  void (*decode_scales)(const uint8_t* lines, int blocks, float* out);

  // Activations of at most kChunkBlocks blocks, to the forms above.
  void (*pack_int8)(const uint8_t* codes, int blocks, int8_t* out, int32_t* offset);
  // Whether a nonzero value is so small that a sum of its products with e2m1 values may be
  // denormal. Null, as dot_bf16 is, where the processor has no products of bf16.
  bool (*pack_bf16)(const uint16_t* x, int blocks, uint16_t* out);

  // Weights of kCols rows, kChunkBlocks blocks at most, from checkpoint order into what this
  // table's dot_int8, and its dot_bf16 and dot_float, read; `out` has kUnpackedBytes.  Rows may be
  // read up to the next multiple of 4 blocks; what lies there does not matter.
  void (*unpack_int8)(const uint8_t* const* rows, int blocks, void* out);
  void (*unpack_float)(const uint8_t* const* rows, int blocks, void* out);
  // fp16 or bf16 weights of kCols rows, to out[block][place][kCols] with the places of kOrder;
  // nothing is read past `blocks` blocks.
  void (*unpack_dense)(const uint16_t* const* rows, DType type, int blocks, float* out);

  // One chain: out[r][kCols] = the sum over `blocks` blocks of each exact block sum times both
  // scales, in fp32, for `rows` activation rows.  scales[block][kCols] are the weights'.
  void (*dot_int8)(const Int8Rows& a, int rows, const void* weights, const float* scales,
                   int blocks, float* out);
  // The same for fp32 activations a[row][kChunkBlocks][place]: each block's sum is a chain of 16
  // fused multiply-adds from 0 in kOrder, and one more adds it times the scale to the sum so far.
  void (*dot_float)(const float* a, int rows, const void* weights, const float* scales, int blocks,
                    float* out);
  // The same bits from bf16 activations.
  void (*dot_bf16)(const Bf16Rows& a, int rows, const void* weights, const float* scales,
                   int blocks, float* out);
  // dot_float for unpack_dense's weights, whose scales are 1.
  void (*dot_dense)(const float* a, int rows, const float* weights, int blocks, float* out);
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
