// SPDX-License-Identifier: Apache-2.0
// The fused kernel for Hopper: one thread keeps a ring of shared memory filled by bulk copies, two
// warpgroups decode weights into registers and multiply them by wgmma.  Nothing but a wait at a
// barrier stands between a warp and its operands; the ring runs ahead across tiles and, where the
// work list is older, ahead of the kernel before this one.
//
// A block of threads takes 128 weight rows: one tile of scales, or with Gated 64 rows of gate and
// the same 64 of up, whose product under the activation is then the output.  A thread has two rows
// of the 16 that its warp has of wgmma's 64; tokens are the columns, NT times 8 of them.
//
// The unit of work is a range of K of a tile (partitions() of them).  Units are dealt out evenly,
// so a tile may be shared by blocks of threads that follow each other: its first range's owner adds
// what the others left in memory (hopper_finish.cuh).  wgmma adds a k16 as mma.sync does, and
// ranges are added in order: the bits are those of the other forms (tests/test_fused_hopper.py
// holds that).
#pragma once

#include "cuda/fused/hopper_copy.cuh"
#include "cuda/fused/hopper_finish.cuh"
#include "cuda/ptx_wgmma.cuh"

namespace fp4lt::cuda {

#if FP4LT_HAS_WGMMA

// A thread's two rows, 32 neighbours of each, under their scales.
template <typename T>
struct HopperFragment {
  uint4 row[2];
  uint32_t scale[2];

  // `scales`: the four blocks' scales of each row; `pick`: which two of them.
  __device__ __forceinline__ void load(uint32_t upper, uint32_t lower, uint32_t upper_scales,
                                       uint32_t lower_scales, uint32_t pick) {
    const uint32_t lines[2] = {ptx::load_shared4(upper_scales), ptx::load_shared4(lower_scales)};
    row[0] = ptx::load_shared16(upper);
    row[1] = ptx::load_shared16(lower);
    const uint32_t both[2] = {__byte_perm(lines[0], 0, pick), __byte_perm(lines[1], 0, pick)};
    decode_scales<T>(both, scale);
  }

  // Word W, eight codes of each row: the operands of two wgmma.
  template <int W>
  __device__ __forceinline__ void decode(uint32_t (&first)[4], uint32_t (&second)[4]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint32_t word = W == 0 ? row[r].x : W == 1 ? row[r].y : W == 2 ? row[r].z : row[r].w;
      uint32_t pair[4];
      Dequant<T>::place(word, pair);
      first[r] = ptx::multiply2_by_half<W / 2>(pair[0], scale[r], T{});
      first[2 + r] = ptx::multiply2_by_half<W / 2>(pair[1], scale[r], T{});
      second[r] = ptx::multiply2_by_half<W / 2>(pair[2], scale[r], T{});
      second[2 + r] = ptx::multiply2_by_half<W / 2>(pair[3], scale[r], T{});
    }
  }
};

// Where a thread finds its part of a stage.
struct HopperStage {
  uint32_t codes;  // of the upper row, of the step's first half; the second's differ in bit 6
  uint32_t lower;  // from there to the lower row
  uint32_t scales[2];
  uint32_t pick;
};

// Two of the four words of half a step times N tokens.
template <typename T, int N, int W>
__device__ __forceinline__ void hopper_words(const HopperFragment<T>& f, uint32_t x, float* sum) {
  uint32_t operand[4][4];
  f.template decode<W>(operand[0], operand[1]);
  f.template decode<W + 1>(operand[2], operand[3]);
  ptx::wgmma_fence();
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    ptx::Wgmma<N, T>::run(sum, operand[i],
                          ptx::matrix_descriptor<kGroupBytes>(x + W * 32 + i * 16));
  }
  ptx::wgmma_commit();
  // The registers of the words before may then be used again.
  ptx::wgmma_wait<1>();
}

// One stage times N tokens.
template <typename T, int N>
__device__ __forceinline__ void hopper_stage(const HopperStage& s, uint32_t x, float* sum) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    HopperFragment<T> f;
    const uint32_t codes = half == 0 ? s.codes : s.codes ^ 64;
    f.load(codes, codes + s.lower, s.scales[0] + half * 2 * kTileBytes,
           s.scales[1] + half * 2 * kTileBytes, s.pick);
    const uint32_t at = x + half * (kGroupBytes / 2 >> 4);
    hopper_words<T, N, 0>(f, at, sum);
    hopper_words<T, N, 2>(f, at, sum);
  }
  // Here and not after the branches of hopper_stage_of() meet: where they did with products under
  // way, the compiler would run all of them one by one.
  ptx::wgmma_wait<0>();
}

// Fewer tokens take a narrower instruction.
template <typename T, int NT>
__device__ __forceinline__ void hopper_stage_of(int rows, const HopperStage& s, uint32_t x,
                                                float* sum) {
  if (NT >= 4 && rows <= NT * 2) {
    hopper_stage<T, NT >= 4 ? NT * 2 : 8>(s, x, sum);
  } else if (NT >= 2 && rows <= NT * 4) {
    hopper_stage<T, NT >= 2 ? NT * 4 : 8>(s, x, sum);
  } else if (NT >= 4 && rows <= NT * 6) {
    hopper_stage<T, NT >= 4 ? NT * 6 : 8>(s, x, sum);
  } else {
    hopper_stage<T, NT * 8>(s, x, sum);
  }
}

template <typename T, int NT, bool Gated>
__device__ __forceinline__ void hopper_consume(const FusedKernelArgs& a, uint32_t base,
                                               Units units) {
  using L = HopperLayout<NT, Gated>;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, t = lane % 4;
  const uint32_t full = base + L::kBarriers, empty = full + L::kStages * 8;
  const HopperRows<Gated> mine(warp, lane);
  uint32_t pick = (t & 1) ? 0x4342u : 0x4140u;
  uint32_t codes = base + mine.row[0] * (kStepK / 2) + (t ^ mine.row[0] % 8) * 16;
  const uint32_t scales = base + L::kScales + t / 2 * kTileBytes;
  // Kept in registers: worked out once more in each step they would cost as much as the products.
  ptx::keep(pick);
  ptx::keep(codes);

  int stage = 0, slot = 0;
  uint32_t parity = 0;
  for (UnitSpan span(a, units); !span.done(); span.next()) {
    ptx::barrier_wait(full + stage * 8, parity);
    const HopperItem item = read_item(base + L::kItems + slot * kItemBytes);
    slot = slot == L::kStages ? 0 : slot + 1;
    // With Gated, rows may begin in the middle of a scale tile.
    uint32_t line[2] = {scales + mine.line(0, item.half & 1),
                        scales + mine.line(1, item.half >> 1) + (Gated ? kScaleBytes : 0)};
    ptx::keep(line[0]);
    ptx::keep(line[1]);
    float sum[NT * 4] = {};
    float total[NT * 4];
    int range = span.first_range(), step = span.first_step();
    const int end_step = span.end_step();
    while (step < end_step) {
      const int range_end = span.end_of(range);
      for (; step < range_end; ++step) {
        // From one lane, so that the compiler knows it to be the same for all.
        const uint32_t x = __shfl_sync(
            0xFFFFFFFFu, ptx::kMatrixWord + ((base + L::kRows + stage * NT * kGroupBytes) >> 4), 0);
        const HopperStage here{codes + stage * kCodeBytes,
                               static_cast<uint32_t>((mine.row[1] - mine.row[0]) * (kStepK / 2)),
                               {line[0] + stage * L::kScaleStage, line[1] + stage * L::kScaleStage},
                               pick};
        ptx::barrier_wait(full + stage * 8, parity);
        hopper_stage_of<T, NT>(item.rows, here, x, sum);
#pragma unroll
        for (int i = 0; i < NT * 4; ++i) ptx::settle(sum[i]);
        if (lane == 0) ptx::barrier_arrive(empty + stage * 8);
        if (++stage == L::kStages) {
          stage = 0;
          parity ^= 1;
        }
      }
      if (span.first_range() > 0) {
        leave_sum<NT>(a, range, sum);
      } else {
#pragma unroll
        for (int i = 0; i < NT * 4; ++i) {
          total[i] = range == 0 ? sum[i] : __fadd_rn(total[i], sum[i]);
        }
      }
#pragma unroll
      for (int i = 0; i < NT * 4; ++i) sum[i] = 0.0f;
      ++range;
    }
    if (span.first_range() > 0) {
      publish_sums(a);
    } else {
      if (range < a.parts) collect_sums<NT>(a, units, span.item(), range, total);
      finish_tile<T, NT, Gated>(a, item, mine, t, total);
    }
  }
}
#endif

template <typename T, int NT, bool Gated>
__global__ void __launch_bounds__(kHopperThreads, HopperLayout<NT, Gated>::kBlocks)
    hopper_kernel(const __grid_constant__ CUtensorMap map,
                  const __grid_constant__ FusedKernelArgs a) {
#if FP4LT_HAS_WGMMA
  using L = HopperLayout<NT, Gated>;
  extern __shared__ __align__(1024) unsigned char shared[];
  const uint32_t base = ptx::shared_address(shared);
  if (threadIdx.x == 0) {
    ptx::prefetch_map(&map);
    for (int i = 0; i < L::kStages; ++i) {
      ptx::barrier_init(base + L::kBarriers + i * 8, 1);
      ptx::barrier_init(base + L::kBarriers + (L::kStages + i) * 8, kHopperWarps);
    }
    ptx::barrier_init_fence();
  }
  __syncthreads();
  const bool copies = threadIdx.x / 32 >= kHopperWarps;
  // With weights_first, what is read before the wait was written by a kernel before the last one.
  if (!copies || !a.weights_first) ptx::wait_for_previous_kernel();
  ptx::allow_next_kernel();

  const Units units(a, blockIdx.x);
  if (copies) {
    ptx::leave_registers<L::kCopyRegisters>();
    if (threadIdx.x == kHopperWarps * 32) hopper_produce<NT, Gated>(map, a, base, units);
  } else {
    ptx::take_registers<L::kRegisters>();
    hopper_consume<T, NT, Gated>(a, base, units);
  }
#endif
}

}  // namespace fp4lt::cuda
