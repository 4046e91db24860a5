// SPDX-License-Identifier: Apache-2.0
// The opaque objects: descriptors, layouts, preferences and the handle.
//
// They are plain data, as the real ones are, so that the Init calls can build them in memory of
// the documented size.  A magic word tells the kind and whether the object still lives; memory
// from a Create call is never handed back, so that use after Destroy is seen and not undefined.
#pragma once

#include <cstdint>

#include "abi.h"

namespace fake {

enum Magic : uint64_t {
  MAGIC_HANDLE = 0x656c646e6148746cULL,
  MAGIC_DESC = 0x63736544746c6246ULL,
  MAGIC_LAYOUT = 0x74756f79614c746cULL,
  MAGIC_SMALL_LAYOUT = 0x6c6c616d53746c46ULL,  // of 64 bytes
  MAGIC_PREFERENCE = 0x6665725061744c66ULL,
  MAGIC_DEAD = 0x6465796f72747344ULL,
};

struct Handle {
  uint64_t magic;
  int device;
};

struct Desc {
  uint64_t magic;
  const void* bias;
  int64_t bias_stride;
  const void* aux;
  int64_t aux_ld;
  int64_t aux_stride;
  int64_t alpha_vector_stride;
  const void* scale[4];  // of A, B, C, D
  const void* amax_d;
  const void* aux_scale;
  const void* aux_amax;
  const void* d_out_scale;
  const void* emulation;
  int64_t alpha_stride;
  int64_t beta_stride;
  int32_t compute_type;
  int32_t scale_type;
  int32_t pointer_mode;
  int32_t op_a;
  int32_t op_b;
  int32_t op_c;
  int32_t fill_mode;
  int32_t epilogue;
  int32_t sm_count;
  int32_t aux_type;
  int32_t bias_type;
  int32_t scale_mode[4];
  int32_t aux_scale_mode;
  int32_t d_out_scale_mode;
  int32_t batch_invariance;
  int8_t fast_accum;
};
static_assert(sizeof(Desc) <= 256, "cublasLtMatmulDescOpaque_t");

// The first 64 bytes are all that a plain layout needs: headers before 13.2 reserve no more.
struct Layout {
  uint64_t magic;
  uint64_t rows;
  uint64_t cols;
  int64_t ld;
  int64_t batch_offset;
  int64_t plane_offset;
  int32_t type;
  int32_t order;
  int32_t batch_count;
  int32_t batch_mode;
  const void* rows_array;
  const void* cols_array;
  const void* ld_array;
  int32_t rows_cols_width;
  int32_t ld_width;
};
constexpr size_t kPlainLayoutBytes = 64;
constexpr size_t kGroupedLayoutBytes = 112;
static_assert(offsetof(Layout, rows_array) == kPlainLayoutBytes, "plain layouts fit in 64 bytes");
static_assert(sizeof(Layout) <= kGroupedLayoutBytes, "cublasLtMatrixLayoutOpaque_t");

struct Preference {
  uint64_t magic;
  uint64_t max_workspace;
  uint64_t impl_mask;
  uint32_t search_mode;
  uint32_t reduction_mask;
  uint32_t alignment[4];  // of A, B, C, D
  float max_waves;
  int32_t has_averages;  // no, where Init got the 64 bytes of a header before 13.2
  int64_t average[3];    // reduction dimension, rows of D, columns of D
};
constexpr size_t kPlainPreferenceBytes = 64;
static_assert(offsetof(Preference, average) <= kPlainPreferenceBytes, "fits in 64 bytes");
static_assert(sizeof(Preference) <= 96, "cublasLtMatmulPreferenceOpaque_t");

// The living object behind a pointer of the caller's; refuses NULL, dead and foreign ones.
Handle& living_handle(void* handle);
Desc& living_desc(void* desc);
Layout& living_layout(void* layout, const char* name);
Preference& living_preference(void* preference);

bool is_grouped(const Layout& layout);

// Bytes of a layout that are there: Init may have been given 64.
size_t size_of(const Layout& layout);

}  // namespace fake
