// SPDX-License-Identifier: Apache-2.0
// libcublasLt, opened at run time.  Which file it is, is decided in Python (_library.py).
#pragma once

#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "cublaslt/abi.h"

namespace fp4lt::cublaslt {

// "CUBLAS_STATUS_NOT_SUPPORTED" and the like, of a status that some version of the library has.
const char* status_name(int status);

// Thread-safe.  Never closed: kernels, handles and torch may hold on to it.
class Library {
 public:
  // Opens `path`.  Throws LibraryError if it does not load, or lacks a function that is needed.
  explicit Library(const std::string& path);
  Library(const Library&) = delete;
  Library& operator=(const Library&) = delete;

  // Where the loader found it.
  const std::string& path() const { return path_; }
  // major * 10000 + minor * 100 + patch.
  int64_t version() const { return version_; }
  // Of the optional functions, those that it does not have.
  const std::vector<std::string>& absent() const { return absent_; }

  const abi::Functions& operator*() const { return functions_; }
  const abi::Functions* operator->() const { return &functions_; }

  // The handle of the CUDA device that is current, which is `device`: made at the first call, kept
  // for good.  Calls from several threads and streams may share one.
  abi::Handle handle(int device) const;

  // Throws LibraryError with the call, the status' name and number, and `details` if there are any,
  // unless `status` is 0.
  void check(int status, const char* call, const std::string& details = "") const {
    if (status != abi::kSuccess) fail(status, call, details);
  }

 private:
  [[noreturn]] void fail(int status, const char* call, const std::string& details) const;

  abi::Functions functions_;
  std::string path_;
  int64_t version_ = 0;
  std::vector<std::string> absent_;
  mutable std::mutex mutex_;
  mutable std::map<int, abi::Handle> handles_;
};

}  // namespace fp4lt::cublaslt

// Calls function `name` of a Library; a failure throws with its name.
#define FP4LT_CUBLASLT_CALL(library, name, ...) \
  (library).check((library)->name(__VA_ARGS__), "cublasLt" #name)
