// SPDX-License-Identifier: Apache-2.0
#include <pybind11/stl.h>

#include "bindings/bind.h"
#include "core/error.h"
#include "core/problem.h"
#include "core/views.h"
#include "cpu/openmp.h"
#include "cpu/simd.h"
#include "cpu/thread_pool.h"

namespace fp4lt::bindings {
namespace {

// Errors of C++ become the Python classes of the same names.
void translate_errors() {
  py::register_exception_translator([](std::exception_ptr p) {
    const auto raise = [](const char* name, const std::exception& e) {
      py::set_error(py::module_::import("fp4lt.errors").attr(name), e.what());
    };
    try {
      if (p) std::rethrow_exception(p);
    } catch (const ArgumentError& e) {
      raise("ArgumentError", e);
    } catch (const UnsupportedError& e) {
      raise("UnsupportedError", e);
    } catch (const LibraryError& e) {
      raise("LibraryError", e);
    }
  });
}

void bind_types(py::module_& m) {
  py::native_enum<DType>(m, "DType", "enum.IntEnum")
      .value("F32", DType::kF32)
      .value("F16", DType::kF16)
      .value("BF16", DType::kBF16)
      .finalize();
  py::native_enum<GateOrder>(m, "GateOrder", "enum.IntEnum")
      .value("NONE", GateOrder::kNone)
      .value("GATE_UP", GateOrder::kGateUp)
      .value("UP_GATE", GateOrder::kUpGate)
      .value("INTERLEAVED", GateOrder::kInterleaved)
      .finalize();
  py::class_<DenseView>(m, "DenseView", "K-contiguous matrices; strides in elements.")
      .def(py::init([](uintptr_t data, DType type, int64_t expert_stride, int64_t row_stride) {
             return DenseView{pointer<const void>(data), type, expert_stride, row_stride};
           }),
           py::kw_only(), py::arg("data"), py::arg("type"), py::arg("expert_stride"),
           py::arg("row_stride"));
  py::class_<ExpertParameter>(m, "ExpertParameter", "One number, or one for each expert.")
      .def(py::init([](uintptr_t values, int64_t stride, float shared) {
             return ExpertParameter{pointer<const float>(values), stride, shared};
           }),
           py::kw_only(), py::arg("values"), py::arg("stride"), py::arg("shared"));
  py::class_<Nvfp4View>(m, "Nvfp4View", "NVFP4 matrices; strides in bytes and in floats.")
      .def(
          py::init([](uintptr_t codes, int64_t codes_expert_stride, uintptr_t scales,
                      int64_t scales_expert_stride, uintptr_t global_scale, int64_t global_stride) {
            return Nvfp4View{pointer<const uint8_t>(codes),      codes_expert_stride,
                             pointer<const uint8_t>(scales),     scales_expert_stride,
                             pointer<const float>(global_scale), global_stride};
          }),
          py::kw_only(), py::arg("codes"), py::arg("codes_expert_stride"), py::arg("scales"),
          py::arg("scales_expert_stride"), py::arg("global_scale"), py::arg("global_stride"));
}

// Clang defines __GNUC__ too.
std::string compiler() {
#if defined(__clang__)
  return concat("clang ", __clang_major__, ".", __clang_minor__, ".", __clang_patchlevel__);
#elif defined(__GNUC__)
  return concat("gcc ", __GNUC__, ".", __GNUC_MINOR__, ".", __GNUC_PATCHLEVEL__);
#else
  return "unknown";
#endif
}

void bind_cpu(py::module_& m) {
  m.def(
      "cpu_kernels",
      [] {
        std::vector<std::string> names;
        for (const SimdKernels* table : all_kernels()) names.emplace_back(table->name);
        return names;
      },
      "Names of the CPU kernel tables that this processor runs, the best one last.");
  m.def("selected_cpu_kernels", [] { return kernels().name; }, "Name of the table in use.");
  m.def("select_cpu_kernels", &select_kernels, py::arg("name"),
        "Use the named table from now on; an empty name means the best one.");
  m.def("compiler", &compiler, "Name and version of the C++ compiler that built the module.");
  m.def("pool_size", &pool_size, "Helper threads of our own started so far.");
  m.def("openmp_in_use", &openmp_in_use,
        "Whether work goes to the threads of the process's OpenMP runtime.");
  m.def("allow_openmp", &allow_openmp, py::arg("allowed"),
        "Use the OpenMP runtime where there is one; otherwise threads of our own.");
}

}  // namespace
}  // namespace fp4lt::bindings

PYBIND11_MODULE(_C, m) {
  using namespace fp4lt::bindings;
  m.doc() = "Compiled core of fp4lt.  Private: use the fp4lt package.";
  translate_errors();
  bind_types(m);
  bind_cpu(m);
  bind_codec(m);
  bind_gemm(m);
  bind_moe(m);
  bind_device(m);
  bind_cuda(m);
  bind_cublaslt(m);
}
