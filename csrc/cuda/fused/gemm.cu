// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <atomic>

#include "cuda/fused/gemm.h"
#include "cuda/fused/split.cuh"
#include "cuda/fused/stream.cuh"
#include "cuda/launch.h"

namespace fp4lt::cuda {
namespace {

// Blocks of threads that a device runs at once; asked for once a kernel and device.
template <auto Kernel>
int resident_blocks(int device, int threads, int shared) {
  static std::atomic<int> known[64] = {};
  std::atomic<int>& blocks = known[device % 64];
  if (blocks == 0) {
    FP4LT_CUDA_CHECK(
        cudaFuncSetAttribute(Kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
    int per_multiprocessor = 0;
    FP4LT_CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_multiprocessor, Kernel,
                                                                   threads, shared));
    blocks = std::max(per_multiprocessor, 1) * traits(device).multiprocessors;
  }
  return blocks;
}

template <typename T, int NT, bool Whole>
void start_stream(int device, FusedKernelArgs args, Stream stream) {
  constexpr auto kKernel = stream_kernel<T, NT, Whole>;
  constexpr int kThreads = kStreamWarps * 32, kShared = kStreamSharedBytes<NT>;
  args.cta_tiles = kStreamWarps;
  const int blocks = resident_blocks<kKernel>(device, kThreads, kShared);
  launch(device, kKernel, dim3(blocks), dim3(kThreads), kShared, stream, args);
}

template <typename T, int NT, bool Whole>
void start_split(int device, FusedKernelArgs args, Stream stream) {
  constexpr auto kKernel = split_kernel<T, NT, Whole>;
  args.cta_tiles = kSplitWarps / args.parts;
  const int warps = args.cta_tiles * args.parts;
  // The attribute is set for the most warps there can be.
  constexpr int kWarpBytes = kSplitStages * kStageBytes + 2 * kSumBytes<NT>;
  const int blocks = resident_blocks<kKernel>(device, kSplitWarps * 32, kSplitWarps * kWarpBytes);
  launch(device, kKernel, dim3(blocks), dim3(warps * 32), warps * kWarpBytes, stream, args);
}

// The launch depends on shapes and on a guess at the work; none of it changes a bit of the result.
template <typename T, bool Whole>
void start(int device, const FusedKernelArgs& args, Stream stream) {
  const FusedGemmArgs& p = args.p;
  const int64_t tiles = p.expected_blocks * args.tiles;
  if (p.block_rows <= 16 && args.parts > 1 && tiles < 64 * traits(device).multiprocessors) {
    return p.block_rows == 8 ? start_split<T, 1, Whole>(device, args, stream)
                             : start_split<T, 2, Whole>(device, args, stream);
  }
  switch (p.block_rows) {
    case 8:
      return start_stream<T, 1, Whole>(device, args, stream);
    case 16:
      return start_stream<T, 2, Whole>(device, args, stream);
    case 32:
      return start_stream<T, 4, Whole>(device, args, stream);
    default:
      return start_stream<T, 8, Whole>(device, args, stream);
  }
}

template <typename T>
void start_type(int device, const FusedKernelArgs& args, Stream stream) {
  if (args.wide && args.p.k % kStepK == 0) {
    start<T, true>(device, args, stream);
  } else {
    start<T, false>(device, args, stream);
  }
}

bool aligned(const void* at, uintptr_t bytes) {
  return reinterpret_cast<uintptr_t>(at) % bytes == 0;
}

}  // namespace

void fused_gemm(int device, const FusedGemmArgs& p, Stream stream) {
  FP4LT_CHECK(aligned(p.b.scales, 16) && aligned(p.b.codes, 8) && p.b.codes_expert_stride % 8 == 0,
              "fused: codes must lie at multiples of 8 bytes and scales at multiples of 16; these "
              "do not: .clone() the tensor");
  const DeviceGuard guard(device);
  FusedKernelArgs args{};
  args.p = p;
  args.steps = static_cast<int>(ceil_div(p.k, kStepK));
  args.parts = partitions(p.k);
  // Of a ragged last scale tile, the groups of 8 rows that the first quarter still reaches.
  args.tiles =
      static_cast<int>(p.n / kTileRows * 4 + std::min<int64_t>(ceil_div(p.n % kTileRows, 8), 4));
  args.padded = padded_blocks(p.k / kBlock);
  args.row_bytes = p.k / 2;
  args.wide = p.k % 32 == 0 && aligned(p.b.codes, 16) && p.b.codes_expert_stride % 16 == 0;
  if (p.a_type == DType::kBF16) {
    start_type<__nv_bfloat16>(device, args, stream);
  } else {
    start_type<__half>(device, args, stream);
  }
}

}  // namespace fp4lt::cuda
