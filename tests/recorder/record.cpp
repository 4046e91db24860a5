// SPDX-License-Identifier: Apache-2.0
#include "record.h"

#include <dlfcn.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <unordered_map>

namespace record {
namespace {

std::recursive_mutex mutex;
std::unordered_map<const void*, int> ids;
std::map<int, int> pointer_modes;
int last_id = 0;

void* open_real() {
  if (const char* path = std::getenv("RECORD_CUBLASLT_REAL")) {
    void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) std::fprintf(stderr, "record_cublaslt: %s\n", dlerror());
    return library;
  }
  for (const char* name : {"libcublasLt.so.13", "libcublasLt.so.12"}) {
    if (void* library = dlopen(name, RTLD_NOW | RTLD_NOLOAD)) return library;
  }
  return nullptr;
}

}  // namespace

void* real(const char* name) {
  const std::lock_guard<std::recursive_mutex> lock(mutex);
  static void* library = nullptr;
  // Until a library is found, each call looks again: torch maps its copy late.
  if (library == nullptr) library = open_real();
  void* found = library != nullptr ? dlsym(library, name) : dlsym(RTLD_NEXT, name);
  if (found == nullptr) Line("missing").raw("name", "\"" + std::string(name) + "\"").write();
  return found;
}

Line::Line(const char* call) : text_("{\"call\": \"" + std::string(call) + "\"") {}

Line& Line::raw(const char* key, const std::string& json) {
  text_ += ", \"" + std::string(key) + "\": " + json;
  return *this;
}

Line& Line::number(const char* key, long long value) { return raw(key, std::to_string(value)); }

Line& Line::real_number(const char* key, double value) {
  char digits[40];
  std::snprintf(digits, sizeof digits, "%.9g", value);
  return raw(key, std::isfinite(value) ? digits : "\"" + std::string(digits) + "\"");
}

Line& Line::pointer(const char* key, const void* value) {
  return raw(key, std::to_string(reinterpret_cast<uintptr_t>(value)));
}

Line& Line::bytes(const char* key, const void* data, size_t size) {
  std::string hex = "\"";
  for (size_t i = 0; data != nullptr && i < size; ++i) {
    char two[3];
    std::snprintf(two, sizeof two, "%02x", static_cast<const unsigned char*>(data)[i]);
    hex += two;
  }
  return raw(key, hex + "\"");
}

Line& Line::words(const char* key, const uint64_t* data, size_t count) {
  if (data == nullptr) return raw(key, "null");
  std::string list;
  for (size_t i = 0; i < count; ++i) list += (i ? ", " : "") + std::to_string(data[i]);
  return raw(key, "[" + list + "]");
}

void Line::write() const {
  const std::lock_guard<std::recursive_mutex> lock(mutex);
  static std::FILE* file = [] {
    const char* path = std::getenv("RECORD_CUBLASLT_OUT");
    return path != nullptr ? std::fopen(path, "a") : stderr;
  }();
  if (file == nullptr) return;
  std::fprintf(file, "%s}\n", text_.c_str());
  std::fflush(file);
}

int made(const void* object) {
  const std::lock_guard<std::recursive_mutex> lock(mutex);
  return ids[object] = ++last_id;
}

int known(const void* object) {
  if (object == nullptr) return 0;
  const std::lock_guard<std::recursive_mutex> lock(mutex);
  const auto found = ids.find(object);
  return found == ids.end() ? -1 : found->second;
}

void set_pointer_mode(int descriptor, int mode) {
  const std::lock_guard<std::recursive_mutex> lock(mutex);
  pointer_modes[descriptor] = mode;
}

bool scalars_on_host(int descriptor) {
  const std::lock_guard<std::recursive_mutex> lock(mutex);
  const auto found = pointer_modes.find(descriptor);
  return descriptor > 0 && (found == pointer_modes.end() || found->second == 0);
}

}  // namespace record
