// SPDX-License-Identifier: Apache-2.0
// The tables themselves; each lives in a file of its own with its own compiler flags.
#pragma once

#include "cpu/simd.h"

namespace fp4lt {

const SimdKernels& scalar_kernels();
#if defined(FP4LT_HAVE_AVX2)
const SimdKernels& avx2_kernels();
#endif
#if defined(FP4LT_HAVE_AVX512)
// Takes the codec from the AVX2 table.
const SimdKernels& avx512_kernels();
#endif

}  // namespace fp4lt
