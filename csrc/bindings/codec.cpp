// SPDX-License-Identifier: Apache-2.0
#include "bindings/bind.h"
#include "core/nvfp4.h"
#include "core/scale_layout.h"
#include "cpu/quantize.h"

namespace fp4lt::bindings {

void bind_codec(py::module_& m) {
  py::native_enum<GlobalScale>(m, "GlobalScale", "enum.IntEnum")
      .value("PER_EXPERT", GlobalScale::kPerExpert)
      .value("PER_ROW", GlobalScale::kPerRow)
      .value("GIVEN", GlobalScale::kGiven)
      .finalize();

  m.def(
      "quantize",
      [](const DenseView& x, int64_t experts, int64_t rows, int64_t k, GlobalScale mode,
         uintptr_t global_scale, int64_t global_expert_stride, int64_t global_row_stride,
         uintptr_t codes, uintptr_t scales, int threads) {
        quantize({x, experts, rows, k, mode, pointer<float>(global_scale), global_expert_stride,
                  global_row_stride, pointer<uint8_t>(codes), pointer<uint8_t>(scales)},
                 threads);
      },
      py::kw_only(), py::arg("x"), py::arg("experts"), py::arg("rows"), py::arg("k"),
      py::arg("mode"), py::arg("global_scale"), py::arg("global_expert_stride"),
      py::arg("global_row_stride"), py::arg("codes"), py::arg("scales"), py::arg("threads"),
      ReleaseGil(), "Round (experts, rows, k) values to NVFP4 on the CPU.");

  m.def(
      "dequantize",
      [](const Nvfp4View& x, int64_t experts, int64_t rows, int64_t k, int64_t global_expert_stride,
         int64_t global_row_stride, uintptr_t out, DType out_type, int threads) {
        dequantize({x, experts, rows, k, global_expert_stride, global_row_stride,
                    pointer<void>(out), out_type},
                   threads);
      },
      py::kw_only(), py::arg("x"), py::arg("experts"), py::arg("rows"), py::arg("k"),
      py::arg("global_expert_stride"), py::arg("global_row_stride"), py::arg("out"),
      py::arg("out_type"), py::arg("threads"), ReleaseGil(), "The inverse of quantize.");

  m.def(
      "tile_scales",
      [](uintptr_t linear, int64_t experts, int64_t rows, int64_t blocks, uintptr_t tiled) {
        tile_scales(pointer<const uint8_t>(linear), experts, rows, blocks, pointer<uint8_t>(tiled));
      },
      py::kw_only(), py::arg("linear"), py::arg("experts"), py::arg("rows"), py::arg("blocks"),
      py::arg("tiled"), ReleaseGil(), "Block scales from row-major order to 128x4 tiles.");

  m.def(
      "untile_scales",
      [](uintptr_t tiled, int64_t experts, int64_t rows, int64_t blocks, uintptr_t linear) {
        untile_scales(pointer<const uint8_t>(tiled), experts, rows, blocks,
                      pointer<uint8_t>(linear));
      },
      py::kw_only(), py::arg("tiled"), py::arg("experts"), py::arg("rows"), py::arg("blocks"),
      py::arg("linear"), ReleaseGil(), "Block scales from 128x4 tiles to row-major order.");

  m.def("scale_offset", &scale_offset, py::arg("row"), py::arg("block"), py::arg("padded"),
        "Byte offset of one block's scale; padded: blocks of a padded row.");

  m.attr("BLOCK") = kBlock;
  m.attr("TILE_ROWS") = kTileRows;
  m.attr("TILE_BLOCKS") = kTileBlocks;
  m.attr("RANGE") = kRange;
}

}  // namespace fp4lt::bindings
