// SPDX-License-Identifier: Apache-2.0
#include "cpu/gemm.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <vector>

#include "cpu/panel.h"
#include "cpu/simd.h"
#include "cpu/thread_pool.h"
#include "cpu/weight_tile.h"

namespace fp4lt {
namespace {

// Activation rows packed at once, over all experts: bounds the scratch memory at about 15 MB for
// K = 7168.  An expert with more rows has its weights unpacked again for the next panel.
constexpr int64_t kPanelRows = 512;
// Weights of one task: enough to hide the hand-out, few enough to spread a small expert.
constexpr int64_t kTaskWeights = 1 << 19;
// How many chunks ahead weights are asked for.  One is too late; from eight on the rows' lines,
// which fall on few sets of the first-level cache, push each other out.
constexpr int64_t kChunksAhead = 4;

// Partial sums of finished chains, added in pairs as a binary counter carries: after n chains there
// is one sum for each set bit of n, so a term meets at most ceil(log2(chains)) further roundings.
class PairwiseTree {
 public:
  PairwiseTree(const SimdKernels& simd, int64_t chains) : simd_(simd) {
    int levels = 1;
    while ((int64_t{1} << levels) <= chains) ++levels;
    // The last one is where an odd chain's sums wait to be added.
    storage_.resize(static_cast<size_t>((levels + 1) * kRowTile * kCols));
    spare_ = &storage_[static_cast<size_t>(levels * kRowTile * kCols)];
  }

  // Where the sums of chain `index` are to be written, before they are pushed.
  float* place(int64_t index) { return (index & 1) == 0 ? at(0) : spare_; }

  // Takes the sums written there, n of them.
  void push(int64_t index, int64_t n) {
    int64_t level = 0;
    for (; (index >> level & 1) != 0; ++level) simd_.add(at(level), n, spare_);
    if (level != 0) std::memcpy(at(level), spare_, static_cast<size_t>(n) * sizeof(float));
  }

  // The total of `chains` pushes.
  const float* total(int64_t chains, int64_t n) {
    int64_t lowest = 0;
    while ((chains >> lowest & 1) == 0) ++lowest;
    float* sum = at(lowest);
    for (int64_t level = lowest + 1; chains >> level != 0; ++level) {
      if ((chains >> level & 1) != 0) simd_.add(at(level), n, sum);
    }
    return sum;
  }

 private:
  float* at(int64_t level) { return &storage_[static_cast<size_t>(level * kRowTile * kCols)]; }
  const SimdKernels& simd_;
  std::vector<float> storage_;
  float* spare_;
};

void store(const GroupedGemmArgs& p, const SimdKernels& simd, const Panel& panel, const Segment& s,
           int64_t row, const WeightTile& tile, const float* sums) {
  const auto* b = std::get_if<Nvfp4View>(&p.b);
  const float g_b = b != nullptr ? b->global[s.expert * b->global_stride] : 1.0f;
  const float g = panel.global(s.panel_row0 + row - s.row0) * g_b;
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
    if (count > 0) simd.narrow(y, count, p.out_type, out);
  }
}

// Walks over the chunks of the tiles [first, last), some way ahead of the work on them.
class Prefetcher {
 public:
  Prefetcher(const GroupedGemmArgs& p, int64_t expert, int64_t first, int64_t last, int64_t chunks)
      : p_(p), expert_(expert), index_(first), last_(last), chunks_(chunks) {
    tile_.emplace(p_, expert_, index_);
    for (int64_t i = 0; i < kChunksAhead; ++i) step();
  }

  void step() {
    if (index_ == last_) return;
    tile_->prefetch(chunk_ * kChunkBlocks);
    if (++chunk_ < chunks_) return;
    chunk_ = 0;
    if (++index_ < last_) tile_.emplace(p_, expert_, index_);
  }

 private:
  const GroupedGemmArgs& p_;
  int64_t expert_, index_, last_, chunks_, chunk_ = 0;
  std::optional<WeightTile> tile_;
};

// All rows of a segment times one weight tile.
void multiply(const GroupedGemmArgs& p, const SimdKernels& simd, const Panel& panel,
              const Segment& s, WeightTile& tile, Prefetcher& ahead, PairwiseTree& tree) {
  alignas(64) float weights[kUnpackedBytes / sizeof(float)];
  const int64_t blocks = p.k / kBlock, chains = ceil_div(blocks, kChunkBlocks);
  for (int64_t row = s.row0; row < s.row1; row += kRowTile) {
    const int rows = static_cast<int>(std::min<int64_t>(kRowTile, s.row1 - row));
    const int64_t from = s.panel_row0 + row - s.row0;
    for (int64_t chain = 0; chain < chains; ++chain) {
      const int64_t block0 = chain * kChunkBlocks;
      const int count = static_cast<int>(std::min<int64_t>(kChunkBlocks, blocks - block0));
      float* sums = tree.place(chain);
      if (row == s.row0) ahead.step();
      tile.unpack(simd, panel.form(), block0, count, weights);
      switch (panel.form()) {
        case Panel::Form::kInt8:
          simd.dot_int8(panel.int8_rows(chain, from), rows, weights, tile.scales(), count, sums);
          break;
        case Panel::Form::kBf16:
          simd.dot_bf16(panel.bf16_rows(chain, from), rows, weights, tile.scales(), count, sums);
          break;
        case Panel::Form::kFloat:
          simd.dot_float(panel.float_rows(chain, from), rows, weights, tile.scales(), count, sums);
          break;
        case Panel::Form::kDense:
          simd.dot_dense(panel.float_rows(chain, from), rows, weights, count, sums);
          break;
      }
      tree.push(chain, rows * kCols);
    }
    const float* total = tree.total(chains, rows * kCols);
    for (int r = 0; r < rows; ++r) store(p, simd, panel, s, row + r, tile, total + r * kCols);
  }
}

void run_panel(const GroupedGemmArgs& p, const std::vector<Segment>& segments, int64_t rows,
               Panel& panel, int threads) {
  const SimdKernels& simd = kernels();
  panel.pack(p, simd, segments, rows, threads);
  const int64_t chains = ceil_div(p.k / kBlock, kChunkBlocks);
  const int64_t tiles = WeightTile::count(p.n);
  const int64_t step = std::clamp<int64_t>(kTaskWeights / p.k / kCols, 1, 32);
  const int64_t tasks = ceil_div(tiles, step);
  parallel_for(static_cast<int64_t>(segments.size()) * tasks, threads, [&](int64_t i) {
    const Segment& s = segments[static_cast<size_t>(i / tasks)];
    const int64_t first = i % tasks * step, last = std::min(tiles, first + step);
    PairwiseTree tree(simd, chains);
    Prefetcher ahead(p, s.expert, first, last, chains);
    for (int64_t index = first; index < last; ++index) {
      WeightTile tile(p, s.expert, index);
      // Of a ragged 128 the last tiles are empty, and nothing but empty ones follows.
      if (tile.empty()) break;
      multiply(p, simd, panel, s, tile, ahead, tree);
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
