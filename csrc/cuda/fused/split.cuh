// SPDX-License-Identifier: Apache-2.0
// The fused kernel for few tiles: a warp to each range of K of a tile, the sums added through
// shared memory.  Activations come from L1 and L2: there are few, and each range has its own.
#pragma once

#include "cuda/fused/tile.cuh"

namespace fp4lt::cuda {

constexpr int kSplitWarps = 4;
constexpr int kSplitStages = 2;

template <int NT>
constexpr int kSumBytes = kTileN * 8 * NT * 4;  // of a warp

template <typename T, int NT, bool Whole>
__global__ void __launch_bounds__(kSplitWarps * 32, NT == 1 ? 4 : 3)
    split_kernel(const __grid_constant__ FusedKernelArgs a) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const FusedGemmArgs& p = a.p;
  const int warps = blockDim.x / 32;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const uint32_t ring = ptx::shared_address(shared) + warp * kSplitStages * kStageBytes + lane * 16;
  auto* sums = reinterpret_cast<float*>(shared + warps * kSplitStages * kStageBytes);

  ptx::wait_for_previous_kernel();
  ptx::allow_next_kernel();

  const int sub_tile = warp / a.parts, part = warp % a.parts;
  const int first = part * a.steps / a.parts, end = (part + 1) * a.steps / a.parts;
  const int groups = (a.tiles + a.cta_tiles - 1) / a.cta_tiles;
  const Items items{static_cast<int>(blockIdx.x), *p.block_count * groups,
                    static_cast<int>(gridDim.x)};
  Loader<Whole, kSplitStages> loader(a, ring, sub_tile, first, end, items);
#pragma unroll
  for (int i = 0; i < kSplitStages - 1; ++i) {
    loader.load();
    ptx::copy_commit();
  }

  uint32_t slot = 0;
  int buffer = 0;
  for (int item = items.first; item < items.end; item += items.stride) {
    const RowBlock block = p.blocks[item / groups];
    const int first_tile = item % groups * a.cta_tiles;
    const int active = (block.rows + 7) / 8;
    const T* x[NT];
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) {
      // A column that no row is for holds the first row's product; nobody stores it.
      const int m = block.row0 + (nt * 8 + g < block.rows ? nt * 8 + g : 0);
      const int64_t row = p.row_index != nullptr ? p.row_index[m] : m;
      x[nt] = static_cast<const T*>(p.a) + row * (int64_t{a.steps} * kStepK) +
              int64_t{first} * kStepK + t * 8;
    }
    float sum[NT][2][4] = {};

    for (int step = first; step < end; ++step) {
      loader.load();
      ptx::copy_commit();
      ptx::copy_wait<kSplitStages - 1>();
      const uint32_t from = ring + slot;
      slot = slot == (kSplitStages - 1) * kStageBytes ? 0 : slot + kStageBytes;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint4 xv[NT][4];
#pragma unroll
        for (int nt = 0; nt < NT; ++nt) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            xv[nt][i] = __ldg(reinterpret_cast<const uint4*>(x[nt] + half * 128 + i * 32));
          }
        }
        const Fragment<T> weights = Fragment<T>::template load<Whole>(
            from + half * 5 * 512, t,
            static_cast<int>(p.k / kBlock) - (step * kStepBlocks + half * 8 + t * 2));
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          uint32_t d[4][4];
          weights.decode(w, d);
#pragma unroll
          for (int nt = 0; nt < NT; ++nt) {
            if (NT > 1 && nt >= active) break;
            multiply_word<T>(d, xv[nt][w], sum[nt]);
          }
        }
      }
#pragma unroll
      for (int nt = 0; nt < NT; ++nt) x[nt] += kStepK;
    }

    // Accumulator j of (nt, pair) is tile row (pair * 2 + j / 2) * 8 + g, token nt * 8 + 2 t + j
    // % 2.
    const int warp_floats = kSumBytes<NT> / 4;
    float* all = sums + buffer * warps * warp_floats;
#pragma unroll
    for (int i = 0; i < NT * 8; ++i) {
      const int nt = i / 8, pair = i / 4 % 2, j = i % 4;
      all[warp * warp_floats + (nt * 8 + 2 * t + j % 2) * kTileN + (pair * 2 + j / 2) * 8 + g] =
          sum[nt][pair][j];
    }
    // The other buffer's readers are a whole tile behind this barrier.
    __syncthreads();
    for (int i = threadIdx.x; i < a.cta_tiles * kTileN * block.rows; i += blockDim.x) {
      const int n = i % kTileN, which = i / kTileN % a.cta_tiles,
                token = i / (kTileN * a.cta_tiles);
      const float* s = all + which * a.parts * warp_floats + token * kTileN + n;
      float v = s[0];
      for (int r = 1; r < a.parts; ++r) v = __fadd_rn(v, s[r * warp_floats]);
      const int64_t column = column_of(first_tile + which, n);
      if (first_tile + which < a.tiles && column < p.n) {
        const int m = block.row0 + token;
        finish(p, block.expert, m, column, scale_of(p, block.expert, m), v * Dequant<T>::kUndo);
      }
    }
    buffer ^= 1;
  }
}

}  // namespace fp4lt::cuda
