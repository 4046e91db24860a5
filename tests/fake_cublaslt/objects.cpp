// SPDX-License-Identifier: Apache-2.0
#include "objects.h"

#include <cstring>

#include "device.h"
#include "report.h"

namespace fake {
namespace {

struct Attribute {
  int id;
  size_t offset;
  size_t size;
  int since;  // first version that knows it
};

#define FIELD(id, owner, field, since) {id, offsetof(owner, field), sizeof(owner::field), since}

constexpr Attribute kDescAttributes[] = {
    FIELD(DESC_COMPUTE_TYPE, Desc, compute_type, 0),
    FIELD(DESC_SCALE_TYPE, Desc, scale_type, 0),
    FIELD(DESC_POINTER_MODE, Desc, pointer_mode, 0),
    FIELD(DESC_TRANSA, Desc, op_a, 0),
    FIELD(DESC_TRANSB, Desc, op_b, 0),
    FIELD(DESC_TRANSC, Desc, op_c, 0),
    FIELD(DESC_FILL_MODE, Desc, fill_mode, 0),
    FIELD(DESC_EPILOGUE, Desc, epilogue, 0),
    FIELD(DESC_BIAS_POINTER, Desc, bias, 0),
    FIELD(DESC_BIAS_BATCH_STRIDE, Desc, bias_stride, 0),
    FIELD(DESC_AUX_POINTER, Desc, aux, 0),
    FIELD(DESC_AUX_LD, Desc, aux_ld, 0),
    FIELD(DESC_AUX_BATCH_STRIDE, Desc, aux_stride, 0),
    FIELD(DESC_ALPHA_VECTOR_BATCH_STRIDE, Desc, alpha_vector_stride, 0),
    FIELD(DESC_SM_COUNT_TARGET, Desc, sm_count, 0),
    FIELD(DESC_A_SCALE_POINTER, Desc, scale[0], 0),
    FIELD(DESC_B_SCALE_POINTER, Desc, scale[1], 0),
    FIELD(DESC_C_SCALE_POINTER, Desc, scale[2], 0),
    FIELD(DESC_D_SCALE_POINTER, Desc, scale[3], 0),
    FIELD(DESC_AMAX_D_POINTER, Desc, amax_d, 0),
    FIELD(DESC_AUX_DATA_TYPE, Desc, aux_type, 0),
    FIELD(DESC_AUX_SCALE_POINTER, Desc, aux_scale, 0),
    FIELD(DESC_AUX_AMAX_POINTER, Desc, aux_amax, 0),
    FIELD(DESC_FAST_ACCUM, Desc, fast_accum, 0),
    FIELD(DESC_BIAS_DATA_TYPE, Desc, bias_type, 0),
    FIELD(DESC_A_SCALE_MODE, Desc, scale_mode[0], 120800),
    FIELD(DESC_B_SCALE_MODE, Desc, scale_mode[1], 120800),
    FIELD(DESC_C_SCALE_MODE, Desc, scale_mode[2], 120800),
    FIELD(DESC_D_SCALE_MODE, Desc, scale_mode[3], 120800),
    FIELD(DESC_AUX_SCALE_MODE, Desc, aux_scale_mode, 120800),
    FIELD(DESC_D_OUT_SCALE_POINTER, Desc, d_out_scale, 120800),
    FIELD(DESC_D_OUT_SCALE_MODE, Desc, d_out_scale_mode, 120800),
    FIELD(DESC_EMULATION, Desc, emulation, 130100),
    FIELD(DESC_ALPHA_BATCH_STRIDE, Desc, alpha_stride, 130200),
    FIELD(DESC_BETA_BATCH_STRIDE, Desc, beta_stride, 130200),
    FIELD(DESC_BATCH_INVARIANCE, Desc, batch_invariance, 130802),
};

constexpr Attribute kLayoutAttributes[] = {
    FIELD(LAYOUT_TYPE, Layout, type, 0),
    FIELD(LAYOUT_ORDER, Layout, order, 0),
    FIELD(LAYOUT_ROWS, Layout, rows, 0),
    FIELD(LAYOUT_COLS, Layout, cols, 0),
    FIELD(LAYOUT_LD, Layout, ld, 0),
    FIELD(LAYOUT_BATCH_COUNT, Layout, batch_count, 0),
    FIELD(LAYOUT_BATCH_OFFSET, Layout, batch_offset, 0),
    FIELD(LAYOUT_PLANE_OFFSET, Layout, plane_offset, 0),
    FIELD(LAYOUT_BATCH_MODE, Layout, batch_mode, 0),
    FIELD(LAYOUT_ROWS_ARRAY, Layout, rows_array, 130200),
    FIELD(LAYOUT_COLS_ARRAY, Layout, cols_array, 130200),
    FIELD(LAYOUT_LD_ARRAY, Layout, ld_array, 130200),
    FIELD(LAYOUT_ROWS_COLS_WIDTH, Layout, rows_cols_width, 130200),
    FIELD(LAYOUT_LD_WIDTH, Layout, ld_width, 130200),
};

// The grouped averages are documented as uint32_t, but every library takes eight bytes.
constexpr Attribute kPreferenceAttributes[] = {
    FIELD(PREF_SEARCH_MODE, Preference, search_mode, 0),
    FIELD(PREF_MAX_WORKSPACE, Preference, max_workspace, 0),
    FIELD(PREF_REDUCTION_MASK, Preference, reduction_mask, 0),
    FIELD(PREF_ALIGNMENT_A, Preference, alignment[0], 0),
    FIELD(PREF_ALIGNMENT_B, Preference, alignment[1], 0),
    FIELD(PREF_ALIGNMENT_C, Preference, alignment[2], 0),
    FIELD(PREF_ALIGNMENT_D, Preference, alignment[3], 0),
    FIELD(PREF_MAX_WAVES, Preference, max_waves, 0),
    FIELD(PREF_IMPL_MASK, Preference, impl_mask, 0),
    FIELD(PREF_AVERAGE_REDUCTION, Preference, average[0], 130200),
    FIELD(PREF_AVERAGE_ROWS, Preference, average[1], 130200),
    FIELD(PREF_AVERAGE_COLS, Preference, average[2], 130200),
};
#undef FIELD

template <size_t count>
const Attribute& find(const Attribute (&table)[count], int id) {
  const int version = pose().version;
  for (const Attribute& entry : table) {
    if (entry.id != id) continue;
    FAKE_REQUIRE(version >= entry.since, INVALID_VALUE,
                 "attribute %d exists from version %d on, this is %d", id, entry.since, version);
    return entry;
  }
  refuse(INVALID_VALUE, "attribute %d is unknown", id);
}

void set(void* object, const Attribute& entry, const void* buffer, size_t size) {
  FAKE_REQUIRE(buffer != nullptr, INVALID_VALUE, "attribute %d: the buffer is NULL", entry.id);
  FAKE_REQUIRE(size == entry.size, INVALID_VALUE, "attribute %d: %zu bytes given, %zu needed",
               entry.id, size, entry.size);
  std::memcpy(static_cast<char*>(object) + entry.offset, buffer, size);
}

void get(const void* object, const Attribute& entry, void* buffer, size_t size, size_t* written) {
  if (size == 0) {
    FAKE_REQUIRE(written != nullptr, INVALID_VALUE,
                 "attribute %d: size 0 asks for the size, but sizeWritten is NULL", entry.id);
  } else {
    FAKE_REQUIRE(buffer != nullptr, INVALID_VALUE, "attribute %d: the buffer is NULL", entry.id);
    FAKE_REQUIRE(size == entry.size, INVALID_VALUE, "attribute %d: %zu bytes given, %zu needed",
                 entry.id, size, entry.size);
    std::memcpy(buffer, static_cast<const char*>(object) + entry.offset, size);
  }
  if (written != nullptr) *written = entry.size;
}

// A dead or foreign object is undefined behaviour in the real library; here it is a refusal.
template <class Object>
Object& living(void* pointer, uint64_t magic, int status, const char* name) {
  FAKE_REQUIRE(pointer != nullptr, status, "%s is NULL", name);
  auto* object = static_cast<Object*>(pointer);
  FAKE_REQUIRE(object->magic != MAGIC_DEAD, status, "%s is used after it was destroyed", name);
  FAKE_REQUIRE(object->magic == magic, status, "%s is no such object", name);
  return *object;
}

void fill(Desc& desc, int compute_type, int scale_type) {
  desc = Desc{};
  desc.magic = MAGIC_DESC;
  desc.compute_type = compute_type;
  desc.scale_type = scale_type;
  desc.fill_mode = FILL_FULL;
  desc.epilogue = EPILOGUE_DEFAULT;
  desc.aux_type = -1;
  desc.bias_type = -1;
  desc.batch_invariance = 0x8000;
}

void fill(Layout* layout, size_t size, int type, uint64_t rows, uint64_t cols, int64_t ld) {
  Layout plain{};
  const bool small = size < sizeof(Layout);
  plain.magic = small ? MAGIC_SMALL_LAYOUT : MAGIC_LAYOUT;
  plain.type = type;
  plain.rows = rows;
  plain.cols = cols;
  plain.ld = ld;
  plain.batch_count = 1;
  std::memcpy(static_cast<void*>(layout), &plain, small ? kPlainLayoutBytes : sizeof plain);
}

[[maybe_unused]] void fill_grouped(Layout& layout, int type, int groups, const void* rows,
                                   const void* cols, const void* ld) {
  FAKE_REQUIRE(pose().version >= 130200, NOT_SUPPORTED,
               "grouped layouts exist from 13.2.0 on, this is version %d", pose().version);
  layout = Layout{};
  layout.magic = MAGIC_LAYOUT;
  layout.type = type;
  layout.batch_count = groups;
  layout.batch_mode = BATCH_GROUPED;
  layout.rows_array = rows;
  layout.cols_array = cols;
  layout.ld_array = ld;
}

void fill(Preference* preference, bool with_averages) {
  Preference plain{};
  plain.magic = MAGIC_PREFERENCE;
  plain.impl_mask = ~uint64_t{0};
  plain.reduction_mask = kReductionMask;
  for (uint32_t& alignment : plain.alignment) alignment = 256;
  plain.has_averages = with_averages;
  std::memcpy(static_cast<void*>(preference), &plain,
              with_averages ? sizeof plain : offsetof(Preference, average));
}

// Attributes past the end of a structure are not there to be written or read.
void require_reach(const Layout& layout, int attribute) {
  FAKE_REQUIRE(attribute < LAYOUT_ROWS_ARRAY || size_of(layout) == sizeof(Layout), INVALID_VALUE,
               "attribute %d does not fit in a layout of 64 bytes", attribute);
}

void require_reach(const Preference& preference, int attribute) {
  FAKE_REQUIRE(attribute < PREF_AVERAGE_REDUCTION || preference.has_averages, INVALID_VALUE,
               "attribute %d does not fit in a preference of 64 bytes", attribute);
}

}  // namespace

Handle& living_handle(void* handle) {
  return living<Handle>(handle, MAGIC_HANDLE, NOT_INITIALIZED, "the handle");
}
Desc& living_desc(void* desc) {
  return living<Desc>(desc, MAGIC_DESC, INVALID_VALUE, "the matmul descriptor");
}
Layout& living_layout(void* layout, const char* name) {
  const bool small = layout != nullptr && static_cast<Layout*>(layout)->magic == MAGIC_SMALL_LAYOUT;
  return living<Layout>(layout, small ? MAGIC_SMALL_LAYOUT : MAGIC_LAYOUT, INVALID_VALUE, name);
}
Preference& living_preference(void* preference) {
  return living<Preference>(preference, MAGIC_PREFERENCE, INVALID_VALUE, "the preference");
}
bool is_grouped(const Layout& layout) { return layout.batch_mode == BATCH_GROUPED; }
size_t size_of(const Layout& layout) {
  return layout.magic == MAGIC_SMALL_LAYOUT ? kPlainLayoutBytes : sizeof(Layout);
}

}  // namespace fake

using namespace fake;

FAKE_API int cublasLtCreate(void** handle) {
  return guard("cublasLtCreate", [&] {
    FAKE_REQUIRE(handle != nullptr, INVALID_VALUE, "the handle's address is NULL");
    device::start();
    *handle = new Handle{MAGIC_HANDLE, device::current()};
  });
}

FAKE_API int cublasLtDestroy(void* handle) {
  return guard("cublasLtDestroy", [&] { living_handle(handle).magic = MAGIC_DEAD; });
}

FAKE_API int cublasLtMatmulDescCreate(void** desc, int compute_type, int scale_type) {
  return guard("cublasLtMatmulDescCreate", [&] {
    FAKE_REQUIRE(desc != nullptr, INVALID_VALUE, "the descriptor's address is NULL");
    auto* made = new Desc;
    fill(*made, compute_type, scale_type);
    *desc = made;
  });
}

FAKE_API int cublasLtMatmulDescInit_internal(void* desc, size_t size, int compute_type,
                                             int scale_type) {
  return guard("cublasLtMatmulDescInit", [&] {
    FAKE_REQUIRE(desc != nullptr, INVALID_VALUE, "the descriptor is NULL");
    FAKE_REQUIRE(size >= sizeof(Desc), ALLOC_FAILED, "%zu bytes are too few", size);
    fill(*static_cast<Desc*>(desc), compute_type, scale_type);
  });
}

FAKE_API int cublasLtMatmulDescDestroy(void* desc) {
  return guard("cublasLtMatmulDescDestroy", [&] { living_desc(desc).magic = MAGIC_DEAD; });
}

FAKE_API int cublasLtMatmulDescSetAttribute(void* desc, int attribute, const void* buffer,
                                            size_t size) {
  return guard("cublasLtMatmulDescSetAttribute",
               [&] { set(&living_desc(desc), find(kDescAttributes, attribute), buffer, size); });
}

FAKE_API int cublasLtMatmulDescGetAttribute(void* desc, int attribute, void* buffer, size_t size,
                                            size_t* written) {
  return guard("cublasLtMatmulDescGetAttribute", [&] {
    get(&living_desc(desc), find(kDescAttributes, attribute), buffer, size, written);
  });
}

FAKE_API int cublasLtMatrixLayoutCreate(void** layout, int type, uint64_t rows, uint64_t cols,
                                        int64_t ld) {
  return guard("cublasLtMatrixLayoutCreate", [&] {
    FAKE_REQUIRE(layout != nullptr, INVALID_VALUE, "the layout's address is NULL");
    auto* made = new Layout{};
    fill(made, sizeof *made, type, rows, cols, ld);
    *layout = made;
  });
}

FAKE_API int cublasLtMatrixLayoutInit_internal(void* layout, size_t size, int type, uint64_t rows,
                                               uint64_t cols, int64_t ld) {
  return guard("cublasLtMatrixLayoutInit", [&] {
    FAKE_REQUIRE(layout != nullptr, INVALID_VALUE, "the layout is NULL");
    FAKE_REQUIRE(size >= kPlainLayoutBytes, ALLOC_FAILED, "%zu bytes are too few", size);
    fill(static_cast<Layout*>(layout), size, type, rows, cols, ld);
  });
}

FAKE_API int cublasLtMatrixLayoutDestroy(void* layout) {
  return guard("cublasLtMatrixLayoutDestroy",
               [&] { living_layout(layout, "the layout").magic = MAGIC_DEAD; });
}

FAKE_API int cublasLtMatrixLayoutSetAttribute(void* layout, int attribute, const void* buffer,
                                              size_t size) {
  return guard("cublasLtMatrixLayoutSetAttribute", [&] {
    Layout& object = living_layout(layout, "the layout");
    const Attribute& entry = find(kLayoutAttributes, attribute);
    require_reach(object, attribute);
    set(&object, entry, buffer, size);
  });
}

FAKE_API int cublasLtMatrixLayoutGetAttribute(void* layout, int attribute, void* buffer,
                                              size_t size, size_t* written) {
  return guard("cublasLtMatrixLayoutGetAttribute", [&] {
    const Layout& object = living_layout(layout, "the layout");
    const Attribute& entry = find(kLayoutAttributes, attribute);
    require_reach(object, attribute);
    get(&object, entry, buffer, size, written);
  });
}

// A build that poses as a library before 13.2 for good leaves these symbols out.
#ifndef FAKE_CUBLASLT_NO_GROUPED
FAKE_API int cublasLtGroupedMatrixLayoutCreate(void** layout, int type, int groups,
                                               const void* rows, const void* cols, const void* ld) {
  return guard("cublasLtGroupedMatrixLayoutCreate", [&] {
    FAKE_REQUIRE(layout != nullptr, INVALID_VALUE, "the layout's address is NULL");
    Layout made;
    fill_grouped(made, type, groups, rows, cols, ld);
    *layout = new Layout(made);
  });
}

FAKE_API int cublasLtGroupedMatrixLayoutInit_internal(void* layout, size_t size, int type,
                                                      int groups, const void* rows,
                                                      const void* cols, const void* ld) {
  return guard("cublasLtGroupedMatrixLayoutInit", [&] {
    FAKE_REQUIRE(layout != nullptr, INVALID_VALUE, "the layout is NULL");
    FAKE_REQUIRE(size >= kGroupedLayoutBytes, ALLOC_FAILED, "%zu bytes given, %zu needed", size,
                 kGroupedLayoutBytes);
    fill_grouped(*static_cast<Layout*>(layout), type, groups, rows, cols, ld);
  });
}
#endif

FAKE_API int cublasLtMatmulPreferenceCreate(void** preference) {
  return guard("cublasLtMatmulPreferenceCreate", [&] {
    FAKE_REQUIRE(preference != nullptr, INVALID_VALUE, "the preference's address is NULL");
    auto* made = new Preference;
    fill(made, true);
    *preference = made;
  });
}

FAKE_API int cublasLtMatmulPreferenceInit_internal(void* preference, size_t size) {
  return guard("cublasLtMatmulPreferenceInit", [&] {
    FAKE_REQUIRE(preference != nullptr, INVALID_VALUE, "the preference is NULL");
    FAKE_REQUIRE(size >= kPlainPreferenceBytes, ALLOC_FAILED, "%zu bytes are too few", size);
    fill(static_cast<Preference*>(preference), size >= sizeof(Preference));
  });
}

FAKE_API int cublasLtMatmulPreferenceDestroy(void* preference) {
  return guard("cublasLtMatmulPreferenceDestroy",
               [&] { living_preference(preference).magic = MAGIC_DEAD; });
}

FAKE_API int cublasLtMatmulPreferenceSetAttribute(void* preference, int attribute,
                                                  const void* buffer, size_t size) {
  return guard("cublasLtMatmulPreferenceSetAttribute", [&] {
    Preference& object = living_preference(preference);
    const Attribute& entry = find(kPreferenceAttributes, attribute);
    require_reach(object, attribute);
    set(&object, entry, buffer, size);
  });
}

FAKE_API int cublasLtMatmulPreferenceGetAttribute(void* preference, int attribute, void* buffer,
                                                  size_t size, size_t* written) {
  return guard("cublasLtMatmulPreferenceGetAttribute", [&] {
    const Preference& object = living_preference(preference);
    const Attribute& entry = find(kPreferenceAttributes, attribute);
    require_reach(object, attribute);
    get(&object, entry, buffer, size, written);
  });
}
