// SPDX-License-Identifier: Apache-2.0
// The fused kernel for many tiles: a warp takes its tile's ranges of K one after the other.  The
// warps of a block of threads work side by side on neighbouring tiles of one expert.  With more
// than 8 rows they share the activations, which are copied to shared memory once for all of them;
// with fewer, each reads its own from L1, and no barrier ties the warps together.
#pragma once

#include "cuda/fused/tile.cuh"

namespace fp4lt::cuda {

constexpr int kStreamWarps = 4;
constexpr int kStreamStages = 2;
constexpr int kRowBytes = kStepK * 2;  // of one activation row and step

template <int NT>
constexpr bool kShareRows = NT > 1;
template <int NT>
constexpr int kStreamSharedBytes = kStreamWarps * kStreamStages * kStageBytes +
                                   (kShareRows<NT> ? kStreamStages * NT * 8 * kRowBytes : 0);

// Copies the rows of a block, step by step.  Of a row's 32 chunks of 16 bytes, the number's bit 2
// is flipped in odd rows: the eight threads that read at once (two rows, four neighbours) then meet
// eight different groups of banks.
template <typename T, int NT>
class ActivationLoader {
 public:
  __device__ __forceinline__ ActivationLoader(const FusedKernelArgs& a, uint32_t to, Items items,
                                              int groups)
      : a_(a), items_(items), groups_(groups) {
    const int chunk = threadIdx.x % 32, row = threadIdx.x / 32;
    // Rows of a thread are kStreamWarps apart, so their bit 0 is the same.
    to_ = to + row * kRowBytes + (chunk ^ (row & 1) << 2) * 16;
    item_ = items.first;
    seek();
  }

  __device__ __forceinline__ void load() {
    if (item_ >= items_.end) return;
#pragma unroll
    for (int i = 0; i < NT * 2; ++i) {
      if (static_cast<int>(threadIdx.x / 32) + i * kStreamWarps < rows_) {
        ptx::copy_async16(to_ + slot_ + i * kStreamWarps * kRowBytes, row_[i] + step_ * kRowBytes);
      }
    }
    slot_ = slot_ == 0 ? NT * 8 * kRowBytes : 0;
    if (++step_ == a_.steps) {
      step_ = 0;
      item_ += items_.stride;
      seek();
    }
  }

 private:
  __device__ __forceinline__ void seek() {
    if (item_ >= items_.end || item_ / groups_ == block_) return;
    block_ = item_ / groups_;
    const RowBlock block = a_.p.blocks[block_];
    rows_ = block.rows;
#pragma unroll
    for (int i = 0; i < NT * 2; ++i) {
      const int r = threadIdx.x / 32 + i * kStreamWarps;
      const int m = block.row0 + (r < rows_ ? r : 0);
      const int64_t row = a_.p.row_index != nullptr ? a_.p.row_index[m] : m;
      row_[i] = static_cast<const unsigned char*>(a_.p.a) + row * (int64_t{a_.steps} * kRowBytes) +
                threadIdx.x % 32 * 16;
    }
  }

  const FusedKernelArgs& a_;
  Items items_;
  int groups_;
  uint32_t to_, slot_ = 0;
  int item_, step_ = 0, block_ = -1, rows_ = 0;
  const unsigned char* row_[NT * 2];
};

template <typename T, int NT, bool Whole>
__global__ void __launch_bounds__(kStreamWarps * 32, NT == 1   ? 4
                                                     : NT == 2 ? 4
                                                     : NT == 4 ? 2
                                                               : 1)
    stream_kernel(const __grid_constant__ FusedKernelArgs a) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const FusedGemmArgs& p = a.p;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const uint32_t base = ptx::shared_address(shared);
  const uint32_t ring = base + warp * kStreamStages * kStageBytes + lane * 16;
  const uint32_t rows = base + kStreamWarps * kStreamStages * kStageBytes;

  ptx::wait_for_previous_kernel();
  ptx::allow_next_kernel();

  // A contiguous share of the items: neighbours are tiles of one expert.
  const int groups = (a.tiles + a.cta_tiles - 1) / a.cta_tiles;
  const int64_t count = int64_t{*p.block_count} * groups;
  const Items items{static_cast<int>(blockIdx.x * count / gridDim.x),
                    static_cast<int>((blockIdx.x + 1) * count / gridDim.x), 1};
  Loader<Whole, kStreamStages> loader(a, ring, warp, 0, a.steps, items);
  ActivationLoader<T, NT> activations(a, rows, items, groups);
  loader.load();
  if constexpr (kShareRows<NT>) activations.load();
  ptx::copy_commit();

  uint32_t x_at[4];  // of the chunk of word w, in the order in which they are stored
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    x_at[w] = rows + g * kRowBytes + ((w * 4 + t) ^ (g & 1) << 2) * 16;
  }
  uint32_t slot = 0, x_slot = 0;
  for (int item = items.first; item < items.end; ++item) {
    const RowBlock block = p.blocks[item / groups];
    const int tile = item % groups * a.cta_tiles + warp;
    const int active = (block.rows + 7) / 8;
    float sum[NT][2][4] = {};
    float total[NT][2][4] = {};
    int range_end = a.steps / a.parts, range = 0;
    const T* x = nullptr;  // this thread's row, where rows are not shared
    if constexpr (!kShareRows<NT>) {
      // A column that no row is for holds the first row's product; nobody stores it.
      const int m = block.row0 + (g < block.rows ? g : 0);
      const int64_t row = p.row_index != nullptr ? p.row_index[m] : m;
      x = static_cast<const T*>(p.a) + row * (int64_t{a.steps} * kStepK) + t * 8;
    }

    for (int step = 0; step < a.steps; ++step) {
      // This step's copies are done, everyone's; and everyone is past the step before, so that the
      // next step may take its place.
      ptx::copy_wait<0>();
      if constexpr (kShareRows<NT>) __syncthreads();
      loader.load();
      if constexpr (kShareRows<NT>) activations.load();
      ptx::copy_commit();
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint4 own[4];
        if constexpr (!kShareRows<NT>) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            own[i] = __ldg(reinterpret_cast<const uint4*>(x + half * 128 + i * 32));
          }
        }
        const Fragment<T> weights = Fragment<T>::template load<Whole>(
            ring + slot + half * 5 * 512, t,
            static_cast<int>(p.k / kBlock) - (step * kStepBlocks + half * 8 + t * 2));
#pragma unroll
        for (int w = 0; w < 4; ++w) {  // a word is 8 codes, half a block
          uint32_t d[4][4];
          weights.decode(w, d);
#pragma unroll
          for (int nt = 0; nt < NT; ++nt) {
            if (NT > 1 && nt >= active) break;
            // Rows that are not there hold anything: a column of the product depends on its own.
            uint4 xw;
            if constexpr (kShareRows<NT>) {
              xw = ptx::load_shared16(x_at[w] + x_slot + nt * 8 * kRowBytes + half * 256);
            } else {
              xw = own[w];
            }
            multiply_word<T>(d, xw, sum[nt]);
          }
        }
      }
      if constexpr (!kShareRows<NT>) x += kStepK;
      slot ^= kStageBytes;
      x_slot ^= NT * 8 * kRowBytes;
      if (step + 1 == range_end) {  // this range's sum joins the total
#pragma unroll
        for (int i = 0; i < NT * 8; ++i) {
          float& s = sum[i / 8][i / 4 % 2][i % 4];
          float& o = total[i / 8][i / 4 % 2][i % 4];
          o = range == 0 ? s : __fadd_rn(o, s);
          s = 0.0f;
        }
        ++range;
        range_end = (range + 1) * a.steps / a.parts;
      }
    }

    // Accumulator j of (nt, pair) is tile row (pair * 2 + j / 2) * 8 + g, token nt * 8 + 2 t + j
    // % 2.
    if (tile >= a.tiles) continue;
#pragma unroll
    for (int i = 0; i < NT * 2; ++i) {
      const int token = i / 2 * 8 + 2 * t + i % 2;
      if (token >= block.rows) continue;
      const int m = block.row0 + token;
      const float f = scale_of(p, block.expert, m);
#pragma unroll
      for (int quarter = 0; quarter < 4; ++quarter) {
        const int64_t column = column_of(tile, quarter * 8 + g);
        if (column < p.n) {
          const float c = total[i / 2][quarter / 2][quarter % 2 * 2 + i % 2];
          finish(p, block.expert, m, column, f, c * Dequant<T>::kUndo);
        }
      }
    }
  }
}

}  // namespace fp4lt::cuda
