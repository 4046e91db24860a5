// SPDX-License-Identifier: Apache-2.0
#include "core/scale_layout.h"
#include "cuda/check.h"
#include "cuda/fused/tensor_map.h"
#include "cuda/moe.h"

namespace fp4lt::cuda {
namespace {

// From the driver that is loaded: the module links none.
decltype(&cuTensorMapEncodeTiled) encoder() {
  static const auto found = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult result{};
#if CUDART_VERSION >= 12050
    FP4LT_CUDA_CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000,
                                                      cudaEnableDefault, &result));
#else
    FP4LT_CUDA_CHECK(
        cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &entry, cudaEnableDefault, &result));
#endif
    FP4LT_CHECK(result == cudaDriverEntryPointSuccess && entry != nullptr,
                "fused: the driver has no cuTensorMapEncodeTiled; a driver for CUDA 12.0 or later "
                "is needed");
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(entry);
  }();
  return found;
}

}  // namespace

CUtensorMap code_map(const Nvfp4View& b, int64_t n, int64_t row_bytes, int box_rows) {
  const auto stride = static_cast<cuuint64_t>(b.codes_expert_stride);
  const cuuint64_t extents[3] = {static_cast<cuuint64_t>(row_bytes), static_cast<cuuint64_t>(n),
                                 kMaxExperts};
  const cuuint64_t strides[2] = {static_cast<cuuint64_t>(row_bytes), stride};
  const cuuint32_t box[3] = {128, static_cast<cuuint32_t>(box_rows), 1};
  const cuuint32_t steps[3] = {1, 1, 1};
  CUtensorMap map{};
  const CUresult status =
      encoder()(&map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 3, const_cast<uint8_t*>(b.codes), extents,
                strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  FP4LT_CHECK(status == CUDA_SUCCESS, "cuTensorMapEncodeTiled: status ", static_cast<int>(status),
              " for ", n, " rows of ", row_bytes, " bytes, experts ", stride, " bytes apart");
  return map;
}

}  // namespace fp4lt::cuda
