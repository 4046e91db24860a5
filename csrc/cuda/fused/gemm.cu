// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "cuda/fused/gemm.cuh"
#include "cuda/launch.h"

namespace fp4lt::cuda {
namespace {

template <typename T, int NT, bool Split, bool Wide>
void start(int device, const FusedKernelArgs& args, Stream stream) {
  constexpr int kShared = FusedKernel<T, NT, Split>::kSharedBytes;
  const auto kernel = fused_kernel<T, NT, Split, Wide>;
  // Once a device: attributes and occupancy do not change.
  static int resident[64] = {};
  int& blocks = resident[device % 64];
  if (blocks == 0) {
    FP4LT_CUDA_CHECK(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared));
    int per_multiprocessor = 0;
    FP4LT_CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_multiprocessor, kernel,
                                                                   kWarps * 32, kShared));
    blocks = std::max(per_multiprocessor, 1) * traits(device).multiprocessors;
  }
  launch(device, kernel, dim3(static_cast<unsigned>(blocks)), dim3(kWarps * 32), kShared, stream,
         args);
}

template <typename T, bool Wide>
void start_rows(int device, const FusedKernelArgs& args, Stream stream) {
  switch (args.p.block_rows) {
    case 8:
      return start<T, 1, true, Wide>(device, args, stream);
    case 16:
      return start<T, 2, true, Wide>(device, args, stream);
    case 32:
      return start<T, 4, false, Wide>(device, args, stream);
    default:
      return start<T, 8, false, Wide>(device, args, stream);
  }
}

}  // namespace

void fused_gemm(int device, const FusedGemmArgs& p, Stream stream) {
  const auto aligned = [](const void* at, uintptr_t bytes) {
    return reinterpret_cast<uintptr_t>(at) % bytes == 0;
  };
  FP4LT_CHECK(aligned(p.b.scales, 16) && aligned(p.b.codes, 8) && p.b.codes_expert_stride % 8 == 0,
              "fused: codes must lie at multiples of 8 bytes and scales at multiples of 16; these "
              "do not: .clone() the tensor");
  FP4LT_CHECK(p.n * p.k / 2 < (int64_t{1} << 32), "fused: one expert has ", p.n, " x ", p.k,
              " weights; at most 2^33 are supported");
  const DeviceGuard guard(device);
  FusedKernelArgs args{};
  args.p = p;
  args.steps = static_cast<int>(ceil_div(p.k, kStepK));
  args.parts = partitions(p.k);
  // The last scale tile's 8-row groups count only where the first quarter reaches them.
  args.tiles =
      static_cast<int>(p.n / kTileRows * 4 + std::min<int64_t>(ceil_div(p.n % kTileRows, 8), 4));
  args.cta_tiles = p.block_rows <= 16 ? kWarps / args.parts : kWarps;
  args.padded = padded_blocks(p.k / kBlock);
  args.row_bytes = p.k / 2;
  const bool wide = p.k % 32 == 0 && aligned(p.b.codes, 16) && p.b.codes_expert_stride % 16 == 0;
  if (p.a_type == DType::kBF16) {
    wide ? start_rows<__nv_bfloat16, true>(device, args, stream)
         : start_rows<__nv_bfloat16, false>(device, args, stream);
  } else {
    wide ? start_rows<__half, true>(device, args, stream)
         : start_rows<__half, false>(device, args, stream);
  }
}

}  // namespace fp4lt::cuda
