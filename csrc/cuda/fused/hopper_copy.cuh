// SPDX-License-Identifier: Apache-2.0
// The Hopper kernel's shared memory, how its work is dealt out, and the thread that copies.
#pragma once

#include <cuda.h>

#include "cuda/fused/tile.cuh"
#include "cuda/ptx_wgmma.cuh"

namespace fp4lt::cuda {

constexpr int kHopperWarps = 8;                          // that compute
constexpr int kHopperThreads = (kHopperWarps + 4) * 32;  // registers move by the warpgroup
constexpr int kCodeBytes = kTileRows * kStepK / 2;       // of a stage
constexpr int kScaleBytes = kTileRows * kStepBlocks;
constexpr int kGroupBytes = 8 * kStepK * 2;  // of eight activation rows
constexpr int kItemBytes = 32;
constexpr int kGatedRows = 64;  // of gate, and of up

template <int NT, bool Gated>
struct HopperLayout {
  static constexpr int kBlocks = NT <= 4 ? 2 : 1;  // of threads to a multiprocessor
  // Of a thread that copies and one that computes; together what the launch gives all.
  static constexpr int kCopyRegisters = kBlocks == 2 ? 32 : 40;
  static constexpr int kRegisters = kBlocks == 2 ? 104 : 232;
  // The halves of two scale tiles that gate and up need come with the other halves.
  static constexpr int kScaleStage = (Gated ? 2 : 1) * kScaleBytes;
  static constexpr int kStage = kCodeBytes + kScaleStage + NT * kGroupBytes;
  static constexpr int kMost = kBlocks == 2 ? 115000 : 231000;
  static constexpr int kStages = kMost / kStage < 5 ? kMost / kStage : 5;
  static constexpr int kScales = kStages * kCodeBytes;
  static constexpr int kRows = kScales + kStages * kScaleStage;
  static constexpr int kItems = kRows + kStages * NT * kGroupBytes;
  static constexpr int kBarriers = kItems + (kStages + 1) * kItemBytes;
  static constexpr int kBytes = kBarriers + 2 * kStages * 8;
  // What setmaxnreg hands out must have been there, or it waits for ever.
  static_assert(kHopperWarps * 32 * kRegisters + 128 * kCopyRegisters <=
                kHopperThreads * (kBlocks == 2 ? 80 : 168));
  static_assert(kStages >= 2 && kBytes <= 232448 / kBlocks);
};

// What is to be known of a tile and a row block; the copying thread leaves it for the others.
struct HopperItem {
  int expert, row0, rows, group;
  int tile;
  int half;  // bit 0: gate's (or all) rows begin in the upper half of their scale tile; bit 1: up's
};

#if FP4LT_HAS_WGMMA

__device__ __forceinline__ HopperItem read_item(uint32_t from) {
  const uint4 v = ptx::load_shared16(from), w = ptx::load_shared16(from + 16);
  return {static_cast<int>(v.x), static_cast<int>(v.y), static_cast<int>(v.z),
          static_cast<int>(v.w), static_cast<int>(w.x), static_cast<int>(w.y)};
}

// A block of threads' share of all units, in order: unit = item * parts + range.
struct Units {
  int64_t first, end;
  int64_t count;  // of all blocks of threads

  __device__ __forceinline__ Units(const FusedKernelArgs& a, int64_t block) {
    // Past L1, which may hold what an older list left: this may run before the kernel before ends.
    count = int64_t{__ldcg(a.p.block_count)} * a.tiles << a.parts_log2;
    first = block * count / gridDim.x;
    end = (block + 1) * count / gridDim.x;
  }
};

// Walks a share item by item: of each, the ranges and steps that are in the share.
class UnitSpan {
 public:
  __device__ __forceinline__ UnitSpan(const FusedKernelArgs& a, const Units& units)
      : a_(a), end_(units.end) {
    item_ = static_cast<int>(units.first >> a.parts_log2);
    first_ = static_cast<int>(units.first) & (a.parts - 1);
    done_ = units.first >= units.end;
    cut();
  }
  __device__ __forceinline__ bool done() const { return done_; }
  __device__ __forceinline__ void next() {
    ++item_;
    first_ = 0;
    done_ = int64_t{item_} << a_.parts_log2 >= end_;
    cut();
  }
  __device__ __forceinline__ int item() const { return item_; }
  __device__ __forceinline__ int first_range() const { return first_; }
  __device__ __forceinline__ int end_of(int range) const {
    return (range + 1) * a_.steps >> a_.parts_log2;
  }
  __device__ __forceinline__ int first_step() const { return first_ * a_.steps >> a_.parts_log2; }
  __device__ __forceinline__ int end_step() const { return end_step_; }

 private:
  __device__ __forceinline__ void cut() {
    const int64_t left = end_ - (int64_t{item_} << a_.parts_log2);
    const int ranges = left < a_.parts ? static_cast<int>(left) : a_.parts;
    end_step_ = ranges * a_.steps >> a_.parts_log2;
  }
  const FusedKernelArgs& a_;
  int64_t end_;
  int item_, first_, end_step_ = 0;
  bool done_;
};

// Walks the steps of a share.
class StepCursor {
 public:
  __device__ __forceinline__ StepCursor(const FusedKernelArgs& a, const Units& units)
      : a_(a), span_(a, units) {
    seek();
  }
  __device__ __forceinline__ bool done() const { return span_.done(); }
  __device__ __forceinline__ void next() {
    if (++step_ < span_.end_step()) return;
    span_.next();
    seek();
  }
  __device__ __forceinline__ bool fresh() const { return step_ == span_.first_step(); }
  __device__ __forceinline__ int step() const { return step_; }
  __device__ __forceinline__ int tile() const { return tile_; }
  __device__ __forceinline__ const RowBlock& block() const { return block_; }

 private:
  __device__ __forceinline__ void seek() {
    if (done()) return;
    step_ = span_.first_step();
    const int4 b = __ldcg(reinterpret_cast<const int4*>(a_.p.blocks) + span_.item() / a_.tiles);
    block_ = {b.x, b.y, b.z, b.w};
    tile_ = span_.item() % a_.tiles;
  }
  const FusedKernelArgs& a_;
  UnitSpan span_;
  int step_ = 0, tile_ = 0;
  RowBlock block_{};
};

// Brings one step's operands into a stage, by the copy engine; one thread's work.
template <int NT, bool Gated>
class StageCopier {
 public:
  using L = HopperLayout<NT, Gated>;
  __device__ __forceinline__ StageCopier(const CUtensorMap& map, const FusedKernelArgs& a,
                                         uint32_t base)
      : map_(map), a_(a), base_(base) {}

  // And announces the activations, which copy_rows() brings.
  __device__ __forceinline__ void copy_weights(const StepCursor& at, int stage) {
    const uint32_t barrier = base_ + L::kBarriers + stage * 8;
    const int half_rows = static_cast<int>(a_.p.n / 2);
    int rows[2] = {at.tile() * (Gated ? kGatedRows : kTileRows), 0};
    if constexpr (Gated) {
      rows[1] = rows[0] + half_rows;
      if (a_.p.order == GateOrder::kUpGate) {
        rows[1] = rows[0];
        rows[0] += half_rows;
      }
    }
    const RowBlock& block = at.block();
    if (at.fresh()) {
      const uint32_t to = base_ + L::kItems + slot_ * kItemBytes;
      slot_ = slot_ == L::kStages ? 0 : slot_ + 1;
      ptx::store_shared16(to, make_uint4(block.expert, block.row0, block.rows, block.group));
      ptx::store_shared16(
          to + 16, make_uint4(at.tile(), (rows[0] / 64 & 1) | (rows[1] / 64 & 1) << 1, 0, 0));
    }
    ptx::barrier_arrive_expecting(barrier,
                                  kCodeBytes + L::kScaleStage + (block.rows + 7) / 8 * kGroupBytes);
#pragma unroll
    for (int i = 0; i < (Gated ? 2 : 1); ++i) {
      ptx::copy_box(base_ + stage * kCodeBytes + i * (kCodeBytes / 2), &map_,
                    at.step() * (kStepK / 2), rows[i], block.expert, barrier);
      ptx::copy_bulk(base_ + L::kScales + stage * L::kScaleStage + i * kScaleBytes,
                     a_.p.b.scales + block.expert * a_.p.b.scales_expert_stride +
                         rows[i] / kTileRows * kTileRows * a_.padded +
                         int64_t{at.step()} * kScaleBytes,
                     kScaleBytes, barrier);
    }
  }

  __device__ __forceinline__ void copy_rows(const StepCursor& at, int stage) {
    const auto* from = static_cast<const unsigned char*>(a_.p.a) +
                       (int64_t{at.block().group} * a_.steps + at.step()) * kGroupBytes;
    const int groups = (at.block().rows + 7) / 8;
    for (int i = 0; i < groups; ++i) {
      ptx::copy_bulk(base_ + L::kRows + (stage * NT + i) * kGroupBytes, from, kGroupBytes,
                     base_ + L::kBarriers + stage * 8);
      from += int64_t{a_.steps} * kGroupBytes;
    }
  }

 private:
  const CUtensorMap& map_;
  const FusedKernelArgs& a_;
  uint32_t base_;
  int slot_ = 0;
};

template <int NT, bool Gated>
__device__ __forceinline__ void hopper_produce(const CUtensorMap& map, const FusedKernelArgs& a,
                                               uint32_t base, const Units& units) {
  using L = HopperLayout<NT, Gated>;
  const uint32_t empty = base + L::kBarriers + L::kStages * 8;
  StageCopier<NT, Gated> copier(map, a, base);
  int ahead = 0;
  if (a.weights_first) {
    for (StepCursor at(a, units); ahead < L::kStages && !at.done(); ++ahead, at.next()) {
      copier.copy_weights(at, ahead);
    }
    ptx::wait_for_previous_kernel();
  }
  int stage = 0;
  uint32_t parity = 1;  // of the phase before: a fresh barrier lets the first round pass
  for (StepCursor at(a, units); !at.done(); at.next()) {
    if (ahead > 0) {
      --ahead;
    } else {
      ptx::barrier_wait(empty + stage * 8, parity);
      copier.copy_weights(at, stage);
    }
    copier.copy_rows(at, stage);
    if (++stage == L::kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
}

#endif

}  // namespace fp4lt::cuda
