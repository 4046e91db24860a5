// SPDX-License-Identifier: Apache-2.0
// The grouped GEMM on the CPU (docs/numerics.md, section 4 and "The CPU backend").
#pragma once

#include <optional>
#include <variant>

#include "core/views.h"

namespace fp4lt {

// For each expert e and its rows m in [ends[e-1], ends[e]):
//
//   out[m, n] = round( f * c + bias[e, n] ),   c = sum over k of a[row(m), k] * b[e, n, k]
//   f = (a.global[row(m)] * b.global[e]) * alpha[e, class(n)]
//
// with row(m) = row_index[m], or m without an index.  Operands are taken without their global
// scales.  NVFP4 with NVFP4 sums each block exactly; any other pair is widened to fp32, exactly.
// Rows of `out` from ends[experts - 1] on are left alone, and so are their inputs.
//
// The order of the sum depends on k alone: a row's bits do not depend on the rows around it, on the
// number of threads, or on the processor.
struct GroupedGemmArgs {
  int64_t experts, n, k;
  const int64_t* ends;  // non-decreasing
  std::variant<Nvfp4View, DenseView> a;
  const int64_t* row_index;  // may be null
  std::variant<Nvfp4View, DenseView> b;
  const float* alpha;  // may be null: 1.  (experts) or, with a gate order, (experts, 2)
  int64_t alpha_expert_stride;
  GateOrder order;
  const float* bias;  // may be null: 0.  bias[e * bias_expert_stride + n]
  int64_t bias_expert_stride;
  void* out;
  DType out_type;
  int64_t out_row_stride;
};
void grouped_gemm(const GroupedGemmArgs& args, int threads);

}  // namespace fp4lt
