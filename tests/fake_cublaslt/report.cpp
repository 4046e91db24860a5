// SPDX-License-Identifier: Apache-2.0
#include "report.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>

namespace fake {
namespace {

std::mutex mutex;
std::string last_reason;

const char* setting(const char* name, const char* otherwise) {
  const char* value = std::getenv(name);
  return value != nullptr && *value != '\0' ? value : otherwise;
}

struct Named {
  int status;
  const char* name;
  const char* text;
};
constexpr Named kNames[] = {
    {SUCCESS, "CUBLAS_STATUS_SUCCESS", "success"},
    {NOT_INITIALIZED, "CUBLAS_STATUS_NOT_INITIALIZED", "the library was not initialized"},
    {ALLOC_FAILED, "CUBLAS_STATUS_ALLOC_FAILED", "the resource allocation failed"},
    {INVALID_VALUE, "CUBLAS_STATUS_INVALID_VALUE", "an invalid value was passed as an argument"},
    {ARCH_MISMATCH, "CUBLAS_STATUS_ARCH_MISMATCH", "the device lacks a feature"},
    {MAPPING_ERROR, "CUBLAS_STATUS_MAPPING_ERROR", "access to GPU memory failed"},
    {EXECUTION_FAILED, "CUBLAS_STATUS_EXECUTION_FAILED", "the program failed to execute"},
    {INTERNAL_ERROR, "CUBLAS_STATUS_INTERNAL_ERROR", "an internal operation failed"},
    {NOT_SUPPORTED, "CUBLAS_STATUS_NOT_SUPPORTED", "the functionality is not supported"},
    {LICENSE_ERROR, "CUBLAS_STATUS_LICENSE_ERROR", "the license check failed"},
};

}  // namespace

Pose pose() {
  Pose result{};
  result.version = std::atoi(setting("FAKE_CUBLASLT_VERSION", "130602"));
  const char* cc = setting("FAKE_CUBLASLT_CC", "10.0");
  const char* dot = std::strchr(cc, '.');
  result.cc = std::atoi(cc) * 10 + (dot != nullptr ? std::atoi(dot + 1) : 0);
  // 13.5.1 to 13.6.0 are documented to break a capture when the heuristic is asked during it.
  const bool breaks = result.version >= 130501 && result.version < 130601;
  const char* capture = setting("FAKE_CUBLASLT_CAPTURE", breaks ? "refuse" : "allow");
  result.refuse_heuristic_in_capture = std::strcmp(capture, "refuse") == 0;
  return result;
}

void refuse(int status, const char* format, ...) {
  char text[1024];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  throw Refused{status, text};
}

const char* status_name(int status) {
  for (const Named& entry : kNames) {
    if (entry.status == status) return entry.name;
  }
  return "unknown status";
}

void report(const char* call, const Refused& refused) {
  const std::lock_guard<std::mutex> lock(mutex);
  char head[160];
  std::snprintf(head, sizeof head, "%s: %d %s: ", call, refused.status,
                status_name(refused.status));
  last_reason = head + refused.reason;
  const char* path = setting("FAKE_CUBLASLT_LOG", "");
  if (*path == '\0') return;
  if (std::FILE* file = std::fopen(path, "a")) {
    std::fprintf(file, "%s\n", last_reason.c_str());
    std::fclose(file);
  }
}

}  // namespace fake

// The last refusal of the process, "call: number NAME: reason", or "" when there was none.
FAKE_API const char* fake_last_reason() {
  static thread_local std::string copy;
  const std::lock_guard<std::mutex> lock(fake::mutex);
  copy = fake::last_reason;
  return copy.c_str();
}

FAKE_API void fake_forget_reason() {
  const std::lock_guard<std::mutex> lock(fake::mutex);
  fake::last_reason.clear();
}

FAKE_API size_t cublasLtGetVersion() { return static_cast<size_t>(fake::pose().version); }

FAKE_API size_t cublasLtGetCudartVersion() {
  return static_cast<size_t>(fake::pose().version / 10000 * 1000);
}

FAKE_API int cublasLtGetProperty(int type, int* value) {
  return fake::guard("cublasLtGetProperty", [&] {
    FAKE_REQUIRE(value != nullptr, fake::INVALID_VALUE, "value is NULL");
    const int version = fake::pose().version;
    FAKE_REQUIRE(type >= 0 && type <= 2, fake::INVALID_VALUE, "property %d is unknown", type);
    *value = type == 0 ? version / 10000 : type == 1 ? version / 100 % 100 : version % 100;
  });
}

FAKE_API const char* cublasLtGetStatusName(int status) { return fake::status_name(status); }

FAKE_API const char* cublasLtGetStatusString(int status) {
  for (const auto& entry : fake::kNames) {
    if (entry.status == status) return entry.text;
  }
  return "unknown status";
}

FAKE_API int cublasLtLoggerSetLevel(int level) {
  return fake::guard("cublasLtLoggerSetLevel", [&] {
    FAKE_REQUIRE(level >= 0 && level <= 5, fake::INVALID_VALUE, "level %d is not 0 to 5", level);
  });
}

// The fake always logs what FAKE_CUBLASLT_LOG asks for; these are here to be found.
FAKE_API int cublasLtLoggerSetMask(int) { return fake::SUCCESS; }
FAKE_API int cublasLtLoggerSetFile(std::FILE*) { return fake::SUCCESS; }
FAKE_API int cublasLtLoggerOpenFile(const char*) { return fake::SUCCESS; }
FAKE_API int cublasLtLoggerSetCallback(void (*)(int, const char*, const char*)) {
  return fake::SUCCESS;
}
FAKE_API int cublasLtLoggerForceDisable() { return fake::SUCCESS; }

namespace {
size_t cache_capacity = 8192;
}

FAKE_API int cublasLtHeuristicsCacheGetCapacity(size_t* capacity) {
  return fake::guard("cublasLtHeuristicsCacheGetCapacity", [&] {
    FAKE_REQUIRE(capacity != nullptr, fake::INVALID_VALUE, "capacity is NULL");
    *capacity = cache_capacity;
  });
}

FAKE_API int cublasLtHeuristicsCacheSetCapacity(size_t capacity) {
  cache_capacity = capacity;
  return fake::SUCCESS;
}
