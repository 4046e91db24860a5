// SPDX-License-Identifier: Apache-2.0
#include "cublaslt/algorithm.h"

#include <cstring>

#include "core/error.h"

namespace fp4lt::cublaslt {
namespace {

// The family of kernels that the notes on defects call algorithm 66.
constexpr int kNvjet = 66;

template <typename T>
T setting(const Library& library, const abi::Algo& algo, abi::AlgoAttribute attribute, T missing) {
  T value = missing;
  size_t written = 0;
  const int status =
      library->MatmulAlgoConfigGetAttribute(&algo, attribute, &value, sizeof value, &written);
  // An attribute that this version does not know is no reason to fail.
  return status == abi::kSuccess ? value : missing;
}

Algorithm describe(const Library& library, const abi::HeuristicResult& result) {
  Algorithm a;
  a.algo = result.algo;
  a.workspace_bytes = static_cast<int64_t>(result.workspace_size);
  a.waves = result.waves;
  a.id = setting(library, a.algo, abi::kAlgoId, -1);
  a.splits = setting(library, a.algo, abi::kAlgoSplitK, 1);
  a.tile = setting(library, a.algo, abi::kAlgoTile, 0u);
  a.reduction = setting(library, a.algo, abi::kAlgoReductionScheme, 0u);
  a.swizzle = setting(library, a.algo, abi::kAlgoSwizzle, 0u);
  a.custom = setting(library, a.algo, abi::kAlgoCustomOption, 0u);
  a.stages = setting(library, a.algo, abi::kAlgoStages, 0u);
  a.inner_shape = setting(library, a.algo, abi::kAlgoInnerShape, uint16_t{0});
  a.cluster_shape = setting(library, a.algo, abi::kAlgoClusterShape, uint16_t{0});
  return a;
}

// One question; why proposals were dropped is added to `reasons`.
std::vector<Algorithm> query(const Library& library, abi::Handle handle, const Matmul& matmul,
                             const MatmulDescription& asked, int count, const Filters& filters,
                             std::string& reasons) {
  const MatmulPreference preference = make_preference(library, asked);
  // Some more than wanted, for those that are dropped.
  std::vector<abi::HeuristicResult> results(static_cast<size_t>(count) + 8);
  int found = 0;
  const int status = library->MatmulAlgoGetHeuristic(
      handle, matmul.desc.get(), matmul.a.get(), matmul.b.get(), matmul.d.get(), matmul.d.get(),
      preference.get(), static_cast<int>(results.size()), results.data(), &found);
  if (status != abi::kSuccess) {
    library.check(status, "cublasLtMatmulAlgoGetHeuristic",
                  to_string(asked) + advice(asked, filters));
  }
  std::vector<Algorithm> algorithms;
  for (int i = 0; i < found && static_cast<int>(algorithms.size()) < count; ++i) {
    if (results[i].state != abi::kSuccess) continue;
    const Algorithm a = describe(library, results[i]);
    const char* reason = dropped(a, asked.k, filters);
    if (reason == nullptr) {
      algorithms.push_back(a);
    } else {
      reasons += concat("\n", to_string(a), ": dropped, since ", reason);
    }
  }
  return algorithms;
}

}  // namespace

std::string to_string(const Algorithm& a) {
  return concat("id ", a.id, " tile ", a.tile, " stages ", a.stages, " splits ", a.splits,
                " reduction ", a.reduction, " swizzle ", a.swizzle, " custom ", a.custom, " inner ",
                a.inner_shape, " cluster ", a.cluster_shape, " workspace ", a.workspace_bytes);
}

std::string to_bytes(const abi::Algo& algo) {
  return std::string(reinterpret_cast<const char*>(&algo), sizeof algo);
}

abi::Algo algo_from_bytes(const std::string& bytes) {
  abi::Algo algo;
  FP4LT_CHECK(bytes.size() == sizeof algo, "an algorithm is ", sizeof algo, " bytes, not ",
              bytes.size());
  std::memcpy(&algo, bytes.data(), sizeof algo);
  return algo;
}

const char* dropped(const Algorithm& a, int64_t k, const Filters& filters) {
  if (filters.drop_768_auto && a.stages == abi::kStages768xAuto) {
    return "stages 768xAUTO are wrong in this version";
  }
  // The defect needs parts of floor(K / S) that are whole stages; a stage is a multiple of 8.
  if (filters.drop_uneven_split_k && a.id == kNvjet && a.splits > 1 && k % a.splits != 0 &&
      k / a.splits % 8 == 0) {
    return "such a split of K into unequal parts is wrong in this version";
  }
  return nullptr;
}

const char* advice(const MatmulDescription& matmul, const Filters& filters) {
  if (filters.refuses_one_row && (matmul.n == 1 || matmul.m == 1)) {
    return "\nthis version refuses some products of one row or one out-feature: install "
           "libcublasLt "
           "13.6.1 or later";
  }
  return "";
}

std::vector<Algorithm> find_algorithms(const Library& library, abi::Handle handle,
                                       const Matmul& matmul, int count, const Filters& filters) {
  MatmulDescription asked = matmul.description();
  std::string reasons;
  std::vector<Algorithm> algorithms =
      query(library, handle, matmul, asked, count, filters, reasons);
  if (algorithms.empty() && !reasons.empty() && filters.drop_uneven_split_k) {
    // All of them split K unevenly: without a split there is always one.
    asked.reduction_schemes = abi::kReduceNone;
    algorithms = query(library, handle, matmul, asked, count, filters, reasons);
  }
  if (algorithms.empty()) {
    library.check(abi::kNotSupported, "cublasLtMatmulAlgoGetHeuristic",
                  to_string(asked) + reasons + advice(asked, filters));
  }
  return algorithms;
}

std::optional<Algorithm> check_algorithm(const Library& library, abi::Handle handle,
                                         const Matmul& matmul, const abi::Algo& algo) {
  abi::HeuristicResult result{};
  const int status =
      library->MatmulAlgoCheck(handle, matmul.desc.get(), matmul.a.get(), matmul.b.get(),
                               matmul.d.get(), matmul.d.get(), &algo, &result);
  if (status != abi::kSuccess) return std::nullopt;
  result.algo = algo;
  Algorithm a = describe(library, result);
  if (a.workspace_bytes > matmul.description().workspace_bytes) return std::nullopt;
  return a;
}

}  // namespace fp4lt::cublaslt
