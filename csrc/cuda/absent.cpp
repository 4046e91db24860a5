// SPDX-License-Identifier: Apache-2.0
// The CUDA side of a build without CUDA: the same surface, no devices.
#include "core/error.h"
#include "cuda/device.h"

namespace fp4lt::cuda {
namespace {

[[noreturn]] void refuse(const char* what) {
  throw UnsupportedError(
      concat(what,
             ": this build of fp4lt has no CUDA code; reinstall it where nvcc is "
             "found (or with -Ccmake.define.FP4LT_CUDA=ON, to see what is "
             "missing)"));
}

}  // namespace

std::string built_with() { return ""; }
std::string architectures() { return ""; }
std::string driver() { return ""; }
int device_count() { return 0; }
DeviceInfo device_info(int) { refuse("device_info"); }
void read_memory(int, const void*, int64_t, void*, uintptr_t) { refuse("read_memory"); }

}  // namespace fp4lt::cuda
