// SPDX-License-Identifier: Apache-2.0
// The tables themselves; each lives in a file of its own with its own compiler flags.
#pragma once

#include "cpu/simd.h"

namespace fp4lt {

const SimdKernels& scalar_kernels();
#if defined(FP4LT_HAVE_AVX2)
const SimdKernels& avx2_kernels();
// Its codec, in a file of its own.
void set_avx2_codec(SimdKernels& table);
#endif
#if defined(FP4LT_HAVE_AVX512)
// Takes the codec from the AVX2 table.
const SimdKernels& avx512_kernels();
#endif
#if defined(FP4LT_HAVE_AVX512_BF16)
// Takes all but the products of bf16 activations from the AVX-512 table.
const SimdKernels& avx512_bf16_kernels();
// Whether this processor's bf16 dot product rounds as the table needs it to: tried on numbers that
// tell the other ways of adding two products to a sum apart.
bool bf16_dot_is_two_fmas();
#endif

}  // namespace fp4lt
