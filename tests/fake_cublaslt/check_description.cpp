// SPDX-License-Identifier: Apache-2.0
// Types, operations, shapes and batch modes.
#include <cinttypes>

#include "problem.h"
#include "report.h"

namespace fake {
namespace {

struct TypeRow {
  int ab, c, d, bias;
  bool plain, grouped;  // in the table of plain matmuls, in that of grouped ones
};

// The documented tables for CUBLAS_COMPUTE_32F and CUDA_R_32F.  The grouped table has no FP4 row,
// but the list of scale modes beside it names FP4, and the release notes of 13.4.0 bring it.
constexpr TypeRow kTypes[] = {
    {R_4F_E2M1, R_16BF, R_16BF, R_16BF, true, true},
    {R_4F_E2M1, R_16BF, R_4F_E2M1, R_16BF, true, false},
    {R_4F_E2M1, R_16F, R_16F, R_16F, true, true},
    {R_4F_E2M1, R_16F, R_4F_E2M1, R_16F, true, false},
    {R_4F_E2M1, R_32F, R_32F, R_16BF, true, true},
    {R_16BF, R_16BF, R_16BF, R_16BF, true, true},
    {R_16BF, R_32F, R_32F, R_32F, true, false},
    {R_16BF, R_32F, R_32F, R_16BF, false, true},
    {R_16F, R_16F, R_16F, R_16F, true, true},
    {R_16F, R_32F, R_32F, R_32F, true, false},
    {R_16F, R_32F, R_32F, R_16BF, false, true},
};

const TypeRow* row_of(const Problem& p) {
  for (const TypeRow& row : kTypes) {
    const bool listed = p.grouped ? row.grouped : row.plain;
    if (listed && row.ab == p.a.type && row.ab == p.b.type && row.c == p.c.type &&
        row.d == p.d.type) {
      return &row;
    }
  }
  return nullptr;
}

void require_aligned(int64_t elements, int type, const char* name) {
  FAKE_REQUIRE(elements * element_bits(type) % 128 == 0, NOT_SUPPORTED,
               "%s = %" PRId64 " elements of %d bits are no multiple of 16 bytes", name, elements,
               element_bits(type));
}

void check_ld(const Layout& layout, const char* name, bool may_broadcast) {
  if (may_broadcast && layout.ld == 0) return;
  FAKE_REQUIRE(layout.ld >= 0 && static_cast<uint64_t>(layout.ld) >= layout.rows, INVALID_VALUE,
               "%s: ld %" PRId64 " is below its %" PRIu64 " rows", name, layout.ld, layout.rows);
}

}  // namespace

int element_bits(int type) {
  switch (type) {
    case R_4F_E2M1:
      return 4;
    case R_8F_E4M3:
      return 8;
    case R_16F:
    case R_16BF:
      return 16;
    default:
      return 32;
  }
}

int bias_type(const Problem& p) { return p.desc.bias_type == -1 ? p.d.type : p.desc.bias_type; }

void check_types(const Problem& p) {
  FAKE_REQUIRE(p.desc.compute_type == COMPUTE_32F, NOT_SUPPORTED,
               "compute type %d: CUBLAS_COMPUTE_32F (68) is needed", p.desc.compute_type);
  FAKE_REQUIRE(p.desc.scale_type == R_32F, NOT_SUPPORTED, "scale type %d: CUDA_R_32F (0) is needed",
               p.desc.scale_type);
  const TypeRow* row = row_of(p);
  FAKE_REQUIRE(row != nullptr, NOT_SUPPORTED,
               "A, B, C, D of types %d, %d, %d, %d are not in the %s table of types", p.a.type,
               p.b.type, p.c.type, p.d.type, p.grouped ? "grouped" : "plain");
  FAKE_REQUIRE(!has_bias(p.desc) || bias_type(p) == row->bias, NOT_SUPPORTED,
               "bias of type %d%s: these types take one of type %d", bias_type(p),
               p.desc.bias_type == -1 ? " (that of D, as BIAS_DATA_TYPE is not set)" : "",
               row->bias);
  FAKE_REQUIRE(p.d.type != R_4F_E2M1, NOT_SUPPORTED,
               "an FP4 D is documented, but this fake does not compute it");
}

void check_device(const Problem& p) {
  if (!p.nvfp4) return;
  const Pose posed = pose();
  FAKE_REQUIRE(posed.cc >= 100, NOT_SUPPORTED,
               "FP4 needs compute capability 10.0, the device has %d.%d", posed.cc / 10,
               posed.cc % 10);
  const int first = posed.cc >= 120 ? 120804 : posed.cc >= 110 ? 130000 : 120800;
  FAKE_REQUIRE(posed.version >= first, NOT_SUPPORTED,
               "FP4 on compute capability %d.%d needs version %d, this is %d", posed.cc / 10,
               posed.cc % 10, first, posed.version);
}

void check_operations(const Problem& p) {
  const Desc& desc = p.desc;
  FAKE_REQUIRE(desc.op_a >= 0 && desc.op_a <= 2 && desc.op_b >= 0 && desc.op_b <= 2, INVALID_VALUE,
               "TRANSA %d and TRANSB %d: 0, 1 or 2 are needed", desc.op_a, desc.op_b);
  FAKE_REQUIRE(!p.nvfp4 || (desc.op_a == OP_T && desc.op_b == OP_N), NOT_SUPPORTED,
               "FP4 needs A transposed and B not (TN); TRANSA is %d, TRANSB %d", desc.op_a,
               desc.op_b);
  FAKE_REQUIRE(desc.op_c == OP_N, NOT_SUPPORTED, "TRANSC %d: only 0 is supported", desc.op_c);
  FAKE_REQUIRE(desc.fill_mode == FILL_FULL, NOT_SUPPORTED, "FILL_MODE %d: only 2 is supported",
               desc.fill_mode);
  FAKE_REQUIRE(desc.pointer_mode == POINTER_HOST || desc.pointer_mode == POINTER_DEVICE,
               NOT_SUPPORTED,
               "POINTER_MODE %d: HOST (0) or DEVICE (1) are needed; vectors are undocumented "
               "for these types",
               desc.pointer_mode);
  FAKE_REQUIRE(desc.sm_count >= 0, INVALID_VALUE, "SM_COUNT_TARGET is %d", desc.sm_count);
  FAKE_REQUIRE(desc.fast_accum == 0 || desc.fast_accum == 1, INVALID_VALUE, "FAST_ACCUM is %d",
               desc.fast_accum);
  FAKE_REQUIRE(p.grouped || (desc.alpha_stride == 0 && desc.beta_stride == 0), NOT_SUPPORTED,
               "a batch stride of alpha or beta is for grouped matmuls only");
  FAKE_REQUIRE(desc.emulation == nullptr, NOT_SUPPORTED,
               "an emulation descriptor is for FP32 and FP64 only");
}

void check_shape(Problem& p) {
  const Layout* all[] = {&p.a, &p.b, &p.c, &p.d};
  const char* names[] = {"A", "B", "C", "D"};
  for (int i = 0; i < 4; ++i) {
    FAKE_REQUIRE(all[i]->order == ORDER_COL, NOT_SUPPORTED, "%s has order %d: column order (0)",
                 names[i], all[i]->order);
    FAKE_REQUIRE(all[i]->plane_offset == 0, NOT_SUPPORTED, "%s is planar-complex", names[i]);
    FAKE_REQUIRE(!is_grouped(*all[i]) || size_of(*all[i]) == sizeof(Layout), INVALID_VALUE,
                 "%s is grouped in a structure of 64 bytes", names[i]);
    FAKE_REQUIRE(is_grouped(*all[i]) == p.grouped, INVALID_VALUE,
                 "%s has batch mode %d, A has %d: all must be the same", names[i],
                 all[i]->batch_mode, p.a.batch_mode);
  }
  if (p.grouped) return;
  for (int i = 0; i < 4; ++i) {
    FAKE_REQUIRE(all[i]->batch_count == 1 && all[i]->batch_mode == BATCH_STRIDED, NOT_SUPPORTED,
                 "%s is a batch of %d in mode %d: this fake computes single matrices", names[i],
                 all[i]->batch_count, all[i]->batch_mode);
    FAKE_REQUIRE(all[i]->rows >= 1 && all[i]->cols >= 1, INVALID_VALUE,
                 "%s is %" PRIu64 " x %" PRIu64 ": an empty matrix is not to be called for",
                 names[i], all[i]->rows, all[i]->cols);
    FAKE_REQUIRE(all[i]->rows < (1ULL << 31) && all[i]->cols < (1ULL << 31), NOT_SUPPORTED,
                 "%s is %" PRIu64 " x %" PRIu64 ": beyond int32", names[i], all[i]->rows,
                 all[i]->cols);
    check_ld(*all[i], names[i], i == 2);
  }
  const bool a_transposed = p.desc.op_a != OP_N;
  const bool b_transposed = p.desc.op_b != OP_N;
  p.m = static_cast<int64_t>(a_transposed ? p.a.cols : p.a.rows);
  p.k = static_cast<int64_t>(a_transposed ? p.a.rows : p.a.cols);
  p.n = static_cast<int64_t>(b_transposed ? p.b.rows : p.b.cols);
  const auto inner = static_cast<int64_t>(b_transposed ? p.b.cols : p.b.rows);
  FAKE_REQUIRE(inner == p.k, INVALID_VALUE, "A has k = %" PRId64 ", B has %" PRId64, p.k, inner);
  for (int i = 2; i < 4; ++i) {
    const bool same =
        static_cast<int64_t>(all[i]->rows) == p.m && static_cast<int64_t>(all[i]->cols) == p.n;
    FAKE_REQUIRE(same, INVALID_VALUE,
                 "%s is %" PRIu64 " x %" PRIu64 ", A and B give %" PRId64 " x %" PRId64, names[i],
                 all[i]->rows, all[i]->cols, p.m, p.n);
  }
  if (!p.nvfp4) return;
  // "Pointers and matrix dimensions must support 16-byte alignment", with FP4 as half a byte;
  // n is the contiguous dimension of no matrix and so is free.
  require_aligned(p.k, p.a.type, "k");
  require_aligned(p.m, p.d.type, "m");
  require_aligned(p.a.ld, p.a.type, "A: ld");
  require_aligned(p.b.ld, p.b.type, "B: ld");
  require_aligned(p.c.ld, p.c.type, "C: ld");
  require_aligned(p.d.ld, p.d.type, "D: ld");
}

Problem describe(void* desc, void* a, void* b, void* c, void* d) {
  Problem p{};
  p.desc = living_desc(desc);
  const char* names[] = {"A's layout", "B's layout", "C's layout", "D's layout"};
  // A C layout left out is D's.
  void* given[] = {a, b, c == nullptr ? d : c, d};
  Layout* taken[] = {&p.a, &p.b, &p.c, &p.d};
  for (int i = 0; i < 4; ++i) {
    const Layout& layout = living_layout(given[i], names[i]);
    __builtin_memcpy(static_cast<void*>(taken[i]), &layout, size_of(layout));
  }
  p.grouped = is_grouped(p.a);
  p.nvfp4 = p.a.type == R_4F_E2M1 && p.b.type == R_4F_E2M1;
  check_types(p);
  check_operations(p);
  check_shape(p);
  check_scales(p);
  check_epilogue(p);
  if (p.grouped) check_grouped(p);
  // Last, as in the real library: on a device without FP4, wrong scales are told apart all the
  // same.
  check_device(p);
  return p;
}

}  // namespace fake
