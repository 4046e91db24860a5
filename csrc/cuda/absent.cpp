// SPDX-License-Identifier: Apache-2.0
// The CUDA side of a build without CUDA: the same surface, no devices.
#include "core/error.h"
#include "cuda/device.h"
#include "cuda/fused/gemm.h"
#include "cuda/moe.h"
#include "cuda/operand.h"
#include "cuda/quantize.h"

namespace fp4lt::cuda {
namespace {

[[noreturn]] void refuse(const char* what) {
  throw UnsupportedError(
      concat(what,
             ": this build of fp4lt has no CUDA code; reinstall it where nvcc is "
             "found (or with -Ccmake.define.FP4LT_CUDA=ON, to see what is "
             "missing)"));
}

}  // namespace

std::string built_with() { return ""; }
std::string architectures() { return ""; }
std::string driver() { return ""; }
int device_count() { return 0; }
DeviceInfo device_info(int) { refuse("device_info"); }
void read_memory(int, const void*, int64_t, void*, Stream) { refuse("read_memory"); }

void quantize(int, const QuantizeArgs&, Stream) { refuse("quantize"); }
void dequantize(int, const DequantizeArgs&, Stream) { refuse("dequantize"); }
void tile_scales(int, const uint8_t*, int64_t, int64_t, int64_t, uint8_t*, Stream) {
  refuse("tile_scales");
}
void untile_scales(int, const uint8_t*, int64_t, int64_t, int64_t, uint8_t*, Stream) {
  refuse("untile_scales");
}
void prepare(int, const PrepareArgs&, Stream) { refuse("prepare"); }

void route(int, const RouteArgs&, Stream) { refuse("route"); }
void plan_blocks(int, const PlanArgs&, Stream) { refuse("plan_blocks"); }
void activate(int, const ActivationArgs&, Stream) { refuse("activate"); }
void combine(int, const CombineArgs&, Stream) { refuse("combine"); }
void scale_rows(int, const DenseView&, const float*, int64_t, int64_t, void*, Stream) {
  refuse("scale_rows");
}

const float* zero_and_one(int) { refuse("zero_and_one"); }
void finish_rows(int, const FinishArgs&, Stream) { refuse("finish_rows"); }
void put_integers(int, const int64_t*, int64_t, int*, Stream) { refuse("put_integers"); }
void locate_rows(int, const LocateArgs&, Stream) { refuse("locate_rows"); }
void clear_tiles(int, const int*, int64_t, int64_t, int64_t, uint8_t*, Stream) {
  refuse("clear_tiles");
}
void expand(int, const ExpandArgs&, Stream) { refuse("expand"); }

void fused_gemm(int, const FusedGemmArgs&, Stream) { refuse("fused_gemm"); }
int most_block_rows(int, RowForm) { return 64; }
bool can_gate(const FusedGemmArgs&) { return false; }
int64_t scratch_bytes(int, RowForm, int64_t, int) { return 0; }
bool can_wgmma(int, const Nvfp4View&, int64_t) { return false; }

}  // namespace fp4lt::cuda
