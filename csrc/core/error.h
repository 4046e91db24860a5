// SPDX-License-Identifier: Apache-2.0
// C++ errors.  Arguments are checked in Python, where their names are known; what is thrown here
// guards the C++ interface itself and reports failures of the CUDA runtime.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace fp4lt {

// Becomes fp4lt.errors.ArgumentError.
struct ArgumentError : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};
// Becomes fp4lt.errors.UnsupportedError.
struct UnsupportedError : std::runtime_error {
  using std::runtime_error::runtime_error;
};
// Becomes fp4lt.errors.LibraryError: a call into CUDA or cuBLAS failed.
struct LibraryError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

template <typename... Parts>
std::string concat(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

}  // namespace fp4lt

#define FP4LT_CHECK(condition, ...)                                               \
  do {                                                                            \
    if (!(condition)) throw ::fp4lt::ArgumentError(::fp4lt::concat(__VA_ARGS__)); \
  } while (0)
