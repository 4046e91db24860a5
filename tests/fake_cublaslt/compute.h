// SPDX-License-Identifier: Apache-2.0
// The arithmetic, from raw bytes, in one place for host and device.  Slow and simple on purpose.
#pragma once

#include <math.h>
#include <string.h>

#include <cstdint>

#include "abi.h"

#ifdef __CUDACC__
#define FAKE_HD __host__ __device__ inline
#else
#define FAKE_HD inline
#endif

namespace fake {

// What is wrong with data that only the device sees, counted while it is read.
enum Violation {
  A_PADDING,  // a scale byte outside the matrix is not zero
  B_PADDING,
  A_SIGN,  // a scale byte from 0x80 on: UE4M3 has no sign
  B_SIGN,
  GROUP_SHAPE,    // sizes of a group disagree, are negative or not multiples of 16 bytes
  GROUP_POINTER,  // a pointer of a group is NULL or not aligned
  WORKSPACE,      // two matmuls in flight shared one workspace
  VIOLATION_KINDS,
};
struct Violations {
  unsigned long long counts[VIOLATION_KINDS];
};

// An array of integers of either width, of a grouped layout.
struct Sizes {
  const void* data;
  int width;
};

struct Operand {
  const void* data;    // of one matrix, or of an array of pointers
  const void* scales;  // the same, NULL without
  int type;
  int transposed;
  int64_t rows, cols, ld;
  Sizes rows_array, cols_array, ld_array;
};

struct Matmul {
  Operand a, b, c, d;
  int groups;          // 0 for a plain matmul
  const float* alpha;  // device pointers; an array of pointers where its stride is 1
  const float* beta;
  int alpha_stride, beta_stride;
  int host_scalars;  // alpha and beta are the values below
  float alpha_value, beta_value;
  const void* bias;
  int bias_type;
  int relu;
  uint64_t* workspace;
  uint64_t ticket;  // written to the workspace to see who shares it
  Violations* violations;
};

// One group with everything looked up.
struct Group {
  int64_t m, n, k, lda, ldb, ldc, ldd;
  const uint8_t *a, *b, *a_scales, *b_scales;
  const uint8_t *c, *bias;
  uint8_t* d;
  float alpha, beta;
  bool shape_ok, pointers_ok;
};

FAKE_HD int64_t at(const Sizes& sizes, int i) {
  return sizes.width == WIDTH_64 ? static_cast<const int64_t*>(sizes.data)[i]
                                 : static_cast<const int32_t*>(sizes.data)[i];
}

FAKE_HD const uint8_t* pointer_of(const void* array, int i) {
  return static_cast<const uint8_t*>(static_cast<const void* const*>(array)[i]);
}

FAKE_HD bool aligned16(const void* pointer) {
  return (reinterpret_cast<uintptr_t>(pointer) & 15) == 0;
}

FAKE_HD int bits_of(int type) { return type == R_4F_E2M1 ? 4 : type == R_32F ? 32 : 16; }

FAKE_HD bool multiple_of_16_bytes(int64_t elements, int type) {
  return elements * bits_of(type) % 128 == 0;
}

struct Extent {
  int64_t rows, cols, ld;
};
FAKE_HD Extent extent_of(const Operand& x, int i, bool grouped) {
  if (!grouped) return {x.rows, x.cols, x.ld};
  return {at(x.rows_array, i), at(x.cols_array, i), at(x.ld_array, i)};
}

// In a plain matmul the host has checked all this already.
FAKE_HD void check_group_shape(const Matmul& p, const Extent (&e)[4], Group& g) {
  const int64_t inner = p.b.transposed ? e[1].cols : e[1].rows;
  g.shape_ok = g.m >= 0 && g.n >= 0 && g.k >= 0 && inner == g.k;
  for (const Extent& x : e) g.shape_ok = g.shape_ok && x.ld >= x.rows;
  for (int i = 2; i < 4; ++i) {
    g.shape_ok = g.shape_ok && e[i].rows == g.m && e[i].cols == g.n;
  }
  g.shape_ok =
      g.shape_ok && multiple_of_16_bytes(e[0].ld, p.a.type) &&
      multiple_of_16_bytes(e[1].ld, p.b.type) && multiple_of_16_bytes(e[2].ld, p.c.type) &&
      multiple_of_16_bytes(e[3].ld, p.d.type) && multiple_of_16_bytes(e[0].rows, p.a.type) &&
      multiple_of_16_bytes(e[1].rows, p.b.type) && multiple_of_16_bytes(e[3].rows, p.d.type);
}

FAKE_HD void check_group_pointers(const Matmul& p, Group& g) {
  // An empty group is not read, so its pointers are free.
  if (g.m == 0 || g.n == 0) return;
  g.pointers_ok = g.d != nullptr && aligned16(g.d) && aligned16(g.c) && aligned16(g.a) &&
                  aligned16(g.b) && aligned16(g.a_scales) && aligned16(g.b_scales);
  if (g.k > 0) {
    g.pointers_ok = g.pointers_ok && g.a != nullptr && g.b != nullptr &&
                    (p.a.scales == nullptr || (g.a_scales != nullptr && g.b_scales != nullptr));
  }
  if (p.bias != nullptr) g.pointers_ok = g.pointers_ok && g.bias != nullptr;
  if (g.beta != 0.0F) g.pointers_ok = g.pointers_ok && g.c != nullptr;
}

FAKE_HD float scalar_of(const float* values, int stride, int i) {
  if (stride == 0) return *values;
  const float* own = reinterpret_cast<const float* const*>(values)[i];
  return own == nullptr ? NAN : *own;
}

FAKE_HD Group group_of(const Matmul& p, int i) {
  const bool grouped = p.groups > 0;
  const Extent e[4] = {extent_of(p.a, i, grouped), extent_of(p.b, i, grouped),
                       extent_of(p.c, i, grouped), extent_of(p.d, i, grouped)};
  Group g{};
  g.m = p.a.transposed ? e[0].cols : e[0].rows;
  g.k = p.a.transposed ? e[0].rows : e[0].cols;
  g.n = p.b.transposed ? e[1].rows : e[1].cols;
  g.lda = e[0].ld;
  g.ldb = e[1].ld;
  g.ldc = e[2].ld;
  g.ldd = e[3].ld;
  const void* given[] = {p.a.data, p.b.data, p.c.data, p.d.data, p.a.scales, p.b.scales, p.bias};
  const uint8_t* own[7];
  for (int j = 0; j < 7; ++j) {
    own[j] = grouped && given[j] != nullptr ? pointer_of(given[j], i)
                                            : static_cast<const uint8_t*>(given[j]);
  }
  g.a = own[0];
  g.b = own[1];
  g.c = own[2];
  g.d = const_cast<uint8_t*>(own[3]);
  g.a_scales = own[4];
  g.b_scales = own[5];
  g.bias = own[6];
  g.alpha = p.host_scalars ? p.alpha_value : scalar_of(p.alpha, p.alpha_stride, i);
  g.beta = p.host_scalars ? p.beta_value : scalar_of(p.beta, p.beta_stride, i);
  g.shape_ok = g.pointers_ok = true;
  if (grouped) {
    check_group_shape(p, e, g);
    check_group_pointers(p, g);
  }
  return g;
}

// Values -----------------------------------------------------------------------------------------

// Twice the value of an e2m1 code, an integer.
FAKE_HD int twice_e2m1(int code) {
  const int magnitude = code & 7;
  const int twice = magnitude < 4 ? magnitude : magnitude == 7 ? 12 : 2 * magnitude - 4;
  return (code & 8) != 0 ? -twice : twice;
}

FAKE_HD double e4m3(uint8_t byte) {
  if ((byte & 0x7f) == 0x7f) return NAN;
  const int exponent = byte >> 3 & 15;
  const int mantissa = byte & 7;
  const double magnitude = exponent == 0 ? ldexp(static_cast<double>(mantissa), -9)
                                         : ldexp(8.0 + mantissa, exponent - 10);
  return (byte & 0x80) != 0 ? -magnitude : magnitude;
}

FAKE_HD float float_of_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

FAKE_HD double load(const uint8_t* data, int64_t i, int type) {
  if (type == R_32F) return reinterpret_cast<const float*>(data)[i];
  const uint16_t half = reinterpret_cast<const uint16_t*>(data)[i];
  if (type == R_16BF) return float_of_bits(static_cast<uint32_t>(half) << 16);
  const int exponent = half >> 10 & 31;
  const int mantissa = half & 1023;
  double magnitude = ldexp(1024.0 + mantissa, exponent - 25);
  if (exponent == 0) magnitude = ldexp(static_cast<double>(mantissa), -24);
  if (exponent == 31) magnitude = mantissa != 0 ? NAN : INFINITY;
  return (half & 0x8000) != 0 ? -magnitude : magnitude;
}

// Rounds once, to nearest even, to `bits` significant bits and exponents from `lowest`.
FAKE_HD double round_to(double x, int bits, int lowest, double largest) {
  if (!isfinite(x) || x == 0.0) return x;
  int exponent;
  frexp(x, &exponent);
  const int step = (exponent - 1 < lowest ? lowest : exponent - 1) - (bits - 1);
  const double rounded = ldexp(rint(ldexp(x, -step)), step);
  return fabs(rounded) > largest ? copysign(INFINITY, x) : rounded;
}

FAKE_HD void store(uint8_t* data, int64_t i, int type, double x) {
  if (type == R_32F) {
    reinterpret_cast<float*>(data)[i] = static_cast<float>(x);
    return;
  }
  auto* out = reinterpret_cast<uint16_t*>(data) + i;
  if (isnan(x)) {
    *out = type == R_16BF ? 0x7fc0 : 0x7e00;
  } else if (type == R_16BF) {
    const auto value = static_cast<float>(round_to(x, 8, -126, 3.3895313892515355e38));
    uint32_t word;
    memcpy(&word, &value, sizeof word);
    *out = static_cast<uint16_t>(word >> 16);
  } else {
    const double value = round_to(x, 11, -14, 65504.0);
    const uint16_t sign = signbit(x) ? 0x8000 : 0;
    const double magnitude = fabs(value);
    uint32_t code = 0x7c00;
    if (magnitude < ldexp(1.0, -14)) {
      code = static_cast<uint32_t>(ldexp(magnitude, 24));
    } else if (isfinite(magnitude)) {
      int exponent;
      const double fraction = frexp(magnitude, &exponent);
      code = static_cast<uint32_t>((exponent + 14) << 10) +
             static_cast<uint32_t>(ldexp(fraction, 11)) - 1024;
    }
    *out = static_cast<uint16_t>(sign | code);
  }
}

// Scale tiles of 128 rows by 4 blocks of 16 ------------------------------------------------------

FAKE_HD int64_t up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

FAKE_HD int64_t scale_offset(int64_t row, int64_t block, int64_t k) {
  const int64_t blocks = up((k + 15) / 16, 4);
  return (row / 128 * blocks + block / 4 * 4) * 128 + row % 32 * 16 + row % 128 / 32 * 4 +
         block % 4;
}

// The i-th scale of the whole tiles: counts the rule that it breaks.
FAKE_HD void check_scale(const uint8_t* scales, int64_t i, int64_t rows, int64_t k, int padding,
                         int sign, Violations& found) {
  const int64_t blocks = up((k + 15) / 16, 4);
  const int64_t row = i / blocks;
  const int64_t block = i % blocks;
  const uint8_t byte = scales[scale_offset(row, block, k)];
  const bool outside = row >= rows || block >= (k + 15) / 16;
  if (outside && byte != 0) ++found.counts[padding];
  if (!outside && byte >= 0x80) ++found.counts[sign];
}

FAKE_HD int64_t scale_count(int64_t rows, int64_t k) {
  return up(rows, 128) * up((k + 15) / 16, 4);
}

// A stride's share of what check_scale and the group's own checks find.
FAKE_HD Violations check_group(const Matmul& p, const Group& g, int64_t first, int64_t stride) {
  Violations found{};
  if (first == 0) {
    found.counts[GROUP_SHAPE] += !g.shape_ok;
    found.counts[GROUP_POINTER] += !g.pointers_ok;
  }
  if (!g.shape_ok || !g.pointers_ok || g.m == 0 || g.n == 0) return found;
  if (p.a.scales == nullptr) return found;
  for (int64_t i = first; i < scale_count(g.m, g.k); i += stride) {
    check_scale(g.a_scales, i, g.m, g.k, A_PADDING, A_SIGN, found);
  }
  for (int64_t i = first; i < scale_count(g.n, g.k); i += stride) {
    check_scale(g.b_scales, i, g.n, g.k, B_PADDING, B_SIGN, found);
  }
  return found;
}

// One output -------------------------------------------------------------------------------------

// sum over k in order.  Blocks of 16 are exact integers times exact scales; double holds their sum
// exactly while sum |a b| stays below 2^33.
FAKE_HD double dot_nvfp4(const Group& g, int64_t i, int64_t j) {
  double sum = 0.0;
  for (int64_t block = 0; block < g.k / 16; ++block) {
    const uint8_t* a = g.a + (i * g.lda + block * 16) / 2;
    const uint8_t* b = g.b + (j * g.ldb + block * 16) / 2;
    int quarters = 0;
    for (int x = 0; x < 8; ++x) {
      quarters += twice_e2m1(a[x] & 15) * twice_e2m1(b[x] & 15);
      quarters += twice_e2m1(a[x] >> 4) * twice_e2m1(b[x] >> 4);
    }
    const double scale = e4m3(g.a_scales[scale_offset(i, block, g.k)]) *
                         e4m3(g.b_scales[scale_offset(j, block, g.k)]);
    sum += 0.25 * quarters * scale;
  }
  return sum;
}

FAKE_HD double dot_plain(const Matmul& p, const Group& g, int64_t i, int64_t j) {
  double sum = 0.0;
  for (int64_t l = 0; l < g.k; ++l) {
    const int64_t at_a = p.a.transposed ? i * g.lda + l : l * g.lda + i;
    const int64_t at_b = p.b.transposed ? l * g.ldb + j : j * g.ldb + l;
    sum += load(g.a, at_a, p.a.type) * load(g.b, at_b, p.b.type);
  }
  return sum;
}

FAKE_HD void compute_element(const Matmul& p, const Group& g, int64_t i, int64_t j) {
  const double sum = p.a.type == R_4F_E2M1 ? dot_nvfp4(g, i, j) : dot_plain(p, g, i, j);
  double y = g.alpha * sum;
  // C is not read where beta is zero.
  if (g.beta != 0.0F) y += g.beta * load(g.c, j * g.ldc + i, p.c.type);
  if (p.bias != nullptr) y += load(g.bias, i, p.bias_type);
  if (p.relu && y < 0.0) y = 0.0;
  store(g.d, j * g.ldd + i, p.d.type, y);
}

FAKE_HD void compute_group(const Matmul& p, const Group& g, int64_t first, int64_t stride) {
  if (!g.shape_ok || !g.pointers_ok) return;
  for (int64_t x = first; x < g.m * g.n; x += stride) compute_element(p, g, x % g.m, x / g.m);
}

}  // namespace fake
