// SPDX-License-Identifier: Apache-2.0
// Algorithms for a product: what the library proposes, less what is known to be wrong.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "cublaslt/matmul.h"

namespace fp4lt::cublaslt {

// Known defects that concern single products; which apply is decided by version and device in
// Python (_hazards.py).
struct Filters {
  bool drop_768_auto = false;        // stages 768xAUTO
  bool drop_uneven_split_k = false;  // algorithm 66 with a number of splits that does not divide K
  bool no_query_in_capture = false;  // asking for algorithms would break an ongoing capture
  bool refuses_one_row = false;      // some products with n or m of 1 are refused
  bool reads_alpha_early = false;    // before the kernel ahead of it in its stream has ended
};

struct Algorithm {
  abi::Algo algo;
  int64_t workspace_bytes;
  float waves;
  int id = -1, splits = 1;
  uint32_t tile = 0, reduction = 0, swizzle = 0, custom = 0, stages = 0;
  uint16_t inner_shape = 0, cluster_shape = 0;
};
std::string to_string(const Algorithm& a);

// The algorithm as 64 bytes, good for the same version of the library, and back.
std::string to_bytes(const abi::Algo& algo);
abi::Algo algo_from_bytes(const std::string& bytes);

// Why a filter drops the algorithm at this K, or null.
const char* dropped(const Algorithm& a, int64_t k, const Filters& filters);

// What to say of a product that the library refuses, beside the product; may be empty.
const char* advice(const MatmulDescription& matmul, const Filters& filters);

// At most `count` algorithms in the library's order of preference.  An FP4 product must have its
// scale pointers set.  Throws LibraryError with the whole description if the library has none, or
// if all of them are dropped.
std::vector<Algorithm> find_algorithms(const Library& library, abi::Handle handle,
                                       const Matmul& matmul, int count, const Filters& filters);

// The algorithm with its workspace for this product, or nothing where it does not serve.
std::optional<Algorithm> check_algorithm(const Library& library, abi::Handle handle,
                                         const Matmul& matmul, const abi::Algo& algo);

}  // namespace fp4lt::cublaslt
