// SPDX-License-Identifier: Apache-2.0
#include <map>
#include <mutex>

#include "cuda/device.h"
#include "cuda/launch.h"

namespace fp4lt::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kLoads = 8;  // 16-byte loads in flight per thread

// One block reads consecutive stretches of kThreads * kLoads * 16 bytes, kLoads loads ahead.
__global__ void __launch_bounds__(kThreads)
    read_kernel(const uint4* data, int64_t count, unsigned* sink) {
  unsigned seen = 0;
  const int64_t stretch = static_cast<int64_t>(kThreads) * kLoads;
  for (int64_t base = blockIdx.x * stretch; base < count; base += gridDim.x * stretch) {
    uint4 v[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int64_t at = base + i * kThreads + threadIdx.x;
      v[i] = at < count ? __ldcs(data + at) : uint4{0, 0, 0, 0};
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) seen |= v[i].x & v[i].y & v[i].z & v[i].w;
  }
  // Taken only if every bit of some word was set in all four words: cheap, and unknowable.
  if (seen == 0xFFFFFFFFu) *sink = seen;
}

std::string version_name(int version) { return concat(version / 1000, ".", version % 1000 / 10); }

}  // namespace

std::string built_with() { return version_name(CUDART_VERSION); }

std::string architectures() { return FP4LT_CUDA_ARCHITECTURES; }

std::string driver() {
  int version = 0;
  if (cudaDriverGetVersion(&version) != cudaSuccess || version == 0) return "";
  return version_name(version);
}

const DeviceTraits& traits(int device) {
  static std::mutex mutex;
  static std::map<int, DeviceTraits> known;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = known.find(device);
  if (found != known.end()) return found->second;
  const DeviceInfo info = device_info(device);
  // A kernel of this file stands for all: the same targets were compiled for each.
  const DeviceGuard guard(device);
  cudaFuncAttributes code{};
  FP4LT_CUDA_CHECK(cudaFuncGetAttributes(&code, read_kernel));
  return known
      .emplace(device, DeviceTraits{info.multiprocessors, info.major, info.minor, info.shared_bytes,
                                    info.major >= 9 && code.ptxVersion >= 90})
      .first->second;
}

int device_count() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    return 0;
  }
  return count;
}

DeviceInfo device_info(int device) {
  cudaDeviceProp p{};
  FP4LT_CUDA_CHECK(cudaGetDeviceProperties(&p, device));
  return {p.name,
          p.major,
          p.minor,
          p.multiProcessorCount,
          p.l2CacheSize,
          static_cast<int64_t>(p.sharedMemPerBlockOptin),
          static_cast<int64_t>(p.totalGlobalMem)};
}

void read_memory(int device, const void* data, int64_t bytes, void* sink, Stream stream) {
  FP4LT_CHECK(bytes >= 0 && bytes % 16 == 0, "read_memory: ", bytes,
              " bytes; a multiple of 16 is needed");
  if (bytes == 0) return;
  const DeviceGuard guard(device);
  read_kernel<<<traits(device).multiprocessors * 4, kThreads, 0, stream>>>(
      static_cast<const uint4*>(data), bytes / 16, static_cast<unsigned*>(sink));
  FP4LT_CUDA_CHECK(cudaGetLastError());
}

}  // namespace fp4lt::cuda
