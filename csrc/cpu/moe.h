// SPDX-License-Identifier: Apache-2.0
// What stands around the two GEMMs of a MoE block, on the CPU (docs/numerics.md, section 5).
#pragma once

#include "core/problem.h"
#include "core/views.h"

namespace fp4lt {

// Sorts the slots (t, j) by local expert, keeping their order within one.  Slots whose id is not in
// [expert_start, expert_start + experts) are left out.  Returns the number of routed rows M.
//   ends (experts)   end offset of each expert's rows
//   row_token (T*k)  first M entries: the token of each row
//   row_expert (T*k) first M entries: its local expert
//   slot_row (T*k)   the row of each slot, -1 where it was left out
int64_t route(const int64_t* ids, int64_t tokens, int64_t top_k, int64_t expert_start,
              int64_t experts, int64_t* ends, int64_t* row_token, int64_t* row_expert,
              int64_t* slot_row);

// u = act(gate) * (up + beta), or act(x) without a gate; gate is first cut at `limit` from above
// and up at both ends.  kSwish is x * sigmoid(alpha * x).  Computed in double and rounded to fp32
// once, then to `out_type`.  Parameters are indexed by local expert (stride 0: shared); limit may
// be null.
struct ActivationArgs {
  const float* h;  // (rows, n) fp32
  int64_t rows, n;
  GateOrder order;
  Activation kind;
  const int64_t* row_expert;
  ExpertParameter alpha, beta, limit;
  bool limited;
  void* out;  // (rows, n / 2), or (rows, n) without a gate
  DType out_type;
};
void activate(const ActivationArgs& args, int threads);

// y[t] = sum over j = 0 .. k-1 of weights[t, j] * z[slot_row[t, j]] in fp32, in that order, rounded
// once.  Slots of -1 are skipped; `weights` null means 1.
struct CombineArgs {
  const float* z;  // (M, hidden)
  const int64_t* slot_row;
  const float* weights;
  int64_t tokens, top_k, hidden;
  void* out;
  DType out_type;
  int64_t out_row_stride;
};
void combine(const CombineArgs& args, int threads);

// out[t] = round(weights[t] * x[t]) in x's own type: the router weight on the input.
void scale_rows(const DenseView& x, const float* weights, int64_t rows, int64_t n, void* out,
                int threads);

}  // namespace fp4lt
