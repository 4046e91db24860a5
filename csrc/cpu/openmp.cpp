// SPDX-License-Identifier: Apache-2.0
#include "cpu/openmp.h"

#include <atomic>
#include <initializer_list>

#if defined(__linux__)
#include <dlfcn.h>
#include <link.h>
#include <pthread.h>

#include <cstdlib>
#include <cstring>
#endif

namespace fp4lt {
namespace {

// libgomp's entry of a parallel region, which LLVM's and Intel's runtimes have as well.
using Parallel = void (*)(void (*fn)(void*), void* data, unsigned threads, unsigned flags);

std::atomic<bool> allowed{true};

#if defined(__linux__)

std::atomic<bool> forked{false};
// Registered as soon as we are loaded: the parent's team may be torch's work alone.
const int registered =
    pthread_atfork(nullptr, nullptr, [] { forked.store(true, std::memory_order_relaxed); });

Parallel find() {
  const auto visit = [](dl_phdr_info* info, size_t, void* found) {
    const char* slash = std::strrchr(info->dlpi_name, '/');
    const char* name = slash != nullptr ? slash + 1 : info->dlpi_name;
    for (const char* known : {"libgomp", "libiomp5", "libomp"}) {
      if (std::strncmp(name, known, std::strlen(known)) != 0) continue;
      // Mapped already, and never closed: what it starts outlives us.
      void* library = dlopen(info->dlpi_name, RTLD_LAZY | RTLD_NOLOAD);
      if (library == nullptr) continue;
      void* entry = dlsym(library, "GOMP_parallel");
      if (entry == nullptr) continue;
      std::memcpy(found, &entry, sizeof(entry));
      return 1;
    }
    return 0;
  };
  static_cast<void>(registered);
  const char* wish = std::getenv("FP4LT_OPENMP");
  if (wish != nullptr && std::strcmp(wish, "0") == 0) return nullptr;
  Parallel parallel = nullptr;
  dl_iterate_phdr(visit, &parallel);
  return parallel;
}

#endif

Parallel runtime() {
#if defined(__linux__)
  static const Parallel found = find();
  const bool usable = allowed.load(std::memory_order_relaxed);
  return usable && !forked.load(std::memory_order_relaxed) ? found : nullptr;
#else
  return nullptr;
#endif
}

}  // namespace

bool openmp_run(int threads, void (*fn)(void*), void* data) {
  const Parallel parallel = runtime();
  if (parallel == nullptr) return false;
  parallel(fn, data, static_cast<unsigned>(threads), 0);
  return true;
}

bool openmp_in_use() { return runtime() != nullptr; }

void allow_openmp(bool value) { allowed.store(value, std::memory_order_relaxed); }

}  // namespace fp4lt
