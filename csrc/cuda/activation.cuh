// SPDX-License-Identifier: Apache-2.0
// The activation that a GEMM's epilogue and the activation kernel share (numerics.md, section 5).
#pragma once

#include "core/macros.h"

namespace fp4lt::cuda {

// x * sigmoid(x) within 4 ulp.  For negative x through exp(x) = exp(x/2)^2, multiplied into x one
// after the other: nothing underflows before the result does.
__device__ __forceinline__ float silu(float x) {
  if (x >= 0.0f) return x / (1.0f + expf(-x));
  const float half = expf(0.5f * x);
  return x * half / (1.0f + half * half) * half;
}

// Written so that a NaN passes through.
__device__ __forceinline__ void limit_gate_and_up(float limit, float& gate, float& up) {
  if (gate > limit) gate = limit;
  if (up > limit) up = limit;
  if (up < -limit) up = -limit;
}

// silu(gate) * up, each rounded once.
__device__ __forceinline__ float gated_silu(float gate, float up, bool limited, float limit) {
  if (limited) limit_gate_and_up(limit, gate, up);
  return __fmul_rn(silu(gate), up);
}

}  // namespace fp4lt::cuda
