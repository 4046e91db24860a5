// SPDX-License-Identifier: Apache-2.0
// One tile of an expert's weights as the inner loops of the grouped GEMM take it, chunk by chunk.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "core/nvfp4.h"
#include "core/scale_layout.h"
#include "cpu/gemm.h"
#include "cpu/panel.h"
#include "cpu/simd.h"

namespace fp4lt {

// A tile is made of the kCols weight rows whose scales share cache lines: four neighbours of each
// quarter of a 128-row scale tile.  Rows past N repeat the last one; nobody stores them.
class WeightTile {
 public:
  // Tiles that cover N columns; the last ones of a ragged 128 may be empty.
  static int64_t count(int64_t n) { return ceil_div(n, kTileRows) * kTilesPerScaleTile; }

  WeightTile(const GroupedGemmArgs& p, int64_t expert, int64_t index)
      : p_(p), row0_(index / kTilesPerScaleTile * kTileRows + index % kTilesPerScaleTile * kRun) {
    if (empty()) return;
    for (int col = 0; col < kCols; ++col) {
      const int64_t n = std::min(row_of(col), p.n - 1);
      if (const auto* b = std::get_if<Nvfp4View>(&p.b)) {
        rows_[col] = b->codes + expert * b->codes_expert_stride + n * (p.k / 2);
      } else {
        const auto& d = std::get<DenseView>(p.b);
        rows_[col] = static_cast<const uint8_t*>(d.data) +
                     (expert * d.expert_stride + n * d.row_stride) * size_of(d.type);
      }
    }
    if (const auto* b = std::get_if<Nvfp4View>(&p.b)) {
      scale_lines_ = b->scales + expert * b->scales_expert_stride +
                     scale_offset(row0_, 0, padded_blocks(p.k / kBlock));
    }
  }

  bool empty() const { return row0_ >= p_.n; }

  // Columns come in kCols / kRun runs of kRun neighbours.
  int64_t run_start(int run) const { return row0_ + run * (kTileRows / 4); }
  int64_t run_length(int run) const { return std::clamp<int64_t>(p_.n - run_start(run), 0, kRun); }

  // Unpacks the weights of `blocks` blocks from `block0` on, for products with activations of that
  // form; scales() are then theirs.
  void unpack(const SimdKernels& simd, Panel::Form form, int64_t block0, int blocks, float* out) {
    if (form == Panel::Form::kDense) {
      const uint16_t* rows[kCols];
      for (int col = 0; col < kCols; ++col) {
        rows[col] = reinterpret_cast<const uint16_t*>(rows_[col]) + block0 * kBlock;
      }
      simd.unpack_dense(rows, std::get<DenseView>(p_.b).type, blocks, out);
      return;
    }
    simd.decode_scales(line(block0), blocks, scales_);
    const auto unpack = form == Panel::Form::kInt8 ? simd.unpack_int8 : simd.unpack_float;
    unpack(codes(block0, blocks), blocks, out);
  }

  // Of the chunk unpacked last, [block][col].
  const float* scales() const { return scales_; }

  // Asks for the chunk from `block0` on.  Sixteen short streams are too many, and each too short,
  // for the processor to foresee.
  void prefetch(int64_t block0) const {
    const int64_t blocks = p_.k / kBlock;
    if (empty() || block0 >= blocks || scale_lines_ == nullptr) return;
    const int64_t count = std::min<int64_t>(kChunkBlocks, blocks - block0);
    // Without this gcc takes the function for one without effects, and removes its calls.
    __asm__ volatile("");
    for (int col = 0; col < kCols; ++col) {
      const uint8_t* from = rows_[col] + block0 * (kBlock / 2);
      __builtin_prefetch(from);
      __builtin_prefetch(from + (count * (kBlock / 2) - 1));
    }
    for (int64_t b = 0; b < count; b += kTileBlocks) __builtin_prefetch(line(block0 + b));
  }

 private:
  static constexpr int kRun = 4;
  static constexpr int kTilesPerScaleTile = kTileRows / kCols;

  int64_t row_of(int col) const { return run_start(col / kRun) + col % kRun; }

  const uint8_t* line(int64_t block0) const {
    return scale_lines_ + block0 / kTileBlocks * kTileBytes;
  }

  // The tables read whole groups of 4 blocks: a ragged end is read from a copy.
  const uint8_t* const* codes(int64_t block0, int blocks) {
    const int64_t bytes = blocks * (kBlock / 2);
    for (int col = 0; col < kCols; ++col) {
      const uint8_t* from = rows_[col] + block0 * (kBlock / 2);
      if (blocks % kTileBlocks == 0) {
        codes_[col] = from;
      } else {
        std::memcpy(ragged_[col], from, static_cast<size_t>(bytes));
        codes_[col] = ragged_[col];
      }
    }
    return codes_;
  }

  const GroupedGemmArgs& p_;
  int64_t row0_;
  const uint8_t* rows_[kCols];
  const uint8_t* scale_lines_ = nullptr;
  const uint8_t* codes_[kCols];
  alignas(64) float scales_[kChunkBlocks * kCols];
  uint8_t ragged_[kCols][kChunkBlocks * kBlock / 2];
};

}  // namespace fp4lt
