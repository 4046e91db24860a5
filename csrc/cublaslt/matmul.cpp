// SPDX-License-Identifier: Apache-2.0
#include "cublaslt/matmul.h"

#include <algorithm>

#include "core/error.h"

namespace fp4lt::cublaslt {
namespace {

const char* type_name(int type) {
  switch (type) {
    case abi::kR32F:
      return "R_32F";
    case abi::kR16F:
      return "R_16F";
    case abi::kR16BF:
      return "R_16BF";
    case abi::kR4FE2M1:
      return "R_4F_E2M1";
    default:
      return "unknown type";
  }
}

// cuBLAS documentation, cublasLtMatmul, block-scaled FP4 kernels: 16-byte rows and pointers.
void check_block_scaled(const MatmulDescription& d) {
  const int64_t unit = d.out == abi::kR32F ? 4 : 8;
  FP4LT_CHECK(d.k % 32 == 0 && d.lda % 32 == 0 && d.ldb % 32 == 0,
              "FP4 needs K and leading dimensions that are multiples of 32: ", to_string(d));
  FP4LT_CHECK(d.m % unit == 0 && d.ldd % unit == 0,
              "FP4 needs out-features and their leading "
              "dimension to be multiples of ",
              unit, ": ", to_string(d));
  FP4LT_CHECK(d.a_alignment >= 16 && d.b_alignment >= 16 && d.d_alignment >= 16,
              "FP4 needs pointers at multiples of 16 bytes: ", to_string(d));
}

const MatmulDescription& checked(const MatmulDescription& d) {
  FP4LT_CHECK(d.m > 0 && d.n > 0 && d.k > 0,
              "an empty product is not for cuBLASLt: ", to_string(d));
  FP4LT_CHECK(d.lda >= d.k && d.ldb >= d.k && d.ldd >= d.m,
              "a leading dimension is less than the rows it spans: ", to_string(d));
  // Past this, algorithm 66 of some versions is wrong or reads elsewhere; nobody needs it.
  constexpr int64_t kTooLong = int64_t{1} << 31;
  const int64_t operand_bits = d.block_scaled() ? 4 : 16;
  FP4LT_CHECK(
      std::max(d.lda, d.ldb) * operand_bits / 8 < kTooLong &&
          d.ldd * (d.out == abi::kR32F ? 4 : 2) < kTooLong,
      "leading dimensions must be less than 2 GiB; make the tensors contiguous: ", to_string(d));
  if (d.block_scaled()) check_block_scaled(d);
  return d;
}

}  // namespace

std::string to_string(const MatmulDescription& d) {
  std::string text =
      concat("matmul D[", d.m, " x ", d.n, "] = A^T[", d.m, " x ", d.k, "] B[", d.k, " x ", d.n,
             "]: A and B ", type_name(d.operand), ", C and D ", type_name(d.out),
             ", compute 32F, scale R_32F, op A T, op B N, lda ", d.lda, ", ldb ", d.ldb,
             ", ldc = ldd ", d.ldd, ", pointer mode DEVICE, epilogue DEFAULT, alignment A ",
             d.a_alignment, " B ", d.b_alignment, " C and D ", d.d_alignment, ", workspace ",
             d.workspace_bytes, " bytes, reduction schemes ", d.reduction_schemes);
  if (d.block_scaled()) text += ", A and B scale mode VEC16_UE4M3";
  return text;
}

Matmul::Matmul(const Library& library, const MatmulDescription& description)
    : desc(library, abi::kCompute32F, abi::kR32F),
      a(library, checked(description).operand, description.k, description.m, description.lda),
      b(library, description.operand, description.k, description.n, description.ldb),
      d(library, description.out, description.m, description.n, description.ldd),
      description_(description) {
  desc.set(abi::kDescTransA, static_cast<int32_t>(abi::kOpT));
  desc.set(abi::kDescTransB, static_cast<int32_t>(abi::kOpN));
  desc.set(abi::kDescPointerMode, static_cast<int32_t>(abi::kPointerDevice));
  // Nothing is said of C's and D's scales: with a wide type, setting them is refused.
  if (description.block_scaled()) {
    desc.set(abi::kDescAScaleMode, static_cast<int32_t>(abi::kScaleVec16Ue4m3));
    desc.set(abi::kDescBScaleMode, static_cast<int32_t>(abi::kScaleVec16Ue4m3));
  }
}

void Matmul::set_rows(int64_t n) {
  if (n == description_.n) return;
  description_.n = n;
  b.set_cols(n);
  d.set_cols(n);
}

void Matmul::set_scales(const void* a_scales, const void* b_scales) {
  const auto aligned = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; };
  FP4LT_CHECK(aligned(a_scales),
              "the weights' scales must lie at multiples of 16 bytes for FP4; these do not: "
              ".clone() the tensor");
  FP4LT_CHECK(aligned(b_scales),
              "the activations' scales must lie at multiples of 16 bytes for FP4");
  desc.set(abi::kDescAScalePointer, a_scales);
  desc.set(abi::kDescBScalePointer, b_scales);
}

MatmulPreference make_preference(const Library& library, const MatmulDescription& d) {
  MatmulPreference preference(library);
  preference.set(abi::kPrefMaxWorkspaceBytes, static_cast<uint64_t>(d.workspace_bytes));
  preference.set(abi::kPrefReductionSchemeMask, d.reduction_schemes);
  preference.set(abi::kPrefMinAlignmentA, d.a_alignment);
  preference.set(abi::kPrefMinAlignmentB, d.b_alignment);
  preference.set(abi::kPrefMinAlignmentC, d.d_alignment);
  preference.set(abi::kPrefMinAlignmentD, d.d_alignment);
  return preference;
}

}  // namespace fp4lt::cublaslt
