// SPDX-License-Identifier: Apache-2.0
// The fused grouped GEMM: FP4 weights straight from memory to 16-bit tensor cores, all experts in
// one launch.  docs/kernels.md has the data flow and the derivation of the tile shapes.
#pragma once

#include "core/problem.h"
#include "core/views.h"
#include "cuda/fused/prepared.h"
#include "cuda/operand.h"

namespace fp4lt::cuda {

// Ranges that the sum over K is cut into: a function of K alone, so that a row's bits do not depend
// on how many rows come with it.  1, 2 or 4; several have two steps of 256 each at least.
int partitions(int64_t k);

// Rows of one expert that a block of threads takes at once: the work list's entries.
struct RowBlock {
  int expert;
  int row0;
  int rows;
  int group;  // of eight rows in an image (prepared.h), where row0 is
};
static_assert(sizeof(RowBlock) == 16);

// Rows of a work list's entries: 8, 16, ... up to `most`.  A larger one reads the weights less
// often, a smaller one wastes less; the choice changes no bit of the result.
int row_block_size(int64_t rows, int64_t experts, int most);
// The largest that a device's shared memory holds for activations in this form.
int most_block_rows(int device, RowForm form);

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
  RowForm form;  // of `a`, kPrepared or kImage: decides which kernel runs, and no bit of the result
  int64_t n, k;
  const RowBlock* blocks;
  const int* block_count;
  int block_rows;
  int64_t expected_blocks;  // a guess at *block_count, to choose the launch by
  // Whether another kernel of this library was launched after the one that made the work list, so
  // that the list is there before this launch begins and weights may be read ahead of the kernel
  // before this one.
  bool list_is_older;
  const void* a;          // prepared, rows of round_up(k, kPreparedK); kImage: an image
  DType a_type;           // kBF16 or kF16
  const int* row_index;   // may be null: row(m) = m
  const float* a_global;  // may be null: 1
  Nvfp4View b;            // codes 8-byte, scales 16-byte aligned
  const float* alpha;     // may be null
  int64_t alpha_expert_stride;
  GateOrder order;
  const float* bias;  // may be null
  int64_t bias_expert_stride;
  void* out;
  DType out_type;
  int64_t out_row_stride;
  // With `gated`, n counts gate and up rows, and out is silu(gate) * up, prepared for the next GEMM
  // in the form gate.form: can_gate() says where.
  bool gated;
  struct {
    RowForm form;
    bool limited;
    ExpertParameter limit;
  } gate;
  // Where blocks of threads that share a tile pass on their sums: scratch_bytes() of memory, and
  // kMaxSharers words that are zero, and zero again afterwards.
  void* shared_sums;
  int* shared_flags;
};
void fused_gemm(int device, const FusedGemmArgs& args, Stream stream);

// Whether the wgmma form can run a GEMM with these weights on the device.
bool can_wgmma(int device, const Nvfp4View& b, int64_t k);
// Whether the wgmma form can also apply silu to gate and up: 64 rows of each to a tile.
bool can_gate(const FusedGemmArgs& args);
constexpr int kMaxSharers = 512;  // blocks of threads that a device may run at once
int64_t scratch_bytes(int device, RowForm form, int64_t k, int block_rows);
// Most fp32 roundings a product can meet in the sum: the kernel's depth (docs/numerics.md).
int64_t fused_depth(int64_t k);

}  // namespace fp4lt::cuda
