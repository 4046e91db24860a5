// SPDX-License-Identifier: Apache-2.0
// The tables themselves; each lives in a file of its own with its own compiler flags.
#pragma once

#include "cpu/simd.h"

namespace fp4lt {

extern const SimdKernels kScalarKernels;
#if defined(FP4LT_HAVE_AVX2)
extern const SimdKernels kAvx2Kernels;
#endif
#if defined(FP4LT_HAVE_AVX512)
extern const SimdKernels kAvx512Kernels;
#endif

}  // namespace fp4lt
