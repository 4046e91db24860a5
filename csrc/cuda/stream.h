// SPDX-License-Identifier: Apache-2.0
#pragma once

struct CUstream_st;

namespace fp4lt::cuda {

// cudaStream_t, without CUDA's headers: a build without CUDA has the same interface.
using Stream = CUstream_st*;

}  // namespace fp4lt::cuda
