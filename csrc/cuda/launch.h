// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime.h>

#include "cuda/check.h"

namespace fp4lt::cuda {

struct DeviceTraits {
  int multiprocessors;
  int major, minor;
  int64_t shared_bytes;  // most that a block may opt in to
  bool overlaps;         // kernels were compiled to wait for the one before: for 9.0 or later
};

// Cached after the first call for a device.
const DeviceTraits& traits(int device);

// Launches a kernel whose blocks may start while the kernel before it is still running (from
// compute capability 9.0 on): it must call ptx::wait_for_previous_kernel() before it touches global
// memory that the kernel before may write.  One that lets the next one start before it has waited
// (fused/hopper.cuh) has three kernels under way; the first is done when the third begins to read.
// `device` is current.
template <typename... Parameters, typename... Arguments>
void launch(int device, void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared,
            cudaStream_t stream, const Arguments&... arguments) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = traits(device).overlaps ? 1 : 0;
  FP4LT_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...));
}

}  // namespace fp4lt::cuda
