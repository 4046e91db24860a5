// SPDX-License-Identifier: Apache-2.0
// What the CUDA side of the package knows about the machine.  The same functions exist in a build
// without CUDA, where there are no devices.
#pragma once

#include <cstdint>
#include <string>

#include "cuda/stream.h"

namespace fp4lt::cuda {

struct DeviceInfo {
  std::string name;
  int major, minor;  // compute capability
  int multiprocessors;
  int64_t l2_bytes;
  int64_t shared_bytes;  // most shared memory a block may opt in to
  int64_t memory_bytes;
};

// "13.0", or "" in a build without CUDA.
std::string built_with();
// The architectures that device code was compiled for, e.g. "90a-real 120a-real".
std::string architectures();
// Version of the driver that is loaded, e.g. "13.0"; "" where there is none.
std::string driver();

// Devices that can be used, 0 without a driver.  Never throws.
int device_count();
DeviceInfo device_info(int device);

// Reads `bytes` (a multiple of 16) from `data` with every multiprocessor and does nothing else:
// the ceiling that memory-bound kernels are measured against.  `sink` (4 bytes) keeps the compiler
// from dropping the loads; what it holds afterwards has no meaning.
void read_memory(int device, const void* data, int64_t bytes, void* sink, Stream stream);

}  // namespace fp4lt::cuda
