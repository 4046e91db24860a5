// SPDX-License-Identifier: Apache-2.0
// A grouped GEMM as one cublasLtMatmul per expert, on a fan of streams.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <tuple>
#include <vector>

#include "core/views.h"
#include "cublaslt/algorithm.h"

namespace fp4lt::cublaslt {

using cuda::Stream;

// Where the product's weights come from.
enum class Weights : int {
  kDense = 0,     // 16-bit, as they are
  kExpanded = 1,  // NVFP4, expanded to 16 bits in the stream's workspace just before
  kCodes = 2,     // NVFP4, as they are: FP4 tensor cores
};

struct LoopedShape {
  int64_t n, k;  // of an expert's weights
  Weights weights;
  DType type;                 // of the 16-bit operands
  DType out;                  // of the sums that are written
  int64_t slice;              // kExpanded: weight rows expanded at once, a multiple of 128; else n
  int64_t library_workspace;  // bytes that an algorithm may use, per stream
  Filters filters;
};

// Sizes are on the host; everything else is on the device.
struct LoopedCall {
  const int64_t* ends;  // end offset of each expert's rows: not decreasing
  int64_t experts;
  DenseView dense;            // kDense: the weights
  Nvfp4View nvfp4;            // kExpanded, kCodes: the weights; their global scales are not applied
  const void* rows;           // activations, K contiguous: 16-bit values, or codes
  int64_t row_stride;         // in elements
  const uint8_t* row_scales;  // kCodes: tiles, each expert's from first_tile() on
  const float* alpha;         // a factor per expert; null: 1
  int64_t alpha_stride;
  // Row-major sums, n to a row.  kExpanded, where n is no multiple of 8 and the stride has room for
  // round_up(n, 8): the columns up to there become zero.
  void* out;
  int64_t out_row_stride;
  void* workspace;  // size() bytes for each stream, at a multiple of 256
  int streams;      // 1 to 32; with 1 the caller's own, unless alpha could be read too early there
  int threads;      // host threads that may enqueue; a capture has one
  Stream stream;
};

// Rows up to which one algorithm is asked for: the next power of two.
inline int64_t row_bucket(int64_t rows) {
  int64_t bucket = 1;
  while (bucket < rows) bucket *= 2;
  return bucket;
}

// One shape on one device.  Thread-safe: what calls share is the table of algorithms, filled as
// sizes come up, so that the algorithm of a product depends on shape, bucket and what pin() was
// given, and on nothing else.
class LoopedGemm {
 public:
  LoopedGemm(std::shared_ptr<const Library> library, int device, const LoopedShape& shape);

  // Bytes of workspace per stream, a multiple of 256.
  int64_t stream_bytes() const;

  // Enqueues all products.  Nothing waits and nothing is allocated on the device.  Experts without
  // rows are skipped.
  void run(const LoopedCall& call);

  // The same where sizes are known to the device only: conditional nodes in the graph that the
  // stream is capturing, a body per expert and bucket of rows, each of which takes its rows into a
  // slot, multiplies, and puts the sums back.  `ends` and `rows`, the most there can be, take the
  // place of the call's ends; offsets that decrease or lie outside are cut.  The workspace holds
  // graph_bytes() for each of the call's streams.  A replay gives the bits of run().
  void add_to_graph(const LoopedCall& call, const int* ends, int64_t rows);
  int64_t graph_bytes(int64_t rows) const;

  // The library's proposals for products of `rows` rows of a call like this one, best first.
  std::vector<Algorithm> candidates(const LoopedCall& call, int64_t rows, int count);
  // Use this algorithm for all products of a bucket from now on, wherever it serves and all
  // operands lie at multiples of 16 bytes.
  void pin(int64_t bucket, const abi::Algo& algo);

 private:
  // What a product's description has beside shape and rows: m, leading dimensions, alignments.
  using Key = std::tuple<int64_t, int64_t, int64_t, int64_t, uint32_t, uint32_t, uint32_t>;
  struct Table {
    std::map<int64_t, Algorithm> buckets;
    std::map<int64_t, Algorithm> by_rows;
  };
  struct Part;
  class Worker;
  struct Slot;

  MatmulDescription describe(const LoopedCall& call, int64_t m, int64_t rows) const;
  // The parts of N, with an algorithm for each of the sizes.
  std::vector<Part> plan(const LoopedCall& call, const std::vector<int64_t>& sizes, bool capturing);
  std::vector<Part> parts(const LoopedCall& call) const;
  Slot slot(int64_t rows) const;
  Algorithm choose(Table& table, Matmul& matmul, int64_t rows, bool capturing);
  Algorithm find(Matmul& matmul, int64_t rows, bool capturing) const;
  void set_any_scales(Matmul& matmul, const LoopedCall& call) const;

  std::shared_ptr<const Library> library_;
  int device_;
  LoopedShape shape_;
  abi::Handle handle_;
  const float* zero_one_;
  std::mutex mutex_;
  std::map<Key, Table> tables_;
  std::map<int64_t, abi::Algo> pinned_;
};

}  // namespace fp4lt::cublaslt
