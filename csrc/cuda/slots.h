// SPDX-License-Identifier: Apache-2.0
// Kernels of a graph whose sizes live on the device: which bodies run, and the way of an expert's
// rows into a slot of fixed size and back.
#pragma once

#include <cuda_runtime_api.h>

#include <vector>

#include "cuda/stream.h"

namespace fp4lt::cuda {

// Conditional nodes of one product: a switch per expert over `buckets`, groups above them.  Expert
// e belongs to group e % groups.
struct Conditions {
  const int* ends;  // on the device; cut to 0 .. rows, a decrease counts as no rows
  int64_t rows;
  std::vector<cudaGraphConditionalHandle> experts, groups;
  std::vector<int64_t> buckets;  // rows up to which each body serves, ascending
};
// Sets every handle: of an expert, the first body that holds its rows, or buckets.size(), which
// runs none; with one bucket, 1 or 0; of a group, whether one of its experts has rows.
void set_conditions(const Conditions& conditions, cudaStream_t stream);

// Rows of one expert between their place among all rows and a slot that begins at row 0.
struct SlotCopy {
  const int* ends;
  int64_t expert, rows;  // rows: all there are
  int64_t bucket;        // the most that the slot holds
  char* packed;          // row 0 of all rows
  char* slot;
  int64_t packed_stride, slot_stride, row_bytes;  // in bytes, multiples of 16
  bool to_slot;
};
void copy_slot(const SlotCopy& copy, cudaStream_t stream);

// The scale tiles of one expert's rows to a slot.
struct TileCopy {
  const int* ends;
  int64_t expert, rows, bucket;
  const char* packed;
  char* slot;
  int64_t line;  // bytes of a row of tiles
};
void copy_tiles(const TileCopy& copy, cudaStream_t stream);

}  // namespace fp4lt::cuda
