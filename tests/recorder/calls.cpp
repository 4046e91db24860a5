// SPDX-License-Identifier: Apache-2.0
// The calls of cuBLASLt that are recorded.  Each does what the real one does and writes a line.
#include <cstring>

#include "record.h"

#define EXPORT extern "C" __attribute__((visibility("default")))
// The real function, of the type of the one it stands in; 15 (NOT_SUPPORTED) where there is none.
#define CALL_REAL(name, ...)                                                        \
  [&] {                                                                             \
    static auto* function = reinterpret_cast<decltype(&name)>(record::real(#name)); \
    return function != nullptr ? function(__VA_ARGS__) : 15;                        \
  }()

using record::known;
using record::Line;
using record::made;

struct Algo {
  uint64_t data[8];
};
struct Result {
  Algo algo;
  size_t workspace_size;
  int state;
  float waves;
  int reserved[4];
};
struct Layouts {
  const void *a, *b, *c, *d;
};

namespace {

Line matmul_line(const char* call, const void* desc, const Layouts& layouts) {
  return Line(call)
      .number("desc", known(desc))
      .number("a", known(layouts.a))
      .number("b", known(layouts.b))
      .number("c", known(layouts.c))
      .number("d", known(layouts.d));
}

void write_set(const char* call, const void* object, int attribute, const void* value, size_t size,
               int status) {
  Line(call)
      .number("on", known(object))
      .number("attribute", attribute)
      .bytes("value", value, size)
      .number("status", status)
      .write();
}

void write_heuristic(const char* call, const void* desc, const Layouts& layouts,
                     const void* preference, int requested, const Result* results,
                     const int* returned, int status) {
  const int count = status == 0 && returned != nullptr ? *returned : 0;
  std::string list;
  for (int i = 0; i < count; ++i) {
    Line one("result");
    one.words("algo", results[i].algo.data, 8)
        .number("workspace", static_cast<long long>(results[i].workspace_size))
        .number("state", results[i].state)
        .real_number("waves", results[i].waves);
    list += (i ? ", " : "") + one.json();
  }
  matmul_line(call, desc, layouts)
      .number("preference", known(preference))
      .number("requested", requested)
      .number("returned", count)
      .number("status", status)
      .raw("results", "[" + list + "]")
      .write();
}

}  // namespace

EXPORT int cublasLtMatmulDescCreate(void** desc, int compute, int scale) {
  const int status = CALL_REAL(cublasLtMatmulDescCreate, desc, compute, scale);
  Line("MatmulDescCreate")
      .number("id", status == 0 ? made(*desc) : 0)
      .number("compute", compute)
      .number("scale", scale)
      .number("status", status)
      .write();
  return status;
}

EXPORT int cublasLtMatmulDescInit_internal(void* desc, size_t size, int compute, int scale) {
  const int status = CALL_REAL(cublasLtMatmulDescInit_internal, desc, size, compute, scale);
  Line("MatmulDescInit")
      .number("id", status == 0 ? made(desc) : 0)
      .number("compute", compute)
      .number("scale", scale)
      .number("size", static_cast<long long>(size))
      .number("status", status)
      .write();
  return status;
}

EXPORT int cublasLtMatmulDescSetAttribute(void* desc, int attribute, const void* value,
                                          size_t size) {
  const int status = CALL_REAL(cublasLtMatmulDescSetAttribute, desc, attribute, value, size);
  write_set("MatmulDescSetAttribute", desc, attribute, value, size, status);
  int32_t mode = 0;
  if (status == 0 && attribute == 2 && size == sizeof mode) {
    std::memcpy(&mode, value, size);
    record::set_pointer_mode(known(desc), mode);
  }
  return status;
}

EXPORT int cublasLtMatmulDescDestroy(void* desc) {
  const int id = known(desc);
  const int status = CALL_REAL(cublasLtMatmulDescDestroy, desc);
  Line("MatmulDescDestroy").number("on", id).number("status", status).write();
  return status;
}

EXPORT int cublasLtMatrixLayoutCreate(void** layout, int type, uint64_t rows, uint64_t cols,
                                      int64_t ld) {
  const int status = CALL_REAL(cublasLtMatrixLayoutCreate, layout, type, rows, cols, ld);
  Line("MatrixLayoutCreate")
      .number("id", status == 0 ? made(*layout) : 0)
      .number("type", type)
      .number("rows", static_cast<long long>(rows))
      .number("cols", static_cast<long long>(cols))
      .number("ld", ld)
      .number("status", status)
      .write();
  return status;
}

EXPORT int cublasLtMatrixLayoutInit_internal(void* layout, size_t size, int type, uint64_t rows,
                                             uint64_t cols, int64_t ld) {
  const int status =
      CALL_REAL(cublasLtMatrixLayoutInit_internal, layout, size, type, rows, cols, ld);
  Line("MatrixLayoutInit")
      .number("id", status == 0 ? made(layout) : 0)
      .number("type", type)
      .number("rows", static_cast<long long>(rows))
      .number("cols", static_cast<long long>(cols))
      .number("ld", ld)
      .number("size", static_cast<long long>(size))
      .number("status", status)
      .write();
  return status;
}

EXPORT int cublasLtGroupedMatrixLayoutCreate(void** layout, int type, int groups, const void* rows,
                                             const void* cols, const void* ld) {
  const int status =
      CALL_REAL(cublasLtGroupedMatrixLayoutCreate, layout, type, groups, rows, cols, ld);
  Line("GroupedMatrixLayoutCreate")
      .number("id", status == 0 ? made(*layout) : 0)
      .number("type", type)
      .number("groups", groups)
      .pointer("rows", rows)
      .pointer("cols", cols)
      .pointer("ld", ld)
      .number("status", status)
      .write();
  return status;
}

EXPORT int cublasLtGroupedMatrixLayoutInit_internal(void* layout, size_t size, int type, int groups,
                                                    const void* rows, const void* cols,
                                                    const void* ld) {
  const int status = CALL_REAL(cublasLtGroupedMatrixLayoutInit_internal, layout, size, type, groups,
                               rows, cols, ld);
  Line("GroupedMatrixLayoutInit")
      .number("id", status == 0 ? made(layout) : 0)
      .number("type", type)
      .number("groups", groups)
      .pointer("rows", rows)
      .pointer("cols", cols)
      .pointer("ld", ld)
      .number("size", static_cast<long long>(size))
      .number("status", status)
      .write();
  return status;
}

EXPORT int cublasLtMatrixLayoutSetAttribute(void* layout, int attribute, const void* value,
                                            size_t size) {
  const int status = CALL_REAL(cublasLtMatrixLayoutSetAttribute, layout, attribute, value, size);
  write_set("MatrixLayoutSetAttribute", layout, attribute, value, size, status);
  return status;
}

EXPORT int cublasLtMatrixLayoutDestroy(void* layout) {
  const int id = known(layout);
  const int status = CALL_REAL(cublasLtMatrixLayoutDestroy, layout);
  Line("MatrixLayoutDestroy").number("on", id).number("status", status).write();
  return status;
}

EXPORT int cublasLtMatmulPreferenceCreate(void** preference) {
  const int status = CALL_REAL(cublasLtMatmulPreferenceCreate, preference);
  Line("MatmulPreferenceCreate")
      .number("id", status == 0 ? made(*preference) : 0)
      .number("status", status)
      .write();
  return status;
}

EXPORT int cublasLtMatmulPreferenceInit_internal(void* preference, size_t size) {
  const int status = CALL_REAL(cublasLtMatmulPreferenceInit_internal, preference, size);
  Line("MatmulPreferenceInit")
      .number("id", status == 0 ? made(preference) : 0)
      .number("size", static_cast<long long>(size))
      .number("status", status)
      .write();
  return status;
}

EXPORT int cublasLtMatmulPreferenceSetAttribute(void* preference, int attribute, const void* value,
                                                size_t size) {
  const int status =
      CALL_REAL(cublasLtMatmulPreferenceSetAttribute, preference, attribute, value, size);
  write_set("MatmulPreferenceSetAttribute", preference, attribute, value, size, status);
  return status;
}

EXPORT int cublasLtMatmulPreferenceDestroy(void* preference) {
  const int id = known(preference);
  const int status = CALL_REAL(cublasLtMatmulPreferenceDestroy, preference);
  Line("MatmulPreferenceDestroy").number("on", id).number("status", status).write();
  return status;
}

EXPORT int cublasLtMatmulAlgoGetHeuristic(void* handle, void* desc, void* a, void* b, void* c,
                                          void* d, void* preference, int requested, Result* results,
                                          int* returned) {
  const int status = CALL_REAL(cublasLtMatmulAlgoGetHeuristic, handle, desc, a, b, c, d, preference,
                               requested, results, returned);
  write_heuristic("MatmulAlgoGetHeuristic", desc, {a, b, c, d}, preference, requested, results,
                  returned, status);
  return status;
}

EXPORT int cublasLtMatmulAlgoGetHeuristicForStream(void* handle, void* desc, void* a, void* b,
                                                   void* c, void* d, void* preference,
                                                   int requested, Result* results, int* returned,
                                                   void* stream) {
  const int status = CALL_REAL(cublasLtMatmulAlgoGetHeuristicForStream, handle, desc, a, b, c, d,
                               preference, requested, results, returned, stream);
  write_heuristic("MatmulAlgoGetHeuristicForStream", desc, {a, b, c, d}, preference, requested,
                  results, returned, status);
  return status;
}

EXPORT int cublasLtMatmulAlgoCheck(void* handle, void* desc, void* a, void* b, void* c, void* d,
                                   const Algo* algo, Result* result) {
  const int status = CALL_REAL(cublasLtMatmulAlgoCheck, handle, desc, a, b, c, d, algo, result);
  matmul_line("MatmulAlgoCheck", desc, {a, b, c, d})
      .words("algo", algo != nullptr ? algo->data : nullptr, 8)
      .number("status", status)
      .write();
  return status;
}

EXPORT int cublasLtMatmulAlgoConfigSetAttribute(Algo* algo, int attribute, const void* value,
                                                size_t size) {
  const int status = CALL_REAL(cublasLtMatmulAlgoConfigSetAttribute, algo, attribute, value, size);
  write_set("MatmulAlgoConfigSetAttribute", nullptr, attribute, value, size, status);
  return status;
}

EXPORT int cublasLtMatmul(void* handle, void* desc, const void* alpha, const void* a,
                          void* a_layout, const void* b, void* b_layout, const void* beta,
                          const void* c, void* c_layout, void* d, void* d_layout, const Algo* algo,
                          void* workspace, size_t workspace_size, void* stream) {
  const int status = CALL_REAL(cublasLtMatmul, handle, desc, alpha, a, a_layout, b, b_layout, beta,
                               c, c_layout, d, d_layout, algo, workspace, workspace_size, stream);
  Line line = matmul_line("Matmul", desc, {a_layout, b_layout, c_layout, d_layout});
  Line pointers("pointers");
  pointers.pointer("alpha", alpha).pointer("beta", beta).pointer("a", a).pointer("b", b);
  pointers.pointer("c", c).pointer("d", d).pointer("workspace", workspace);
  pointers.pointer("stream", stream);
  line.raw("pointers", pointers.json());
  if (record::scalars_on_host(known(desc)) && alpha != nullptr && beta != nullptr) {
    line.real_number("alpha", *static_cast<const float*>(alpha));
    line.real_number("beta", *static_cast<const float*>(beta));
  }
  line.words("algo", algo != nullptr ? algo->data : nullptr, 8)
      .number("workspace_size", static_cast<long long>(workspace_size))
      .number("status", status)
      .write();
  return status;
}
