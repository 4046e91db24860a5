// SPDX-License-Identifier: Apache-2.0
// The build for a GPU: kernels on the caller's stream, nothing else, so that it can be captured.
#include <cuda_runtime.h>

#include <algorithm>

#include "device.h"
#include "report.h"

namespace fake::device {
namespace {

constexpr int kThreads = 128;

Violations* counted = nullptr;  // pinned, so that the host reads it without waiting

void check(cudaError_t error, const char* call) {
  FAKE_REQUIRE(error == cudaSuccess, EXECUTION_FAILED, "%s: %s", call, cudaGetErrorString(error));
}

class OnDevice {
 public:
  explicit OnDevice(int device) {
    check(cudaGetDevice(&before_), "cudaGetDevice");
    if (before_ != device) check(cudaSetDevice(device), "cudaSetDevice");
  }
  ~OnDevice() { cudaSetDevice(before_); }

 private:
  int before_ = 0;
};

__device__ void count(Violations* all, int kind, unsigned long long by) {
  if (by != 0) atomicAdd_system(&all->counts[kind], by);
}

__global__ void take_workspace(Matmul p) { *p.workspace = p.ticket; }

__global__ void leave_workspace(Matmul p) {
  count(p.violations, WORKSPACE, *p.workspace != p.ticket);
}

__global__ void multiply(Matmul p) {
  const Group group = group_of(p, static_cast<int>(blockIdx.y));
  const int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  const Violations found = check_group(p, group, first, stride);
  for (int kind = 0; kind < VIOLATION_KINDS; ++kind) count(p.violations, kind, found.counts[kind]);
  compute_group(p, group, first, stride);
}

cudaMemoryType kind_of(const void* pointer) {
  cudaPointerAttributes attributes{};
  check(cudaPointerGetAttributes(&attributes, pointer), "cudaPointerGetAttributes");
  return attributes.type;
}

}  // namespace

void start() {
  if (counted != nullptr) return;
  void* memory = nullptr;
  const unsigned flags = cudaHostAllocMapped | cudaHostAllocPortable;
  check(cudaHostAlloc(&memory, sizeof(Violations), flags), "cudaHostAlloc");
  counted = new (memory) Violations{};
}

int current() {
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  return device;
}

bool capturing(void* stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &status), "cudaStreamIsCapturing");
  return status != cudaStreamCaptureStatusNone;
}

bool capture_breaks() {
  void* memory = nullptr;
  const cudaError_t error = cudaMalloc(&memory, 256);
  if (error == cudaSuccess) {
    cudaFree(memory);
    return false;
  }
  cudaGetLastError();
  return error == cudaErrorStreamCaptureUnsupported || error == cudaErrorStreamCaptureImplicit ||
         error == cudaErrorStreamCaptureInvalidated;
}

bool device_reads(const void* pointer) { return kind_of(pointer) != cudaMemoryTypeUnregistered; }
bool host_reads(const void* pointer) { return kind_of(pointer) != cudaMemoryTypeDevice; }
Violations& violations() { return *counted; }
void synchronize() { check(cudaDeviceSynchronize(), "cudaDeviceSynchronize"); }

void launch(const Matmul& p, int device, void* stream) {
  const OnDevice guard(device);
  auto* on = static_cast<cudaStream_t>(stream);
  if (p.workspace != nullptr) take_workspace<<<1, 1, 0, on>>>(p);
  const int64_t outputs = p.groups > 0 ? 0 : p.d.rows * p.d.cols;
  // The sizes of groups are not known here: a fixed grid walks over them.
  const int64_t blocks = p.groups > 0 ? 64 : (outputs + kThreads - 1) / kThreads;
  const dim3 grid(static_cast<unsigned>(std::min<int64_t>(blocks, 65536)),
                  static_cast<unsigned>(std::max(p.groups, 1)));
  multiply<<<grid, kThreads, 0, on>>>(p);
  if (p.workspace != nullptr) leave_workspace<<<1, 1, 0, on>>>(p);
  check(cudaGetLastError(), "a kernel launch");
}

}  // namespace fake::device

FAKE_API void fake_pretend_capture(int) {}
