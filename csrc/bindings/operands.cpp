// SPDX-License-Identifier: Apache-2.0
// What surrounds a product on a CUDA device: forms of rows, finishing of sums, offsets.
#include "bindings/bind.h"
#include "cuda/operand.h"

namespace fp4lt::bindings {

void bind_operands(py::module_& m) {
  py::native_enum<cuda::RowForm>(m, "RowForm", "enum.IntEnum")
      .value("PREPARED", cuda::RowForm::kPrepared)
      .value("PLAIN", cuda::RowForm::kPlain)
      .value("CODES", cuda::RowForm::kCodes)
      .value("IMAGE", cuda::RowForm::kImage)
      .finalize();
  py::class_<cuda::OperandRows>(m, "OperandRows", "Where the rows of an operand go.")
      .def(py::init([](cuda::RowForm form, uintptr_t values, int64_t width, uintptr_t scales,
                       uintptr_t scale_row, uintptr_t place) {
             return cuda::OperandRows{form,
                                      pointer<void>(values),
                                      width,
                                      pointer<uint8_t>(scales),
                                      pointer<const int>(scale_row),
                                      pointer<const int>(place)};
           }),
           py::kw_only(), py::arg("form"), py::arg("values"), py::arg("width"), py::arg("scales"),
           py::arg("scale_row"), py::arg("place"));
  py::class_<cuda::Finish>(m, "Finish", "Factors and biases that turn sums into results.")
      .def(py::init([](uintptr_t a_global, uintptr_t row_index, uintptr_t b_global,
                       int64_t b_stride, uintptr_t alpha, int64_t alpha_expert_stride,
                       GateOrder order, uintptr_t bias, int64_t bias_expert_stride) {
             return cuda::Finish{pointer<const float>(a_global),
                                 pointer<const int>(row_index),
                                 pointer<const float>(b_global),
                                 b_stride,
                                 pointer<const float>(alpha),
                                 alpha_expert_stride,
                                 order,
                                 pointer<const float>(bias),
                                 bias_expert_stride};
           }),
           py::kw_only(), py::arg("a_global") = 0, py::arg("row_index") = 0,
           py::arg("b_global") = 0, py::arg("b_stride") = 0, py::arg("alpha") = 0,
           py::arg("alpha_expert_stride") = 0, py::arg("order"), py::arg("bias") = 0,
           py::arg("bias_expert_stride") = 0);
  m.def(
      "cuda_finish_rows",
      [](uintptr_t c, int64_t c_row_stride, uintptr_t row_expert, uintptr_t row_count, int64_t rows,
         int64_t n, const cuda::Finish& finish, uintptr_t out, DType out_type,
         int64_t out_row_stride, int device, uintptr_t stream) {
        cuda::finish_rows(device,
                          {pointer<const float>(c), c_row_stride, pointer<const int>(row_expert),
                           pointer<const int>(row_count), rows, n, finish, pointer<void>(out),
                           out_type, out_row_stride},
                          pointer<CUstream_st>(stream));
      },
      py::kw_only(), py::arg("c"), py::arg("c_row_stride"), py::arg("row_expert"),
      py::arg("row_count"), py::arg("rows"), py::arg("n"), py::arg("finish"), py::arg("out"),
      py::arg("out_type"), py::arg("out_row_stride"), py::arg("device"), py::arg("stream"),
      ReleaseGil(), "Sums to results.");
  m.def(
      "cuda_put_integers",
      [](uintptr_t values, int64_t count, uintptr_t out, int device, uintptr_t stream) {
        cuda::put_integers(device, pointer<const int64_t>(values), count, pointer<int>(out),
                           pointer<CUstream_st>(stream));
      },
      py::kw_only(), py::arg("values"), py::arg("count"), py::arg("out"), py::arg("device"),
      py::arg("stream"), ReleaseGil(), "int64 of host memory to int32 on the device, by value.");
  m.def(
      "cuda_locate_rows",
      [](uintptr_t ends, int64_t experts, int64_t rows, uintptr_t row_expert, uintptr_t scale_row,
         int device, uintptr_t stream) {
        cuda::locate_rows(device,
                          {pointer<const int>(ends), experts, rows, pointer<int>(row_expert),
                           pointer<int>(scale_row)},
                          pointer<CUstream_st>(stream));
      },
      py::kw_only(), py::arg("ends"), py::arg("experts"), py::arg("rows"), py::arg("row_expert"),
      py::arg("scale_row"), py::arg("device"), py::arg("stream"), ReleaseGil(),
      "Each row's expert and place among the scale tiles.");
  m.def(
      "cuda_clear_tiles",
      [](uintptr_t ends, int64_t experts, int64_t rows, int64_t padded_blocks, uintptr_t scales,
         int device, uintptr_t stream) {
        cuda::clear_tiles(device, pointer<const int>(ends), experts, rows, padded_blocks,
                          pointer<uint8_t>(scales), pointer<CUstream_st>(stream));
      },
      py::kw_only(), py::arg("ends"), py::arg("experts"), py::arg("rows"), py::arg("padded_blocks"),
      py::arg("scales"), py::arg("device"), py::arg("stream"), ReleaseGil(),
      "Zeros for the rows of padding of scale tiles.");
  m.def("packed_tiles", &packed_tiles, py::arg("rows"), py::arg("experts"),
        "Tiles of 128 rows of a packed activation whose experts each begin one.");
  m.def(
      "cuda_expand",
      [](uintptr_t codes, uintptr_t scales, int64_t row0, int64_t rows, int64_t pad, int64_t k,
         uintptr_t out, DType out_type, int device, uintptr_t stream) {
        cuda::expand(device,
                     {pointer<const uint8_t>(codes), pointer<const uint8_t>(scales), row0, rows,
                      pad, k, pointer<void>(out), out_type, false},
                     pointer<CUstream_st>(stream));
      },
      py::kw_only(), py::arg("codes"), py::arg("scales"), py::arg("row0"), py::arg("rows"),
      py::arg("pad"), py::arg("k"), py::arg("out"), py::arg("out_type"), py::arg("device"),
      py::arg("stream"), ReleaseGil(), "Rows of NVFP4 as 16-bit products, without global scale.");
}

}  // namespace fp4lt::bindings
