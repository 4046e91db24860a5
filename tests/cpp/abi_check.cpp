// SPDX-License-Identifier: Apache-2.0
// Compiled, never run: holds csrc/cublaslt/abi.h against the real cublasLt.h, line by line.
#include <cublasLt.h>

#include <type_traits>

#include "cublaslt/abi.h"

namespace abi = fp4lt::cublaslt::abi;

#define SAME(ours, theirs) \
  static_assert(static_cast<long long>(ours) == static_cast<long long>(theirs), #theirs)

SAME(abi::kSuccess, CUBLAS_STATUS_SUCCESS);
SAME(abi::kNotInitialized, CUBLAS_STATUS_NOT_INITIALIZED);
SAME(abi::kAllocFailed, CUBLAS_STATUS_ALLOC_FAILED);
SAME(abi::kInvalidValue, CUBLAS_STATUS_INVALID_VALUE);
SAME(abi::kArchMismatch, CUBLAS_STATUS_ARCH_MISMATCH);
SAME(abi::kMappingError, CUBLAS_STATUS_MAPPING_ERROR);
SAME(abi::kExecutionFailed, CUBLAS_STATUS_EXECUTION_FAILED);
SAME(abi::kInternalError, CUBLAS_STATUS_INTERNAL_ERROR);
SAME(abi::kNotSupported, CUBLAS_STATUS_NOT_SUPPORTED);
SAME(abi::kLicenseError, CUBLAS_STATUS_LICENSE_ERROR);

SAME(abi::kR32F, CUDA_R_32F);
SAME(abi::kR16F, CUDA_R_16F);
SAME(abi::kR16BF, CUDA_R_16BF);
SAME(abi::kR4FE2M1, CUDA_R_4F_E2M1);
SAME(abi::kCompute32F, CUBLAS_COMPUTE_32F);
SAME(abi::kOpN, CUBLAS_OP_N);
SAME(abi::kOpT, CUBLAS_OP_T);
SAME(abi::kPointerHost, CUBLASLT_POINTER_MODE_HOST);
SAME(abi::kPointerDevice, CUBLASLT_POINTER_MODE_DEVICE);
SAME(abi::kScaleScalar32F, CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F);
SAME(abi::kScaleVec16Ue4m3, CUBLASLT_MATMUL_MATRIX_SCALE_VEC16_UE4M3);
SAME(abi::kEpilogueDefault, CUBLASLT_EPILOGUE_DEFAULT);
SAME(abi::kReduceNone, CUBLASLT_REDUCTION_SCHEME_NONE);
SAME(abi::kReduceComputeType, CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE);
SAME(abi::kOrderCol, CUBLASLT_ORDER_COL);
#if CUBLAS_VERSION >= 130002
SAME(abi::kStages768xAuto, CUBLASLT_MATMUL_STAGES_768xAUTO);
#endif

SAME(abi::kDescComputeType, CUBLASLT_MATMUL_DESC_COMPUTE_TYPE);
SAME(abi::kDescScaleType, CUBLASLT_MATMUL_DESC_SCALE_TYPE);
SAME(abi::kDescPointerMode, CUBLASLT_MATMUL_DESC_POINTER_MODE);
SAME(abi::kDescTransA, CUBLASLT_MATMUL_DESC_TRANSA);
SAME(abi::kDescTransB, CUBLASLT_MATMUL_DESC_TRANSB);
SAME(abi::kDescEpilogue, CUBLASLT_MATMUL_DESC_EPILOGUE);
SAME(abi::kDescAScalePointer, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER);
SAME(abi::kDescBScalePointer, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER);
SAME(abi::kDescAScaleMode, CUBLASLT_MATMUL_DESC_A_SCALE_MODE);
SAME(abi::kDescBScaleMode, CUBLASLT_MATMUL_DESC_B_SCALE_MODE);

SAME(abi::kLayoutType, CUBLASLT_MATRIX_LAYOUT_TYPE);
SAME(abi::kLayoutOrder, CUBLASLT_MATRIX_LAYOUT_ORDER);
SAME(abi::kLayoutRows, CUBLASLT_MATRIX_LAYOUT_ROWS);
SAME(abi::kLayoutCols, CUBLASLT_MATRIX_LAYOUT_COLS);
SAME(abi::kLayoutLd, CUBLASLT_MATRIX_LAYOUT_LD);

SAME(abi::kPrefMaxWorkspaceBytes, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES);
SAME(abi::kPrefReductionSchemeMask, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK);
SAME(abi::kPrefMinAlignmentA, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES);
SAME(abi::kPrefMinAlignmentB, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES);
SAME(abi::kPrefMinAlignmentC, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES);
SAME(abi::kPrefMinAlignmentD, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES);

SAME(abi::kAlgoId, CUBLASLT_ALGO_CONFIG_ID);
SAME(abi::kAlgoTile, CUBLASLT_ALGO_CONFIG_TILE_ID);
SAME(abi::kAlgoSplitK, CUBLASLT_ALGO_CONFIG_SPLITK_NUM);
SAME(abi::kAlgoReductionScheme, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME);
SAME(abi::kAlgoSwizzle, CUBLASLT_ALGO_CONFIG_CTA_SWIZZLING);
SAME(abi::kAlgoCustomOption, CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION);
SAME(abi::kAlgoStages, CUBLASLT_ALGO_CONFIG_STAGES_ID);
SAME(abi::kAlgoInnerShape, CUBLASLT_ALGO_CONFIG_INNER_SHAPE_ID);
SAME(abi::kAlgoClusterShape, CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID);

SAME(sizeof(abi::Algo), sizeof(cublasLtMatmulAlgo_t));
SAME(sizeof(abi::HeuristicResult), sizeof(cublasLtMatmulHeuristicResult_t));
SAME(alignof(abi::HeuristicResult), alignof(cublasLtMatmulHeuristicResult_t));
SAME(offsetof(abi::HeuristicResult, algo), offsetof(cublasLtMatmulHeuristicResult_t, algo));
SAME(offsetof(abi::HeuristicResult, workspace_size),
     offsetof(cublasLtMatmulHeuristicResult_t, workspaceSize));
SAME(offsetof(abi::HeuristicResult, state), offsetof(cublasLtMatmulHeuristicResult_t, state));
SAME(offsetof(abi::HeuristicResult, waves), offsetof(cublasLtMatmulHeuristicResult_t, wavesCount));

// A parameter is the same where it travels the same way: pointers with pointers, the rest by size.
template <typename Ours, typename Theirs>
constexpr bool alike() {
  if (std::is_same_v<Ours, Theirs>) return true;
  if (std::is_pointer_v<Ours> || std::is_pointer_v<Theirs>) {
    return std::is_pointer_v<Ours> && std::is_pointer_v<Theirs>;
  }
  return sizeof(Ours) == sizeof(Theirs) &&
         (std::is_enum_v<Theirs> || std::is_signed_v<Ours> == std::is_signed_v<Theirs>);
}

template <typename Ours, typename Theirs>
struct Same : std::false_type {};
template <typename R, typename... P, typename S, typename... Q>
struct Same<R (*)(P...), S (*)(Q...)> {
  static constexpr bool count = sizeof...(P) == sizeof...(Q);
  template <bool Count>
  static constexpr bool parameters() {
    if constexpr (Count) {
      return alike<R, S>() && (alike<P, Q>() && ...);
    } else {
      return false;
    }
  }
  static constexpr bool value = parameters<count>();
};

#define SAME_FUNCTION(name, result, parameters) \
  static_assert(Same<decltype(abi::Functions::name), decltype(&cublasLt##name)>::value, #name);
FP4LT_CUBLASLT_FUNCTIONS(SAME_FUNCTION)
SAME_FUNCTION(GetCudartVersion, , )
SAME_FUNCTION(GetStatusName, , )
SAME_FUNCTION(GetStatusString, , )
#if CUBLAS_VERSION >= 130200
SAME_FUNCTION(GroupedMatrixLayoutCreate, , )
#endif
