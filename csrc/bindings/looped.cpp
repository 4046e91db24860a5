// SPDX-License-Identifier: Apache-2.0
// The grouped GEMM as a loop of cublasLtMatmul.
#include "cublaslt/looped.h"

#include <pybind11/stl.h>

#include "bindings/bind.h"
#include "cublaslt/streams.h"

namespace fp4lt::bindings {
namespace {

using cublaslt::Algorithm;
using cublaslt::Filters;
using cublaslt::Library;
using cublaslt::LoopedCall;
using cublaslt::LoopedGemm;
using cublaslt::Weights;

LoopedCall make_call(const std::variant<Nvfp4View, DenseView>& weights, uintptr_t rows,
                     int64_t row_stride, uintptr_t row_scales, uintptr_t alpha,
                     int64_t alpha_stride, uintptr_t out, int64_t out_row_stride) {
  LoopedCall call{};
  if (const auto* dense = std::get_if<DenseView>(&weights)) {
    call.dense = *dense;
  } else {
    call.nvfp4 = std::get<Nvfp4View>(weights);
  }
  call.rows = pointer<const void>(rows);
  call.row_stride = row_stride;
  call.row_scales = pointer<const uint8_t>(row_scales);
  call.alpha = pointer<const float>(alpha);
  call.alpha_stride = alpha_stride;
  call.out = pointer<void>(out);
  call.out_row_stride = out_row_stride;
  return call;
}

}  // namespace

void bind_looped(py::module_& m) {
  py::native_enum<Weights>(m, "LoopedWeights", "enum.IntEnum")
      .value("DENSE", Weights::kDense)
      .value("EXPANDED", Weights::kExpanded)
      .value("CODES", Weights::kCodes)
      .finalize();
  m.attr("MAX_STREAMS") = cublaslt::kMaxStreams;
  py::class_<Algorithm>(m, "LoopedAlgorithm", "An algorithm that the library proposes.")
      .def_property_readonly(
          "data", [](const Algorithm& a) { return py::bytes(cublaslt::to_bytes(a.algo)); },
          "64 bytes, good for the same version of the library.")
      .def_readonly("workspace_bytes", &Algorithm::workspace_bytes)
      .def_readonly("id", &Algorithm::id)
      .def_readonly("splits", &Algorithm::splits)
      .def_readonly("tile", &Algorithm::tile)
      .def_readonly("stages", &Algorithm::stages)
      .def("__str__", [](const Algorithm& a) { return to_string(a); });
  py::class_<LoopedGemm>(m, "LoopedGemm", "One shape on one device; see csrc/cublaslt/looped.h.")
      .def(py::init([](std::shared_ptr<Library> library, int device, int64_t n, int64_t k,
                       Weights weights, DType type, DType out, int64_t slice,
                       int64_t library_workspace, const Filters& filters) {
             return new LoopedGemm(std::move(library), device,
                                   {n, k, weights, type, out, slice, library_workspace, filters});
           }),
           py::kw_only(), py::arg("library"), py::arg("device"), py::arg("n"), py::arg("k"),
           py::arg("weights"), py::arg("type"), py::arg("out"), py::arg("slice"),
           py::arg("library_workspace"), py::arg("filters"))
      .def_property_readonly("stream_bytes", &LoopedGemm::stream_bytes,
                             "Bytes of workspace per stream.")
      .def(
          "run",
          [](LoopedGemm& gemm, uintptr_t ends, int64_t experts,
             const std::variant<Nvfp4View, DenseView>& weights, uintptr_t rows, int64_t row_stride,
             uintptr_t row_scales, uintptr_t alpha, int64_t alpha_stride, uintptr_t out,
             int64_t out_row_stride, uintptr_t workspace, int streams, int threads,
             uintptr_t stream) {
            LoopedCall call = make_call(weights, rows, row_stride, row_scales, alpha, alpha_stride,
                                        out, out_row_stride);
            call.ends = pointer<const int64_t>(ends);
            call.experts = experts;
            call.workspace = pointer<void>(workspace);
            call.streams = streams;
            call.threads = threads;
            call.stream = pointer<CUstream_st>(stream);
            gemm.run(call);
          },
          py::kw_only(), py::arg("ends"), py::arg("experts"), py::arg("weights"), py::arg("rows"),
          py::arg("row_stride"), py::arg("row_scales"), py::arg("alpha"), py::arg("alpha_stride"),
          py::arg("out"), py::arg("out_row_stride"), py::arg("workspace"), py::arg("streams"),
          py::arg("threads"), py::arg("stream"), ReleaseGil(), "Enqueue one product per expert.")
      .def("graph_bytes", &LoopedGemm::graph_bytes, py::arg("rows"),
           "Bytes of workspace per stream of add_to_graph().")
      .def(
          "add_to_graph",
          [](LoopedGemm& gemm, uintptr_t ends, int64_t experts, int64_t row_count,
             const std::variant<Nvfp4View, DenseView>& weights, uintptr_t rows, int64_t row_stride,
             uintptr_t row_scales, uintptr_t alpha, int64_t alpha_stride, uintptr_t out,
             int64_t out_row_stride, uintptr_t workspace, int streams, uintptr_t stream) {
            LoopedCall call = make_call(weights, rows, row_stride, row_scales, alpha, alpha_stride,
                                        out, out_row_stride);
            call.experts = experts;
            call.workspace = pointer<void>(workspace);
            call.streams = streams;
            call.stream = pointer<CUstream_st>(stream);
            gemm.add_to_graph(call, pointer<const int>(ends), row_count);
          },
          py::kw_only(), py::arg("ends"), py::arg("experts"), py::arg("row_count"),
          py::arg("weights"), py::arg("rows"), py::arg("row_stride"), py::arg("row_scales"),
          py::arg("alpha"), py::arg("alpha_stride"), py::arg("out"), py::arg("out_row_stride"),
          py::arg("workspace"), py::arg("streams"), py::arg("stream"), ReleaseGil(),
          "Add the products to the graph that the stream is capturing.")
      .def(
          "candidates",
          [](LoopedGemm& gemm, const std::variant<Nvfp4View, DenseView>& weights, uintptr_t rows,
             int64_t row_stride, uintptr_t row_scales, uintptr_t out, int64_t out_row_stride,
             int64_t row_count, int count) {
            return gemm.candidates(
                make_call(weights, rows, row_stride, row_scales, 0, 0, out, out_row_stride),
                row_count, count);
          },
          py::kw_only(), py::arg("weights"), py::arg("rows"), py::arg("row_stride"),
          py::arg("row_scales"), py::arg("out"), py::arg("out_row_stride"), py::arg("row_count"),
          py::arg("count"), ReleaseGil(), "The library's proposals for a number of rows.")
      .def(
          "pin",
          [](LoopedGemm& gemm, int64_t bucket, const py::bytes& data) {
            gemm.pin(bucket, cublaslt::algo_from_bytes(data));
          },
          py::arg("bucket"), py::arg("data"), "Use this algorithm for a bucket of rows.");
  m.def("row_bucket", &cublaslt::row_bucket, py::arg("rows"),
        "Rows up to which one algorithm is asked for.");
}

}  // namespace fp4lt::bindings
