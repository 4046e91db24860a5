// SPDX-License-Identifier: Apache-2.0
// The CUDA kernels.  Each call names the device and the stream; an address of 0 stands for an
// argument that is left out.
#include <pybind11/stl.h>

#include <optional>

#include "bindings/bind.h"
#include "cuda/fused/gemm.h"
#include "cuda/moe.h"
#include "cuda/quantize.h"

namespace fp4lt::bindings {
namespace {

using cuda::Stream;

Stream stream_of(uintptr_t stream) { return pointer<CUstream_st>(stream); }

void bind_cuda_codec(py::module_& m) {
  m.def(
      "cuda_quantize",
      [](const DenseView& x, int64_t experts, int64_t rows, int64_t k, GlobalScale mode,
         uintptr_t global_scale, int64_t global_expert_stride, int64_t global_row_stride,
         uintptr_t codes, uintptr_t scales, int device, uintptr_t stream) {
        cuda::quantize(
            device,
            {x, experts, rows, k, mode, pointer<float>(global_scale), global_expert_stride,
             global_row_stride, pointer<uint8_t>(codes), pointer<uint8_t>(scales)},
            stream_of(stream));
      },
      py::kw_only(), py::arg("x"), py::arg("experts"), py::arg("rows"), py::arg("k"),
      py::arg("mode"), py::arg("global_scale"), py::arg("global_expert_stride"),
      py::arg("global_row_stride"), py::arg("codes"), py::arg("scales"), py::arg("device"),
      py::arg("stream"), ReleaseGil(), "quantize on a CUDA device.");
  m.def(
      "cuda_dequantize",
      [](const Nvfp4View& x, int64_t experts, int64_t rows, int64_t k, int64_t global_expert_stride,
         int64_t global_row_stride, uintptr_t out, DType out_type, int device, uintptr_t stream) {
        cuda::dequantize(device,
                         {x, experts, rows, k, global_expert_stride, global_row_stride,
                          pointer<void>(out), out_type},
                         stream_of(stream));
      },
      py::kw_only(), py::arg("x"), py::arg("experts"), py::arg("rows"), py::arg("k"),
      py::arg("global_expert_stride"), py::arg("global_row_stride"), py::arg("out"),
      py::arg("out_type"), py::arg("device"), py::arg("stream"), ReleaseGil(),
      "dequantize on a CUDA device.");
  m.def(
      "cuda_tile_scales",
      [](uintptr_t linear, int64_t experts, int64_t rows, int64_t blocks, uintptr_t tiled,
         int device, uintptr_t stream) {
        cuda::tile_scales(device, pointer<const uint8_t>(linear), experts, rows, blocks,
                          pointer<uint8_t>(tiled), stream_of(stream));
      },
      py::kw_only(), py::arg("linear"), py::arg("experts"), py::arg("rows"), py::arg("blocks"),
      py::arg("tiled"), py::arg("device"), py::arg("stream"), ReleaseGil(),
      "tile_scales on a CUDA device.");
  m.def(
      "cuda_untile_scales",
      [](uintptr_t tiled, int64_t experts, int64_t rows, int64_t blocks, uintptr_t linear,
         int device, uintptr_t stream) {
        cuda::untile_scales(device, pointer<const uint8_t>(tiled), experts, rows, blocks,
                            pointer<uint8_t>(linear), stream_of(stream));
      },
      py::kw_only(), py::arg("tiled"), py::arg("experts"), py::arg("rows"), py::arg("blocks"),
      py::arg("linear"), py::arg("device"), py::arg("stream"), ReleaseGil(),
      "untile_scales on a CUDA device.");
}

void bind_fused(py::module_& m) {
  m.attr("PREPARED_K") = cuda::kPreparedK;
  m.attr("MAX_EXPERTS") = cuda::kMaxExperts;
  m.attr("ROW_BLOCK_BYTES") = sizeof(cuda::RowBlock);
  m.def("can_wgmma", &cuda::can_wgmma, py::arg("device"), py::arg("b"), py::arg("k"),
        "Whether the wgmma form of the fused kernel can run a GEMM with these weights.");
  m.attr("MAX_SHARERS") = cuda::kMaxSharers;
  m.def("scratch_bytes", &cuda::scratch_bytes, py::arg("device"), py::arg("form"), py::arg("k"),
        py::arg("block_rows"), "Memory that a fused GEMM needs for tiles that are shared.");
  m.def("row_block_size", &cuda::row_block_size, py::arg("rows"), py::arg("experts"),
        py::arg("most"), "Rows of a work list's entries.");
  m.def("most_block_rows", &cuda::most_block_rows, py::arg("device"), py::arg("form"),
        "The most rows that an entry of a work list may have on the device.");
  m.def("expected_row_blocks", &cuda::expected_row_blocks, py::arg("rows"), py::arg("experts"),
        py::arg("block_rows"), "Entries that a work list is likely to have.");
  m.def("max_row_blocks", &cuda::max_row_blocks, py::arg("rows"), py::arg("experts"),
        py::arg("block_rows"), "Entries that a work list needs room for.");
  m.def("fused_depth", &cuda::fused_depth, py::arg("k"),
        "Most fp32 roundings a product can meet in the fused kernel's sum over k.");
  m.def(
      "cuda_prepare",
      [](const std::variant<Nvfp4View, DenseView>& x, bool quantize, int64_t rows, int64_t k,
         uintptr_t source, uintptr_t count, uintptr_t given, int64_t given_stride,
         uintptr_t scale_index, uintptr_t global_out, const cuda::OperandRows& out,
         uintptr_t starts, uintptr_t places, int64_t experts, int device, uintptr_t stream) {
        cuda::prepare(device,
                      {x, quantize, rows, k, pointer<const int>(source), pointer<const int>(count),
                       pointer<const float>(given), given_stride, pointer<const int>(scale_index),
                       pointer<float>(global_out), out, pointer<const int>(starts),
                       pointer<const int>(places), experts},
                      stream_of(stream));
      },
      py::kw_only(), py::arg("x"), py::arg("quantize"), py::arg("rows"), py::arg("k"),
      py::arg("source"), py::arg("count"), py::arg("given"), py::arg("given_stride"),
      py::arg("scale_index"), py::arg("global_out"), py::arg("out"), py::arg("starts") = 0,
      py::arg("places") = 0, py::arg("experts") = 0, py::arg("device"), py::arg("stream"),
      ReleaseGil(), "Activations to an operand.");
  m.def(
      "cuda_plan_blocks",
      [](uintptr_t ends, bool ends_are_64_bit, int64_t experts, int64_t rows, int block_rows,
         uintptr_t blocks, uintptr_t block_count, uintptr_t flags, uintptr_t starts,
         uintptr_t places, int device, uintptr_t stream) {
        cuda::plan_blocks(device,
                          {pointer<const void>(ends), ends_are_64_bit, experts, rows, block_rows,
                           pointer<cuda::RowBlock>(blocks), pointer<int>(block_count),
                           pointer<int>(flags), pointer<int>(starts), pointer<int>(places)},
                          stream_of(stream));
      },
      py::kw_only(), py::arg("ends"), py::arg("ends_are_64_bit"), py::arg("experts"),
      py::arg("rows"), py::arg("block_rows"), py::arg("blocks"), py::arg("block_count"),
      py::arg("flags"), py::arg("starts"), py::arg("places"), py::arg("device"), py::arg("stream"),
      ReleaseGil(), "The work list of sorted rows.");
  m.def(
      "cuda_fused_gemm",
      [](cuda::RowForm form, int64_t n, int64_t k, uintptr_t blocks, uintptr_t block_count,
         int block_rows, int64_t expected_blocks, bool list_is_older, uintptr_t a, DType a_type,
         uintptr_t row_index, uintptr_t a_global, const Nvfp4View& b, uintptr_t alpha,
         int64_t alpha_expert_stride, GateOrder order, uintptr_t bias, int64_t bias_expert_stride,
         uintptr_t out, DType out_type, int64_t out_row_stride,
         const std::optional<cuda::RowForm>& gated, const std::optional<ExpertParameter>& limit,
         uintptr_t shared_sums, uintptr_t shared_flags, int device, uintptr_t stream) {
        cuda::fused_gemm(device,
                         {form,
                          n,
                          k,
                          pointer<const cuda::RowBlock>(blocks),
                          pointer<const int>(block_count),
                          block_rows,
                          expected_blocks,
                          list_is_older,
                          pointer<const void>(a),
                          a_type,
                          pointer<const int>(row_index),
                          pointer<const float>(a_global),
                          b,
                          pointer<const float>(alpha),
                          alpha_expert_stride,
                          order,
                          pointer<const float>(bias),
                          bias_expert_stride,
                          pointer<void>(out),
                          out_type,
                          out_row_stride,
                          gated.has_value(),
                          {gated.value_or(cuda::RowForm::kPrepared), limit.has_value(),
                           limit.value_or(ExpertParameter{})},
                          pointer<void>(shared_sums),
                          pointer<int>(shared_flags)},
                         stream_of(stream));
      },
      py::kw_only(), py::arg("form"), py::arg("n"), py::arg("k"), py::arg("blocks"),
      py::arg("block_count"), py::arg("block_rows"), py::arg("expected_blocks"),
      py::arg("list_is_older"), py::arg("a"), py::arg("a_type"), py::arg("row_index"),
      py::arg("a_global"), py::arg("b"), py::arg("alpha"), py::arg("alpha_expert_stride"),
      py::arg("order"), py::arg("bias"), py::arg("bias_expert_stride"), py::arg("out"),
      py::arg("out_type"), py::arg("out_row_stride"), py::arg("gated"), py::arg("limit"),
      py::arg("shared_sums"), py::arg("shared_flags"), py::arg("device"), py::arg("stream"),
      ReleaseGil(), "The fused grouped GEMM over a work list.");
}

void bind_cuda_moe(py::module_& m) {
  py::native_enum<cuda::ActivationForm>(m, "ActivationForm", "enum.IntEnum")
      .value("FLOAT", cuda::ActivationForm::kFloat)
      .value("HALF", cuda::ActivationForm::kHalf)
      .value("ROUNDED", cuda::ActivationForm::kRounded)
      .finalize();
  m.def(
      "cuda_route",
      [](uintptr_t ids, bool ids_are_64_bit, int64_t tokens, int64_t top_k, int64_t expert_start,
         int64_t experts, int block_rows, uintptr_t row_count, uintptr_t row_token,
         uintptr_t row_expert, uintptr_t slot_row, uintptr_t ends, uintptr_t row_place,
         uintptr_t blocks, uintptr_t block_count, uintptr_t flags, int device, uintptr_t stream) {
        cuda::route(
            device,
            {pointer<const void>(ids), ids_are_64_bit, tokens, top_k, expert_start, experts,
             block_rows, pointer<int>(row_count), pointer<int>(row_token), pointer<int>(row_expert),
             pointer<int>(slot_row), pointer<int>(ends), pointer<int>(row_place),
             pointer<cuda::RowBlock>(blocks), pointer<int>(block_count), pointer<int>(flags)},
            stream_of(stream));
      },
      py::kw_only(), py::arg("ids"), py::arg("ids_are_64_bit"), py::arg("tokens"), py::arg("top_k"),
      py::arg("expert_start"), py::arg("experts"), py::arg("block_rows"), py::arg("row_count"),
      py::arg("row_token"), py::arg("row_expert"), py::arg("slot_row"), py::arg("ends"),
      py::arg("row_place"), py::arg("blocks"), py::arg("block_count"), py::arg("flags"),
      py::arg("device"), py::arg("stream"), ReleaseGil(),
      "Sort the slots by local expert and make the work list.");
  m.def(
      "cuda_activate",
      [](uintptr_t h, int64_t h_row_stride, const cuda::Finish& finish, uintptr_t row_count,
         uintptr_t row_expert, int64_t rows, int64_t n, GateOrder order, Activation kind,
         const ExpertParameter& alpha, const ExpertParameter& beta,
         const std::optional<ExpertParameter>& limit, cuda::ActivationForm form, DType type,
         uintptr_t given, int64_t given_stride, uintptr_t global_out, const cuda::OperandRows& out,
         int device, uintptr_t stream) {
        cuda::activate(
            device,
            {pointer<const float>(h), h_row_stride, finish, pointer<const int>(row_count),
             pointer<const int>(row_expert), rows, n, order, kind, alpha, beta,
             limit.value_or(ExpertParameter{}), limit.has_value(), form, type,
             pointer<const float>(given), given_stride, pointer<float>(global_out), out},
            stream_of(stream));
      },
      py::kw_only(), py::arg("h"), py::arg("h_row_stride"), py::arg("finish"), py::arg("row_count"),
      py::arg("row_expert"), py::arg("rows"), py::arg("n"), py::arg("order"), py::arg("kind"),
      py::arg("alpha"), py::arg("beta"), py::arg("limit"), py::arg("form"), py::arg("type"),
      py::arg("given"), py::arg("given_stride"), py::arg("global_out"), py::arg("out"),
      py::arg("device"), py::arg("stream"), ReleaseGil(),
      "Gate and up to the second GEMM's input, in one of three forms.");
  m.def(
      "cuda_combine",
      [](uintptr_t z, const cuda::Finish& finish, uintptr_t row_expert, uintptr_t slot_row,
         uintptr_t weights, int64_t tokens, int64_t top_k, int64_t hidden, uintptr_t out,
         DType out_type, int64_t out_row_stride, int device, uintptr_t stream) {
        cuda::combine(device,
                      {pointer<const float>(z), finish, pointer<const int>(row_expert),
                       pointer<const int>(slot_row), pointer<const float>(weights), tokens, top_k,
                       hidden, pointer<void>(out), out_type, out_row_stride},
                      stream_of(stream));
      },
      py::kw_only(), py::arg("z"), py::arg("finish"), py::arg("row_expert"), py::arg("slot_row"),
      py::arg("weights"), py::arg("tokens"), py::arg("top_k"), py::arg("hidden"), py::arg("out"),
      py::arg("out_type"), py::arg("out_row_stride"), py::arg("device"), py::arg("stream"),
      ReleaseGil(), "Weighted sum of each token's rows, in slot order.");
  m.def(
      "cuda_scale_rows",
      [](const DenseView& x, uintptr_t weights, int64_t rows, int64_t n, uintptr_t out, int device,
         uintptr_t stream) {
        cuda::scale_rows(device, x, pointer<const float>(weights), rows, n, pointer<void>(out),
                         stream_of(stream));
      },
      py::kw_only(), py::arg("x"), py::arg("weights"), py::arg("rows"), py::arg("n"),
      py::arg("out"), py::arg("device"), py::arg("stream"), ReleaseGil(),
      "Rows times the router weight, rounded to their own type.");
}

}  // namespace

void bind_cuda(py::module_& m) {
  bind_operands(m);
  bind_cuda_codec(m);
  bind_fused(m);
  bind_cuda_moe(m);
}

}  // namespace fp4lt::bindings
