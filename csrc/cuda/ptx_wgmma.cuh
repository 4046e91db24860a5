// SPDX-License-Identifier: Apache-2.0
// wgmma.m64nNk16 with the weights in registers and the activations in shared memory, for the
// numbers of tokens that the fused kernel uses.  One macro states the instruction; what differs
// between sizes is how many accumulators it names.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace fp4lt::cuda::ptx {

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define FP4LT_HAS_WGMMA 1

// Before the first wgmma, and after registers that one reads or writes were touched.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Returns once at most `Pending` groups are still under way.
template <int Pending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}
// Shared memory of K-major core matrices, 8 rows of 16 bytes each without gaps; neighbours in k lie
// 128 bytes apart and groups of 8 rows GroupBytes.  The low word is
// kMatrixWord plus the address / 16.
constexpr uint32_t kMatrixWord = 128u >> 4 << 16;
template <int GroupBytes>
__device__ __forceinline__ uint64_t matrix_descriptor(uint32_t word) {
  return uint64_t{word} | uint64_t{GroupBytes >> 4} << 32;
}

// Tells the compiler that a finished wgmma wrote this accumulator.
__device__ __forceinline__ void settle(float& sum) { asm volatile("" : "+f"(sum)::"memory"); }

// Has the compiler hold a value in a register rather than work it out again.
__device__ __forceinline__ void keep(uint32_t& v) { asm volatile("" : "+r"(v)); }

// Lets the warps of a warpgroup have more registers, or fewer, than the kernel was launched with.
template <int Registers>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers));
}
template <int Registers>
__device__ __forceinline__ void leave_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers));
}

// d += a * b for the warp's 16 of 64 rows of a and N columns; d of N / 2.
template <int N, typename T>
struct Wgmma;

#define FP4LT_WGMMA_8(T, NAME)                                                                 \
  template <>                                                                                  \
  struct Wgmma<8, T> {                                                                         \
    static __device__ __forceinline__ void run(float* d, const uint32_t (&a)[4], uint64_t b) { \
      asm volatile(                                                                            \
          "{ .reg .pred add; setp.ne.b32 add, 1, 0; wgmma.mma_async.sync.aligned."             \
          "m64n8k16.f32." NAME "." NAME                                                        \
          " {"                                                                                 \
          "%0, %1, %2, %3"                                                                     \
          "}, {%4, %5, %6, %7}, %8, add, 1, 1, 0; }"                                           \
          : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                     \
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                               \
    }                                                                                          \
  };
FP4LT_WGMMA_8(__nv_bfloat16, "bf16")
FP4LT_WGMMA_8(__half, "f16")
#undef FP4LT_WGMMA_8

#define FP4LT_WGMMA_16(T, NAME)                                                                 \
  template <>                                                                                   \
  struct Wgmma<16, T> {                                                                         \
    static __device__ __forceinline__ void run(float* d, const uint32_t (&a)[4], uint64_t b) {  \
      asm volatile(                                                                             \
          "{ .reg .pred add; setp.ne.b32 add, 1, 0; wgmma.mma_async.sync.aligned."              \
          "m64n16k16.f32." NAME "." NAME                                                        \
          " {"                                                                                  \
          "%0, %1, %2, %3, %4, %5, %6, %7"                                                      \
          "}, {%8, %9, %10, %11}, %12, add, 1, 1, 0; }"                                         \
          : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), \
            "+f"(d[7])                                                                          \
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                \
    }                                                                                           \
  };
FP4LT_WGMMA_16(__nv_bfloat16, "bf16")
FP4LT_WGMMA_16(__half, "f16")
#undef FP4LT_WGMMA_16

#define FP4LT_WGMMA_24(T, NAME)                                                                 \
  template <>                                                                                   \
  struct Wgmma<24, T> {                                                                         \
    static __device__ __forceinline__ void run(float* d, const uint32_t (&a)[4], uint64_t b) {  \
      asm volatile(                                                                             \
          "{ .reg .pred add; setp.ne.b32 add, 1, 0; wgmma.mma_async.sync.aligned."              \
          "m64n24k16.f32." NAME "." NAME                                                        \
          " {"                                                                                  \
          "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11"                                    \
          "}, {%12, %13, %14, %15}, %16, add, 1, 1, 0; }"                                       \
          : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), \
            "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11])                        \
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                \
    }                                                                                           \
  };
FP4LT_WGMMA_24(__nv_bfloat16, "bf16")
FP4LT_WGMMA_24(__half, "f16")
#undef FP4LT_WGMMA_24

#define FP4LT_WGMMA_32(T, NAME)                                                                 \
  template <>                                                                                   \
  struct Wgmma<32, T> {                                                                         \
    static __device__ __forceinline__ void run(float* d, const uint32_t (&a)[4], uint64_t b) {  \
      asm volatile(                                                                             \
          "{ .reg .pred add; setp.ne.b32 add, 1, 0; wgmma.mma_async.sync.aligned."              \
          "m64n32k16.f32." NAME "." NAME                                                        \
          " {"                                                                                  \
          "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, "                        \
          "%14, %15"                                                                            \
          "}, {%16, %17, %18, %19}, %20, add, 1, 1, 0; }"                                       \
          : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), \
            "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]),          \
            "+f"(d[13]), "+f"(d[14]), "+f"(d[15])                                               \
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                \
    }                                                                                           \
  };
FP4LT_WGMMA_32(__nv_bfloat16, "bf16")
FP4LT_WGMMA_32(__half, "f16")
#undef FP4LT_WGMMA_32

#define FP4LT_WGMMA_48(T, NAME)                                                                 \
  template <>                                                                                   \
  struct Wgmma<48, T> {                                                                         \
    static __device__ __forceinline__ void run(float* d, const uint32_t (&a)[4], uint64_t b) {  \
      asm volatile(                                                                             \
          "{ .reg .pred add; setp.ne.b32 add, 1, 0; wgmma.mma_async.sync.aligned."              \
          "m64n48k16.f32." NAME "." NAME                                                        \
          " {"                                                                                  \
          "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, "                        \
          "%14, %15, %16, %17, %18, %19, %20, %21, %22, %23"                                    \
          "}, {%24, %25, %26, %27}, %28, add, 1, 1, 0; }"                                       \
          : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), \
            "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]),          \
            "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]),       \
            "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23])                     \
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                \
    }                                                                                           \
  };
FP4LT_WGMMA_48(__nv_bfloat16, "bf16")
FP4LT_WGMMA_48(__half, "f16")
#undef FP4LT_WGMMA_48

#define FP4LT_WGMMA_64(T, NAME)                                                                 \
  template <>                                                                                   \
  struct Wgmma<64, T> {                                                                         \
    static __device__ __forceinline__ void run(float* d, const uint32_t (&a)[4], uint64_t b) {  \
      asm volatile(                                                                             \
          "{ .reg .pred add; setp.ne.b32 add, 1, 0; wgmma.mma_async.sync.aligned."              \
          "m64n64k16.f32." NAME "." NAME                                                        \
          " {"                                                                                  \
          "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, "                        \
          "%14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, "              \
          "%28, %29, %30, %31"                                                                  \
          "}, {%32, %33, %34, %35}, %36, add, 1, 1, 0; }"                                       \
          : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), \
            "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]),          \
            "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]),       \
            "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),       \
            "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]),       \
            "+f"(d[31])                                                                         \
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                \
    }                                                                                           \
  };
FP4LT_WGMMA_64(__nv_bfloat16, "bf16")
FP4LT_WGMMA_64(__half, "f16")
#undef FP4LT_WGMMA_64

#define FP4LT_WGMMA_96(T, NAME)                                                                 \
  template <>                                                                                   \
  struct Wgmma<96, T> {                                                                         \
    static __device__ __forceinline__ void run(float* d, const uint32_t (&a)[4], uint64_t b) {  \
      asm volatile(                                                                             \
          "{ .reg .pred add; setp.ne.b32 add, 1, 0; wgmma.mma_async.sync.aligned."              \
          "m64n96k16.f32." NAME "." NAME                                                        \
          " {"                                                                                  \
          "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, "                        \
          "%14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, "              \
          "%28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, "              \
          "%42, %43, %44, %45, %46, %47"                                                        \
          "}, {%48, %49, %50, %51}, %52, add, 1, 1, 0; }"                                       \
          : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), \
            "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]),          \
            "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]),       \
            "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),       \
            "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]),       \
            "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]),       \
            "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]),       \
            "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47])                     \
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                \
    }                                                                                           \
  };
FP4LT_WGMMA_96(__nv_bfloat16, "bf16")
FP4LT_WGMMA_96(__half, "f16")
#undef FP4LT_WGMMA_96

#define FP4LT_WGMMA_128(T, NAME)                                                                \
  template <>                                                                                   \
  struct Wgmma<128, T> {                                                                        \
    static __device__ __forceinline__ void run(float* d, const uint32_t (&a)[4], uint64_t b) {  \
      asm volatile(                                                                             \
          "{ .reg .pred add; setp.ne.b32 add, 1, 0; wgmma.mma_async.sync.aligned."              \
          "m64n128k16.f32." NAME "." NAME                                                       \
          " {"                                                                                  \
          "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, "                        \
          "%14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, "              \
          "%28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, "              \
          "%42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, "              \
          "%56, %57, %58, %59, %60, %61, %62, %63"                                              \
          "}, {%64, %65, %66, %67}, %68, add, 1, 1, 0; }"                                       \
          : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), \
            "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]),          \
            "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]),       \
            "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),       \
            "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]),       \
            "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]),       \
            "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]),       \
            "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]),       \
            "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]),       \
            "+f"(d[55]), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]),       \
            "+f"(d[61]), "+f"(d[62]), "+f"(d[63])                                               \
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                \
    }                                                                                           \
  };
FP4LT_WGMMA_128(__nv_bfloat16, "bf16")
FP4LT_WGMMA_128(__half, "f16")
#undef FP4LT_WGMMA_128

#endif

}  // namespace fp4lt::cuda::ptx
