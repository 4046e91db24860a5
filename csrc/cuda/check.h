// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include "core/error.h"

// Evaluates a CUDA runtime call; a failure throws with the call, the status' name and number.
#define FP4LT_CUDA_CHECK(call)                                                           \
  do {                                                                                   \
    const cudaError_t status = (call);                                                   \
    if (status != cudaSuccess) {                                                         \
      static_cast<void>(cudaGetLastError());                                             \
      throw ::fp4lt::LibraryError(                                                       \
          ::fp4lt::concat(#call, " failed with ", cudaGetErrorName(status), " (",        \
                          static_cast<int>(status), "): ", cudaGetErrorString(status))); \
    }                                                                                    \
  } while (0)

namespace fp4lt::cuda {

// Makes `device` current for the statically linked runtime, whose current device is its own
// per-thread state, and restores the previous one.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    FP4LT_CUDA_CHECK(cudaGetDevice(&previous_));
    if (previous_ != device) FP4LT_CUDA_CHECK(cudaSetDevice(device));
    current_ = device;
  }
  ~DeviceGuard() {
    if (previous_ != current_) static_cast<void>(cudaSetDevice(previous_));
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = 0;
  int current_ = 0;
};

}  // namespace fp4lt::cuda
