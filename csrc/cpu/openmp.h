// SPDX-License-Identifier: Apache-2.0
// The OpenMP runtime that the process has mapped already, if any: torch's.
#pragma once

namespace fp4lt {

// Calls fn(data) on the caller and on the `threads` - 1 others of its OpenMP team, fewer where the
// runtime grants fewer, and returns once all have.  False, and nothing done, where there is no
// runtime, where it was switched off, or in the child of a fork, whose team does not exist.
//
// torch's threads go on spinning for some milliseconds after each of its operations.  Threads of
// our own would find the processors taken; those of the team take up the work at once.
bool openmp_run(int threads, void (*fn)(void*), void* data);

// Whether openmp_run() does anything.
bool openmp_in_use();

// Switches it off, or on again.
void allow_openmp(bool allowed);

}  // namespace fp4lt
