// SPDX-License-Identifier: Apache-2.0
#include "cuda/device.h"

#include "bindings/bind.h"

namespace fp4lt::bindings {

void bind_device(py::module_& m) {
  m.def("cuda_built_with", &cuda::built_with,
        "Version of the CUDA toolkit that compiled the device code; empty in a CPU-only build.");
  m.def("cuda_architectures", &cuda::architectures,
        "Architectures of the device code, separated by spaces.");
  m.def("cuda_driver", &cuda::driver, "CUDA version of the loaded driver; empty where none is.");
  m.def("cuda_device_count", &cuda::device_count, "Usable CUDA devices; 0 without a driver.");
  py::class_<cuda::DeviceInfo>(m, "DeviceInfo", "A CUDA device; sizes in bytes.")
      .def_readonly("name", &cuda::DeviceInfo::name)
      .def_readonly("major", &cuda::DeviceInfo::major)
      .def_readonly("minor", &cuda::DeviceInfo::minor)
      .def_readonly("multiprocessors", &cuda::DeviceInfo::multiprocessors)
      .def_readonly("l2_bytes", &cuda::DeviceInfo::l2_bytes)
      .def_readonly("shared_bytes", &cuda::DeviceInfo::shared_bytes)
      .def_readonly("memory_bytes", &cuda::DeviceInfo::memory_bytes);
  m.def("cuda_device_info", &cuda::device_info, py::arg("device"), "What a device is.");
  m.def(
      "cuda_read_memory",
      [](int device, uintptr_t data, int64_t bytes, uintptr_t sink, uintptr_t stream) {
        cuda::read_memory(device, pointer<const void>(data), bytes, pointer<void>(sink),
                          pointer<CUstream_st>(stream));
      },
      py::kw_only(), py::arg("device"), py::arg("data"), py::arg("bytes"), py::arg("sink"),
      py::arg("stream"), ReleaseGil(), "Launch a pure read of device memory: a bandwidth ceiling.");
}

}  // namespace fp4lt::bindings
