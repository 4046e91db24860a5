// SPDX-License-Identifier: Apache-2.0
// The loop in a build without CUDA: the same surface, which refuses.
#include "core/error.h"
#include "cublaslt/looped.h"

namespace fp4lt::cublaslt {
namespace {

[[noreturn]] void refuse() {
  throw UnsupportedError(
      "looped: this build of fp4lt has no CUDA code; reinstall it where nvcc is found");
}

}  // namespace

LoopedGemm::LoopedGemm(std::shared_ptr<const Library>, int, const LoopedShape&) { refuse(); }
int64_t LoopedGemm::stream_bytes() const { refuse(); }
void LoopedGemm::run(const LoopedCall&) { refuse(); }
void LoopedGemm::add_to_graph(const LoopedCall&, const int*, int64_t) { refuse(); }
int64_t LoopedGemm::graph_bytes(int64_t) const { refuse(); }
std::vector<Algorithm> LoopedGemm::candidates(const LoopedCall&, int64_t, int) { refuse(); }
void LoopedGemm::pin(int64_t, const abi::Algo&) { refuse(); }

}  // namespace fp4lt::cublaslt
