// SPDX-License-Identifier: Apache-2.0
// Inside LoopedGemm: what enqueues products, for the loop and for the graph.
#pragma once

#include "core/scale_layout.h"
#include "cublaslt/looped.h"
#include "cuda/operand.h"

namespace fp4lt::cublaslt {

inline const char* at(const void* base, int64_t bytes) {
  return static_cast<const char*>(base) + bytes;
}
inline char* at(void* base, int64_t bytes) { return static_cast<char*>(base) + bytes; }

// Weight rows of every expert that one product takes.
struct LoopedGemm::Part {
  int64_t row0, rows, pad;
  MatmulDescription description;
  // By number of rows, for the sizes of one call.
  std::map<int64_t, Algorithm> algorithms;
};

// Enqueues products to one stream, with descriptors of its own.
class LoopedGemm::Worker {
 public:
  // The rows of one expert: activations, their scale tiles, sums.
  struct Place {
    const void* b;
    const void* b_scales;
    void* d;
  };

  // `plain`: kernels of ours are launched without programmatic serialization.
  Worker(const LoopedGemm& gemm, const LoopedCall& call, const std::vector<Part>& parts,
         Stream stream, void* workspace, bool plain)
      : gemm_(gemm),
        call_(call),
        parts_(parts),
        stream_(stream),
        workspace_(workspace),
        plain_(plain) {
    matmuls_.reserve(parts.size());
    for (const Part& part : parts) matmuls_.emplace_back(*gemm.library_, part.description);
  }

  void run(int64_t expert, int64_t rows, const Place& place) {
    for (size_t i = 0; i < parts_.size(); ++i)
      multiply(expert, rows, place, parts_[i], matmuls_[i]);
  }

 private:
  const void* weights(int64_t expert, const Part& part) const {
    const LoopedShape& s = gemm_.shape_;
    if (s.weights == Weights::kDense) {
      return at(call_.dense.data, expert * call_.dense.expert_stride * 2);
    }
    const uint8_t* codes = call_.nvfp4.codes + expert * call_.nvfp4.codes_expert_stride;
    if (s.weights == Weights::kCodes) return codes;
    void* expanded = at(workspace_, round_up(s.library_workspace, 256));
    cuda::expand(gemm_.device_,
                 {codes, call_.nvfp4.scales + expert * call_.nvfp4.scales_expert_stride, part.row0,
                  part.rows, part.pad, s.k, expanded, s.type, plain_},
                 stream_);
    return expanded;
  }

  void multiply(int64_t expert, int64_t rows, const Place& place, const Part& part,
                Matmul& matmul) {
    const Library& library = *gemm_.library_;
    const LoopedShape& s = gemm_.shape_;
    const Algorithm& algorithm = part.algorithms.at(rows);
    matmul.set_rows(rows);
    if (s.weights == Weights::kCodes) {
      matmul.set_scales(call_.nvfp4.scales + expert * call_.nvfp4.scales_expert_stride,
                        place.b_scales);
    }
    const void* a = weights(expert, part);
    void* d = at(place.d, part.row0 * size_of(s.out));
    const float* alpha =
        call_.alpha != nullptr ? call_.alpha + expert * call_.alpha_stride : gemm_.zero_one_ + 1;
    const int status = library->Matmul(gemm_.handle_, matmul.desc.get(), alpha, a, matmul.a.get(),
                                       place.b, matmul.b.get(), gemm_.zero_one_, d, matmul.d.get(),
                                       d, matmul.d.get(), &algorithm.algo, workspace_,
                                       static_cast<size_t>(s.library_workspace), stream_);
    if (status != abi::kSuccess) {
      library.check(status, "cublasLtMatmul",
                    to_string(matmul.description()) + "\nalgorithm " + to_string(algorithm) +
                        advice(matmul.description(), s.filters));
    }
  }

  const LoopedGemm& gemm_;
  const LoopedCall& call_;
  const std::vector<Part>& parts_;
  Stream stream_;
  void* workspace_;
  bool plain_;
  std::vector<Matmul> matmuls_;
};

}  // namespace fp4lt::cublaslt
