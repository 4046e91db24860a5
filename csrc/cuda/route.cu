// SPDX-License-Identifier: Apache-2.0
#include <cub/block/block_scan.cuh>

#include "core/scale_layout.h"
#include "cuda/fused/gemm.h"
#include "cuda/launch.h"
#include "cuda/moe.h"
#include "cuda/ptx.cuh"

namespace fp4lt::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kWarpsPerBlock = kThreads / 32;
constexpr int kPerThread = kMaxExperts / kThreads;
using Scan = cub::BlockScan<int, kThreads>;

// Exclusive prefix sums of one number per expert, kPerThread neighbours to a thread.
__device__ void scan_experts(int (&values)[kPerThread], int (&starts)[kPerThread], int& total,
                             Scan::TempStorage& storage) {
  Scan(storage).ExclusiveSum(values, starts, total);
  __syncthreads();
}

// The work list; `groups`: where each expert's rows begin in an image, in groups of eight.
__device__ void write_blocks(const int (&counts)[kPerThread], const int (&starts)[kPerThread],
                             int64_t experts, int block_rows, RowBlock* blocks, int* block_count,
                             int (&groups)[kPerThread], Scan::TempStorage& storage) {
  int pieces[kPerThread], at[kPerThread], total;
  for (int i = 0; i < kPerThread; ++i) pieces[i] = (counts[i] + 7) / 8;
  scan_experts(pieces, groups, total, storage);
  for (int i = 0; i < kPerThread; ++i) pieces[i] = (counts[i] + block_rows - 1) / block_rows;
  scan_experts(pieces, at, total, storage);
  for (int i = 0; i < kPerThread; ++i) {
    const int expert = threadIdx.x * kPerThread + i;
    if (expert >= experts) continue;
    for (int j = 0; j < pieces[i]; ++j) {
      const int left = counts[i] - j * block_rows;
      blocks[at[i] + j] = {expert, starts[i] + j * block_rows,
                           left < block_rows ? left : block_rows, groups[i] + j * block_rows / 8};
    }
  }
  if (threadIdx.x == 0) *block_count = total;
}

__device__ void clear_flags(int* flags) {
  for (int i = threadIdx.x; i < 2 * kMaxSharers; i += kThreads) flags[i] = 0;
}

// One block of threads, whatever the size: each warp counts a contiguous part of the slots, so that
// ranks within an expert follow the slots' order.
template <typename Id>
__global__ void __launch_bounds__(kThreads) route_kernel(const RouteArgs a) {
  extern __shared__ int counts[];  // [warp][expert], then where the warp's rows begin
  __shared__ Scan::TempStorage storage;
  ptx::wait_for_previous_kernel();
  if (a.flags != nullptr) clear_flags(a.flags);
  const auto* ids = static_cast<const Id*>(a.ids);
  const int experts = static_cast<int>(a.experts);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t slots = a.tokens * a.top_k;
  const int64_t share = round_up(ceil_div(slots, kWarpsPerBlock), 32);
  const int64_t begin = warp * share, end = begin + share < slots ? begin + share : slots;
  int* mine = counts + warp * experts;
  for (int i = threadIdx.x; i < kWarpsPerBlock * experts; i += kThreads) counts[i] = 0;
  __syncthreads();

  for (int64_t base = begin; base < end; base += 32) {
    const int64_t slot = base + lane;
    int expert = -1;
    if (slot < end) {
      const int64_t id = static_cast<int64_t>(ids[slot]) - a.expert_start;
      if (id >= 0 && id < experts) expert = static_cast<int>(id);
    }
    const unsigned peers = __match_any_sync(0xFFFFFFFFu, expert);
    const int rank = __popc(peers & ((1u << lane) - 1));
    const int before = expert >= 0 ? mine[expert] : 0;
    __syncwarp();
    if (expert >= 0 && rank == 0) mine[expert] = before + __popc(peers);
    __syncwarp();
    if (slot < end) a.slot_row[slot] = expert >= 0 ? before + rank : -1;
  }
  __syncthreads();

  int totals[kPerThread], starts[kPerThread], rows;
  for (int i = 0; i < kPerThread; ++i) {
    const int expert = threadIdx.x * kPerThread + i;
    totals[i] = 0;
    for (int w = 0; expert < experts && w < kWarpsPerBlock; ++w) {
      const int count = counts[w * experts + expert];
      counts[w * experts + expert] = totals[i];
      totals[i] += count;
    }
  }
  scan_experts(totals, starts, rows, storage);
  for (int i = 0; i < kPerThread; ++i) {
    const int expert = threadIdx.x * kPerThread + i;
    if (a.ends != nullptr && expert < experts) a.ends[expert] = starts[i] + totals[i];
    for (int w = 0; expert < experts && w < kWarpsPerBlock; ++w) {
      counts[w * experts + expert] += starts[i];
    }
  }
  int* to_place = counts + kWarpsPerBlock * experts;  // from a row's number to its place
  if (a.blocks != nullptr) {
    int groups[kPerThread];
    write_blocks(totals, starts, a.experts, a.block_rows, a.blocks, a.block_count, groups, storage);
    for (int i = 0; i < kPerThread; ++i) {
      const int expert = threadIdx.x * kPerThread + i;
      if (expert < experts) to_place[expert] = groups[i] * 8 - starts[i];
    }
  }
  if (threadIdx.x == 0) *a.row_count = rows;
  __syncthreads();

  for (int64_t slot = begin + lane; slot < end; slot += 32) {
    const int64_t id = static_cast<int64_t>(ids[slot]) - a.expert_start;
    if (id < 0 || id >= experts) continue;
    const int row = mine[id] + a.slot_row[slot];
    a.slot_row[slot] = row;
    a.row_token[row] = static_cast<int>(slot / a.top_k);
    a.row_expert[row] = static_cast<int>(id);
    if (a.blocks != nullptr && a.row_place != nullptr) a.row_place[row] = row + to_place[id];
  }
}

template <typename Offset>
__global__ void __launch_bounds__(kThreads) plan_kernel(const PlanArgs a) {
  __shared__ Scan::TempStorage storage;
  ptx::wait_for_previous_kernel();
  ptx::allow_next_kernel();
  clear_flags(a.flags);
  const auto* ends = static_cast<const Offset*>(a.ends);
  // Running maximum: offsets that decrease give empty groups.
  int own[kPerThread], best = 0;
  for (int i = 0; i < kPerThread; ++i) {
    const int64_t expert = threadIdx.x * kPerThread + i;
    const int64_t end = expert < a.experts ? static_cast<int64_t>(ends[expert]) : 0;
    const int cut = static_cast<int>(end < 0 ? 0 : end > a.rows ? a.rows : end);
    best = cut > best ? cut : best;
    own[i] = best;
  }
  int before;
  Scan(storage).ExclusiveScan(best, before, 0, [](int x, int y) { return x > y ? x : y; });
  __syncthreads();
  int counts[kPerThread], starts[kPerThread], groups[kPerThread];
  for (int i = 0; i < kPerThread; ++i) {
    const int from = i == 0 ? before : (own[i - 1] > before ? own[i - 1] : before);
    const int to = own[i] > before ? own[i] : before;
    starts[i] = from;
    counts[i] = threadIdx.x * kPerThread + i < a.experts ? to - from : 0;
  }
  write_blocks(counts, starts, a.experts, a.block_rows, a.blocks, a.block_count, groups, storage);
  for (int i = 0; i < kPerThread; ++i) {
    const int expert = threadIdx.x * kPerThread + i;
    if (expert >= a.experts) continue;
    a.starts[expert] = starts[i];
    a.places[expert] = groups[i] * 8;
    if (expert == a.experts - 1) a.starts[a.experts] = starts[i] + counts[i];
  }
}

void check_experts(int64_t experts) {
  FP4LT_CHECK(experts <= kMaxExperts, "fused: ", experts, " experts; at most ", kMaxExperts,
              " are supported");
}

}  // namespace

void route(int device, const RouteArgs& a, Stream stream) {
  check_experts(a.experts);
  const DeviceGuard guard(device);
  const size_t shared = static_cast<size_t>((kWarpsPerBlock + 1) * a.experts) * sizeof(int);
  const auto kernel = a.ids_are_64_bit ? route_kernel<int64_t> : route_kernel<int>;
  if (shared > 40000) {
    FP4LT_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                          (kWarpsPerBlock + 1) * kMaxExperts * 4));
  }
  launch(device, kernel, dim3(1), dim3(kThreads), shared, stream, a);
}

void plan_blocks(int device, const PlanArgs& a, Stream stream) {
  check_experts(a.experts);
  const DeviceGuard guard(device);
  launch(device, a.ends_are_64_bit ? plan_kernel<int64_t> : plan_kernel<int>, dim3(1),
         dim3(kThreads), 0, stream, a);
}

}  // namespace fp4lt::cuda
