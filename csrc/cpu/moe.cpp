// SPDX-License-Identifier: Apache-2.0
#include "cpu/moe.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "cpu/simd.h"
#include "cpu/thread_pool.h"

namespace fp4lt {

int64_t route(const int64_t* ids, int64_t tokens, int64_t top_k, int64_t expert_start,
              int64_t experts, int64_t* ends, int64_t* row_token, int64_t* row_expert,
              int64_t* slot_row) {
  const int64_t slots = tokens * top_k;
  const auto local = [&](int64_t slot) {
    const int64_t id = ids[slot];
    return id >= expert_start && id - expert_start < experts ? id - expert_start : -1;
  };
  std::vector<int64_t> next(static_cast<size_t>(experts), 0);
  for (int64_t i = 0; i < slots; ++i) {
    if (local(i) >= 0) ++next[static_cast<size_t>(local(i))];
  }
  int64_t total = 0;
  for (int64_t e = 0; e < experts; ++e) {
    const int64_t count = next[static_cast<size_t>(e)];
    next[static_cast<size_t>(e)] = total;
    ends[e] = total += count;
  }
  for (int64_t i = 0; i < slots; ++i) {
    const int64_t e = local(i);
    slot_row[i] = e < 0 ? -1 : next[static_cast<size_t>(e)]++;
    if (e < 0) continue;
    row_token[slot_row[i]] = i / top_k;
    row_expert[slot_row[i]] = e;
  }
  return total;
}

namespace {

// Through exp of a negative number: nothing overflows, and small results keep their precision.
double sigmoid(double x) {
  if (x >= 0) return 1.0 / (1.0 + std::exp(-x));
  const double e = std::exp(x);
  return e / (1.0 + e);
}

double apply(Activation kind, double x, double alpha) {
  switch (kind) {
    case Activation::kSwish:
      return x * sigmoid(alpha * x);
    case Activation::kGelu:
      return 0.5 * x * std::erfc(-x * 0.70710678118654752440);
    case Activation::kGeluTanh: {
      // 0.5 * (1 + tanh(y)) = sigmoid(2 y), which does not cancel.
      constexpr double kSqrt8OverPi = 1.59576912160573071176;
      return x * sigmoid(kSqrt8OverPi * (x + 0.044715 * x * x * x));
    }
    case Activation::kRelu2:
      return x > 0 ? x * x : (std::isnan(x) ? x : 0.0);
  }
  return 0.0;
}

}  // namespace

void activate(const ActivationArgs& a, int threads) {
  const bool gated = a.order != GateOrder::kNone;
  const int64_t width = gated ? a.n / 2 : a.n;
  // Where gate and up of element i lie: at i * step + start.
  const int64_t step = a.order == GateOrder::kInterleaved ? 2 : 1;
  const int64_t half = a.order == GateOrder::kInterleaved ? 1 : width;
  const int64_t gate0 = a.order == GateOrder::kUpGate ? half : 0;
  const int64_t up0 = a.order == GateOrder::kUpGate ? 0 : half;
  parallel_for(a.rows, threads, [&](int64_t row) {
    std::vector<float> u(static_cast<size_t>(width));
    const float* h = a.h + row * a.n;
    const int64_t e = a.row_expert[row];
    const double alpha = parameter_of(a.alpha, e), beta = parameter_of(a.beta, e);
    const double limit = parameter_of(a.limit, e);
    for (int64_t i = 0; i < width; ++i) {
      double gate = h[i * step + gate0];
      // Written so that a NaN passes through.
      if (a.limited && gate > limit) gate = limit;
      double value = apply(a.kind, gate, alpha);
      if (gated) {
        double up = h[i * step + up0];
        if (a.limited && up > limit) up = limit;
        if (a.limited && up < -limit) up = -limit;
        value *= up + beta;
      }
      u[static_cast<size_t>(i)] = static_cast<float>(value);
    }
    kernels().narrow(u.data(), width, a.out_type,
                     static_cast<char*>(a.out) + row * width * size_of(a.out_type));
  });
}

void combine(const CombineArgs& a, int threads) {
  parallel_for(a.tokens, threads, [&](int64_t t) {
    std::vector<float> sum(static_cast<size_t>(a.hidden), 0.0f);
    for (int64_t j = 0; j < a.top_k; ++j) {
      const int64_t row = a.slot_row[t * a.top_k + j];
      if (row < 0) continue;
      const float w = a.weights != nullptr ? a.weights[t * a.top_k + j] : 1.0f;
      const float* z = a.z + row * a.hidden;
      for (int64_t i = 0; i < a.hidden; ++i) sum[static_cast<size_t>(i)] += w * z[i];
    }
    kernels().narrow(sum.data(), a.hidden, a.out_type,
                     static_cast<char*>(a.out) + t * a.out_row_stride * size_of(a.out_type));
  });
}

void scale_rows(const DenseView& x, const float* weights, int64_t rows, int64_t n, void* out,
                int threads) {
  parallel_for(rows, threads, [&](int64_t row) {
    std::vector<float> wide(static_cast<size_t>(n));
    const int64_t bytes = size_of(x.type);
    kernels().widen(static_cast<const char*>(x.data) + row * x.row_stride * bytes, x.type, n,
                    wide.data());
    for (float& v : wide) v *= weights[row];
    kernels().narrow(wide.data(), n, x.type, static_cast<char*>(out) + row * n * bytes);
  });
}

}  // namespace fp4lt
