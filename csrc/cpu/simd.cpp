// SPDX-License-Identifier: Apache-2.0
#include "cpu/simd.h"

#include <atomic>

#include "core/error.h"
#include "cpu/simd_tables.h"

namespace fp4lt {
namespace {

std::vector<const SimdKernels*> detect() {
  std::vector<const SimdKernels*> tables{&scalar_kernels()};
#if defined(FP4LT_HAVE_AVX2)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
      __builtin_cpu_supports("f16c")) {
    tables.push_back(&avx2_kernels());
  }
#endif
#if defined(FP4LT_HAVE_AVX512)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vnni")) {
    tables.push_back(&avx512_kernels());
#if defined(FP4LT_HAVE_AVX512_BF16)
    if (__builtin_cpu_supports("avx512bf16") && bf16_dot_is_two_fmas()) {
      tables.push_back(&avx512_bf16_kernels());
    }
#endif
  }
#endif
  return tables;
}

std::atomic<const SimdKernels*> selected{nullptr};

}  // namespace

const std::vector<const SimdKernels*>& all_kernels() {
  static const std::vector<const SimdKernels*> tables = detect();
  return tables;
}

const SimdKernels& kernels() {
  const SimdKernels* table = selected.load(std::memory_order_relaxed);
  return table != nullptr ? *table : *all_kernels().back();
}

void select_kernels(const std::string& name) {
  if (name.empty()) {
    selected.store(nullptr);
    return;
  }
  std::string known;
  for (const SimdKernels* table : all_kernels()) {
    if (name == table->name) {
      selected.store(table);
      return;
    }
    known += concat(known.empty() ? "" : ", ", table->name);
  }
  FP4LT_CHECK(false, "no CPU kernels named '", name, "' run on this processor; there are: ", known);
}

}  // namespace fp4lt
