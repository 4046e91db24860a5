// SPDX-License-Identifier: Apache-2.0
#include "cpu/panel.h"

#include <algorithm>
#include <array>

#include "core/nvfp4.h"
#include "core/scale_layout.h"
#include "cpu/thread_pool.h"

namespace fp4lt {
namespace {

// Below this many elements a helper thread would wake too late to be of use.
constexpr int64_t kWorthSharing = 1 << 16;

const float* e4m3_table() {
  static const std::array<float, 256> table = [] {
    std::array<float, 256> t{};
    for (int i = 0; i < 256; ++i) t[static_cast<size_t>(i)] = decode_e4m3(static_cast<uint8_t>(i));
    return t;
  }();
  return table.data();
}

Panel::Form form_of(const GroupedGemmArgs& p, const SimdKernels& simd) {
  if (!std::holds_alternative<Nvfp4View>(p.b)) return Panel::Form::kDense;
  const auto* dense = std::get_if<DenseView>(&p.a);
  if (dense == nullptr) return Panel::Form::kInt8;
  const bool bf16 = dense->type == DType::kBF16 && simd.dot_bf16 != nullptr;
  return bf16 ? Panel::Form::kBf16 : Panel::Form::kFloat;
}

}  // namespace

void Panel::pack(const GroupedGemmArgs& p, const SimdKernels& simd,
                 const std::vector<Segment>& segments, int64_t rows, int threads) {
  form_ = form_of(p, simd);
  rows_ = rows;
  const int64_t chunks = ceil_div(p.k / kBlock, kChunkBlocks);
  const size_t blocks = slot(chunks, 0) * kChunkBlocks;
  switch (form_) {
    case Form::kInt8:
      codes_.resize(blocks * kBlock);
      offset_.resize(blocks);
      scale_.resize(blocks);
      break;
    case Form::kBf16:
      halves_.resize(blocks * kBlock);
      tiny_.resize(slot(chunks, 0));
      break;
    case Form::kFloat:
    case Form::kDense:
      floats_.resize(blocks * kBlock);
      break;
  }
  global_.assign(static_cast<size_t>(rows), 1.0f);
  std::vector<int64_t> routed(static_cast<size_t>(rows));
  for (const Segment& s : segments) {
    for (int64_t m = s.row0; m < s.row1; ++m) {
      routed[static_cast<size_t>(s.panel_row0 + m - s.row0)] =
          p.row_index != nullptr ? p.row_index[m] : m;
    }
  }
  const auto* a = std::get_if<Nvfp4View>(&p.a);
  parallel_for(rows, rows * p.k < kWorthSharing ? 1 : threads, [&](int64_t to) {
    const int64_t row = routed[static_cast<size_t>(to)];
    if (a != nullptr) global_[static_cast<size_t>(to)] = a->global[row * a->global_stride];
    switch (form_) {
      case Form::kInt8:
        return pack_int8(p, simd, row, to);
      case Form::kBf16:
        return pack_bf16(p, simd, row, to);
      case Form::kFloat:
      case Form::kDense:
        return pack_float(p, simd, row, to);
    }
  });
}

Int8Rows Panel::int8_rows(int64_t chunk, int64_t row) const {
  const size_t at = slot(chunk, row) * kChunkBlocks;
  return {&codes_[at * kBlock], &offset_[at], &scale_[at]};
}

Bf16Rows Panel::bf16_rows(int64_t chunk, int64_t row) const {
  const size_t at = slot(chunk, row);
  return {&halves_[at * kChunkBlocks * kBlock], &tiny_[at]};
}

const float* Panel::float_rows(int64_t chunk, int64_t row) const {
  return &floats_[slot(chunk, row) * kChunkBlocks * kBlock];
}

void Panel::pack_int8(const GroupedGemmArgs& p, const SimdKernels& simd, int64_t row, int64_t to) {
  const auto& a = std::get<Nvfp4View>(p.a);
  const int64_t blocks = p.k / kBlock, padded = padded_blocks(blocks);
  const uint8_t* codes = a.codes + row * (p.k / 2);
  const float* e4m3 = e4m3_table();
  for (int64_t block0 = 0, chunk = 0; block0 < blocks; block0 += kChunkBlocks, ++chunk) {
    const int count = static_cast<int>(std::min<int64_t>(kChunkBlocks, blocks - block0));
    const size_t at = slot(chunk, to) * kChunkBlocks;
    simd.pack_int8(codes + block0 * (kBlock / 2), count, &codes_[at * kBlock], &offset_[at]);
    // Both operands' codes are doubled; the quarter is taken here, where it is exact.
    constexpr float kFactor = 0.25f / kScaleUp;
    for (int b = 0; b < count; ++b) {
      scale_[at + static_cast<size_t>(b)] =
          kFactor * e4m3[a.scales[scale_offset(row, block0 + b, padded)]];
    }
  }
}

void Panel::pack_bf16(const GroupedGemmArgs& p, const SimdKernels& simd, int64_t row, int64_t to) {
  const auto& a = std::get<DenseView>(p.a);
  const int64_t blocks = p.k / kBlock;
  const uint16_t* x = static_cast<const uint16_t*>(a.data) + row * a.row_stride;
  for (int64_t block0 = 0, chunk = 0; block0 < blocks; block0 += kChunkBlocks, ++chunk) {
    const int count = static_cast<int>(std::min<int64_t>(kChunkBlocks, blocks - block0));
    const size_t at = slot(chunk, to);
    tiny_[at] = simd.pack_bf16(x + block0 * kBlock, count, &halves_[at * kChunkBlocks * kBlock]);
  }
}

void Panel::pack_float(const GroupedGemmArgs& p, const SimdKernels& simd, int64_t row, int64_t to) {
  const int64_t blocks = p.k / kBlock, padded = padded_blocks(blocks);
  float wide[kChunkBlocks * kBlock];
  uint8_t linear[kChunkBlocks];
  for (int64_t block0 = 0, chunk = 0; block0 < blocks; block0 += kChunkBlocks, ++chunk) {
    const int64_t count = std::min<int64_t>(kChunkBlocks, blocks - block0);
    if (const auto* dense = std::get_if<DenseView>(&p.a)) {
      const int64_t first = row * dense->row_stride + block0 * kBlock;
      simd.widen(static_cast<const char*>(dense->data) + first * size_of(dense->type), dense->type,
                 count * kBlock, wide);
    } else {
      const auto& a = std::get<Nvfp4View>(p.a);
      for (int64_t b = 0; b < count; ++b) {
        linear[b] = a.scales[scale_offset(row, block0 + b, padded)];
      }
      const uint8_t* codes = a.codes + row * (p.k / 2) + block0 * (kBlock / 2);
      simd.dequantize(codes, linear, count, 1.0f, wide);
    }
    float* out = &floats_[slot(chunk, to) * kChunkBlocks * kBlock];
    for (int64_t b = 0; b < count; ++b) {
      for (int i = 0; i < kBlock; ++i) out[b * kBlock + i] = wide[b * kBlock + kOrder[i]];
    }
  }
}

}  // namespace fp4lt
