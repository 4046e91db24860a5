// SPDX-License-Identifier: Apache-2.0
// Numbers and structures of the cuBLASLt ABI, as NVIDIA documents them.  abi_check.cpp holds every
// one against the real header where it is installed.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fake {

enum Status : int {
  SUCCESS = 0,
  NOT_INITIALIZED = 1,
  ALLOC_FAILED = 3,
  INVALID_VALUE = 7,
  ARCH_MISMATCH = 8,
  MAPPING_ERROR = 11,
  EXECUTION_FAILED = 13,
  INTERNAL_ERROR = 14,
  NOT_SUPPORTED = 15,
  LICENSE_ERROR = 16,
};

enum DataType : int32_t { R_32F = 0, R_16F = 2, R_16BF = 14, R_8F_E4M3 = 28, R_4F_E2M1 = 33 };
enum ComputeType : int32_t { COMPUTE_16F = 64, COMPUTE_32F = 68 };
enum Operation : int32_t { OP_N = 0, OP_T = 1 };
enum Order : int32_t { ORDER_COL = 0, ORDER_ROW = 1 };
enum BatchMode : int32_t { BATCH_STRIDED = 0, BATCH_POINTER_ARRAY = 1, BATCH_GROUPED = 2 };
enum IntegerWidth : int32_t { WIDTH_32 = 0, WIDTH_64 = 1 };
enum PointerMode : int32_t { POINTER_HOST = 0, POINTER_DEVICE = 1, POINTER_DEVICE_VECTOR = 2 };
enum ScaleMode : int32_t { SCALE_SCALAR_32F = 0, SCALE_VEC16_UE4M3 = 1, SCALE_VEC32_UE8M0 = 2 };
enum FillMode : int32_t { FILL_FULL = 2 };

enum Epilogue : int32_t {
  EPILOGUE_DEFAULT = 1,
  EPILOGUE_RELU = 2,
  EPILOGUE_BIAS = 4,
  EPILOGUE_RELU_BIAS = 6,
  EPILOGUE_GELU = 32,
  EPILOGUE_GELU_BIAS = 36,
  EPILOGUE_BGRADA = 256,
  EPILOGUE_BGRADB = 512,
};

enum ReductionScheme : int32_t { REDUCTION_NONE = 0, REDUCTION_COMPUTE_TYPE = 2 };
constexpr uint32_t kReductionMask = 7;

enum DescAttribute : int {
  DESC_COMPUTE_TYPE = 0,
  DESC_SCALE_TYPE = 1,
  DESC_POINTER_MODE = 2,
  DESC_TRANSA = 3,
  DESC_TRANSB = 4,
  DESC_TRANSC = 5,
  DESC_FILL_MODE = 6,
  DESC_EPILOGUE = 7,
  DESC_BIAS_POINTER = 8,
  DESC_BIAS_BATCH_STRIDE = 10,
  DESC_AUX_POINTER = 11,
  DESC_AUX_LD = 12,
  DESC_AUX_BATCH_STRIDE = 13,
  DESC_ALPHA_VECTOR_BATCH_STRIDE = 14,
  DESC_SM_COUNT_TARGET = 15,
  DESC_A_SCALE_POINTER = 17,
  DESC_B_SCALE_POINTER = 18,
  DESC_C_SCALE_POINTER = 19,
  DESC_D_SCALE_POINTER = 20,
  DESC_AMAX_D_POINTER = 21,
  DESC_AUX_DATA_TYPE = 22,
  DESC_AUX_SCALE_POINTER = 23,
  DESC_AUX_AMAX_POINTER = 24,
  DESC_FAST_ACCUM = 25,
  DESC_BIAS_DATA_TYPE = 26,
  DESC_A_SCALE_MODE = 31,
  DESC_B_SCALE_MODE = 32,
  DESC_C_SCALE_MODE = 33,
  DESC_D_SCALE_MODE = 34,
  DESC_AUX_SCALE_MODE = 35,
  DESC_D_OUT_SCALE_POINTER = 36,
  DESC_D_OUT_SCALE_MODE = 37,
  DESC_EMULATION = 38,
  DESC_ALPHA_BATCH_STRIDE = 39,
  DESC_BETA_BATCH_STRIDE = 40,
  DESC_BATCH_INVARIANCE = 41,
};

enum LayoutAttribute : int {
  LAYOUT_TYPE = 0,
  LAYOUT_ORDER = 1,
  LAYOUT_ROWS = 2,
  LAYOUT_COLS = 3,
  LAYOUT_LD = 4,
  LAYOUT_BATCH_COUNT = 5,
  LAYOUT_BATCH_OFFSET = 6,
  LAYOUT_PLANE_OFFSET = 7,
  LAYOUT_BATCH_MODE = 8,
  LAYOUT_ROWS_ARRAY = 9,
  LAYOUT_COLS_ARRAY = 10,
  LAYOUT_LD_ARRAY = 11,
  LAYOUT_ROWS_COLS_WIDTH = 12,
  LAYOUT_LD_WIDTH = 13,
};

enum PreferenceAttribute : int {
  PREF_SEARCH_MODE = 0,
  PREF_MAX_WORKSPACE = 1,
  PREF_REDUCTION_MASK = 3,
  PREF_ALIGNMENT_A = 5,
  PREF_ALIGNMENT_B = 6,
  PREF_ALIGNMENT_C = 7,
  PREF_ALIGNMENT_D = 8,
  PREF_MAX_WAVES = 9,
  PREF_IMPL_MASK = 12,
  PREF_AVERAGE_REDUCTION = 13,
  PREF_AVERAGE_ROWS = 14,
  PREF_AVERAGE_COLS = 15,
};

enum ConfigAttribute : int {
  CONFIG_ID = 0,
  CONFIG_TILE = 1,
  CONFIG_SPLITK = 2,
  CONFIG_REDUCTION = 3,
  CONFIG_SWIZZLE = 4,
  CONFIG_CUSTOM = 5,
  CONFIG_STAGES = 6,
  CONFIG_INNER_SHAPE = 7,
  CONFIG_CLUSTER_SHAPE = 8,
};

enum CapAttribute : int {
  CAP_SPLITK = 0,
  CAP_REDUCTION_MASK = 1,
  CAP_OUT_OF_PLACE = 4,
  CAP_POINTER_MODES = 11,
  CAP_ALIGNMENT_A = 16,
  CAP_ALIGNMENT_B = 17,
  CAP_ALIGNMENT_C = 18,
  CAP_ALIGNMENT_D = 19,
  CAP_GROUPED = 23,
};

constexpr int kTile128x64 = 18;
constexpr int kStages768xAuto = 38;

struct Algo {
  uint64_t data[8];
};

struct HeuristicResult {
  Algo algo;
  size_t workspace_size;
  int state;
  float waves;
  int reserved[4];
};

static_assert(sizeof(Algo) == 64, "cublasLtMatmulAlgo_t");
static_assert(sizeof(HeuristicResult) == 96, "cublasLtMatmulHeuristicResult_t");

}  // namespace fake

#define FAKE_API extern "C" __attribute__((visibility("default")))
