// SPDX-License-Identifier: Apache-2.0
#include "cpu/moe.h"

#include <pybind11/stl.h>

#include <optional>

#include "bindings/bind.h"

namespace fp4lt::bindings {

void bind_moe(py::module_& m) {
  py::native_enum<Activation>(m, "Activation", "enum.IntEnum")
      .value("SWISH", Activation::kSwish)
      .value("GELU", Activation::kGelu)
      .value("GELU_TANH", Activation::kGeluTanh)
      .value("RELU2", Activation::kRelu2)
      .finalize();

  m.def(
      "route",
      [](uintptr_t ids, int64_t tokens, int64_t top_k, int64_t expert_start, int64_t experts,
         uintptr_t ends, uintptr_t row_token, uintptr_t row_expert, uintptr_t slot_row) {
        return route(pointer<const int64_t>(ids), tokens, top_k, expert_start, experts,
                     pointer<int64_t>(ends), pointer<int64_t>(row_token),
                     pointer<int64_t>(row_expert), pointer<int64_t>(slot_row));
      },
      py::kw_only(), py::arg("ids"), py::arg("tokens"), py::arg("top_k"), py::arg("expert_start"),
      py::arg("experts"), py::arg("ends"), py::arg("row_token"), py::arg("row_expert"),
      py::arg("slot_row"), ReleaseGil(), "Sort the slots by local expert; returns the rows.");

  m.def(
      "activate",
      [](uintptr_t h, int64_t rows, int64_t n, GateOrder order, Activation kind,
         uintptr_t row_expert, const ExpertParameter& alpha, const ExpertParameter& beta,
         const std::optional<ExpertParameter>& limit, uintptr_t out, DType out_type, int threads) {
        activate({pointer<const float>(h), rows, n, order, kind, pointer<const int64_t>(row_expert),
                  alpha, beta, limit.value_or(ExpertParameter{}), limit.has_value(),
                  pointer<void>(out), out_type},
                 threads);
      },
      py::kw_only(), py::arg("h"), py::arg("rows"), py::arg("n"), py::arg("order"), py::arg("kind"),
      py::arg("row_expert"), py::arg("alpha"), py::arg("beta"), py::arg("limit"), py::arg("out"),
      py::arg("out_type"), py::arg("threads"), ReleaseGil(),
      "Gate and up to the second GEMM's input.");

  m.def(
      "combine",
      [](uintptr_t z, uintptr_t slot_row, uintptr_t weights, int64_t tokens, int64_t top_k,
         int64_t hidden, uintptr_t out, DType out_type, int64_t out_row_stride, int threads) {
        combine({pointer<const float>(z), pointer<const int64_t>(slot_row),
                 pointer<const float>(weights), tokens, top_k, hidden, pointer<void>(out), out_type,
                 out_row_stride},
                threads);
      },
      py::kw_only(), py::arg("z"), py::arg("slot_row"), py::arg("weights"), py::arg("tokens"),
      py::arg("top_k"), py::arg("hidden"), py::arg("out"), py::arg("out_type"),
      py::arg("out_row_stride"), py::arg("threads"), ReleaseGil(),
      "Weighted sum of each token's rows, in slot order.");

  m.def(
      "scale_rows",
      [](const DenseView& x, uintptr_t weights, int64_t rows, int64_t n, uintptr_t out,
         int threads) {
        scale_rows(x, pointer<const float>(weights), rows, n, pointer<void>(out), threads);
      },
      py::kw_only(), py::arg("x"), py::arg("weights"), py::arg("rows"), py::arg("n"),
      py::arg("out"), py::arg("threads"), ReleaseGil(),
      "Rows times the router weight, rounded to their own type.");
}

}  // namespace fp4lt::bindings
