// SPDX-License-Identifier: Apache-2.0
// How the Hopper kernel's sums end: shared tiles are put together, then scaled, activated, stored.
#pragma once

#include "cuda/activation.cuh"
#include "cuda/fused/hopper_copy.cuh"

namespace fp4lt::cuda {

// Eight neighbours of a tile in an order in which two that follow each other differ in bit 2: their
// 16-byte chunks then lie in different halves of the copy engine's 128-byte swizzle.
__device__ __forceinline__ int spread_row(int g) { return g >> 1 | (g & 1) << 2; }

// Which rows of a stage a thread has: of the 128, two neighbours' distance apart.
template <bool Gated>
struct HopperRows {
  int row[2];

  __device__ __forceinline__ HopperRows(int warp, int lane) {
    const int eight = spread_row(lane / 4);
    if constexpr (Gated) {
      row[0] = warp * 8 + eight;
      row[1] = row[0] + kGatedRows;
    } else {
      row[0] = warp % 2 * 64 + warp / 2 * 8 + eight;
      row[1] = row[0] + 32;
    }
  }
  // Offset of row i's scales within a scale tile's first four blocks; `upper`: with Gated, whether
  // the 64 rows are the tile's upper half.
  __device__ __forceinline__ uint32_t line(int i, int upper) const {
    const int r = Gated ? row[i] % kGatedRows + upper * kGatedRows : row[i];
    return static_cast<uint32_t>(r % 32 * 16 + r / 32 * 4);
  }
};

#if FP4LT_HAS_WGMMA

constexpr int kHopperThreadsThatCompute = kHopperWarps * 32;

// Leaves one range's sum for the owner of the tile's first range.
template <int NT>
__device__ __forceinline__ void leave_sum(const FusedKernelArgs& a, int range, const float* sum) {
  float4* to =
      static_cast<float4*>(a.p.shared_sums) +
      (int64_t{blockIdx.x} * (a.parts - 1) + range - 1) * (NT * kHopperThreadsThatCompute) +
      threadIdx.x;
#pragma unroll
  for (int nt = 0; nt < NT; ++nt) {
    to[nt * kHopperThreadsThatCompute] =
        make_float4(sum[nt * 4], sum[nt * 4 + 1], sum[nt * 4 + 2], sum[nt * 4 + 3]);
  }
}

// Says that this block of threads has left its sums.
__device__ __forceinline__ void publish_sums(const FusedKernelArgs& a) {
  __threadfence();
  ptx::named_barrier<1, kHopperThreadsThatCompute>();
  if (threadIdx.x == 0) ptx::store_release(a.p.shared_flags + blockIdx.x, 1);
}

// Adds the ranges of `item` from `range` on, which the blocks of threads after this one have.  They
// take them first of all, and wait for nobody.  (Where they have not started yet, they will: blocks
// are started in order, and all but one of those before them leave.)  Their flags are zero again
// afterwards.
template <int NT>
__device__ __forceinline__ void collect_sums(const FusedKernelArgs& a, const Units& units, int item,
                                             int range, float* total) {
  int64_t block = blockIdx.x, end = 0;  // the units before `end` are known to be there
  for (; range < a.parts; ++range) {
    const int64_t unit = (int64_t{item} << a.parts_log2) + range;
    if (unit >= end) {
      do {
        ++block;
        end = (block + 1) * units.count / gridDim.x;
      } while (end <= unit);
      if (threadIdx.x == 0) {
        while (ptx::load_acquire(a.p.shared_flags + block) == 0) {
        }
        a.p.shared_flags[block] = 0;
      }
      ptx::named_barrier<1, kHopperThreadsThatCompute>();
    }
    const float4* from = static_cast<const float4*>(a.p.shared_sums) +
                         (block * (a.parts - 1) + range - 1) * (NT * kHopperThreadsThatCompute) +
                         threadIdx.x;
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) {
      const float4 v = __ldcg(from + nt * kHopperThreadsThatCompute);
      total[nt * 4] = __fadd_rn(total[nt * 4], v.x);
      total[nt * 4 + 1] = __fadd_rn(total[nt * 4 + 1], v.y);
      total[nt * 4 + 2] = __fadd_rn(total[nt * 4 + 2], v.z);
      total[nt * 4 + 3] = __fadd_rn(total[nt * 4 + 3], v.w);
    }
  }
}

// A tile's outputs.  Accumulator j of eight tokens nt is row j / 2 of the thread's two, token
// nt * 8 + 2 t + j % 2.
template <typename T, int NT, bool Gated>
__device__ __forceinline__ void finish_tile(const FusedKernelArgs& a, const HopperItem& item,
                                            const HopperRows<Gated>& mine, int t,
                                            const float* total) {
  const FusedGemmArgs& p = a.p;
  const float g_b = p.b.global[item.expert * p.b.global_stride];
  // Factors and biases of the thread's two columns.
  float alpha[2] = {1.0f, 1.0f}, bias[2] = {0.0f, 0.0f};
  int64_t column[2];
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    if constexpr (Gated) {
      const bool upper = (j == 0) == (p.order == GateOrder::kUpGate);
      column[j] = item.tile * kGatedRows + mine.row[0] + (upper ? p.n / 2 : 0);
    } else {
      column[j] = item.tile * kTileRows + mine.row[j];
    }
    if (column[j] >= p.n) continue;
    if (p.alpha != nullptr) {
      alpha[j] = p.alpha[item.expert * p.alpha_expert_stride + gate_class(p.order, column[j], p.n)];
    }
    if (p.bias != nullptr) bias[j] = p.bias[item.expert * p.bias_expert_stride + column[j]];
  }
  float limit = 0.0f;
  if (Gated && p.gate.limited) limit = parameter_of(p.gate.limit, item.expert);
#pragma unroll
  for (int i = 0; i < NT * 2; ++i) {
    const int token = i / 2 * 8 + 2 * t + i % 2;
    if (token >= item.rows) continue;
    const int m = item.row0 + token;
    float f = g_b;
    if (p.a_global != nullptr) {
      f = __fmul_rn(p.a_global[p.row_index != nullptr ? p.row_index[m] : m], g_b);
    }
    float y[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float c = total[i / 2 * 4 + j * 2 + i % 2] * Dequant<T>::kUndo;
      y[j] = __fmul_rn(p.alpha != nullptr ? __fmul_rn(f, alpha[j]) : f, c);
      if (p.bias != nullptr) y[j] = __fadd_rn(y[j], bias[j]);
    }
    if constexpr (Gated) {
      const int64_t k = item.tile * kGatedRows + mine.row[0];
      const int pair = static_cast<int>(k % 4);
      const int64_t at = p.gate.form == RowForm::kImage
                             ? wgmma_pair(item.group * 8 + token, p.out_row_stride, k / 8, pair)
                             : m * p.out_row_stride / 2 + mma_pair(k / 8, pair);
      store_value(p.out, p.out_type, at * 2 + k % 8 / 4,
                  gated_silu(y[0], y[1], p.gate.limited, limit));
    } else {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        if (column[j] < p.n) store_value(p.out, p.out_type, m * p.out_row_stride + column[j], y[j]);
      }
    }
  }
}

#endif

}  // namespace fp4lt::cuda
