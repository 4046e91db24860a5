// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "core/scale_layout.h"
#include "cuda/launch.h"
#include "cuda/operand.cuh"
#include "cuda/quantize.h"

namespace fp4lt::cuda {
namespace {

constexpr int kThreads = 128;

__device__ __forceinline__ int64_t offset_of(const DenseView& x, int64_t expert, int64_t row) {
  return expert * x.expert_stride + row * x.row_stride;
}

// Each expert's largest finite magnitude as bits, which order as the numbers do.
__global__ void amax_kernel(const QuantizeArgs a) {
  __shared__ float scratch[33];
  ptx::wait_for_previous_kernel();
  const int64_t blocks = a.k / kBlock, expert = blockIdx.y;
  float best = 0.0f;
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < a.rows * blocks;
       i += int64_t{gridDim.x} * blockDim.x) {
    float v[16];
    load_block(a.x.data, a.x.type, offset_of(a.x, expert, i / blocks) + i % blocks * kBlock, v);
    best = fmaxf(best, finite_amax(v));
  }
  best = block_max(best, scratch);
  if (threadIdx.x == 0) {
    atomicMax(reinterpret_cast<unsigned*>(a.global + expert * a.global_expert_stride),
              float_bits(best));
  }
}

__global__ void derive_kernel(float* global, int64_t experts, int64_t stride) {
  ptx::wait_for_previous_kernel();
  const int64_t e = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (e < experts) global[e * stride] = derive_global(global[e * stride]);
}

__global__ void __launch_bounds__(kThreads) quantize_kernel(const QuantizeArgs a) {
  __shared__ float scratch[33];
  ptx::wait_for_previous_kernel();
  const int64_t blocks = a.k / kBlock, padded = padded_blocks(blocks);
  const int64_t expert = blockIdx.y, row = blockIdx.x;
  const int64_t from = offset_of(a.x, expert, row);
  float* g_at = a.global + expert * a.global_expert_stride + row * a.global_row_stride;
  float v[16];
  float g;
  if (a.mode == GlobalScale::kPerRow) {
    float best = 0.0f;
    for (int64_t b = threadIdx.x; b < blocks; b += kThreads) {
      load_block(a.x.data, a.x.type, from + b * kBlock, v);
      best = fmaxf(best, finite_amax(v));
    }
    g = derive_global(block_max(best, scratch));
    if (threadIdx.x == 0) *g_at = g;
  } else {
    g = *g_at;
  }
  uint8_t* scales = a.scales + expert * scale_bytes(a.rows, blocks);
  auto* codes = reinterpret_cast<uint64_t*>(a.codes + (expert * a.rows + row) * (a.k / 2));
  for (int64_t b = threadIdx.x; b < blocks; b += kThreads) {
    unsigned code[16];
    load_block(a.x.data, a.x.type, from + b * kBlock, v);
    scales[scale_offset(row, b, padded)] = quantize_block(v, g, code);
    codes[b] = pack_codes(code);
  }
}

__global__ void __launch_bounds__(kThreads) dequantize_kernel(const DequantizeArgs a) {
  ptx::wait_for_previous_kernel();
  const int64_t blocks = a.k / kBlock, padded = padded_blocks(blocks);
  const int64_t expert = blockIdx.y, row = blockIdx.x;
  const float g = a.x.global[expert * a.global_expert_stride + row * a.global_row_stride];
  const uint8_t* scales = a.x.scales + expert * a.x.scales_expert_stride;
  const uint8_t* codes = a.x.codes + expert * a.x.codes_expert_stride + row * (a.k / 2);
  const int64_t to = (expert * a.rows + row) * a.k;
  for (int64_t i = threadIdx.x; i < a.k; i += kThreads) {
    const float step = decode_e4m3(scales[scale_offset(row, i / kBlock, padded)]) * g;
    const float v = decode_e2m1(codes[i / 2] >> (i % 2 * 4) & 15u) * step;
    if (a.out_type == DType::kF32) {
      static_cast<float*>(a.out)[to + i] = v;
    } else if (a.out_type == DType::kF16) {
      static_cast<__half*>(a.out)[to + i] = __float2half_rn(v);
    } else {
      static_cast<__nv_bfloat16*>(a.out)[to + i] = __float2bfloat16_rn(v);
    }
  }
}

__global__ void retile_kernel(const uint8_t* from, uint8_t* to, int64_t rows, int64_t blocks,
                              bool to_tiles) {
  ptx::wait_for_previous_kernel();
  const int64_t padded = padded_blocks(blocks), expert = blockIdx.y;
  const int64_t linear = expert * rows * blocks, tiled = expert * scale_bytes(rows, blocks);
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < rows * blocks;
       i += int64_t{gridDim.x} * blockDim.x) {
    const int64_t at = tiled + scale_offset(i / blocks, i % blocks, padded);
    if (to_tiles) {
      to[at] = from[linear + i];
    } else {
      to[linear + i] = from[at];
    }
  }
}

// A launch's view of PrepareArgs: device code has no std::variant.
struct PrepareKernelArgs {
  Nvfp4View nvfp4;
  DenseView dense;
  int64_t k;
  const int *source, *count, *scale_index;
  const float* given;
  int64_t given_stride;
  float* global_out;
  OperandRows out;
  const int *starts, *places;
  int64_t experts;
};

// Where sorted row `row` goes in an image; asked by all threads of a block.
__device__ int place_of_sorted(const PrepareKernelArgs& a, int row, int* found) {
  for (int e = threadIdx.x; e < a.experts; e += kThreads) {
    if (a.starts[e] <= row && row < a.starts[e + 1]) *found = a.places[e] + row - a.starts[e];
  }
  __syncthreads();
  return *found;
}

enum class Source { kCopy, kRound, kNvfp4 };

template <Source S>
__global__ void __launch_bounds__(kThreads) prepare_kernel(const PrepareKernelArgs a) {
  __shared__ float scratch[33];
  __shared__ int found;
  ptx::wait_for_previous_kernel();
  ptx::allow_next_kernel();
  const int row = blockIdx.x;
  if (a.count != nullptr && row >= *a.count) return;
  const int64_t from = a.source != nullptr ? a.source[row] : row;
  const int64_t blocks = a.k / kBlock, all = blocks_of(a.out);
  const bool image = a.out.form == RowForm::kImage;
  int place = 0;
  if (image) {
    place = a.out.place != nullptr ? a.out.place[row] : place_of_sorted(a, row, &found);
  }
  float v[16];
  float g = 1.0f;
  if constexpr (S == Source::kRound) {
    if (a.given != nullptr) {
      g = a.given[(a.scale_index != nullptr ? a.scale_index[row] : 0) * a.given_stride];
    } else {
      float best = 0.0f;
      for (int64_t b = threadIdx.x; b < blocks; b += kThreads) {
        load_block(a.dense.data, a.dense.type, from * a.dense.row_stride + b * kBlock, v);
        best = fmaxf(best, finite_amax(v));
      }
      g = derive_global(block_max(best, scratch));
    }
    if (threadIdx.x == 0) a.global_out[row] = g;
  }
  for (int64_t b = threadIdx.x; b < all; b += kThreads) {
    if (b >= blocks) {
      store_padding(a.out, row, b);
      continue;
    }
    if constexpr (S == Source::kCopy) {
      const auto* x = static_cast<const uint16_t*>(a.dense.data) + from * a.dense.row_stride;
      uint16_t h[16];
      for (int i = 0; i < 16; ++i) h[i] = x[b * kBlock + i];
      if (image) {
        store_image(a.out.values, place, a.out.width, b, h);
      } else {
        store_halves(a.out, row, b, h);
      }
    } else {
      unsigned code[16];
      uint8_t scale;
      if constexpr (S == Source::kRound) {
        load_block(a.dense.data, a.dense.type, from * a.dense.row_stride + b * kBlock, v);
        scale = quantize_block(v, g, code);
      } else {
        scale = a.nvfp4.scales[scale_offset(from, b, padded_blocks(blocks))];
        const uint8_t* codes = a.nvfp4.codes + from * (a.k / 2) + b * (kBlock / 2);
        for (int i = 0; i < 16; ++i) code[i] = codes[i / 2] >> (i % 2 * 4) & 15u;
      }
      if (image) {
        uint16_t h[16];
        block_products(code, scale, h);
        store_image(a.out.values, place, a.out.width, b, h);
      } else {
        store_nvfp4(a.out, row, b, code, scale);
      }
    }
  }
}

dim3 row_grid(int64_t rows, int64_t experts) {
  FP4LT_CHECK(experts <= 65535, "fused: ", experts, " experts; at most 65535 are supported");
  FP4LT_CHECK(rows < (int64_t{1} << 31), "fused: ", rows, " rows; fewer than 2^31 are supported");
  return dim3(static_cast<unsigned>(rows), static_cast<unsigned>(experts));
}

void clear_padding(uint8_t* tiled, int64_t experts, int64_t rows, int64_t blocks, Stream stream) {
  const int64_t bytes = scale_bytes(rows, blocks);
  if (bytes == rows * blocks) return;
  FP4LT_CUDA_CHECK(cudaMemsetAsync(tiled, 0, static_cast<size_t>(experts * bytes), stream));
}

void retile(int device, const uint8_t* from, uint8_t* to, int64_t experts, int64_t rows,
            int64_t blocks, bool to_tiles, Stream stream) {
  const int64_t wanted = ceil_div(rows * blocks, 256);
  launch(device, retile_kernel, row_grid(std::min<int64_t>(wanted, 1024), experts), dim3(256), 0,
         stream, from, to, rows, blocks, to_tiles);
}

}  // namespace

void quantize(int device, const QuantizeArgs& a, Stream stream) {
  const DeviceGuard guard(device);
  FP4LT_CHECK(reinterpret_cast<uintptr_t>(a.codes) % 8 == 0, "quantize: codes must lie at 8 bytes");
  const int64_t blocks = a.k / kBlock;
  clear_padding(a.scales, a.experts, a.rows, blocks, stream);
  if (a.mode == GlobalScale::kPerExpert) {
    FP4LT_CUDA_CHECK(
        cudaMemsetAsync(a.global, 0, static_cast<size_t>(a.experts) * sizeof(float), stream));
    const int64_t wanted = ceil_div(a.rows * blocks, 1024);
    launch(device, amax_kernel, row_grid(std::min<int64_t>(wanted, 512), a.experts), dim3(256), 0,
           stream, a);
    launch(device, derive_kernel, dim3(static_cast<unsigned>(ceil_div(a.experts, 256))), dim3(256),
           0, stream, a.global, a.experts, a.global_expert_stride);
  }
  launch(device, quantize_kernel, row_grid(a.rows, a.experts), dim3(kThreads), 0, stream, a);
}

void dequantize(int device, const DequantizeArgs& a, Stream stream) {
  const DeviceGuard guard(device);
  launch(device, dequantize_kernel, row_grid(a.rows, a.experts), dim3(kThreads), 0, stream, a);
}

void tile_scales(int device, const uint8_t* linear, int64_t experts, int64_t rows, int64_t blocks,
                 uint8_t* tiled, Stream stream) {
  const DeviceGuard guard(device);
  clear_padding(tiled, experts, rows, blocks, stream);
  retile(device, linear, tiled, experts, rows, blocks, true, stream);
}

void untile_scales(int device, const uint8_t* tiled, int64_t experts, int64_t rows, int64_t blocks,
                   uint8_t* linear, Stream stream) {
  const DeviceGuard guard(device);
  retile(device, tiled, linear, experts, rows, blocks, false, stream);
}

void prepare(int device, const PrepareArgs& p, Stream stream) {
  if (p.rows == 0) return;
  const DeviceGuard guard(device);
  PrepareKernelArgs a{};
  a.k = p.k;
  a.source = p.source;
  a.count = p.count;
  a.scale_index = p.scale_index;
  a.given = p.given;
  a.given_stride = p.given_stride;
  a.global_out = p.global_out;
  a.out = p.out;
  a.starts = p.starts;
  a.places = p.places;
  a.experts = p.experts;
  auto kernel = prepare_kernel<Source::kNvfp4>;
  if (const auto* dense = std::get_if<DenseView>(&p.x)) {
    a.dense = *dense;
    FP4LT_CHECK(p.quantize || (dense->type != DType::kF32 && p.out.form != RowForm::kCodes),
                "prepare: fp32, and codes, need rounding");
    kernel = p.quantize ? prepare_kernel<Source::kRound> : prepare_kernel<Source::kCopy>;
  } else {
    a.nvfp4 = std::get<Nvfp4View>(p.x);
  }
  launch(device, kernel, row_grid(p.rows, 1), dim3(kThreads), 0, stream, a);
}

}  // namespace fp4lt::cuda
