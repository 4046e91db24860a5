// SPDX-License-Identifier: Apache-2.0
#pragma once

// FP4LT_HD marks functions that host and device code share.  They are always inlined: translation
// units built for AVX must never hand a baseline one their own copy of a shared inline function.
#if defined(__CUDACC__)
#define FP4LT_HD __host__ __device__ __forceinline__
#else
#define FP4LT_HD inline __attribute__((always_inline))
#endif
