// SPDX-License-Identifier: Apache-2.0
// What the fake poses as, and how it says no.
#pragma once

#include <cstdarg>
#include <string>
#include <utility>

#include "abi.h"

namespace fake {

// Read from the environment at every use, so that one process can pose as several libraries.
struct Pose {
  int version;  // FAKE_CUBLASLT_VERSION, as cublasLtGetVersion counts: 130602 is 13.6.2
  int cc;       // FAKE_CUBLASLT_CC, compute capability times ten: "10.0" is 100
  bool refuse_heuristic_in_capture;  // FAKE_CUBLASLT_CAPTURE: "allow" or "refuse"
};
Pose pose();

// A refusal on its way to the caller; guard() turns it into the status.
struct Refused {
  int status;
  std::string reason;
};

[[noreturn]] __attribute__((format(printf, 2, 3))) void refuse(int status, const char* format, ...);
#define FAKE_REQUIRE(condition, status, ...)               \
  do {                                                     \
    if (!(condition)) ::fake::refuse(status, __VA_ARGS__); \
  } while (false)

// Writes one line to the file that FAKE_CUBLASLT_LOG names and keeps it for fake_last_reason().
void report(const char* call, const Refused& refused);
const char* status_name(int status);

// Runs the body of an exported call; its refusal is reported and becomes the result.
template <class Body>
int guard(const char* call, Body&& body) {
  try {
    std::forward<Body>(body)();
    return SUCCESS;
  } catch (const Refused& refused) {
    report(call, refused);
    return refused.status;
  } catch (const std::exception& error) {
    report(call, {INTERNAL_ERROR, error.what()});
    return INTERNAL_ERROR;
  }
}

}  // namespace fake
