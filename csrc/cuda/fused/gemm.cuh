// SPDX-License-Identifier: Apache-2.0
// The fused kernel's body, for the translation units that instantiate it.
//
// A warp takes 32 weight rows: eight neighbours of each quarter of a 128-row scale tile, so that
// one 16-byte load brings the scales of four rows and four blocks.  Weights are the 16-row operand
// of mma.m16n8k16, tokens its 8 columns.  Each thread copies the codes and scales that it will
// itself decode into its own slots of a ring in shared memory, running ahead across tiles: no
// barrier stands between a load and its use.
//
// The sum over K is cut into `partitions(k)` ranges, each summed in the order of k in one
// accumulator, and the ranges are added in order.  Few rows: a warp to a range, added through
// shared memory.  Many rows: one warp after the other range.  The number of ranges depends on K
// alone, so both give the same bits, and a row's bits do not depend on the rows around it.
#pragma once

#include "core/float16.h"
#include "core/scale_layout.h"
#include "cuda/fused/dequant.cuh"
#include "cuda/fused/gemm.h"

namespace fp4lt::cuda {

constexpr int kWarps = 4;
constexpr int kStages = 3;
constexpr int kTileN = 32;   // weight rows of a warp
constexpr int kStepK = 256;  // k of one ring stage: 128 bytes of a row
constexpr int kStepBlocks = kStepK / kBlock;
constexpr int kSlots = 10;                     // 16-byte slots of a thread and stage
constexpr int kStageBytes = kSlots * 32 * 16;  // of a warp
static_assert(kStepK == kPreparedK);

// A launch's constants, small enough for the parameter bank.
struct FusedKernelArgs {
  FusedGemmArgs p;
  int steps;          // kStepK steps of a row
  int parts;          // partitions(k)
  int tiles;          // 32-row tiles of N, padding to 128 left out where it is empty
  int cta_tiles;      // tiles a block of threads has at once: kWarps / parts when warps split K
  int64_t padded;     // blocks of a padded scale row
  int64_t row_bytes;  // code bytes of a weight row
};

// Where a warp is in its sequence of (row block, tile, step).
struct Cursor {
  int item;  // index into row blocks x groups of tiles
  int step, last;
};

template <typename T, int NT, bool Split>
struct FusedKernel {
  static constexpr int kRedFloats = Split ? kWarps * kTileN * 8 * NT : 0;
  static constexpr int kSharedBytes =
      kWarps * kStages * kStageBytes + 2 * kRedFloats * static_cast<int>(sizeof(float));
};

__device__ __forceinline__ void store_value(void* out, DType type, int64_t at, float v) {
  switch (type) {
    case DType::kF32:
      static_cast<float*>(out)[at] = v;
      return;
    case DType::kF16:
      static_cast<__half*>(out)[at] = __float2half_rn(v);
      return;
    case DType::kBF16:
      static_cast<__nv_bfloat16*>(out)[at] = __float2bfloat16_rn(v);
      return;
  }
}

// One output from its sum: factor, bias, rounding.
__device__ __forceinline__ void finish(const FusedGemmArgs& p, int expert, int m, int64_t n,
                                       float c) {
  const int row = p.row_index != nullptr ? p.row_index[m] : m;
  const float g_a = p.a_global != nullptr ? p.a_global[row] : 1.0f;
  float f = __fmul_rn(g_a, p.b.global[expert * p.b.global_stride]);
  if (p.alpha != nullptr) {
    f = __fmul_rn(f, p.alpha[expert * p.alpha_expert_stride + gate_class(p.order, n, p.n)]);
  }
  float y = __fmul_rn(f, c);
  if (p.bias != nullptr) y = __fadd_rn(y, p.bias[expert * p.bias_expert_stride + n]);
  store_value(p.out, p.out_type, m * p.out_row_stride + n, y);
}

template <typename T, int NT, bool Split, bool Wide>
__global__ void __launch_bounds__(kWarps * 32, NT <= 2   ? 3
                                               : NT == 4 ? 2
                                                         : 1)
    fused_kernel(const FusedKernelArgs a) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const FusedGemmArgs& p = a.p;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const uint32_t ring = ptx::shared_address(shared) + warp * kStages * kStageBytes + lane * 16;
  auto* red = reinterpret_cast<float*>(shared + kWarps * kStages * kStageBytes);

  ptx::wait_for_previous_kernel();
  ptx::allow_next_kernel();

  // This warp's tile of a group, and its steps of a tile.
  const int sub_tile = Split ? warp / a.parts : warp;
  const int part = Split ? warp % a.parts : 0;
  const int first_step = Split ? part * a.steps / a.parts : 0;
  const int end_step = Split ? (part + 1) * a.steps / a.parts : a.steps;
  const int groups = static_cast<int>(ceil_div(a.tiles, a.cta_tiles));
  const int items = *p.block_count * groups;
  const int last_block = static_cast<int>(p.k / kBlock);

  // -- loads: a cursor of its own, kStages - 1 steps ahead
  int load_item = blockIdx.x, load_step = first_step;
  const uint8_t* codes = nullptr;
  const uint8_t* lines = nullptr;
  uint32_t row_offset[4];
  uint32_t load_slot = 0;
  const auto seek = [&] {
    if (load_item >= items) return;
    const int tile = (load_item % groups) * a.cta_tiles + sub_tile;
    const int expert = p.blocks[load_item / groups].expert;
    const int row = tile / 4 * kTileRows + tile % 4 * 8 + g;
    codes = p.b.codes + expert * p.b.codes_expert_stride + t * 16;
    for (int q = 0; q < 4; ++q) {
      const int64_t r = row + q * 32 < p.n ? row + q * 32 : p.n - 1;
      row_offset[q] = static_cast<uint32_t>(r * a.row_bytes);
    }
    // Past the last tile the last one is read again; nobody stores it.
    const int64_t scale_tile =
        (tile < a.tiles ? tile / 4 : (a.tiles - 1) / 4) * kTileRows * a.padded;
    lines = p.b.scales + expert * p.b.scales_expert_stride + scale_tile + (tile % 4 * 8 + g) * 16;
  };
  const auto copy = [&](uint32_t to, const uint8_t* from, int64_t left) {
    const int valid = left >= 16 ? 16 : left > 0 ? static_cast<int>(left) : 0;
    if constexpr (Wide) {
      ptx::copy_async16(to, valid > 0 ? from : codes, valid);
    } else {
      ptx::copy_async8(to, valid > 0 ? from : codes, valid < 8 ? valid : 8);
      ptx::copy_async8(to + 8, valid > 8 ? from + 8 : codes, valid > 8 ? valid - 8 : 0);
    }
  };
  const auto load = [&] {
    if (load_item < items) {
      const uint32_t to = ring + load_slot * kStageBytes;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int byte = load_step * (kStepK / 2) + half * 64;
#pragma unroll
        for (int q = 0; q < 4; ++q) {
          copy(to + (half * 5 + q) * 512, codes + row_offset[q] + byte,
               a.row_bytes - byte - t * 16);
        }
        const int tile = load_step * (kStepBlocks / 4) + half * 2 + t / 2;
        const bool there = tile * 4 < a.padded;
        ptx::copy_async16(to + (half * 5 + 4) * 512, there ? lines + tile * kTileBytes : p.b.scales,
                          there ? 16 : 0);
      }
      if (++load_step == end_step) {
        load_step = first_step;
        load_item += gridDim.x;
        seek();
      }
    }
    ptx::copy_commit();
    load_slot = load_slot + 1 == kStages ? 0 : load_slot + 1;
  };
  seek();
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) load();

  // -- products
  uint32_t use_slot = 0;
  int buffer = 0;
  const uint32_t pick = (t & 1) ? 0x4342u : 0x4140u;  // this thread's two blocks of a line's four
  for (int item = blockIdx.x; item < items; item += gridDim.x) {
    const RowBlock block = p.blocks[item / groups];
    const int tile = (item % groups) * a.cta_tiles + sub_tile;
    const int active = (block.rows + 7) / 8;
    const T* x[NT];
    bool valid[NT];
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) {
      valid[nt] = nt * 8 + g < block.rows;
      const int m = block.row0 + (valid[nt] ? nt * 8 + g : 0);
      const int64_t row = p.row_index != nullptr ? p.row_index[m] : m;
      x[nt] = static_cast<const T*>(p.a) + row * (static_cast<int64_t>(a.steps) * kStepK) + t * 32;
    }
    float sum[2][NT][4] = {};
    float total[Split ? 1 : 2][Split ? 1 : NT][4] = {};
    int range = 0;

    for (int step = first_step; step < end_step; ++step) {
      load();
      ptx::copy_wait<kStages - 1>();
      const uint32_t from = ring + use_slot * kStageBytes;
      use_slot = use_slot + 1 == kStages ? 0 : use_slot + 1;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint4 xv[NT <= 2 ? NT : 1][4];
        const int64_t x_at = static_cast<int64_t>(step) * kStepK + half * 128;
        if constexpr (NT <= 2) {
#pragma unroll
          for (int nt = 0; nt < NT; ++nt) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              xv[nt][i] = valid[nt] ? __ldg(reinterpret_cast<const uint4*>(x[nt] + x_at) + i)
                                    : make_uint4(0, 0, 0, 0);
            }
          }
        }
        // Scales of this thread's two blocks, for its four rows.
        uint4 line = ptx::load_shared16(from + (half * 5 + 4) * 512);
        const int left = last_block - (step * kStepBlocks + half * 8 + t * 2);
        uint32_t scale[4][2];
        {
          const uint32_t keep = left >= 2 ? 0xFFFFFFFFu : left == 1 ? 0xFFu : 0u;
          const uint32_t words[4] = {line.x, line.y, line.z, line.w};
          const bool nan = has_nan_scale(line);
#pragma unroll
          for (int q = 0; q < 4; ++q) {
            const uint32_t bytes = __byte_perm(words[q], 0, pick) & (keep | keep << 8 & 0xFF0000u);
            uint32_t both = Dequant<T>::scales(bytes);
            if (nan) {
              if ((bytes & 0xFFu) == kScaleNan) both |= 0x7FFFu;
              if (bytes >> 16 == kScaleNan) both |= 0x7FFF0000u;
            }
            scale[q][0] = __byte_perm(both, both, 0x1010);
            scale[q][1] = __byte_perm(both, both, 0x3232);
          }
        }
        uint4 row[4];
#pragma unroll
        for (int q = 0; q < 4; ++q) row[q] = ptx::load_shared16(from + (half * 5 + q) * 512);
#pragma unroll
        for (int w = 0; w < 4; ++w) {  // a word is 8 codes, half a block
          uint32_t d[4][4];
#pragma unroll
          for (int q = 0; q < 4; ++q) {
            const uint32_t word = w == 0   ? row[q].x
                                  : w == 1 ? row[q].y
                                  : w == 2 ? row[q].z
                                           : row[q].w;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              d[q][i] =
                  ptx::multiply2(Dequant<T>::place(word << (12 - 4 * i)), scale[q][w / 2], T{});
            }
          }
#pragma unroll
          for (int nt = 0; nt < NT; ++nt) {
            if (NT > 1 && nt >= active) break;
            uint4 xw;
            if constexpr (NT <= 2) {
              xw = xv[nt][w];
            } else {
              xw = valid[nt] ? __ldg(reinterpret_cast<const uint4*>(x[nt] + x_at) + w)
                             : make_uint4(0, 0, 0, 0);
            }
#pragma unroll
            for (int pair = 0; pair < 2; ++pair) {
              const uint32_t lo[4] = {d[2 * pair][0], d[2 * pair + 1][0], d[2 * pair][1],
                                      d[2 * pair + 1][1]};
              const uint32_t hi[4] = {d[2 * pair][2], d[2 * pair + 1][2], d[2 * pair][3],
                                      d[2 * pair + 1][3]};
              ptx::mma(sum[pair][nt], lo, xw.x, xw.y, T{});
              ptx::mma(sum[pair][nt], hi, xw.z, xw.w, T{});
            }
          }
        }
      }
      if constexpr (!Split) {
        // At the end of a range its sum joins the total.
        if (step + 1 == (range + 1) * a.steps / a.parts) {
#pragma unroll
          for (int i = 0; i < 2 * NT * 4; ++i) {
            float& s = sum[i / (NT * 4)][i / 4 % NT][i % 4];
            float& o = total[i / (NT * 4)][i / 4 % NT][i % 4];
            o = range == 0 ? s : __fadd_rn(o, s);
            s = 0.0f;
          }
          ++range;
        }
      }
    }

    // Accumulator i of (pair, nt) is row pair * 2 + i / 2 (a quarter), column 2 t + i % 2.
    if constexpr (Split) {
      float* mine = red + buffer * FusedKernel<T, NT, Split>::kRedFloats + warp * kTileN * 8 * NT;
#pragma unroll
      for (int i = 0; i < 2 * NT * 4; ++i) {
        const int pair = i / (NT * 4), nt = i / 4 % NT, j = i % 4;
        const int token = nt * 8 + 2 * t + j % 2, n = (pair * 2 + j / 2) * 8 + g;
        mine[token * kTileN + n] = sum[pair][nt][j];
      }
      __syncthreads();
      const float* all = red + buffer * FusedKernel<T, NT, Split>::kRedFloats;
      const int outputs = a.cta_tiles * kTileN * block.rows;
      for (int i = threadIdx.x; i < outputs; i += kWarps * 32) {
        const int n = i % kTileN, which = i / kTileN % a.cta_tiles,
                  token = i / (kTileN * a.cta_tiles);
        const float* s = all + which * a.parts * kTileN * 8 * NT + token * kTileN + n;
        float v = s[0];
        for (int r = 1; r < a.parts; ++r) v = __fadd_rn(v, s[r * kTileN * 8 * NT]);
        const int from_tile = (item % groups) * a.cta_tiles + which;
        const int64_t column = from_tile / 4 * kTileRows + n / 8 * 32 + from_tile % 4 * 8 + n % 8;
        if (column < p.n) {
          finish(p, block.expert, block.row0 + token, column, v * Dequant<T>::kUndo);
        }
      }
      buffer ^= 1;
    } else {
#pragma unroll
      for (int i = 0; i < 2 * NT * 4; ++i) {
        const int pair = i / (NT * 4), nt = i / 4 % NT, j = i % 4;
        const int token = nt * 8 + 2 * t + j % 2;
        const int64_t column = tile / 4 * kTileRows + (pair * 2 + j / 2) * 32 + tile % 4 * 8 + g;
        if (token < block.rows && column < p.n) {
          finish(p, block.expert, block.row0 + token, column,
                 total[pair][nt][j] * Dequant<T>::kUndo);
        }
      }
    }
  }
}

}  // namespace fp4lt::cuda
