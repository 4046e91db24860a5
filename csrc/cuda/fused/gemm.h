// SPDX-License-Identifier: Apache-2.0
// The fused grouped GEMM: FP4 weights straight from memory to 16-bit tensor cores, all experts in
// one launch.  docs/kernels.md has the data flow and the derivation of the tile shapes.
#pragma once

#include "core/views.h"
#include "cuda/stream.h"

namespace fp4lt::cuda {

// Activations as the kernel wants them: K padded with zeros to a multiple of kPreparedK, and each
// eight neighbours stored in the order 0, 4, 1, 5, 2, 6, 3, 7 (see dequant.cuh).
constexpr int kPreparedK = 256;
FP4LT_HD constexpr int prepared_order(int i) { return (i & 1) * 4 + i / 2; }

// Ranges that the sum over K is cut into: a function of K alone, so that a row's bits do not depend
// on how many rows come with it.  1, 2 or 4; several have two steps of 256 each at least.
int partitions(int64_t k);

// Rows of one expert that a block of threads takes at once: the work list's entries.
struct RowBlock {
  int expert;
  int row0;
  int rows;
  int unused;
};

// Rows of a work list's entries: 8, 16, 32 or 64.  A larger one reads the weights less often, a
// smaller one wastes less; the choice changes no bit of the result.
int row_block_size(int64_t rows, int64_t experts);

// Entries that a work list is likely to have when `rows` are spread at random.
int64_t expected_row_blocks(int64_t rows, int64_t experts, int block_rows);

// Entries that a work list needs room for.
int64_t max_row_blocks(int64_t rows, int64_t experts, int block_rows);

// For each entry of the work list and each of its rows m:
//
//   out[m, n] = round( f * c + bias[e, n] ),  c = sum over k of a[row(m), k] * b[e, n, k]
//   f = (a_global[row(m)] * b.global[e]) * alpha[e, class(n)]
//
// as GroupedGemmArgs of the CPU has it.  Sizes live on the device: the launch depends on the shape
// and on block_rows only.
struct FusedGemmArgs {
  int64_t n, k;
  const RowBlock* blocks;
  const int* block_count;
  int block_rows;
  int64_t expected_blocks;  // a guess at *block_count, to choose the launch by
  const void* a;            // prepared; rows of round_up(k, kPreparedK)
  DType a_type;             // kBF16 or kF16
  const int* row_index;     // may be null: row(m) = m
  const float* a_global;    // may be null: 1
  Nvfp4View b;              // codes 8-byte, scales 16-byte aligned
  const float* alpha;       // may be null
  int64_t alpha_expert_stride;
  GateOrder order;
  const float* bias;  // may be null
  int64_t bias_expert_stride;
  void* out;
  DType out_type;
  int64_t out_row_stride;
};
void fused_gemm(int device, const FusedGemmArgs& args, Stream stream);

// Most fp32 roundings a product can meet in the sum: the kernel's depth (docs/numerics.md).
int64_t fused_depth(int64_t k);

}  // namespace fp4lt::cuda
