// SPDX-License-Identifier: Apache-2.0
// Choices that every backend knows by the same names.
#pragma once

#include <cstdint>

#include "core/macros.h"

namespace fp4lt {

// Where the global scale of a quantization comes from.
enum class GlobalScale : int {
  kPerExpert = 0,  // derived from each expert's values, and written
  kPerRow = 1,     // derived from each row's values, and written
  kGiven = 2,      // read: finite and > 0
};

// kSwish is x * sigmoid(alpha * x): silu and swigluoai.
enum class Activation : int { kSwish = 0, kGelu = 1, kGeluTanh = 2, kRelu2 = 3 };

// A parameter of the activation: one number, or one for each expert.
struct ExpertParameter {
  const float* values;  // null: `shared` for all
  int64_t stride;
  float shared;
};
FP4LT_HD float parameter_of(const ExpertParameter& p, int64_t expert) {
  return p.values != nullptr ? p.values[expert * p.stride] : p.shared;
}

}  // namespace fp4lt
