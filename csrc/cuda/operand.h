// SPDX-License-Identifier: Apache-2.0
// What surrounds a matrix product: the forms its activations are brought into, and what turns its
// bare sums into results.
#pragma once

#include "core/scale_layout.h"
#include "core/views.h"
#include "cuda/stream.h"

namespace fp4lt::cuda {

enum class RowForm : int {
  kPrepared = 0,  // 16-bit, in the fused kernel's order (fused/prepared.h)
  kPlain = 1,     // 16-bit, in order
  kCodes = 2,     // NVFP4: codes, and scales in tiles
  kImage = 3,     // 16-bit, as wgmma wants shared memory to be (fused/prepared.h)
};

// Where the rows of an operand go.
struct OperandRows {
  RowForm form;
  void* values;          // rows of `width` 16-bit values, or of width / 2 bytes of codes
  int64_t width;         // K with its padding, which is zero; K itself for kCodes
  uint8_t* scales;       // kCodes; blocks of padding are written as zero
  const int* scale_row;  // kCodes: the tiles' row that each row's scales belong in
  const int* place;      // kImage: the place that each row has
};

// y = f * c + bias[e, n], f = (a_global[row] * b_global[e]) * alpha[e, class(n)], each operation
// rounded on its own.  What is null is left out.
struct Finish {
  const float* a_global;
  const int* row_index;  // a_global's entry of a row; null: the row itself
  const float* b_global;
  int64_t b_stride;
  const float* alpha;
  int64_t alpha_expert_stride;
  GateOrder order;  // of alpha's classes
  const float* bias;
  int64_t bias_expert_stride;
};

struct FinishArgs {
  const float* c;
  int64_t c_row_stride;
  const int* row_expert;
  const int* row_count;  // may be null: `rows`
  int64_t rows, n;
  Finish finish;
  void* out;  // may be `c`
  DType out_type;
  int64_t out_row_stride;
};
void finish_rows(int device, const FinishArgs& args, Stream stream);

// The floats 0 and 1 in the device's memory, for the life of the process.  Cached per device.
const float* zero_and_one(int device);

// Integers of host memory to the device as parameters of a kernel: nothing is copied later, so the
// host's memory may go, and a capture has the values.
void put_integers(int device, const int64_t* values, int64_t count, int* out, Stream stream);

// Each row's expert, and where its scales go when every expert begins a tile (scale_layout.h).
struct LocateArgs {
  const int* ends;  // on the device, not decreasing, at most `rows`
  int64_t experts, rows;
  int* row_expert;  // may be null
  int* scale_row;   // may be null
};
void locate_rows(int device, const LocateArgs& args, Stream stream);

// Zeros for the rows of padding in the tiles that hold rows of such an operand.
void clear_tiles(int device, const int* ends, int64_t experts, int64_t rows, int64_t padded_blocks,
                 uint8_t* scales, Stream stream);

// Rows [row0, row0 + rows) of one NVFP4 matrix as products code * scale, exact in both 16-bit
// types; the global scale stays out.  Rows of `out` are contiguous; `pad` rows of zeros follow.
struct ExpandArgs {
  const uint8_t* codes;  // of the matrix, at a multiple of 8 bytes
  const uint8_t* scales;
  int64_t row0, rows, pad, k;
  void* out;
  DType out_type;
  bool plain;  // launched without programmatic serialization
};
void expand(int device, const ExpandArgs& args, Stream stream);

}  // namespace fp4lt::cuda
