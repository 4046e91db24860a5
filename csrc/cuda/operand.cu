// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <map>
#include <mutex>

#include "cuda/fused/dequant.cuh"
#include "cuda/launch.h"
#include "cuda/operand.cuh"

namespace fp4lt::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kIntegers = 512;  // to a launch: 2 KB of its 4 KB of parameters

__device__ const float kZeroAndOne[2] = {0.0f, 1.0f};

struct Integers {
  int values[kIntegers];
};

__global__ void put_kernel(const Integers in, int count, int* out) {
  ptx::wait_for_previous_kernel();
  for (int i = threadIdx.x; i < count; i += blockDim.x) out[i] = in.values[i];
}

// The first expert whose end lies beyond the row.
__device__ __forceinline__ int expert_of(const int* ends, int experts, int64_t row) {
  int low = 0, high = experts - 1;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (ends[middle] > row) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

__global__ void __launch_bounds__(kThreads) locate_kernel(const LocateArgs a) {
  ptx::wait_for_previous_kernel();
  const int experts = static_cast<int>(a.experts);
  const int64_t row = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (row >= a.ends[experts - 1] || row >= a.rows) return;
  const int expert = expert_of(a.ends, experts, row);
  if (a.row_expert != nullptr) a.row_expert[row] = expert;
  if (a.scale_row != nullptr) {
    // Cut as well: offsets on the device may be wrong, and must not lead outside.
    const int64_t start = expert > 0 ? min(max(int64_t{a.ends[expert - 1]}, int64_t{0}), row) : 0;
    a.scale_row[row] = static_cast<int>(first_tile(start, expert) * kTileRows + (row - start));
  }
}

// A block of threads for each expert: the rest of its last tiles.
__global__ void __launch_bounds__(kThreads)
    clear_kernel(const int* ends, int64_t rows, int64_t blocks, uint8_t* scales) {
  ptx::wait_for_previous_kernel();
  const int64_t expert = blockIdx.x;
  const auto cut = [&](int64_t v) { return v < 0 ? 0 : v > rows ? rows : v; };
  const int64_t start = expert > 0 ? cut(ends[expert - 1]) : 0;
  const int64_t count = cut(ends[expert]) - start;
  const int used = static_cast<int>(count % kTileRows);
  if (count <= 0 || used == 0) return;
  const int64_t line = blocks * kTileRows / 4;  // words of one row of tiles
  auto* words =
      reinterpret_cast<uint32_t*>(scales) + (first_tile(start, expert) + count / kTileRows) * line;
  for (int64_t i = threadIdx.x; i < line; i += kThreads) {
    // A word holds four blocks of one row; scale_offset() says of which.
    const int in_tile = static_cast<int>(i % (kTileBytes / 4));
    if (in_tile / 4 + in_tile % 4 * 32 >= used) words[i] = 0;
  }
}

__device__ __forceinline__ void store(void* out, DType type, int64_t at, float v) {
  if (type == DType::kF32) {
    static_cast<float*>(out)[at] = v;
  } else if (type == DType::kF16) {
    static_cast<__half*>(out)[at] = __float2half_rn(v);
  } else {
    static_cast<__nv_bfloat16*>(out)[at] = __float2bfloat16_rn(v);
  }
}

__global__ void __launch_bounds__(kThreads) finish_kernel(const FinishArgs a) {
  ptx::wait_for_previous_kernel();
  const int64_t row = blockIdx.x;
  if (a.row_count != nullptr && row >= *a.row_count) return;
  const RowFactors r = factors_of(a.finish, row, a.row_expert[row]);
  const float* c = a.c + row * a.c_row_stride;
  for (int64_t n = blockIdx.y * int64_t{kThreads} + threadIdx.x; n < a.n;
       n += int64_t{gridDim.y} * kThreads) {
    const float y = finish(r, gate_class(a.finish.order, n, a.n), n, c[n]);
    store(a.out, a.out_type, row * a.out_row_stride + n, y);
  }
}

// Products of one block of 16, in order.  place() and scales() leave a power of two, which a last
// exact multiplication takes away.
template <typename T>
__device__ __forceinline__ void expand_block(uint2 codes, uint8_t scale, uint4 (&out)[2]) {
  constexpr bool kIsBf16 = std::is_same_v<T, __nv_bfloat16>;
  constexpr uint32_t kUndo = kIsBf16 ? 0x43804380u : 0x58005800u;  // 2^8, 2^7
  constexpr uint32_t kNan = kIsBf16 ? 0x7FC07FC0u : 0x7E007E00u;
  const uint32_t s = Dequant<T>::scales(scale | static_cast<uint32_t>(scale) << 16);
  for (int half = 0; half < 2; ++half) {
    const uint32_t word = half == 0 ? codes.x : codes.y;
    uint32_t pair[4];  // k and k + 4
    Dequant<T>::place(word, pair);
    for (int i = 0; i < 4; ++i) {
      pair[i] = ptx::multiply2(ptx::multiply2(pair[i], s, T{}), kUndo, T{});
      if (scale == kScaleNan) pair[i] = kNan;
    }
    out[half] =
        make_uint4(__byte_perm(pair[0], pair[1], 0x5410), __byte_perm(pair[2], pair[3], 0x5410),
                   __byte_perm(pair[0], pair[1], 0x7632), __byte_perm(pair[2], pair[3], 0x7632));
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads) expand_kernel(const ExpandArgs a) {
  ptx::wait_for_previous_kernel();
  const int blocks = static_cast<int>(a.k / kBlock);
  const int64_t padded = padded_blocks(blocks);
  const int64_t row = blockIdx.y;
  auto* out = reinterpret_cast<uint4*>(static_cast<uint16_t*>(a.out) + row * a.k);
  const auto* codes = reinterpret_cast<const uint2*>(a.codes + (a.row0 + row) * (a.k / 2));
  for (int b = blockIdx.x * kThreads + threadIdx.x; b < blocks; b += gridDim.x * kThreads) {
    uint4 values[2] = {};
    if (row < a.rows) {
      expand_block<T>(__ldcs(codes + b), a.scales[scale_offset(a.row0 + row, b, padded)], values);
    }
    out[2 * b] = values[0];
    out[2 * b + 1] = values[1];
  }
}

}  // namespace

const float* zero_and_one(int device) {
  static std::mutex mutex;
  static std::map<int, const float*> known;
  const std::lock_guard<std::mutex> lock(mutex);
  const float*& at = known[device];
  if (at == nullptr) {
    const DeviceGuard guard(device);
    void* address = nullptr;
    FP4LT_CUDA_CHECK(cudaGetSymbolAddress(&address, kZeroAndOne));
    at = static_cast<const float*>(address);
  }
  return at;
}

void put_integers(int device, const int64_t* values, int64_t count, int* out, Stream stream) {
  const DeviceGuard guard(device);
  for (int64_t first = 0; first < count; first += kIntegers) {
    Integers part;
    const int n = static_cast<int>(std::min<int64_t>(count - first, kIntegers));
    for (int i = 0; i < n; ++i) part.values[i] = static_cast<int>(values[first + i]);
    launch(device, put_kernel, dim3(1), dim3(128), 0, stream, part, n, out + first);
  }
}

void locate_rows(int device, const LocateArgs& a, Stream stream) {
  if (a.rows == 0) return;
  const DeviceGuard guard(device);
  launch(device, locate_kernel, dim3(static_cast<unsigned>(ceil_div(a.rows, kThreads))),
         dim3(kThreads), 0, stream, a);
}

void clear_tiles(int device, const int* ends, int64_t experts, int64_t rows, int64_t padded_blocks,
                 uint8_t* scales, Stream stream) {
  const DeviceGuard guard(device);
  launch(device, clear_kernel, dim3(static_cast<unsigned>(experts)), dim3(kThreads), 0, stream,
         ends, rows, padded_blocks, scales);
}

void finish_rows(int device, const FinishArgs& a, Stream stream) {
  if (a.rows == 0) return;
  FP4LT_CHECK(a.rows < (int64_t{1} << 31), a.rows, " rows; fewer than 2^31 are supported");
  const DeviceGuard guard(device);
  const int64_t parts = std::min<int64_t>(ceil_div(a.n, kThreads * 4), 64);
  launch(device, finish_kernel, dim3(static_cast<unsigned>(a.rows), static_cast<unsigned>(parts)),
         dim3(kThreads), 0, stream, a);
}

void expand(int device, const ExpandArgs& a, Stream stream) {
  const int64_t rows = a.rows + a.pad;
  FP4LT_CHECK(rows > 0 && rows <= 65535, "expand: ", rows, " rows; 1 to 65535 are supported");
  const int64_t blocks = a.k / kBlock;
  const dim3 grid(static_cast<unsigned>(ceil_div(blocks, kThreads)), static_cast<unsigned>(rows));
  const auto kernel =
      a.out_type == DType::kF16 ? expand_kernel<__half> : expand_kernel<__nv_bfloat16>;
  if (!a.plain) {
    launch(device, kernel, grid, dim3(kThreads), 0, stream, a);
    return;
  }
  kernel<<<grid, kThreads, 0, stream>>>(a);
  FP4LT_CUDA_CHECK(cudaGetLastError());
}

}  // namespace fp4lt::cuda
