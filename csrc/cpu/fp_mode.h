// SPDX-License-Identifier: Apache-2.0
#pragma once

#if defined(__x86_64__) || defined(_M_X64)
#include <xmmintrin.h>
#elif defined(__aarch64__)
#include <cstdint>
#endif

namespace fp4lt {

// While alive: round to nearest even, no flushing of denormals.  torch.set_flush_denormal(True) or
// a -ffast-math library may have changed the thread's mode, and e4m3 times a small global scale is
// a denormal often enough to matter.
class DefaultFpMode {
 public:
#if defined(__x86_64__) || defined(_M_X64)
  DefaultFpMode() : saved_(_mm_getcsr()) { _mm_setcsr(0x1F80u); }
  ~DefaultFpMode() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#elif defined(__aarch64__)
  DefaultFpMode() {
    __asm__ volatile("mrs %0, fpcr" : "=r"(saved_));
    set(0);
  }
  ~DefaultFpMode() { set(saved_); }

 private:
  static void set(uint64_t fpcr) { __asm__ volatile("msr fpcr, %0" : : "r"(fpcr)); }
  uint64_t saved_;
#else
  DefaultFpMode() {}
  ~DefaultFpMode() {}

 private:
#endif
  DefaultFpMode(const DefaultFpMode&) = delete;
  DefaultFpMode& operator=(const DefaultFpMode&) = delete;
};

}  // namespace fp4lt
