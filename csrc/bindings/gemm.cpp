// SPDX-License-Identifier: Apache-2.0
#include "cpu/gemm.h"

#include <pybind11/stl.h>

#include "bindings/bind.h"
#include "cpu/simd.h"

namespace fp4lt::bindings {

void bind_gemm(py::module_& m) {
  m.attr("CHAIN_BLOCKS") = kChunkBlocks;

  m.def(
      "grouped_gemm",
      [](int64_t experts, int64_t n, int64_t k, uintptr_t ends,
         const std::variant<Nvfp4View, DenseView>& a, uintptr_t row_index,
         const std::variant<Nvfp4View, DenseView>& b, uintptr_t alpha, int64_t alpha_expert_stride,
         GateOrder order, uintptr_t bias, int64_t bias_expert_stride, uintptr_t out, DType out_type,
         int64_t out_row_stride, int threads) {
        grouped_gemm(
            {experts, n, k, pointer<const int64_t>(ends), a, pointer<const int64_t>(row_index), b,
             pointer<const float>(alpha), alpha_expert_stride, order, pointer<const float>(bias),
             bias_expert_stride, pointer<void>(out), out_type, out_row_stride},
            threads);
      },
      py::kw_only(), py::arg("experts"), py::arg("n"), py::arg("k"), py::arg("ends"), py::arg("a"),
      py::arg("row_index"), py::arg("b"), py::arg("alpha"), py::arg("alpha_expert_stride"),
      py::arg("order"), py::arg("bias"), py::arg("bias_expert_stride"), py::arg("out"),
      py::arg("out_type"), py::arg("out_row_stride"), py::arg("threads"), ReleaseGil(),
      "Grouped GEMM on the CPU; addresses of 0 stand for arguments left out.");
}

}  // namespace fp4lt::bindings
