// SPDX-License-Identifier: Apache-2.0
// One product as cuBLASLt is asked for it.
//
// Row-major Y[rows, N] = X[rows, K] W[N, K]^T is column-major D = A^T B with A = W, B = X, D = Y:
// the weights' rows are m, the activations' rows are n, and any number of rows works.
#pragma once

#include <string>

#include "cublaslt/descriptors.h"

namespace fp4lt::cublaslt {

// Plain and printable: what an error shows is all that was asked.
struct MatmulDescription {
  abi::DataType operand = abi::kR16BF;  // of A and B; FP4 comes with VEC16_UE4M3 scales
  abi::DataType out = abi::kR32F;       // of C and D, which share one layout
  int64_t m = 0, n = 0, k = 0;          // out-features, rows, K
  int64_t lda = 0, ldb = 0, ldd = 0;    // in elements
  uint32_t a_alignment = 256, b_alignment = 256, d_alignment = 256;  // of the pointers, in bytes
  int64_t workspace_bytes = 0;  // the most that an algorithm may want
  // Split-K sums in fp32 or not at all: the other schemes round partial sums to the output type.
  uint32_t reduction_schemes = abi::kReduceComputeType;

  bool block_scaled() const { return operand == abi::kR4FE2M1; }
};
std::string to_string(const MatmulDescription& d);

// The library's objects for a description.  Pointer mode DEVICE: alpha and beta are read when the
// product runs, so a captured graph sees their values of each replay.
class Matmul {
 public:
  // Throws ArgumentError for what the documentation rules out, naming the rule.
  Matmul(const Library& library, const MatmulDescription& description);

  const MatmulDescription& description() const { return description_; }
  // Another number of rows.
  void set_rows(int64_t n);
  // Scale tiles of A and B, for FP4 only.  Throws ArgumentError unless they lie at multiples of 16
  // bytes.
  void set_scales(const void* a, const void* b);

  MatmulDesc desc;
  MatrixLayout a, b, d;

 private:
  MatmulDescription description_;
};

MatmulPreference make_preference(const Library& library, const MatmulDescription& description);

}  // namespace fp4lt::cublaslt
