// SPDX-License-Identifier: Apache-2.0
// Pointers with extents.  They own nothing; strides count elements of the pointed-to type.
#pragma once

#include <cstdint>

#include "core/macros.h"

namespace fp4lt {

enum class DType : int { kF32 = 0, kF16 = 1, kBF16 = 2 };

constexpr int64_t size_of(DType t) { return t == DType::kF32 ? 4 : 2; }

// Matrices (one per expert) whose K is contiguous.
struct DenseView {
  const void* data;
  DType type;
  int64_t expert_stride;
  int64_t row_stride;
};

// NVFP4 matrices: rows of K/2 code bytes without gaps, scales in 128x4 tiles (scale_layout.h).
// `global` is indexed by expert for weights and by row for activations; stride 0 shares one value.
struct Nvfp4View {
  const uint8_t* codes;
  int64_t codes_expert_stride;
  const uint8_t* scales;
  int64_t scales_expert_stride;
  const float* global;
  int64_t global_stride;
};

// How the rows of w13 hold gate and up.  kNone: there is no gate.
enum class GateOrder : int { kNone = 0, kGateUp = 1, kUpGate = 2, kInterleaved = 3 };

// 0 for a gate row, 1 for an up row, of `n` rows in all.
FP4LT_HD constexpr int gate_class(GateOrder order, int64_t row, int64_t n) {
  switch (order) {
    case GateOrder::kGateUp:
      return row < n / 2 ? 0 : 1;
    case GateOrder::kUpGate:
      return row < n / 2 ? 1 : 0;
    case GateOrder::kInterleaved:
      return static_cast<int>(row & 1);
    default:
      return 0;
  }
}

}  // namespace fp4lt
