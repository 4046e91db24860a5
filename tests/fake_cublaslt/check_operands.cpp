// SPDX-License-Identifier: Apache-2.0
// Scales, epilogues and what grouped matmuls add.
#include <cinttypes>

#include "problem.h"
#include "report.h"

namespace fake {
namespace {

bool aligned(const void* pointer, uintptr_t to) {
  return reinterpret_cast<uintptr_t>(pointer) % to == 0;
}

void require_array(const void* array, uintptr_t width, const char* what) {
  FAKE_REQUIRE(array != nullptr, INVALID_VALUE, "%s is NULL", what);
  FAKE_REQUIRE(aligned(array, width), INVALID_VALUE, "%s is not aligned to its %d-byte elements",
               what, static_cast<int>(width));
}

void check_sizes(const Layout& layout, const char* name) {
  char what[64];
  const int width = layout.rows_cols_width;
  FAKE_REQUIRE(width == WIDTH_32 || width == WIDTH_64, INVALID_VALUE,
               "%s: integer width %d of rows and columns", name, width);
  FAKE_REQUIRE(layout.ld_width == WIDTH_32 || layout.ld_width == WIDTH_64, INVALID_VALUE,
               "%s: integer width %d of ld", name, layout.ld_width);
  const uintptr_t bytes = width == WIDTH_64 ? 8 : 4;
  __builtin_snprintf(what, sizeof what, "%s: the array of rows", name);
  require_array(layout.rows_array, bytes, what);
  __builtin_snprintf(what, sizeof what, "%s: the array of columns", name);
  require_array(layout.cols_array, bytes, what);
  __builtin_snprintf(what, sizeof what, "%s: the array of ld", name);
  require_array(layout.ld_array, layout.ld_width == WIDTH_64 ? 8 : 4, what);
}

}  // namespace

void check_scales(const Problem& p) {
  const Desc& desc = p.desc;
  const char* names[] = {"A", "B", "C", "D"};
  for (int i = 0; i < 2; ++i) {
    if (p.nvfp4) {
      FAKE_REQUIRE(desc.scale_mode[i] == SCALE_VEC16_UE4M3, INVALID_VALUE,
                   "%s has scale mode %d: FP4 needs VEC16_UE4M3 (1)", names[i], desc.scale_mode[i]);
      FAKE_REQUIRE(desc.scale[i] != nullptr, INVALID_VALUE,
                   "%s has no scale pointer: VEC16_UE4M3 needs one", names[i]);
      FAKE_REQUIRE(aligned(desc.scale[i], 16), INVALID_VALUE,
                   "%s's scale pointer %p is not aligned to 16 bytes", names[i], desc.scale[i]);
    } else {
      FAKE_REQUIRE(desc.scale_mode[i] == SCALE_SCALAR_32F && desc.scale[i] == nullptr,
                   INVALID_VALUE, "%s is not narrow and takes no scales", names[i]);
    }
  }
  for (int i = 2; i < 4; ++i) {
    FAKE_REQUIRE(desc.scale_mode[i] == SCALE_SCALAR_32F, INVALID_VALUE,
                 "%s has scale mode %d, but it is not narrow", names[i], desc.scale_mode[i]);
    FAKE_REQUIRE(desc.scale[i] == nullptr, INVALID_VALUE,
                 "%s has a scale pointer, but it is not narrow", names[i]);
  }
  FAKE_REQUIRE(desc.d_out_scale == nullptr && desc.d_out_scale_mode == SCALE_SCALAR_32F,
               INVALID_VALUE, "D_OUT scales are set, but D is not narrow");
  FAKE_REQUIRE(desc.amax_d == nullptr, INVALID_VALUE, "AMAX_D_POINTER is set, but D is not narrow");
}

void check_epilogue(const Problem& p) {
  const Desc& desc = p.desc;
  FAKE_REQUIRE(desc.epilogue > 0 && desc.epilogue < 1024, INVALID_VALUE, "EPILOGUE %d is unknown",
               desc.epilogue);
  FAKE_REQUIRE((desc.epilogue & (EPILOGUE_BGRADA | EPILOGUE_BGRADB)) == 0, NOT_SUPPORTED,
               "EPILOGUE %d: bias gradients are not supported for these types", desc.epilogue);
  FAKE_REQUIRE(desc.epilogue == EPILOGUE_DEFAULT || desc.epilogue == EPILOGUE_RELU ||
                   desc.epilogue == EPILOGUE_BIAS || desc.epilogue == EPILOGUE_RELU_BIAS,
               NOT_SUPPORTED, "EPILOGUE %d: this fake computes DEFAULT, RELU, BIAS, RELU_BIAS",
               desc.epilogue);
  // The heuristic may be asked before the bias is known; cublasLtMatmul needs it.
  const uintptr_t width = p.grouped ? 8 : element_bits(bias_type(p)) / 8;
  FAKE_REQUIRE(!has_bias(desc) || aligned(desc.bias, width), INVALID_VALUE,
               "the bias pointer %p is not aligned to its elements", desc.bias);
  FAKE_REQUIRE(desc.aux == nullptr && desc.aux_scale == nullptr && desc.aux_amax == nullptr &&
                   desc.aux_scale_mode == SCALE_SCALAR_32F,
               INVALID_VALUE, "the epilogue has no auxiliary buffer, but one is set");
}

void check_grouped(const Problem& p) {
  const Pose posed = pose();
  const bool hopper = posed.cc == 90;
  FAKE_REQUIRE(hopper || (posed.cc >= 100 && posed.cc <= 110), NOT_SUPPORTED,
               "grouped matmuls need compute capability 9.0, 10.x or 11.0, this is %d.%d",
               posed.cc / 10, posed.cc % 10);
  const int first = p.nvfp4 || hopper ? 130400 : 130200;
  FAKE_REQUIRE(posed.version >= first, NOT_SUPPORTED,
               "grouped matmuls of these types exist from version %d on, this is %d", first,
               posed.version);
  const Layout* all[] = {&p.a, &p.b, &p.c, &p.d};
  const char* names[] = {"A", "B", "C", "D"};
  for (int i = 0; i < 4; ++i) {
    FAKE_REQUIRE(all[i]->batch_count >= 1, INVALID_VALUE, "%s has %d groups", names[i],
                 all[i]->batch_count);
    FAKE_REQUIRE(all[i]->batch_count == p.a.batch_count, INVALID_VALUE,
                 "%s has %d groups, A has %d", names[i], all[i]->batch_count, p.a.batch_count);
    check_sizes(*all[i], names[i]);
  }
  const Desc& desc = p.desc;
  const int epilogue = desc.epilogue;
  FAKE_REQUIRE(epilogue == EPILOGUE_DEFAULT || (epilogue == EPILOGUE_BIAS && !hopper),
               NOT_SUPPORTED, "EPILOGUE %d: grouped matmuls take DEFAULT%s", epilogue,
               hopper ? "" : " or BIAS");
  FAKE_REQUIRE(epilogue != EPILOGUE_BIAS || posed.version >= 130400, NOT_SUPPORTED,
               "grouped BIAS exists from 13.4.0 on, this is version %d", posed.version);
  FAKE_REQUIRE(epilogue != EPILOGUE_BIAS || desc.bias_stride == 1, INVALID_VALUE,
               "BIAS_BATCH_STRIDE is %" PRId64 ": a grouped bias needs 1", desc.bias_stride);
  for (const int64_t stride : {desc.alpha_stride, desc.beta_stride}) {
    FAKE_REQUIRE(stride == 0 || stride == 1, INVALID_VALUE,
                 "a batch stride of alpha or beta is %" PRId64 ": 0 or 1", stride);
    FAKE_REQUIRE(stride == 0 || desc.pointer_mode == POINTER_DEVICE, NOT_SUPPORTED,
                 "a batch stride of alpha or beta needs POINTER_MODE DEVICE");
    FAKE_REQUIRE(stride == 0 || !hopper, NOT_SUPPORTED,
                 "a batch stride of alpha or beta is not supported on compute capability 9.0");
  }
}

}  // namespace fake
