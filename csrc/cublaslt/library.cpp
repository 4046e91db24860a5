// SPDX-License-Identifier: Apache-2.0
#include "cublaslt/library.h"

#include <dlfcn.h>
#include <link.h>

#include "core/error.h"

namespace fp4lt::cublaslt {
namespace {

std::string loaded_path(void* library, const std::string& asked) {
  link_map* map = nullptr;
  const bool found = dlinfo(library, RTLD_DI_LINKMAP, &map) == 0 && map != nullptr;
  return found && map->l_name[0] != '\0' ? map->l_name : asked;
}

template <typename Function>
bool look_up(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  return function != nullptr;
}

}  // namespace

const char* status_name(int status) {
  switch (status) {
    case abi::kSuccess:
      return "CUBLAS_STATUS_SUCCESS";
    case abi::kNotInitialized:
      return "CUBLAS_STATUS_NOT_INITIALIZED";
    case abi::kAllocFailed:
      return "CUBLAS_STATUS_ALLOC_FAILED";
    case abi::kInvalidValue:
      return "CUBLAS_STATUS_INVALID_VALUE";
    case abi::kArchMismatch:
      return "CUBLAS_STATUS_ARCH_MISMATCH";
    case abi::kMappingError:
      return "CUBLAS_STATUS_MAPPING_ERROR";
    case abi::kExecutionFailed:
      return "CUBLAS_STATUS_EXECUTION_FAILED";
    case abi::kInternalError:
      return "CUBLAS_STATUS_INTERNAL_ERROR";
    case abi::kNotSupported:
      return "CUBLAS_STATUS_NOT_SUPPORTED";
    case abi::kLicenseError:
      return "CUBLAS_STATUS_LICENSE_ERROR";
    default:
      return "an unknown status";
  }
}

Library::Library(const std::string& path) {
  // A copy that is mapped already, such as torch's, is not loaded again.
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* why = dlerror();
    throw LibraryError(concat("libcublasLt ", path, " does not load: ", why ? why : "unknown"));
  }
  path_ = loaded_path(library, path);
  std::vector<std::string> missing;
#define FP4LT_LOOK_UP(name, result, parameters) \
  if (!look_up(library, "cublasLt" #name, functions_.name)) missing.push_back("cublasLt" #name);
  FP4LT_CUBLASLT_FUNCTIONS(FP4LT_LOOK_UP)
  missing.swap(absent_);
  FP4LT_CUBLASLT_OPTIONAL_FUNCTIONS(FP4LT_LOOK_UP)
#undef FP4LT_LOOK_UP
  missing.swap(absent_);
  if (!missing.empty()) {
    std::string names;
    for (const std::string& name : missing) names += (names.empty() ? "" : ", ") + name;
    throw LibraryError(concat("libcublasLt ", path_, " has no ", names,
                              ": it is another library, or older than CUDA 12"));
  }
  version_ = static_cast<int64_t>(functions_.GetVersion());
}

abi::Handle Library::handle(int device) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  abi::Handle& handle = handles_[device];
  if (handle == nullptr) FP4LT_CUBLASLT_CALL(*this, Create, &handle);
  return handle;
}

void Library::fail(int status, const char* call, const std::string& details) const {
  std::string text = concat(call, " failed with ", status_name(status), " (", status, ")");
  if (functions_.GetStatusString != nullptr) {
    const char* words = functions_.GetStatusString(status);
    if (words != nullptr && words[0] != '\0') text += concat(": ", words);
  }
  text += concat(" [libcublasLt ", version_, ", ", path_, "]");
  if (!details.empty()) text += "\n" + details;
  throw LibraryError(text);
}

}  // namespace fp4lt::cublaslt
