// SPDX-License-Identifier: Apache-2.0
// What both forms of the fused kernel share: tiles, copies, decoding, and the end of a sum.
//
// A warp takes 32 weight rows: eight neighbours of each quarter of a 128-row scale tile, so that
// one 16-byte load brings the scales of four rows and four blocks.  Weights are the 16-row operand
// of mma.m16n8k16, tokens its 8 columns.  Each thread copies the codes and scales that it will
// itself decode into its own slots of a ring in shared memory, running ahead across tiles: no
// barrier stands between a load and its use.
//
// The sum over K is cut into `partitions(k)` ranges, each summed in the order of k in one
// accumulator, and the ranges are added in order.  Where tiles are few, each range has a warp of
// its own (split.cuh); where they are many, a warp takes its tile's ranges one after the other
// (stream.cuh).  The number of ranges depends on K alone, so both give the same bits.
#pragma once

#include "core/float16.h"
#include "core/scale_layout.h"
#include "cuda/fused/dequant.cuh"
#include "cuda/fused/gemm.h"

namespace fp4lt::cuda {

constexpr int kTileN = 32;   // weight rows of a warp
constexpr int kStepK = 256;  // k of one ring stage: 128 bytes of a row
constexpr int kStepBlocks = kStepK / kBlock;
constexpr int kSlots = 10;                     // 16-byte slots of a thread and stage
constexpr int kStageBytes = kSlots * 32 * 16;  // of a warp
static_assert(kStepK == kPreparedK);

// A launch's constants, small enough for the parameter bank.
struct FusedKernelArgs {
  FusedGemmArgs p;
  int steps;  // kStepK steps of a row
  int parts;  // partitions(k)
  int parts_log2;
  int tiles;          // 32-row tiles of N; where the last 128 rows are ragged, only those with rows
  int cta_tiles;      // tiles that a block of threads has at once
  int64_t padded;     // blocks of a padded scale row
  int64_t row_bytes;  // code bytes of a weight row
  bool wide;          // rows lie at multiples of 16 bytes
  bool weights_first;  // the work list was there before the kernel before this one began
};

// A warp's sequence of items: first, first + stride, ... below end.
struct Items {
  int first, end, stride;
};

// Copies a warp's codes and scales into its ring of `Stages` stages, step by step and item by item.
// Whole: K is a multiple of kStepK and rows lie at 16 bytes, so that nothing needs a mask.
template <bool Whole, int Stages>
class Loader {
 public:
  // `to`: this thread's first slot.  The warp has tile `sub_tile` of a group, from step `first` to
  // `end`.
  __device__ __forceinline__ Loader(const FusedKernelArgs& a, uint32_t to, int sub_tile, int first,
                                    int end, Items items)
      : a_(a), to_(to), sub_tile_(sub_tile), first_(first), end_(end), items_(items) {
    item_ = items.first;
    step_ = first;
    seek();
  }

  // Starts the next step's copies, if there is one left; the caller commits them.
  __device__ __forceinline__ void load() {
    if (item_ < items_.end) {
      const uint32_t to = to_ + slot_;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if constexpr (Whole) {
#pragma unroll
          for (int q = 0; q < 4; ++q) {
            ptx::copy_async16(to + (half * 5 + q) * 512, row_[q] + half * 64);
          }
          ptx::copy_async16(to + (half * 5 + 4) * 512, line_ + half * 2 * kTileBytes);
        } else {
          load_masked(to + half * 5 * 512, half);
        }
      }
#pragma unroll
      for (int q = 0; q < 4; ++q) row_[q] += kStepK / 2;
      line_ += kStepBlocks / kTileBlocks * kTileBytes;
      if (++step_ == end_) {
        step_ = first_;
        item_ += items_.stride;
        seek();
      }
    }
    slot_ = slot_ == (Stages - 1) * kStageBytes ? 0 : slot_ + kStageBytes;
  }

 private:
  __device__ __forceinline__ void seek() {
    if (item_ >= items_.end) return;
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int groups = (a_.tiles + a_.cta_tiles - 1) / a_.cta_tiles;
    // Past the last tile the last one is read again; nobody stores it.
    const int wanted = item_ % groups * a_.cta_tiles + sub_tile_;
    const int tile = wanted < a_.tiles ? wanted : a_.tiles - 1;
    if (item_ / groups != block_) {
      block_ = item_ / groups;
      expert_ = a_.p.blocks[block_].expert;
    }
    const int64_t first_row = tile / 4 * kTileRows + tile % 4 * 8 + g;
    const uint8_t* codes = a_.p.b.codes + expert_ * a_.p.b.codes_expert_stride +
                           int64_t{first_} * (kStepK / 2) + t * 16;
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      const int64_t r = first_row + q * 32;
      row_[q] = codes + (r < a_.p.n ? r : a_.p.n - 1) * a_.row_bytes;
    }
    line_ = a_.p.b.scales + expert_ * a_.p.b.scales_expert_stride +
            tile / 4 * kTileRows * a_.padded + (tile % 4 * 8 + g) * 16 +
            int64_t{first_} * (kStepBlocks / kTileBlocks * kTileBytes) + t / 2 * kTileBytes;
  }

  // Zeros in place of what lies past K.
  __device__ __forceinline__ void load_masked(uint32_t to, int half) {
    const int t = threadIdx.x % 4;
    const int64_t left = a_.row_bytes - step_ * (kStepK / 2) - half * 64 - t * 16;
    const int valid = left >= 16 ? 16 : left > 0 ? static_cast<int>(left) : 0;
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      const uint8_t* from = valid > 0 ? row_[q] + half * 64 : a_.p.b.codes;
      if (a_.wide) {
        ptx::copy_async16(to + q * 512, from, valid);
      } else {
        ptx::copy_async8(to + q * 512, from, valid < 8 ? valid : 8);
        ptx::copy_async8(to + q * 512 + 8, valid > 8 ? from + 8 : from, valid > 8 ? valid - 8 : 0);
      }
    }
    const bool there =
        (step_ * (kStepBlocks / kTileBlocks) + half * 2 + t / 2) * kTileBlocks < a_.padded;
    ptx::copy_async16(to + 4 * 512, there ? line_ + half * 2 * kTileBytes : a_.p.b.scales,
                      there ? 16 : 0);
  }

  const FusedKernelArgs& a_;
  uint32_t to_;
  uint32_t slot_ = 0;
  int sub_tile_, first_, end_;
  Items items_;
  int item_, step_;
  int block_ = -1, expert_ = 0;
  const uint8_t* row_[4];
  const uint8_t* line_ = nullptr;
};

// Pairs of scale bytes, the first block's in the low half, to factors of T.
template <typename T, int Count>
__device__ __forceinline__ void decode_scales(const uint32_t (&both)[Count],
                                              uint32_t (&scale)[Count]) {
  uint32_t unusual = 0;
#pragma unroll
  for (int i = 0; i < Count; ++i) unusual |= unusual_scales(both[i]);
  if ((unusual & 0x80808080u) != 0) {
#pragma unroll
    for (int i = 0; i < Count; ++i) {
      const uint32_t nan = ((both[i] & 0xFFu) == kScaleNan ? 0x7FFFu : 0u) |
                           (both[i] >> 16 == kScaleNan ? 0x7FFF0000u : 0u);
      scale[i] = Dequant<T>::scales(both[i]) | nan;
    }
  } else {
#pragma unroll
    for (int i = 0; i < Count; ++i) scale[i] = Dequant<T>::normal_scales(both[i]);
  }
}

// What a thread decodes of half a step: two blocks of its four rows.
template <typename T>
struct Fragment {
  uint4 row[4];
  uint32_t scale[4];  // of the first block in the low half, of the second in the high one

  // From the thread's slots of a half stage.  `left`: blocks that the matrix has from the first of
  // the two on.
  template <bool Whole>
  static __device__ __forceinline__ Fragment load(uint32_t slots, int t, int left) {
    Fragment f;
    const uint4 line = ptx::load_shared16(slots + 4 * 512);
    const uint32_t pick = (t & 1) ? 0x4342u : 0x4140u;
    const uint32_t words[4] = {line.x, line.y, line.z, line.w};
    uint32_t both[4];
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      both[q] = __byte_perm(words[q], 0, pick);
      if (!Whole && left < 2) both[q] &= left == 1 ? 0xFFu : 0u;
    }
    decode_scales<T>(both, f.scale);
#pragma unroll
    for (int q = 0; q < 4; ++q) f.row[q] = ptx::load_shared16(slots + q * 512);
    return f;
  }

  // Word `W`: eight codes of each row under their scale, the operands of four mma.
  template <int W>
  __device__ __forceinline__ void decode(uint32_t (&d)[4][4]) const {
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      const uint32_t word = W == 0 ? row[q].x : W == 1 ? row[q].y : W == 2 ? row[q].z : row[q].w;
      Dequant<T>::place(word, d[q]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        d[q][i] = ptx::multiply2_by_half<W / 2>(d[q][i], scale[q], T{});
      }
    }
  }
  __device__ __forceinline__ void decode(int w, uint32_t (&d)[4][4]) const {
    switch (w) {  // known once the caller's loop is unrolled
      case 0:
        return decode<0>(d);
      case 1:
        return decode<1>(d);
      case 2:
        return decode<2>(d);
      default:
        return decode<3>(d);
    }
  }
};

template <typename T>
__device__ __forceinline__ void multiply_word(const uint32_t (&d)[4][4], uint4 x,
                                              float (&sum)[2][4]) {
#pragma unroll
  for (int pair = 0; pair < 2; ++pair) {
    const uint32_t (&upper)[4] = d[2 * pair];
    const uint32_t (&lower)[4] = d[2 * pair + 1];
    const uint32_t first[4] = {upper[0], lower[0], upper[1], lower[1]};
    const uint32_t second[4] = {upper[2], lower[2], upper[3], lower[3]};
    ptx::mma(sum[pair], first, x.x, x.y, T{});
    ptx::mma(sum[pair], second, x.z, x.w, T{});
  }
}

__device__ __forceinline__ void store_value(void* out, DType type, int64_t at, float v) {
  if (type == DType::kF32) {
    static_cast<float*>(out)[at] = v;
  } else if (type == DType::kF16) {
    static_cast<__half*>(out)[at] = __float2half_rn(v);
  } else {
    static_cast<__nv_bfloat16*>(out)[at] = __float2bfloat16_rn(v);
  }
}

// The product of a routed row's and an expert's global scales.
__device__ __forceinline__ float scale_of(const FusedGemmArgs& p, int expert, int m) {
  float g_a = 1.0f;
  if (p.a_global != nullptr) g_a = p.a_global[p.row_index != nullptr ? p.row_index[m] : m];
  return __fmul_rn(g_a, p.b.global[expert * p.b.global_stride]);
}

// One output from its sum: factor, bias, rounding.
__device__ __forceinline__ void finish(const FusedGemmArgs& p, int expert, int m, int64_t n,
                                       float f, float c) {
  if (p.alpha != nullptr) {
    f = __fmul_rn(f, p.alpha[expert * p.alpha_expert_stride + gate_class(p.order, n, p.n)]);
  }
  float y = __fmul_rn(f, c);
  if (p.bias != nullptr) y = __fadd_rn(y, p.bias[expert * p.bias_expert_stride + n]);
  store_value(p.out, p.out_type, m * p.out_row_stride + n, y);
}

// Weight row of row `i` (0 to 31, by quarter) of a tile.
__device__ __forceinline__ int64_t column_of(int tile, int i) {
  return tile / 4 * kTileRows + i / 8 * 32 + tile % 4 * 8 + i % 8;
}

}  // namespace fp4lt::cuda
