// SPDX-License-Identifier: Apache-2.0
// The part of cublasLt.h that is used, in our own words: the library is opened at run time, so one
// build serves every version from 12 on.  tests/cpp/abi_check.cpp holds each line against the real
// header.  Objects are made by the library's Create functions, never on the stack: their sizes grew
// between versions.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/stream.h"

namespace fp4lt::cublaslt::abi {

using cuda::Stream;

enum Status : int {
  kSuccess = 0,
  kNotInitialized = 1,
  kAllocFailed = 3,
  kInvalidValue = 7,
  kArchMismatch = 8,
  kMappingError = 11,
  kExecutionFailed = 13,
  kInternalError = 14,
  kNotSupported = 15,
  kLicenseError = 16,
};

enum DataType : int { kR32F = 0, kR16F = 2, kR16BF = 14, kR4FE2M1 = 33 };
constexpr int kCompute32F = 68;
enum Operation : int { kOpN = 0, kOpT = 1 };
enum PointerMode : int { kPointerHost = 0, kPointerDevice = 1 };
enum ScaleMode : int { kScaleScalar32F = 0, kScaleVec16Ue4m3 = 1 };
enum Epilogue : int { kEpilogueDefault = 1 };
enum ReductionScheme : uint32_t { kReduceNone = 0, kReduceComputeType = 2 };
constexpr uint32_t kStages768xAuto = 38;

enum DescAttribute : int {
  kDescComputeType = 0,
  kDescScaleType = 1,
  kDescPointerMode = 2,
  kDescTransA = 3,
  kDescTransB = 4,
  kDescEpilogue = 7,
  kDescAScalePointer = 17,
  kDescBScalePointer = 18,
  kDescAScaleMode = 31,
  kDescBScaleMode = 32,
};

enum LayoutAttribute : int {
  kLayoutType = 0,
  kLayoutOrder = 1,
  kLayoutRows = 2,
  kLayoutCols = 3,
  kLayoutLd = 4,
};
constexpr int32_t kOrderCol = 0;

enum PreferenceAttribute : int {
  kPrefMaxWorkspaceBytes = 1,
  kPrefReductionSchemeMask = 3,
  kPrefMinAlignmentA = 5,
  kPrefMinAlignmentB = 6,
  kPrefMinAlignmentC = 7,
  kPrefMinAlignmentD = 8,
};

enum AlgoAttribute : int {
  kAlgoId = 0,
  kAlgoTile = 1,
  kAlgoSplitK = 2,
  kAlgoReductionScheme = 3,
  kAlgoSwizzle = 4,
  kAlgoCustomOption = 5,
  kAlgoStages = 6,
  kAlgoInnerShape = 7,
  kAlgoClusterShape = 8,
};

// May be kept as bytes, for the same version of the library.
struct Algo {
  uint64_t data[8];
};

struct HeuristicResult {
  Algo algo;
  size_t workspace_size;
  int state;  // a Status; the other fields are valid where it is kSuccess
  float waves;
  int reserved[4];
};

struct OpaqueHandle;
struct OpaqueDesc;
struct OpaqueLayout;
struct OpaquePreference;
using Handle = OpaqueHandle*;
using Desc = OpaqueDesc*;
using Layout = OpaqueLayout*;
using Preference = OpaquePreference*;

// Every function that is looked up: name without the prefix cublasLt, result, parameters.
#define FP4LT_CUBLASLT_FUNCTIONS(X)                                                          \
  X(GetVersion, size_t, ())                                                                  \
  X(Create, int, (Handle*))                                                                  \
  X(MatmulDescCreate, int, (Desc*, int, int))                                                \
  X(MatmulDescDestroy, int, (Desc))                                                          \
  X(MatmulDescSetAttribute, int, (Desc, int, const void*, size_t))                           \
  X(MatmulDescGetAttribute, int, (Desc, int, void*, size_t, size_t*))                        \
  X(MatrixLayoutCreate, int, (Layout*, int, uint64_t, uint64_t, int64_t))                    \
  X(MatrixLayoutDestroy, int, (Layout))                                                      \
  X(MatrixLayoutSetAttribute, int, (Layout, int, const void*, size_t))                       \
  X(MatrixLayoutGetAttribute, int, (Layout, int, void*, size_t, size_t*))                    \
  X(MatmulPreferenceCreate, int, (Preference*))                                              \
  X(MatmulPreferenceDestroy, int, (Preference))                                              \
  X(MatmulPreferenceSetAttribute, int, (Preference, int, const void*, size_t))               \
  X(MatmulPreferenceGetAttribute, int, (Preference, int, void*, size_t, size_t*))            \
  X(MatmulAlgoGetHeuristic, int,                                                             \
    (Handle, Desc, Layout, Layout, Layout, Layout, Preference, int, HeuristicResult*, int*)) \
  X(MatmulAlgoCheck, int,                                                                    \
    (Handle, Desc, Layout, Layout, Layout, Layout, const Algo*, HeuristicResult*))           \
  X(MatmulAlgoConfigGetAttribute, int, (const Algo*, int, void*, size_t, size_t*))           \
  X(Matmul, int,                                                                             \
    (Handle, Desc, const void*, const void*, Layout, const void*, Layout, const void*,       \
     const void*, Layout, void*, Layout, const Algo*, void*, size_t, Stream))

// Not in every library that is served; a null pointer where it is absent.
#define FP4LT_CUBLASLT_OPTIONAL_FUNCTIONS(X) \
  X(GetCudartVersion, size_t, ())            \
  X(GetStatusName, const char*, (int))       \
  X(GetStatusString, const char*, (int))     \
  X(GroupedMatrixLayoutCreate, int, (Layout*, int, int, const void*, const void*, const void*))

struct Functions {
#define FP4LT_DECLARE(name, result, parameters) result(*name) parameters = nullptr;
  FP4LT_CUBLASLT_FUNCTIONS(FP4LT_DECLARE)
  FP4LT_CUBLASLT_OPTIONAL_FUNCTIONS(FP4LT_DECLARE)
#undef FP4LT_DECLARE
};

}  // namespace fp4lt::cublaslt::abi
