// SPDX-License-Identifier: Apache-2.0
// cublasLtMatmul: the rules that need pointers, then the launch.
#include <atomic>
#include <cinttypes>

#include "algorithms.h"
#include "device.h"
#include "report.h"

namespace fake {
namespace {

std::atomic<uint64_t> tickets{0};

struct Call {
  const void* alpha;
  const void* a;
  const void* b;
  const void* beta;
  const void* c;
  void* d;
  const Algo* algo;
  void* workspace;
  size_t workspace_bytes;
  void* stream;
};

void require_device_memory(const void* pointer, const char* name) {
  FAKE_REQUIRE(device::device_reads(pointer), INVALID_VALUE, "%s (%p) is not device memory", name,
               pointer);
}

// Data that an earlier matmul found broken is told by the next call, once.
void tell_violations() {
  static const char* const kWhat[VIOLATION_KINDS] = {
      "bytes of A's scale padding that are not zero",
      "bytes of B's scale padding that are not zero",
      "signed scale bytes (from 0x80 on) of A",
      "signed scale bytes (from 0x80 on) of B",
      "groups whose sizes disagree or are not multiples of 16 bytes",
      "groups with a pointer that is NULL or not aligned to 16 bytes",
      "matmuls whose workspace another one wrote to meanwhile",
  };
  Violations& all = device::violations();
  std::string text;
  for (int kind = 0; kind < VIOLATION_KINDS; ++kind) {
    const unsigned long long found = __atomic_exchange_n(&all.counts[kind], 0, __ATOMIC_RELAXED);
    if (found == 0) continue;
    text += (text.empty() ? "" : "; ") + std::to_string(found) + " " + kWhat[kind];
  }
  FAKE_REQUIRE(text.empty(), EXECUTION_FAILED, "earlier matmuls read %s", text.c_str());
}

void check_scalars(const Problem& p, const Call& call) {
  for (const void* scalar : {call.alpha, call.beta}) {
    FAKE_REQUIRE(scalar != nullptr, INVALID_VALUE, "alpha or beta is NULL");
    if (p.desc.pointer_mode == POINTER_HOST) {
      FAKE_REQUIRE(device::host_reads(scalar), INVALID_VALUE,
                   "alpha or beta is device memory, but POINTER_MODE is HOST");
    } else {
      require_device_memory(scalar, "alpha or beta (POINTER_MODE is DEVICE)");
    }
    FAKE_REQUIRE(reinterpret_cast<uintptr_t>(scalar) % 4 == 0, INVALID_VALUE,
                 "alpha or beta is not aligned to 4 bytes");
  }
}

bool beta_is_host_zero(const Problem& p, const Call& call) {
  return p.desc.pointer_mode == POINTER_HOST && *static_cast<const float*>(call.beta) == 0.0F;
}

void check_matrices(const Problem& p, const Call& call, const Algo& algo) {
  uint32_t promised[4];
  promised_alignment(algo, promised);
  const void* all[] = {call.a, call.b, call.c, call.d};
  const Layout* layouts[] = {&p.a, &p.b, &p.c, &p.d};
  for (int i = 0; i < 4; ++i) {
    const char name[] = {"ABCD"[i], '\0'};
    if (i == 2 && call.c == nullptr && beta_is_host_zero(p, call)) continue;
    FAKE_REQUIRE(all[i] != nullptr, INVALID_VALUE, "%s is NULL", name);
    require_device_memory(all[i], name);
    const auto address = reinterpret_cast<uintptr_t>(all[i]);
    const auto element = static_cast<uint32_t>(element_bits(layouts[i]->type)) / 8;
    const uint32_t needed = p.grouped ? 8 : p.nvfp4 ? 16 : element;
    FAKE_REQUIRE(address % needed == 0, INVALID_VALUE, "%s (%p) is not aligned to %u bytes", name,
                 all[i], needed);
    FAKE_REQUIRE(p.grouped || address % promised[i] == 0, INVALID_VALUE,
                 "%s (%p) is not aligned to %u bytes, as the preference promised when the "
                 "algorithm was chosen (MIN_ALIGNMENT_%s_BYTES)",
                 name, all[i], promised[i], name);
  }
}

bool same_layout(const Layout& x, const Layout& y) {
  return x.type == y.type && x.order == y.order && x.rows == y.rows && x.cols == y.cols &&
         x.ld == y.ld && x.batch_count == y.batch_count && x.batch_offset == y.batch_offset &&
         x.rows_array == y.rows_array && x.cols_array == y.cols_array && x.ld_array == y.ld_array;
}

struct Range {
  uintptr_t first, last;
};

Range range_of(const void* pointer, int64_t bytes) {
  const auto first = reinterpret_cast<uintptr_t>(pointer);
  return {first, first + static_cast<uintptr_t>(bytes)};
}

Range range_of(const void* pointer, const Layout& layout) {
  const auto columns = static_cast<int64_t>(layout.cols) - 1;
  const int64_t elements = layout.ld * columns + static_cast<int64_t>(layout.rows);
  return range_of(pointer, elements * element_bits(layout.type) / 8);
}

void require_apart(const Range& x, const Range& y, const char* what) {
  FAKE_REQUIRE(x.last <= y.first || y.last <= x.first, INVALID_VALUE, "%s overlap", what);
}

void check_places(const Problem& p, const Call& call) {
  FAKE_REQUIRE(call.c != call.d || same_layout(p.c, p.d), INVALID_VALUE,
               "C is D, but their layouts differ");
  if (p.grouped) return;
  const Range d = range_of(call.d, p.d);
  require_apart(d, range_of(call.a, p.a), "D and A");
  require_apart(d, range_of(call.b, p.b), "D and B");
  if (call.c != call.d && call.c != nullptr && !beta_is_host_zero(p, call)) {
    // A dummy C of another matrix is read only where beta is not zero; D must not be under it.
    require_apart(d, range_of(call.c, p.c), "D and C");
  }
  if (p.nvfp4) {
    require_apart(d, range_of(p.desc.scale[0], scale_count(p.m, p.k)), "D and A's scales");
    require_apart(d, range_of(p.desc.scale[1], scale_count(p.n, p.k)), "D and B's scales");
  }
  if (call.workspace == nullptr) return;
  const Range workspace = range_of(call.workspace, static_cast<int64_t>(call.workspace_bytes));
  require_apart(workspace, d, "the workspace and D");
  require_apart(workspace, range_of(call.a, p.a), "the workspace and A");
  require_apart(workspace, range_of(call.b, p.b), "the workspace and B");
}

void check_workspace(const Problem& p, const Call& call, const Config& config) {
  const size_t needed = workspace_needed(config, p);
  FAKE_REQUIRE(call.workspace_bytes >= needed, INVALID_VALUE,
               "a workspace of %zu bytes, the algorithm needs %zu", call.workspace_bytes, needed);
  FAKE_REQUIRE(call.workspace != nullptr || call.workspace_bytes == 0, INVALID_VALUE,
               "the workspace is NULL, its size %zu", call.workspace_bytes);
  if (call.workspace != nullptr) {
    require_device_memory(call.workspace, "the workspace");
    FAKE_REQUIRE(reinterpret_cast<uintptr_t>(call.workspace) % 256 == 0, INVALID_VALUE,
                 "the workspace (%p) is not aligned to 256 bytes", call.workspace);
  }
  // Without one the real library may allocate, which some graphs cannot hold.
  FAKE_REQUIRE(call.workspace != nullptr || !device::capturing(call.stream), INVALID_VALUE,
               "a captured matmul needs a workspace of the caller's");
}

Operand operand(const void* data, const void* scales, const Layout& x, int op) {
  return {data,
          scales,
          x.type,
          op != OP_N,
          static_cast<int64_t>(x.rows),
          static_cast<int64_t>(x.cols),
          x.ld,
          {x.rows_array, x.rows_cols_width},
          {x.cols_array, x.rows_cols_width},
          {x.ld_array, x.ld_width}};
}

Matmul matmul_of(const Problem& p, const Call& call, bool uses_workspace) {
  const Desc& desc = p.desc;
  Matmul m{};
  m.a = operand(call.a, desc.scale[0], p.a, desc.op_a);
  m.b = operand(call.b, desc.scale[1], p.b, desc.op_b);
  m.c = operand(call.c, nullptr, p.c, OP_N);
  m.d = operand(call.d, nullptr, p.d, OP_N);
  m.groups = p.grouped ? p.a.batch_count : 0;
  m.host_scalars = desc.pointer_mode == POINTER_HOST;
  if (m.host_scalars != 0) {
    m.alpha_value = *static_cast<const float*>(call.alpha);
    m.beta_value = *static_cast<const float*>(call.beta);
  } else {
    m.alpha = static_cast<const float*>(call.alpha);
    m.beta = static_cast<const float*>(call.beta);
    m.alpha_stride = static_cast<int>(desc.alpha_stride);
    m.beta_stride = static_cast<int>(desc.beta_stride);
  }
  m.bias = has_bias(desc) ? desc.bias : nullptr;
  m.bias_type = bias_type(p);
  m.relu = has_relu(desc);
  m.workspace = uses_workspace ? static_cast<uint64_t*>(call.workspace) : nullptr;
  m.ticket = ++tickets;
  m.violations = &device::violations();
  return m;
}

void run(void* handle, void* desc, void* a, void* b, void* c, void* d, const Call& call) {
  const Handle& on = living_handle(handle);
  tell_violations();
  const Problem p = describe(desc, a, b, c, d);
  check_scalars(p, call);
  const Algo algo = call.algo != nullptr ? *call.algo : implicit_algorithm(p, call.workspace_bytes);
  require_belongs(algo, p);
  check_matrices(p, call, algo);
  check_places(p, call);
  const Config config = config_of(algo);
  check_workspace(p, call, config);
  if (p.nvfp4) {
    require_device_memory(p.desc.scale[0], "A's scale pointer");
    require_device_memory(p.desc.scale[1], "B's scale pointer");
  }
  if (has_bias(p.desc)) {
    FAKE_REQUIRE(p.desc.bias != nullptr, INVALID_VALUE, "the epilogue adds a bias: it is NULL");
    require_device_memory(p.desc.bias, "the bias");
  }
  device::launch(matmul_of(p, call, workspace_needed(config, p) > 0), on.device, call.stream);
}

std::atomic<uint64_t> done{0};

}  // namespace
}  // namespace fake

using namespace fake;

FAKE_API int cublasLtMatmul(void* handle, void* desc, const void* alpha, const void* a,
                            void* a_desc, const void* b, void* b_desc, const void* beta,
                            const void* c, void* c_desc, void* d, void* d_desc, const Algo* algo,
                            void* workspace, size_t workspace_bytes, void* stream) {
  return guard("cublasLtMatmul", [&] {
    run(handle, desc, a_desc, b_desc, c_desc, d_desc,
        {alpha, a, b, beta, c, d, algo, workspace, workspace_bytes, stream});
    ++done;
  });
}

// Waits for the device and says what matmuls found in their data: 0, or 13 and a reason.
FAKE_API int fake_check() {
  return guard("fake_check", [] {
    device::start();
    device::synchronize();
    tell_violations();
  });
}

// Matmuls that were queued since the library was loaded.
FAKE_API uint64_t fake_matmuls() { return done; }
