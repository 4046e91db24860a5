// SPDX-License-Identifier: Apache-2.0
// Calls that only pass through, for programs that look every symbol up in this library instead of
// having it preloaded.
#include <cstdio>

#include "record.h"

#define FORWARD(result, otherwise, name, parameters, arguments)                     \
  extern "C" __attribute__((visibility("default"))) result name parameters {        \
    static auto* function = reinterpret_cast<decltype(&name)>(record::real(#name)); \
    return function != nullptr ? function arguments : otherwise;                    \
  }
#define FORWARD_STATUS(name, parameters, arguments) FORWARD(int, 15, name, parameters, arguments)

FORWARD(size_t, 0, cublasLtGetVersion, (), ())
FORWARD(size_t, 0, cublasLtGetCudartVersion, (), ())
FORWARD(const char*, "unknown", cublasLtGetStatusName, (int status), (status))
FORWARD(const char*, "unknown", cublasLtGetStatusString, (int status), (status))
FORWARD_STATUS(cublasLtGetProperty, (int type, int* value), (type, value))
FORWARD_STATUS(cublasLtCreate, (void** handle), (handle))
FORWARD_STATUS(cublasLtDestroy, (void* handle), (handle))
FORWARD_STATUS(cublasLtHeuristicsCacheGetCapacity, (size_t* capacity), (capacity))
FORWARD_STATUS(cublasLtHeuristicsCacheSetCapacity, (size_t capacity), (capacity))
FORWARD_STATUS(cublasLtMatmulDescGetAttribute,
               (void* desc, int attribute, void* value, size_t size, size_t* written),
               (desc, attribute, value, size, written))
FORWARD_STATUS(cublasLtMatrixLayoutGetAttribute,
               (void* layout, int attribute, void* value, size_t size, size_t* written),
               (layout, attribute, value, size, written))
FORWARD_STATUS(cublasLtMatmulPreferenceGetAttribute,
               (void* preference, int attribute, void* value, size_t size, size_t* written),
               (preference, attribute, value, size, written))
FORWARD_STATUS(cublasLtMatmulAlgoGetIds,
               (void* handle, int compute, int scale, int a, int b, int c, int d, int requested,
                int* ids, int* returned),
               (handle, compute, scale, a, b, c, d, requested, ids, returned))
FORWARD_STATUS(cublasLtMatmulAlgoInit,
               (void* handle, int compute, int scale, int a, int b, int c, int d, int id,
                void* algo),
               (handle, compute, scale, a, b, c, d, id, algo))
FORWARD_STATUS(cublasLtMatmulAlgoCapGetAttribute,
               (const void* algo, int attribute, void* value, size_t size, size_t* written),
               (algo, attribute, value, size, written))
FORWARD_STATUS(cublasLtMatmulAlgoConfigGetAttribute,
               (const void* algo, int attribute, void* value, size_t size, size_t* written),
               (algo, attribute, value, size, written))
FORWARD_STATUS(cublasLtMatmulAlgoCheckForStream,
               (void* handle, void* desc, void* a, void* b, void* c, void* d, const void* algo,
                void* result, void* stream),
               (handle, desc, a, b, c, d, algo, result, stream))
FORWARD_STATUS(cublasLtLoggerSetLevel, (int level), (level))
FORWARD_STATUS(cublasLtLoggerSetMask, (int mask), (mask))
FORWARD_STATUS(cublasLtLoggerSetFile, (std::FILE * file), (file))
FORWARD_STATUS(cublasLtLoggerOpenFile, (const char* path), (path))
FORWARD_STATUS(cublasLtLoggerSetCallback, (void (*callback)(int, const char*, const char*)),
               (callback))
FORWARD_STATUS(cublasLtLoggerForceDisable, (), ())
