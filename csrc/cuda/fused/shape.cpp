// SPDX-License-Identifier: Apache-2.0
// What the host decides about a fused GEMM; in every build, since none of it needs a device.
#include <algorithm>
#include <cmath>

#include "core/scale_layout.h"
#include "cuda/fused/gemm.h"

namespace fp4lt::cuda {

int partitions(int64_t k) {
  const int64_t steps = ceil_div(k, kPreparedK);
  return steps >= 8 ? 4 : steps >= 4 ? 2 : 1;
}

int row_block_size(int64_t rows, int64_t experts, int most) {
  // Twice the average, so that most experts fit into one block when the routing is uneven.
  const int64_t want = ceil_div(2 * rows, std::max<int64_t>(experts, 1));
  int size = 8;
  while (size < want && size < most) size *= 2;
  return size;
}

int64_t expected_row_blocks(int64_t rows, int64_t experts, int block_rows) {
  const double e = static_cast<double>(experts), m = static_cast<double>(rows);
  const double busy = e * (1.0 - std::pow(1.0 - 1.0 / e, m));
  return static_cast<int64_t>(busy + std::max(0.0, m / block_rows - busy));
}

int64_t max_row_blocks(int64_t rows, int64_t experts, int block_rows) {
  return std::min(rows, rows / block_rows + experts);
}

int64_t fused_depth(int64_t k) {
  // A range is summed by mma instructions, in which every addend may be aligned to the largest and
  // cut: each of its terms counts.  Then the other ranges join.
  const int parts = partitions(k);
  const int64_t steps = ceil_div(k, kPreparedK);
  return std::min(k, ceil_div(steps, parts) * kPreparedK) + parts - 1;
}

}  // namespace fp4lt::cuda
