// SPDX-License-Identifier: Apache-2.0
#include "cpu/gemm.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "core/nvfp4.h"
#include "core/scale_layout.h"
#include "cpu/simd.h"
#include "cpu/thread_pool.h"

namespace fp4lt {
namespace {

// Activation rows unpacked at once, over all experts: bounds the scratch memory at about 15 MB for
// K = 7168.  An expert with more rows has its weights unpacked again for the next panel.
constexpr int64_t kPanelRows = 512;
// Weights of one task: enough to hide the hand-out, few enough to spread a small expert.
constexpr int64_t kTaskWeights = 1 << 17;

const float* e4m3_table() {
  static const std::array<float, 256> table = [] {
    std::array<float, 256> t{};
    for (int i = 0; i < 256; ++i) t[static_cast<size_t>(i)] = decode_e4m3(static_cast<uint8_t>(i));
    return t;
  }();
  return table.data();
}

// One expert's rows within a panel.
struct Segment {
  int64_t expert;
  int64_t row0, row1;  // routed rows
  int64_t panel_row0;  // where row0 lies in the panel
};

// The activations of a panel, in the form that the inner loops take: `blocks` set or `floats` set.
struct Panel {
  std::vector<int8_t> codes;
  std::vector<int16_t> offset;
  std::vector<float> scale;
  std::vector<float> floats;
  std::vector<float> global;  // g_a of each row; 1 for dense activations
};

void pack_int8_row(const Nvfp4View& a, int64_t row, int64_t blocks, Panel& panel, int64_t to) {
  const uint8_t* codes = a.codes + row * blocks * (kBlock / 2);
  const int64_t padded = padded_blocks(blocks);
  for (int64_t b = 0; b < blocks; ++b) {
    int8_t* out = &panel.codes[static_cast<size_t>((to * blocks + b) * kBlock)];
    int sum = 0;
    for (int i = 0; i < kBlock / 2; ++i) {
      const unsigned pair = codes[b * (kBlock / 2) + i];
      out[i] = kE2m1Doubled[pair & 15u];
      out[i + kBlock / 2] = kE2m1Doubled[pair >> 4];
      sum += out[i] + out[i + kBlock / 2];
    }
    const auto at = static_cast<size_t>(to * blocks + b);
    panel.offset[at] = static_cast<int16_t>(-12 * sum);
    // Both operands' codes are doubled; the quarter is taken here, where it is exact.
    panel.scale[at] = 0.25f * e4m3_table()[a.scales[scale_offset(row, b, padded)]];
  }
}

void pack_float_row(const GroupedGemmArgs& p, int64_t row, Panel& panel, int64_t to) {
  float* out = &panel.floats[static_cast<size_t>(to * p.k)];
  if (const auto* dense = std::get_if<DenseView>(&p.a)) {
    const char* x =
        static_cast<const char*>(dense->data) + row * dense->row_stride * size_of(dense->type);
    kernels().widen(x, dense->type, p.k, out);
    return;
  }
  const auto& a = std::get<Nvfp4View>(p.a);
  const int64_t blocks = p.k / kBlock, padded = padded_blocks(blocks);
  std::vector<uint8_t> linear(static_cast<size_t>(blocks));
  for (int64_t b = 0; b < blocks; ++b) {
    linear[static_cast<size_t>(b)] = a.scales[scale_offset(row, b, padded)];
  }
  kernels().dequantize(a.codes + row * (p.k / 2), linear.data(), blocks, 1.0f, out);
}

// Partial sums of finished chains, added in pairs as a binary counter carries: after n chains there
// is one sum for each set bit of n, so a term meets at most ceil(log2(chains)) further roundings.
class PairwiseTree {
 public:
  explicit PairwiseTree(int64_t chains) {
    int levels = 1;
    while ((int64_t{1} << levels) <= chains) ++levels;
    storage_.resize(static_cast<size_t>(levels * kRowTile * kCols));
  }

  // Takes the next chain's sums, n of them; `sums` is used up.
  void push(int64_t index, float* sums, int64_t n) {
    int64_t level = 0;
    for (; (index >> level & 1) != 0; ++level) kernels().add(at(level), n, sums);
    std::memcpy(at(level), sums, static_cast<size_t>(n) * sizeof(float));
  }

  // The total of `chains` pushes.
  const float* total(int64_t chains, int64_t n) {
    int64_t lowest = 0;
    while ((chains >> lowest & 1) == 0) ++lowest;
    float* sum = at(lowest);
    for (int64_t level = lowest + 1; chains >> level != 0; ++level) {
      if ((chains >> level & 1) != 0) kernels().add(at(level), n, sum);
    }
    return sum;
  }

 private:
  float* at(int64_t level) { return &storage_[static_cast<size_t>(level * kRowTile * kCols)]; }
  std::vector<float> storage_;
};

// One weight tile, chunk after chunk.  It is made of the kCols weight rows whose scales share cache
// lines: four neighbours of each quarter of a 128-row scale tile.  Rows past N repeat the last one;
// nobody stores them.
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
        codes_[col] = b->codes + expert * b->codes_expert_stride + n * (p.k / 2);
      } else {
        const auto& d = std::get<DenseView>(p.b);
        codes_[col] = static_cast<const uint8_t*>(d.data) +
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

  void unpack_int8(int64_t block0, int blocks, int8_t* out) {
    kernels().decode_scales(line(block0), blocks, scales_);
    kernels().unpack_int8(rows(block0, blocks), blocks, out);
  }

  void unpack_float(int64_t block0, int blocks, float* out) {
    if (const auto* d = std::get_if<DenseView>(&p_.b)) {
      const uint16_t* rows[kCols];
      for (int col = 0; col < kCols; ++col) {
        rows[col] = reinterpret_cast<const uint16_t*>(codes_[col]) + block0 * kBlock;
      }
      kernels().unpack_half(rows, d->type, blocks, out);
      return;
    }
    kernels().decode_scales(line(block0), blocks, scales_);
    kernels().unpack_float(rows(block0, blocks), scales_, blocks, out);
  }

  // Asks for the chunk from `block0` on.  Sixteen short streams are too many, and each too short,
  // for the processor to foresee.
  void prefetch(int64_t block0) const {
    const int64_t blocks = p_.k / kBlock;
    if (empty() || block0 >= blocks || scale_lines_ == nullptr) return;
    const int64_t count = std::min<int64_t>(kChunkBlocks, blocks - block0);
    for (int col = 0; col < kCols; ++col) {
      const uint8_t* from = codes_[col] + block0 * (kBlock / 2);
      __builtin_prefetch(from);
      __builtin_prefetch(from + (count * (kBlock / 2) - 1));
    }
    for (int64_t b = 0; b < count; b += kTileBlocks) __builtin_prefetch(line(block0 + b));
  }

  const float* scales() const { return scales_; }

 private:
  static constexpr int kRun = 4;
  static constexpr int kTilesPerScaleTile = kTileRows / kCols;

  int64_t row_of(int col) const { return run_start(col / kRun) + col % kRun; }

  const uint8_t* line(int64_t block0) const {
    return scale_lines_ + block0 / kTileBlocks * kTileBytes;
  }

  // The tables read whole groups of 4 blocks: a ragged end is read from a copy.
  const uint8_t* const* rows(int64_t block0, int blocks) {
    const int64_t bytes = blocks * (kBlock / 2);
    for (int col = 0; col < kCols; ++col) {
      const uint8_t* from = codes_[col] + block0 * (kBlock / 2);
      if (blocks % kTileBlocks == 0) {
        rows_[col] = from;
      } else {
        std::memcpy(ragged_[col], from, static_cast<size_t>(bytes));
        rows_[col] = ragged_[col];
      }
    }
    return rows_;
  }

  const GroupedGemmArgs& p_;
  int64_t row0_;
  const uint8_t* codes_[kCols];
  const uint8_t* scale_lines_ = nullptr;
  const uint8_t* rows_[kCols];
  float scales_[kChunkBlocks * kCols];
  uint8_t ragged_[kCols][kChunkBlocks * kBlock / 2];
};

void store(const GroupedGemmArgs& p, const Panel& panel, const Segment& s, int64_t row,
           const WeightTile& tile, const float* sums) {
  const auto* b = std::get_if<Nvfp4View>(&p.b);
  const float g_b = b != nullptr ? b->global[s.expert * b->global_stride] : 1.0f;
  const float g = panel.global[static_cast<size_t>(s.panel_row0 + row - s.row0)] * g_b;
  for (int run = 0, col = 0; col < kCols; ++run, col += 4) {
    const int64_t n0 = tile.run_start(run), count = tile.run_length(run);
    float y[kCols];
    for (int64_t i = 0; i < count; ++i) {
      float f = g;
      if (p.alpha != nullptr) {
        f *= p.alpha[s.expert * p.alpha_expert_stride + gate_class(p.order, n0 + i, p.n)];
      }
      y[i] = f * sums[col + i];
      if (p.bias != nullptr) y[i] += p.bias[s.expert * p.bias_expert_stride + n0 + i];
    }
    char* out = static_cast<char*>(p.out) + (row * p.out_row_stride + n0) * size_of(p.out_type);
    if (count > 0) kernels().narrow(y, count, p.out_type, out);
  }
}

// Asks for chunk `chain` of the tile, or for the one of the next tile that comes in its place.
void prefetch(const WeightTile& tile, const WeightTile& next, int64_t chain, int64_t chains) {
  if (chain < chains) {
    tile.prefetch(chain * kChunkBlocks);
  } else {
    next.prefetch((chain - chains) * kChunkBlocks);
  }
}

// All rows of a segment times one weight tile; `next` is the tile that follows.
void multiply(const GroupedGemmArgs& p, bool int8, const Panel& panel, const Segment& s,
              WeightTile& tile, const WeightTile& next, PairwiseTree& tree) {
  alignas(64) float weights[kChunkBlocks * kBlock * kCols];
  alignas(64) float sums[kRowTile * kCols];
  auto* codes = reinterpret_cast<int8_t*>(weights);
  const int64_t blocks = p.k / kBlock, chains = ceil_div(blocks, kChunkBlocks);
  for (int64_t row = s.row0; row < s.row1; row += kRowTile) {
    const int rows = static_cast<int>(std::min<int64_t>(kRowTile, s.row1 - row));
    const int64_t panel_row = s.panel_row0 + row - s.row0;
    for (int64_t chain = 0; chain < chains; ++chain) {
      const int64_t block0 = chain * kChunkBlocks;
      const int count = static_cast<int>(std::min<int64_t>(kChunkBlocks, blocks - block0));
      prefetch(tile, next, chain + 1, chains);
      if (int8) {
        tile.unpack_int8(block0, count, codes);
        const auto at = static_cast<size_t>(panel_row * blocks + block0);
        const Int8Rows a{&panel.codes[at * kBlock], &panel.offset[at], &panel.scale[at], blocks};
        kernels().dot_int8(a, rows, codes, tile.scales(), count, sums);
      } else {
        tile.unpack_float(block0, count, weights);
        const float* a = &panel.floats[static_cast<size_t>(panel_row * p.k + block0 * kBlock)];
        kernels().dot_float(a, p.k, rows, weights, count, sums);
      }
      tree.push(chain, sums, rows * kCols);
    }
    const float* total = tree.total(chains, rows * kCols);
    for (int r = 0; r < rows; ++r) store(p, panel, s, row + r, tile, total + r * kCols);
  }
}

void run_panel(const GroupedGemmArgs& p, const std::vector<Segment>& segments, int64_t rows,
               Panel& panel, int threads) {
  const auto* a = std::get_if<Nvfp4View>(&p.a);
  const bool int8 = a != nullptr && std::holds_alternative<Nvfp4View>(p.b);
  const int64_t blocks = p.k / kBlock;
  const auto cells = static_cast<size_t>(rows * blocks);
  if (int8) {
    panel.codes.resize(cells * kBlock);
    panel.offset.resize(cells);
    panel.scale.resize(cells);
  } else {
    panel.floats.resize(static_cast<size_t>(rows * p.k));
  }
  panel.global.assign(static_cast<size_t>(rows), 1.0f);

  parallel_for(static_cast<int64_t>(segments.size()), threads, [&](int64_t i) {
    const Segment& s = segments[static_cast<size_t>(i)];
    for (int64_t m = s.row0; m < s.row1; ++m) {
      const int64_t row = p.row_index != nullptr ? p.row_index[m] : m;
      const int64_t to = s.panel_row0 + m - s.row0;
      if (int8) {
        pack_int8_row(*a, row, blocks, panel, to);
      } else {
        pack_float_row(p, row, panel, to);
      }
      if (a != nullptr) {
        panel.global[static_cast<size_t>(to)] = a->global[row * a->global_stride];
      }
    }
  });

  const int64_t tiles = WeightTile::count(p.n);
  const int64_t step = std::clamp<int64_t>(kTaskWeights / p.k / kCols, 1, 32);
  const int64_t tasks = ceil_div(tiles, step);
  parallel_for(static_cast<int64_t>(segments.size()) * tasks, threads, [&](int64_t i) {
    const Segment& s = segments[static_cast<size_t>(i / tasks)];
    const int64_t last = std::min(tiles, (i % tasks + 1) * step);
    PairwiseTree tree(ceil_div(blocks, kChunkBlocks));
    for (int64_t index = i % tasks * step; index < last; ++index) {
      WeightTile tile(p, s.expert, index);
      const WeightTile next(p, s.expert, std::min(index + 1, tiles - 1));
      if (!tile.empty()) multiply(p, int8, panel, s, tile, next, tree);
    }
  });
}

}  // namespace

void grouped_gemm(const GroupedGemmArgs& p, int threads) {
  Panel panel;
  std::vector<Segment> segments;
  int64_t filled = 0;
  const auto flush = [&] {
    if (!segments.empty()) run_panel(p, segments, filled, panel, threads);
    segments.clear();
    filled = 0;
  };
  for (int64_t e = 0; e < p.experts; ++e) {
    int64_t row = e == 0 ? 0 : p.ends[e - 1];
    while (row < p.ends[e]) {
      if (filled == kPanelRows) flush();
      const int64_t take = std::min(p.ends[e] - row, kPanelRows - filled);
      segments.push_back({e, row, row + take, filled});
      filled += take;
      row += take;
    }
  }
  flush();
}

}  // namespace fp4lt
