// SPDX-License-Identifier: Apache-2.0
// What stands around the GEMMs of a MoE block on a CUDA device.  Sizes that depend on the routing
// live on the device; every launch depends on shapes alone, so all of it can be captured.
#pragma once

#include "core/problem.h"
#include "core/views.h"
#include "cuda/fused/gemm.h"
#include "cuda/operand.h"

namespace fp4lt::cuda {

constexpr int kMaxExperts = 1024;

// Sorts the slots (t, j) by local expert, keeping their order within one, and makes the work list.
struct RouteArgs {
  const void* ids;  // (T, k), int64 or int32, global
  bool ids_are_64_bit;
  int64_t tokens, top_k, expert_start, experts;
  int block_rows;
  int* row_count;    // rows routed, M
  int* row_token;    // first M: the token of each row
  int* row_expert;   // first M: its local expert
  int* slot_row;     // (T, k): the row of each slot, or -1
  int* ends;         // (experts,): end offset of each expert's rows; may be null
  int* row_place;    // first M: where the row goes in an image (fused/prepared.h); may be null
  RowBlock* blocks;  // may be null: no work list, nor row_place
  int* block_count;
  int* flags;  // with blocks: 2 kMaxSharers words, set to zero for the two GEMMs that follow
};
void route(int device, const RouteArgs& args, Stream stream);

// The work list of rows that are sorted already.  Offsets that decrease or pass `rows` are cut: on
// the device nobody can be told.  Expert e's rows begin at starts[e], and starts[E] is their
// number; in an image they begin at places[e].
struct PlanArgs {
  const void* ends;
  bool ends_are_64_bit;
  int64_t experts, rows;
  int block_rows;
  RowBlock* blocks;
  int* block_count;
  int* flags;   // as in RouteArgs
  int* starts;  // (E + 1,)
  int* places;  // (E,)
};
void plan_blocks(int device, const PlanArgs& args, Stream stream);

// u = act(gate) * (up + beta) of the CPU's ActivationArgs, into one of three forms.
enum class ActivationForm : int {
  kFloat = 0,    // (rows, I) fp32
  kHalf = 1,     // rounded to `type`
  kRounded = 2,  // rounded to NVFP4; global scales to `global_out`
};
struct ActivationArgs {
  const float* h;  // (rows, n)
  int64_t h_row_stride;
  Finish finish;  // of h
  const int* row_count;
  const int* row_expert;
  int64_t rows, n;  // rows: the most there can be
  GateOrder order;
  Activation kind;
  ExpertParameter alpha, beta, limit;
  bool limited;
  ActivationForm form;
  DType type;          // of kHalf
  const float* given;  // of kRounded: static global scale by expert, null derives one per row
  int64_t given_stride;
  float* global_out;
  OperandRows out;  // of kFloat, `values` are fp32 and contiguous
};
void activate(int device, const ActivationArgs& args, Stream stream);

// y[t] = sum over j of weights[t, j] * z[slot_row[t, j]], in the order of j, product and sum
// rounded one by one; weights null means 1.  row_expert is needed where z is to be finished.
struct CombineArgs {
  const float* z;  // contiguous
  Finish finish;   // of z
  const int* row_expert;
  const int* slot_row;
  const float* weights;
  int64_t tokens, top_k, hidden;
  void* out;
  DType out_type;
  int64_t out_row_stride;
};
void combine(int device, const CombineArgs& args, Stream stream);

// out[t] = round(weights[t] * x[t]) in x's own type; out is contiguous.
void scale_rows(int device, const DenseView& x, const float* weights, int64_t rows, int64_t n,
                void* out, Stream stream);

}  // namespace fp4lt::cuda
