// SPDX-License-Identifier: Apache-2.0
#include "core/scale_layout.h"
#include "cuda/activation.cuh"
#include "cuda/launch.h"
#include "cuda/moe.h"
#include "cuda/operand.cuh"

namespace fp4lt::cuda {
namespace {

constexpr int kThreads = 128;

__device__ __forceinline__ double sigmoid(double x) {
  if (x >= 0) return 1.0 / (1.0 + exp(-x));
  const double e = exp(x);
  return e / (1.0 + e);
}

__device__ __forceinline__ double act(Activation kind, double x, double alpha) {
  switch (kind) {
    case Activation::kSwish:
      return x * sigmoid(alpha * x);
    case Activation::kGelu:
      return 0.5 * x * erfc(-x * 0.70710678118654752440);
    case Activation::kGeluTanh:
      return x * sigmoid(1.59576912160573071176 * (x + 0.044715 * x * x * x));
    case Activation::kRelu2:
      return x > 0 ? x * x : (x == x ? 0.0 : x);
  }
  return 0.0;
}

struct Parameters {
  float alpha, beta, limit;
  bool limited, plain;  // plain: silu without further parameters, all in fp32
};

__device__ __forceinline__ float element(const ActivationArgs& a, const Parameters& p, float gate,
                                         float up) {
  if (p.limited) limit_gate_and_up(p.limit, gate, up);
  if (p.plain) {
    const float s = silu(gate);
    return a.order == GateOrder::kNone ? s : __fmul_rn(s, up);
  }
  double v = act(a.kind, gate, p.alpha);
  if (a.order != GateOrder::kNone) v *= static_cast<double>(up) + p.beta;
  return static_cast<float>(v);
}

// u of the block's 16 elements from `first` on.
__device__ __forceinline__ void block_of(const ActivationArgs& a, const Parameters& p,
                                         const RowFactors& r, const float* h, int64_t first,
                                         float (&u)[16]) {
  const int64_t width = a.order == GateOrder::kNone ? a.n : a.n / 2;
  const auto value = [&](int kind, int64_t n) { return finish(r, kind, n, h[n]); };
  for (int i = 0; i < 16; ++i) {
    const int64_t at = first + i;
    float gate, up = 0.0f;
    switch (a.order) {
      case GateOrder::kGateUp:
        gate = value(0, at);
        up = value(1, width + at);
        break;
      case GateOrder::kUpGate:
        gate = value(0, width + at);
        up = value(1, at);
        break;
      case GateOrder::kInterleaved:
        gate = value(0, 2 * at);
        up = value(1, 2 * at + 1);
        break;
      default:
        gate = value(0, at);
    }
    u[i] = element(a, p, gate, up);
  }
}

__global__ void __launch_bounds__(kThreads) activate_kernel(const ActivationArgs a) {
  __shared__ float scratch[33];
  ptx::wait_for_previous_kernel();
  ptx::allow_next_kernel();
  const int row = blockIdx.x;
  if (row >= *a.row_count) return;
  const int64_t width = a.order == GateOrder::kNone ? a.n : a.n / 2;
  const int64_t blocks = width / kBlock;
  const int expert = a.row_expert[row];
  const RowFactors r = factors_of(a.finish, row, expert);
  Parameters p;
  p.alpha = parameter_of(a.alpha, expert);
  p.beta = parameter_of(a.beta, expert);
  p.limited = a.limited;
  p.limit = parameter_of(a.limit, expert);
  p.plain = a.kind == Activation::kSwish && p.alpha == 1.0f && p.beta == 0.0f;
  const float* h = a.h + row * a.h_row_stride;
  float u[16];

  if (a.form == ActivationForm::kFloat) {
    auto* out = static_cast<float*>(a.out.values) + row * width;
    for (int64_t b = threadIdx.x; b < blocks; b += kThreads) {
      block_of(a, p, r, h, b * kBlock, u);
      for (int i = 0; i < 16; ++i) out[b * kBlock + i] = u[i];
    }
    return;
  }
  float g = 1.0f;
  if (a.form == ActivationForm::kRounded) {
    if (a.given != nullptr) {
      g = a.given[expert * a.given_stride];
    } else {
      float best = 0.0f;
      for (int64_t b = threadIdx.x; b < blocks; b += kThreads) {
        block_of(a, p, r, h, b * kBlock, u);
        best = fmaxf(best, finite_amax(u));
      }
      g = derive_global(block_max(best, scratch));
    }
    if (threadIdx.x == 0) a.global_out[row] = g;
  }
  for (int64_t b = threadIdx.x; b < blocks_of(a.out); b += kThreads) {
    if (b >= blocks) {
      store_padding(a.out, row, b);
      continue;
    }
    block_of(a, p, r, h, b * kBlock, u);
    if (a.form == ActivationForm::kRounded) {
      unsigned code[16];
      const uint8_t scale = quantize_block(u, g, code);
      store_nvfp4(a.out, row, b, code, scale);
    } else {
      uint16_t half[16];
      for (int i = 0; i < 16; ++i) {
        half[i] = a.type == DType::kF16 ? __half_as_ushort(__float2half_rn(u[i]))
                                        : __bfloat16_as_ushort(__float2bfloat16_rn(u[i]));
      }
      store_halves(a.out, row, b, half);
    }
  }
}

template <typename T>
__device__ __forceinline__ T narrow(float v);
template <>
__device__ __forceinline__ float narrow<float>(float v) {
  return v;
}
template <>
__device__ __forceinline__ __half narrow<__half>(float v) {
  return __float2half_rn(v);
}
template <>
__device__ __forceinline__ __nv_bfloat16 narrow<__nv_bfloat16>(float v) {
  return __float2bfloat16_rn(v);
}

template <typename T>
__global__ void __launch_bounds__(kThreads) combine_kernel(const CombineArgs a) {
  ptx::wait_for_previous_kernel();
  ptx::allow_next_kernel();
  const int64_t token = blockIdx.x;
  const int* rows = a.slot_row + token * a.top_k;
  // H is a multiple of 16, so rows of z lie at 16 bytes.
  for (int64_t i = (blockIdx.y * int64_t{kThreads} + threadIdx.x) * 4; i < a.hidden;
       i += int64_t{gridDim.y} * kThreads * 4) {
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    for (int64_t j = 0; j < a.top_k; ++j) {
      const int row = rows[j];
      if (row < 0) continue;
      const float w = a.weights != nullptr ? a.weights[token * a.top_k + j] : 1.0f;
      float4 z = *reinterpret_cast<const float4*>(a.z + row * a.hidden + i);
      if (a.row_expert != nullptr) {
        const RowFactors r = factors_of(a.finish, row, a.row_expert[row]);
        z = make_float4(finish(r, 0, i, z.x), finish(r, 0, i + 1, z.y), finish(r, 0, i + 2, z.z),
                        finish(r, 0, i + 3, z.w));
      }
      sum.x = __fadd_rn(sum.x, __fmul_rn(w, z.x));
      sum.y = __fadd_rn(sum.y, __fmul_rn(w, z.y));
      sum.z = __fadd_rn(sum.z, __fmul_rn(w, z.z));
      sum.w = __fadd_rn(sum.w, __fmul_rn(w, z.w));
    }
    T* out = static_cast<T*>(a.out) + token * a.out_row_stride + i;
    out[0] = narrow<T>(sum.x);
    out[1] = narrow<T>(sum.y);
    out[2] = narrow<T>(sum.z);
    out[3] = narrow<T>(sum.w);
  }
}

template <typename T>
__global__ void scale_rows_kernel(const DenseView x, const float* weights, int64_t n, T* out) {
  ptx::wait_for_previous_kernel();
  const int64_t row = blockIdx.x;
  const T* from = static_cast<const T*>(x.data) + row * x.row_stride;
  for (int64_t i = threadIdx.x; i < n; i += blockDim.x) {
    out[row * n + i] = narrow<T>(__fmul_rn(weights[row], static_cast<float>(from[i])));
  }
}

dim3 token_grid(int64_t tokens, int64_t parts) {
  FP4LT_CHECK(tokens < (int64_t{1} << 31), "fused: ", tokens, " rows; fewer than 2^31 are needed");
  return dim3(static_cast<unsigned>(tokens), static_cast<unsigned>(parts));
}

}  // namespace

void activate(int device, const ActivationArgs& a, Stream stream) {
  if (a.rows == 0) return;
  const DeviceGuard guard(device);
  launch(device, activate_kernel, token_grid(a.rows, 1), dim3(kThreads), 0, stream, a);
}

void combine(int device, const CombineArgs& a, Stream stream) {
  if (a.tokens == 0) return;
  const DeviceGuard guard(device);
  // Few tokens are spread over more blocks of threads.
  const int64_t parts = a.tokens < 512 ? ceil_div(a.hidden, kThreads * 4) : 1;
  const auto kernel = a.out_type == DType::kF32   ? combine_kernel<float>
                      : a.out_type == DType::kF16 ? combine_kernel<__half>
                                                  : combine_kernel<__nv_bfloat16>;
  launch(device, kernel, token_grid(a.tokens, parts), dim3(kThreads), 0, stream, a);
}

void scale_rows(int device, const DenseView& x, const float* weights, int64_t rows, int64_t n,
                void* out, Stream stream) {
  if (rows == 0) return;
  const DeviceGuard guard(device);
  const auto start = [&](auto kernel, auto* to) {
    launch(device, kernel, token_grid(rows, 1), dim3(256), 0, stream, x, weights, n, to);
  };
  switch (x.type) {
    case DType::kF32:
      return start(scale_rows_kernel<float>, static_cast<float*>(out));
    case DType::kF16:
      return start(scale_rows_kernel<__half>, static_cast<__half*>(out));
    case DType::kBF16:
      return start(scale_rows_kernel<__nv_bfloat16>, static_cast<__nv_bfloat16*>(out));
  }
}

}  // namespace fp4lt::cuda
