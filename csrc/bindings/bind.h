// SPDX-License-Identifier: Apache-2.0
// Shared by the binding files, the only C++ that knows Python.  Memory comes in as integer
// addresses: Python's _interop.py has checked dtype, extents, strides and device, and keeps the
// tensors alive for the duration of the call.
#pragma once

#include <pybind11/native_enum.h>
#include <pybind11/pybind11.h>

#include <cstdint>

namespace fp4lt::bindings {

namespace py = pybind11;

template <typename T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

using ReleaseGil = py::call_guard<py::gil_scoped_release>;

void bind_codec(py::module_& m);
void bind_gemm(py::module_& m);
void bind_moe(py::module_& m);
void bind_device(py::module_& m);
void bind_cuda(py::module_& m);
void bind_operands(py::module_& m);
void bind_cublaslt(py::module_& m);
void bind_looped(py::module_& m);

}  // namespace fp4lt::bindings
