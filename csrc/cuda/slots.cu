// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "core/scale_layout.h"
#include "cuda/check.h"
#include "cuda/slots.h"

namespace fp4lt::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kHandles = 256;  // experts to a launch: 2 KB of its 4 KB of parameters
constexpr int kBuckets = 32;

struct Handles {
  cudaGraphConditionalHandle values[kHandles];
};
struct Buckets {
  int64_t rows[kBuckets];
  int count;
};

struct Range {
  int64_t start, count;
};

// An expert's rows.  On the device nobody can be told of wrong offsets: they are cut.
__device__ __forceinline__ Range range_of(const int* ends, int64_t expert, int64_t rows) {
  const auto cut = [&](int64_t v) { return v < 0 ? 0 : v > rows ? rows : v; };
  const int64_t start = expert > 0 ? cut(ends[expert - 1]) : 0;
  const int64_t end = cut(ends[expert]);
  return {start, end > start ? end - start : 0};
}

__global__ void experts_kernel(const int* ends, int64_t rows, const Handles handles, int first,
                               int count, const Buckets buckets) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const int64_t n = range_of(ends, first + i, rows).count;
  unsigned value = buckets.count;
  if (buckets.count == 1) {
    value = n > 0;
  } else if (n > 0) {
    value = 0;
    while (value + 1 < buckets.count && buckets.rows[value] < n) ++value;
  }
  cudaGraphSetConditional(handles.values[i], value);
}

__global__ void groups_kernel(const int* ends, int64_t rows, int64_t experts, int groups,
                              const Handles handles, int first, int count) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  unsigned any = 0;
  for (int64_t e = first + i; e < experts; e += groups) {
    any |= range_of(ends, e, rows).count > 0;
  }
  cudaGraphSetConditional(handles.values[i], any);
}

__global__ void __launch_bounds__(kThreads) slot_kernel(const SlotCopy c) {
  const Range range = range_of(c.ends, c.expert, c.rows);
  const int64_t count = range.count < c.bucket ? range.count : c.bucket;
  const int64_t words = c.row_bytes / 16;
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < count * words;
       i += int64_t{gridDim.x} * kThreads) {
    const int64_t row = i / words, at = i % words * 16;
    auto* packed = reinterpret_cast<uint4*>(c.packed + (range.start + row) * c.packed_stride + at);
    auto* slot = reinterpret_cast<uint4*>(c.slot + row * c.slot_stride + at);
    if (c.to_slot) {
      *slot = *packed;
    } else {
      *packed = *slot;
    }
  }
}

__global__ void __launch_bounds__(kThreads) tiles_kernel(const TileCopy c) {
  const Range range = range_of(c.ends, c.expert, c.rows);
  const int64_t count = range.count < c.bucket ? range.count : c.bucket;
  const int64_t words = ceil_div(count, kTileRows) * c.line / 16;
  const auto* from =
      reinterpret_cast<const uint4*>(c.packed + first_tile(range.start, c.expert) * c.line);
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < words;
       i += int64_t{gridDim.x} * kThreads) {
    reinterpret_cast<uint4*>(c.slot)[i] = from[i];
  }
}

// Launched plainly: what a programmatic edge means among conditional nodes is not documented.
unsigned blocks_for(int64_t bytes) {
  return static_cast<unsigned>(std::clamp<int64_t>(ceil_div(bytes, kThreads * 64), 1, 64));
}

}  // namespace

void set_conditions(const Conditions& c, cudaStream_t stream) {
  Buckets buckets{};
  buckets.count = static_cast<int>(c.buckets.size());
  FP4LT_CHECK(buckets.count <= kBuckets, "graph: ", buckets.count, " buckets; at most ", kBuckets);
  std::copy(c.buckets.begin(), c.buckets.end(), buckets.rows);
  const auto each = [](const auto& handles, auto&& start) {
    for (size_t first = 0; first < handles.size(); first += kHandles) {
      Handles part{};
      const size_t count = std::min<size_t>(handles.size() - first, kHandles);
      std::copy_n(handles.begin() + first, count, part.values);
      start(part, static_cast<int>(first), static_cast<int>(count));
      FP4LT_CUDA_CHECK(cudaGetLastError());
    }
  };
  each(c.experts, [&](const Handles& part, int first, int count) {
    experts_kernel<<<1, kHandles, 0, stream>>>(c.ends, c.rows, part, first, count, buckets);
  });
  each(c.groups, [&](const Handles& part, int first, int count) {
    groups_kernel<<<1, kHandles, 0, stream>>>(
        c.ends, c.rows, static_cast<int64_t>(c.experts.size()), static_cast<int>(c.groups.size()),
        part, first, count);
  });
}

void copy_slot(const SlotCopy& c, cudaStream_t stream) {
  slot_kernel<<<blocks_for(c.bucket * c.row_bytes), kThreads, 0, stream>>>(c);
  FP4LT_CUDA_CHECK(cudaGetLastError());
}

void copy_tiles(const TileCopy& c, cudaStream_t stream) {
  tiles_kernel<<<blocks_for(ceil_div(c.bucket, kTileRows) * c.line), kThreads, 0, stream>>>(c);
  FP4LT_CUDA_CHECK(cudaGetLastError());
}

}  // namespace fp4lt::cuda
