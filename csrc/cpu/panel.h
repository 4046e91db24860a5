// SPDX-License-Identifier: Apache-2.0
// Activation rows of a grouped GEMM, rewritten once a call into what the inner loops read.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/gemm.h"
#include "cpu/simd.h"

namespace fp4lt {

// One expert's rows within a panel.
struct Segment {
  int64_t expert;
  int64_t row0, row1;  // routed rows
  int64_t panel_row0;  // where row0 lies in the panel
};

// The rows of some segments.  All arrays are chunk after chunk, then row after row, so that the
// rows of one chunk lie side by side: rows of their own would be a multiple of K apart, and for
// most K that is a handful of cache sets.
class Panel {
 public:
  // What the rows become, and which of the tables' products takes them.
  enum class Form { kInt8, kBf16, kFloat, kDense };

  // Packs `rows` rows, those of all `segments`.
  void pack(const GroupedGemmArgs& args, const SimdKernels& simd,
            const std::vector<Segment>& segments, int64_t rows, int threads);

  Form form() const { return form_; }
  float global(int64_t row) const { return global_[static_cast<size_t>(row)]; }

  // Rows from `row` on, in the chunk of 16 blocks that starts at 16 * chunk.
  Int8Rows int8_rows(int64_t chunk, int64_t row) const;
  Bf16Rows bf16_rows(int64_t chunk, int64_t row) const;
  const float* float_rows(int64_t chunk, int64_t row) const;

 private:
  void pack_int8(const GroupedGemmArgs& args, const SimdKernels& simd, int64_t row, int64_t to);
  void pack_bf16(const GroupedGemmArgs& args, const SimdKernels& simd, int64_t row, int64_t to);
  void pack_float(const GroupedGemmArgs& args, const SimdKernels& simd, int64_t row, int64_t to);
  size_t slot(int64_t chunk, int64_t row) const { return static_cast<size_t>(chunk * rows_ + row); }

  Form form_ = Form::kFloat;
  int64_t rows_ = 0;
  std::vector<int8_t> codes_;
  std::vector<int32_t> offset_;
  std::vector<float> scale_;
  std::vector<uint16_t> halves_;
  std::vector<uint8_t> tiny_;
  std::vector<float> floats_;
  std::vector<float> global_;  // g_a of each row; 1 for dense activations
};

}  // namespace fp4lt
