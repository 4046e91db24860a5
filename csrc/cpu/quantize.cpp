// SPDX-License-Identifier: Apache-2.0
#include "cpu/quantize.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "core/nvfp4.h"
#include "core/scale_layout.h"
#include "cpu/simd.h"
#include "cpu/thread_pool.h"

namespace fp4lt {
namespace {

const char* row_of(const DenseView& x, int64_t expert, int64_t row) {
  return static_cast<const char*>(x.data) +
         (expert * x.expert_stride + row * x.row_stride) * size_of(x.type);
}

// Rows as fp32, widened into a buffer of the thread's own where they are not.
class Fp32Row {
 public:
  Fp32Row(const DenseView& x, int64_t k) : x_(x), k_(k), buffer_(x.type == DType::kF32 ? 0 : k) {}

  const float* operator()(int64_t expert, int64_t row) {
    const char* source = row_of(x_, expert, row);
    if (x_.type == DType::kF32) return reinterpret_cast<const float*>(source);
    kernels().widen(source, x_.type, k_, buffer_.data());
    return buffer_.data();
  }

 private:
  const DenseView& x_;
  int64_t k_;
  std::vector<float> buffer_;
};

// Rows a task takes: enough work to be worth handing out, few enough that all threads get some.
int64_t rows_per_task(int64_t rows, int64_t k, int threads) {
  const int64_t worthwhile = ceil_div(8192, k);
  const int64_t share = ceil_div(rows, static_cast<int64_t>(std::max(threads, 1)) * 4);
  return std::max<int64_t>({worthwhile, std::min<int64_t>(share, 256), 1});
}

// Calls fn(row0, row1) on ranges of [0, rows).
void for_rows(int64_t rows, int64_t k, int threads,
              const std::function<void(int64_t, int64_t)>& fn) {
  const int64_t step = rows_per_task(rows, k, threads);
  parallel_for(ceil_div(rows, step), threads,
               [&](int64_t i) { fn(i * step, std::min(rows, (i + 1) * step)); });
}

void derive_per_expert(const QuantizeArgs& a, int threads) {
  const int64_t total = a.experts * a.rows;
  std::vector<float> amax(static_cast<size_t>(total));
  for_rows(total, a.k, threads, [&](int64_t r0, int64_t r1) {
    Fp32Row fp32(a.x, a.k);
    for (int64_t r = r0; r < r1; ++r) {
      amax[static_cast<size_t>(r)] = kernels().amax(fp32(r / a.rows, r % a.rows), a.k);
    }
  });
  for (int64_t e = 0; e < a.experts; ++e) {
    float largest = 0.0f;
    for (int64_t r = 0; r < a.rows; ++r) {
      largest = std::max(largest, amax[static_cast<size_t>(e * a.rows + r)]);
    }
    a.global[e * a.global_expert_stride] = derive_global(largest);
  }
}

}  // namespace

void quantize(const QuantizeArgs& a, int threads) {
  const int64_t blocks = a.k / kBlock;
  const int64_t padded = padded_blocks(blocks);
  const int64_t expert_scales = scale_bytes(a.rows, blocks);
  if (expert_scales != a.rows * blocks) {
    std::memset(a.scales, 0, static_cast<size_t>(a.experts * expert_scales));
  }
  if (a.mode == GlobalScale::kPerExpert) derive_per_expert(a, threads);

  for_rows(a.experts * a.rows, a.k, threads, [&](int64_t r0, int64_t r1) {
    Fp32Row fp32(a.x, a.k);
    std::vector<uint8_t> linear(static_cast<size_t>(blocks));
    for (int64_t i = r0; i < r1; ++i) {
      const int64_t expert = i / a.rows, row = i % a.rows;
      const float* x = fp32(expert, row);
      float& g = a.global[expert * a.global_expert_stride + row * a.global_row_stride];
      if (a.mode == GlobalScale::kPerRow) g = derive_global(kernels().amax(x, a.k));
      kernels().quantize(x, blocks, g, a.codes + i * (a.k / 2), linear.data());
      uint8_t* scales = a.scales + expert * expert_scales;
      for (int64_t b = 0; b < blocks; ++b) {
        scales[scale_offset(row, b, padded)] = linear[static_cast<size_t>(b)];
      }
    }
  });
}

void dequantize(const DequantizeArgs& a, int threads) {
  const int64_t blocks = a.k / kBlock;
  const int64_t padded = padded_blocks(blocks);
  for_rows(a.experts * a.rows, a.k, threads, [&](int64_t r0, int64_t r1) {
    std::vector<uint8_t> linear(static_cast<size_t>(blocks));
    std::vector<float> wide(static_cast<size_t>(a.out_type == DType::kF32 ? 0 : a.k));
    for (int64_t i = r0; i < r1; ++i) {
      const int64_t expert = i / a.rows, row = i % a.rows;
      const uint8_t* scales = a.x.scales + expert * a.x.scales_expert_stride;
      for (int64_t b = 0; b < blocks; ++b) {
        linear[static_cast<size_t>(b)] = scales[scale_offset(row, b, padded)];
      }
      char* out = static_cast<char*>(a.out) + i * a.k * size_of(a.out_type);
      float* values = wide.empty() ? reinterpret_cast<float*>(out) : wide.data();
      kernels().dequantize(
          a.x.codes + expert * a.x.codes_expert_stride + row * (a.k / 2), linear.data(), blocks,
          a.x.global[expert * a.global_expert_stride + row * a.global_row_stride], values);
      if (!wide.empty()) kernels().narrow(values, a.k, a.out_type, out);
    }
  });
}

void tile_scales(const uint8_t* linear, int64_t experts, int64_t rows, int64_t blocks,
                 uint8_t* tiled) {
  const int64_t bytes = scale_bytes(rows, blocks), padded = padded_blocks(blocks);
  std::memset(tiled, 0, static_cast<size_t>(experts * bytes));
  for (int64_t e = 0; e < experts; ++e, tiled += bytes) {
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t b = 0; b < blocks; ++b) tiled[scale_offset(r, b, padded)] = *linear++;
    }
  }
}

void untile_scales(const uint8_t* tiled, int64_t experts, int64_t rows, int64_t blocks,
                   uint8_t* linear) {
  const int64_t bytes = scale_bytes(rows, blocks), padded = padded_blocks(blocks);
  for (int64_t e = 0; e < experts; ++e, tiled += bytes) {
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t b = 0; b < blocks; ++b) *linear++ = tiled[scale_offset(r, b, padded)];
    }
  }
}

}  // namespace fp4lt
