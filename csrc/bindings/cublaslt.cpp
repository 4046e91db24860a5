// SPDX-License-Identifier: Apache-2.0
// libcublasLt: opening one, what a product is described as, and the rules about algorithms.
#include <pybind11/stl.h>

#include <map>

#include "bindings/bind.h"
#include "core/error.h"
#include "cublaslt/algorithm.h"
#include "cublaslt/library.h"
#include "cublaslt/matmul.h"

namespace fp4lt::bindings {
namespace {

using cublaslt::Algorithm;
using cublaslt::Filters;
using cublaslt::Library;
using cublaslt::Matmul;
using cublaslt::MatmulDescription;
namespace abi = cublaslt::abi;

// Every attribute that a description sets, as the library gives it back.
std::map<std::string, int64_t> read_back(const Library& library, const MatmulDescription& wanted,
                                         uintptr_t a_scales, uintptr_t b_scales) {
  Matmul matmul(library, wanted);
  if (wanted.block_scaled()) {
    matmul.set_scales(pointer<const void>(a_scales), pointer<const void>(b_scales));
  }
  std::map<std::string, int64_t> found;
  const auto integer = [&](const char* name, abi::DescAttribute attribute) {
    found[name] = matmul.desc.get_attribute<int32_t>(attribute);
  };
  integer("compute_type", abi::kDescComputeType);
  integer("scale_type", abi::kDescScaleType);
  integer("pointer_mode", abi::kDescPointerMode);
  integer("trans_a", abi::kDescTransA);
  integer("trans_b", abi::kDescTransB);
  integer("epilogue", abi::kDescEpilogue);
  if (library.version() >= 120800) {
    integer("a_scale_mode", abi::kDescAScaleMode);
    integer("b_scale_mode", abi::kDescBScaleMode);
  }
  found["a_scale_pointer"] = matmul.desc.get_attribute<int64_t>(abi::kDescAScalePointer);
  found["b_scale_pointer"] = matmul.desc.get_attribute<int64_t>(abi::kDescBScalePointer);
  const auto layout = [&](const std::string& name, const cublaslt::MatrixLayout& l) {
    found[name + "_type"] = l.get_attribute<int32_t>(abi::kLayoutType);
    found[name + "_order"] = l.get_attribute<int32_t>(abi::kLayoutOrder);
    found[name + "_rows"] = l.get_attribute<int64_t>(abi::kLayoutRows);
    found[name + "_cols"] = l.get_attribute<int64_t>(abi::kLayoutCols);
    found[name + "_ld"] = l.get_attribute<int64_t>(abi::kLayoutLd);
  };
  layout("a", matmul.a);
  layout("b", matmul.b);
  layout("d", matmul.d);
  const auto preference = cublaslt::make_preference(library, wanted);
  found["workspace_bytes"] = preference.get_attribute<int64_t>(abi::kPrefMaxWorkspaceBytes);
  const auto number = [&](const char* name, abi::PreferenceAttribute attribute) {
    found[name] = preference.get_attribute<uint32_t>(attribute);
  };
  number("reduction_schemes", abi::kPrefReductionSchemeMask);
  number("a_alignment", abi::kPrefMinAlignmentA);
  number("b_alignment", abi::kPrefMinAlignmentB);
  number("c_alignment", abi::kPrefMinAlignmentC);
  number("d_alignment", abi::kPrefMinAlignmentD);
  return found;
}

void bind_library(py::module_& m) {
  py::class_<Library, std::shared_ptr<Library>>(m, "CublasLt", "An opened libcublasLt.")
      .def(py::init<const std::string&>(), py::arg("path"), "Open the file, for good.")
      .def_property_readonly("path", &Library::path, "Where the loader found it.")
      .def_property_readonly("version", &Library::version, "major * 10000 + minor * 100 + patch.")
      .def_property_readonly("absent", &Library::absent, "Newer functions that it does not have.")
      .def(
          "check", [](const Library& l, int status, const char* call) { l.check(status, call); },
          py::arg("status"), py::arg("call"), "Raise LibraryError unless the status is 0.");
}

void bind_description(py::module_& m) {
  py::native_enum<abi::DataType>(m, "CudaDataType", "enum.IntEnum")
      .value("R_32F", abi::kR32F)
      .value("R_16F", abi::kR16F)
      .value("R_16BF", abi::kR16BF)
      .value("R_4F_E2M1", abi::kR4FE2M1)
      .finalize();
  py::class_<MatmulDescription>(m, "MatmulDescription",
                                "D[m, n] = A^T B, column-major; see csrc/cublaslt/matmul.h.")
      .def(py::init([](abi::DataType operand, abi::DataType out, int64_t mm, int64_t n, int64_t k,
                       int64_t lda, int64_t ldb, int64_t ldd, uint32_t alignment,
                       int64_t workspace_bytes) {
             MatmulDescription d;
             d.operand = operand;
             d.out = out;
             d.m = mm;
             d.n = n;
             d.k = k;
             d.lda = lda;
             d.ldb = ldb;
             d.ldd = ldd;
             d.a_alignment = d.b_alignment = d.d_alignment = alignment;
             d.workspace_bytes = workspace_bytes;
             return d;
           }),
           py::kw_only(), py::arg("operand"), py::arg("out"), py::arg("m"), py::arg("n"),
           py::arg("k"), py::arg("lda"), py::arg("ldb"), py::arg("ldd"), py::arg("alignment"),
           py::arg("workspace_bytes"))
      .def("__str__", [](const MatmulDescription& d) { return to_string(d); });
  m.def("cublaslt_read_back", &read_back, py::arg("library"), py::arg("description"), py::kw_only(),
        py::arg("a_scales"), py::arg("b_scales"),
        "What the library gives back of the objects made for a description.");
}

void bind_algorithms(py::module_& m) {
  py::class_<Filters>(m, "AlgorithmFilters", "Defects that concern single algorithms.")
      .def(py::init([](bool drop_768_auto, bool drop_uneven_split_k, bool no_query_in_capture,
                       bool refuses_one_row, bool reads_alpha_early) {
             return Filters{drop_768_auto, drop_uneven_split_k, no_query_in_capture,
                            refuses_one_row, reads_alpha_early};
           }),
           py::kw_only(), py::arg("drop_768_auto"), py::arg("drop_uneven_split_k"),
           py::arg("no_query_in_capture"), py::arg("refuses_one_row"), py::arg("reads_alpha_early"))
      .def_readonly("drop_768_auto", &Filters::drop_768_auto)
      .def_readonly("drop_uneven_split_k", &Filters::drop_uneven_split_k)
      .def_readonly("no_query_in_capture", &Filters::no_query_in_capture)
      .def_readonly("refuses_one_row", &Filters::refuses_one_row)
      .def_readonly("reads_alpha_early", &Filters::reads_alpha_early);
  m.def(
      "cublaslt_dropped",
      [](int id, int splits, uint32_t stages, int64_t k,
         const Filters& filters) -> std::optional<std::string> {
        Algorithm a{};
        a.id = id;
        a.splits = splits;
        a.stages = stages;
        const char* reason = cublaslt::dropped(a, k, filters);
        return reason == nullptr ? std::nullopt : std::optional<std::string>(reason);
      },
      py::kw_only(), py::arg("id"), py::arg("splits"), py::arg("stages"), py::arg("k"),
      py::arg("filters"), "Why an algorithm is not used, or None.");
  m.def("cublaslt_advice", &cublaslt::advice, py::arg("description"), py::arg("filters"),
        "What to say of a product that the library refuses; may be empty.");
}

}  // namespace

void bind_cublaslt(py::module_& m) {
  bind_library(m);
  bind_description(m);
  bind_algorithms(m);
  bind_looped(m);
}

}  // namespace fp4lt::bindings
