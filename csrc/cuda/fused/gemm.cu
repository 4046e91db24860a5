// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <atomic>

#include "cuda/fused/gemm.h"
#include "cuda/fused/hopper.cuh"
#include "cuda/fused/split.cuh"
#include "cuda/fused/stream.cuh"
#include "cuda/fused/tensor_map.h"
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

template <typename T, int NT, bool Gated>
void start_hopper(int device, FusedKernelArgs args, Stream stream) {
  constexpr auto kKernel = hopper_kernel<T, NT, Gated>;
  constexpr int kShared = HopperLayout<NT, Gated>::kBytes;
  args.tiles = static_cast<int>(Gated ? args.p.n / kTileRows : ceil_div(args.p.n, kTileRows));
  const CUtensorMap map =
      code_map(args.p.b, args.p.n, args.row_bytes, Gated ? kGatedRows : kTileRows);
  const int blocks = resident_blocks<kKernel>(device, kHopperThreads, kShared);
  launch(device, kKernel, dim3(blocks), dim3(kHopperThreads), kShared, stream, map, args);
}

template <typename T, bool Gated>
void start_hopper_rows(int device, const FusedKernelArgs& args, Stream stream) {
  switch (args.p.block_rows) {
    case 8:
      return start_hopper<T, 1, Gated>(device, args, stream);
    case 16:
      return start_hopper<T, 2, Gated>(device, args, stream);
    case 32:
      return start_hopper<T, 4, Gated>(device, args, stream);
    case 64:
      return start_hopper<T, 8, Gated>(device, args, stream);
    default:
      return start_hopper<T, 16, Gated>(device, args, stream);
  }
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
  if (args.p.form == RowForm::kImage) {
    if (args.p.gated) {
      start_hopper_rows<T, true>(device, args, stream);
    } else {
      start_hopper_rows<T, false>(device, args, stream);
    }
  } else if (args.wide && args.p.k % kStepK == 0) {
    start<T, true>(device, args, stream);
  } else {
    start<T, false>(device, args, stream);
  }
}

bool aligned(const void* at, uintptr_t bytes) {
  return reinterpret_cast<uintptr_t>(at) % bytes == 0;
}

// Whether rows of codes begin at multiples of 16 bytes.
bool is_wide(const Nvfp4View& b, int64_t k) {
  return k % 32 == 0 && aligned(b.codes, 16) && b.codes_expert_stride % 16 == 0;
}

}  // namespace

bool can_wgmma(int device, const Nvfp4View& b, int64_t k) {
  // Code for sm_90a runs on compute capability 9.0 alone.
  const DeviceTraits& d = traits(device);
  return FP4LT_HAS_SM90A && d.major == 9 && d.minor == 0 && k % kStepK == 0 && is_wide(b, k) &&
         b.codes_expert_stride > 0 && 2 * d.multiprocessors <= kMaxSharers;
}

int most_block_rows(int device, RowForm form) {
  if (form == RowForm::kImage) return 128;
  // 64 rows of activations do not fit into the 99 KB of compute capability 8.6, 8.9 and 12.x.
  return traits(device).shared_bytes >= kStreamSharedBytes<8> ? 64 : 32;
}

bool can_gate(const FusedGemmArgs& p) {
  return p.form == RowForm::kImage && p.n % kTileRows == 0 &&
         (p.order == GateOrder::kGateUp || p.order == GateOrder::kUpGate);
}

int64_t scratch_bytes(int device, RowForm form, int64_t k, int block_rows) {
  if (form == RowForm::kPrepared) return 0;
  // Of each block of threads, all ranges but the first of a tile of fp32 sums.
  const int64_t blocks = (block_rows <= 32 ? 2 : 1) * traits(device).multiprocessors;
  return blocks * (partitions(k) - 1) * kTileRows * block_rows * 4;
}

void fused_gemm(int device, const FusedGemmArgs& p, Stream stream) {
  FP4LT_CHECK(aligned(p.b.codes, 8) && p.b.codes_expert_stride % 8 == 0,
              "fused: every expert's codes must lie at multiples of 8 bytes; these do not: "
              ".clone() the tensor of codes");
  FP4LT_CHECK(aligned(p.b.scales, 16) && p.b.scales_expert_stride % 16 == 0,
              "fused: every expert's scales must lie at multiples of 16 bytes; these do not: "
              ".clone() the tensor of scales");
  FP4LT_CHECK(p.block_rows <= most_block_rows(device, p.form), "fused: row blocks of ",
              p.block_rows, " are too large for this device");
  const DeviceGuard guard(device);
  FP4LT_CHECK(p.form == RowForm::kPrepared || can_wgmma(device, p.b, p.k),
              "fused: activations are in wgmma's order, but these weights or this device cannot be "
              "run by it");
  FP4LT_CHECK(!p.gated || can_gate(p), "fused: this GEMM cannot apply the activation");
  FusedKernelArgs args{};
  args.p = p;
  args.steps = static_cast<int>(ceil_div(p.k, kStepK));
  args.parts = partitions(p.k);
  args.parts_log2 = args.parts == 4 ? 2 : args.parts - 1;
  // Of a ragged last scale tile, the groups of 8 rows that the first quarter still reaches.
  args.tiles =
      static_cast<int>(p.n / kTileRows * 4 + std::min<int64_t>(ceil_div(p.n % kTileRows, 8), 4));
  args.padded = padded_blocks(p.k / kBlock);
  args.row_bytes = p.k / 2;
  args.weights_first = p.list_is_older;
  args.wide = is_wide(p.b, p.k);
  if (p.a_type == DType::kBF16) {
    start_type<__nv_bfloat16>(device, args, stream);
  } else {
    start_type<__half>(device, args, stream);
  }
}

}  // namespace fp4lt::cuda
