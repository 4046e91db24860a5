// SPDX-License-Identifier: Apache-2.0
// Every line of inline PTX of the project but for wgmma's (ptx_wgmma.cuh), one instruction to a
// function.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace fp4lt::cuda::ptx {

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Copies 16 bytes to shared memory past the registers, zeros in place of the last 16 - `valid`.
// Both addresses are multiples of 16.  Nothing is read when `valid` is 0.
__device__ __forceinline__ void copy_async16(uint32_t to, const void* from, int valid) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(valid));
}

// The same without a mask.
__device__ __forceinline__ void copy_async16(uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from));
}

// The same for 8 bytes and addresses that are multiples of 8.
__device__ __forceinline__ void copy_async8(uint32_t to, const void* from, int valid) {
  asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], 8, %2;" ::"r"(to), "l"(from),
               "r"(valid));
}

__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;"); }

// Returns once at most `Pending` of this thread's groups are still under way.
template <int Pending>
__device__ __forceinline__ void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

__device__ __forceinline__ uint4 load_shared16(uint32_t from) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(from)
               : "memory");
  return v;
}

// d += a * b for a 16x16 and b 16x8, row and column major, accumulated in fp32.
__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                    __nv_bfloat16 /*type*/) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                    __half /*type*/) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Pairwise products, rounded to nearest even, denormals honoured.  On sm_80 bf16 has fused
// multiply-add only: adding -0 changes no product, not even the sign of a zero.
__device__ __forceinline__ uint32_t multiply2(uint32_t a, uint32_t b, __nv_bfloat16 /*type*/) {
  uint32_t d;
#if __CUDA_ARCH__ >= 900
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
#else
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(0x80008000u));
#endif
  return d;
}

__device__ __forceinline__ uint32_t multiply2(uint32_t a, uint32_t b, __half /*type*/) {
  uint32_t d;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

// The same with one half of b for both of a: the hardware picks it at no cost.
template <int Half>
__device__ __forceinline__ uint32_t multiply2_by_half(uint32_t a, uint32_t b, __nv_bfloat16 type) {
#if __CUDA_ARCH__ >= 900
  uint32_t d;
  if constexpr (Half == 0) {
    asm("{ .reg .b16 l, h; .reg .b32 t; mov.b32 {l, h}, %2; mov.b32 t, {l, l}; "
        "mul.rn.bf16x2 %0, %1, t; }"
        : "=r"(d)
        : "r"(a), "r"(b));
  } else {
    asm("{ .reg .b16 l, h; .reg .b32 t; mov.b32 {l, h}, %2; mov.b32 t, {h, h}; "
        "mul.rn.bf16x2 %0, %1, t; }"
        : "=r"(d)
        : "r"(a), "r"(b));
  }
  return d;
#else
  return multiply2(a, __byte_perm(b, b, Half == 0 ? 0x1010 : 0x3232), type);
#endif
}

template <int Half>
__device__ __forceinline__ uint32_t multiply2_by_half(uint32_t a, uint32_t b, __half /*type*/) {
  uint32_t d;
  if constexpr (Half == 0) {
    asm("{ .reg .b16 l, h; .reg .b32 t; mov.b32 {l, h}, %2; mov.b32 t, {l, l}; "
        "mul.rn.f16x2 %0, %1, t; }"
        : "=r"(d)
        : "r"(a), "r"(b));
  } else {
    asm("{ .reg .b16 l, h; .reg .b32 t; mov.b32 {l, h}, %2; mov.b32 t, {h, h}; "
        "mul.rn.f16x2 %0, %1, t; }"
        : "=r"(d)
        : "r"(a), "r"(b));
  }
  return d;
}

// ---- Hopper and later: barriers of transactions and bulk copies ----
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

__device__ __forceinline__ void barrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes barrier_init() visible to the copy engine; a barrier of the threads that wait must follow.
__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives, and has the barrier wait for `bytes` of copies too.
__device__ __forceinline__ void barrier_arrive_expecting(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// Waits until the phase of parity `parity` has ended.
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Copies `bytes`, a multiple of 16 between multiples of 16, counted at `barrier`.
__device__ __forceinline__ void copy_bulk(uint32_t to, const void* from, uint32_t bytes,
                                          uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}

// Copies a box of a three-dimensional tensor map, zeros where it leaves the tensor.
__device__ __forceinline__ void copy_box(uint32_t to, const void* map, int x, int y, int z,
                                         uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(to),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier)
      : "memory");
}

__device__ __forceinline__ void prefetch_map(const void* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

#endif

__device__ __forceinline__ uint32_t load_shared4(uint32_t from) {
  uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(from) : "memory");
  return v;
}

__device__ __forceinline__ void store_shared16(uint32_t to, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z),
               "r"(v.w)
               : "memory");
}

__device__ __forceinline__ void store_shared4(uint32_t to, uint32_t v) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(v) : "memory");
}

// A barrier of `Threads` threads of a block; number 0 is __syncthreads().
template <int Number, int Threads>
__device__ __forceinline__ void named_barrier() {
  asm volatile("bar.sync %0, %1;" ::"n"(Number), "n"(Threads) : "memory");
}

// A word that blocks of threads pass to each other, with what was written before it.
__device__ __forceinline__ void store_release(int* to, int v) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(to), "r"(v) : "memory");
}
__device__ __forceinline__ int load_acquire(const int* from) {
  int v;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
  return v;
}

// Waits until the kernels before this one in the stream have finished and their writes are seen.
// Every kernel of ours calls it before it touches global memory that a kernel before may write,
// whether or not it was launched with programmatic serialization; without, it returns at once.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel's blocks start as soon as there is room for them.
__device__ __forceinline__ void allow_next_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

}  // namespace fp4lt::cuda::ptx
