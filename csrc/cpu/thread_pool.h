// SPDX-License-Identifier: Apache-2.0
// Work for several threads: those of the process's OpenMP runtime (openmp.h) or, without one, those
// of a pool of our own, asleep when there is nothing to do.
#pragma once

#include <cstdint>
#include <functional>

namespace fp4lt {

// Calls fn(i) for each i in [0, tasks) from at most `threads` threads, the caller among them, and
// returns when all are done.  Tasks are handed out in order, one by one.  Any number of callers may
// be inside at once: each works on its own tasks and never waits for another's.
//
// `fn` runs with denormals honoured and rounding to nearest, whatever the caller's mode is.  The
// first exception is rethrown here; tasks not yet started are then dropped.
//
// Safe after fork(): the child starts a pool of its own when it first needs one.
void parallel_for(int64_t tasks, int threads, const std::function<void(int64_t)>& fn);

// Threads of the pool started so far in this process; for tests.
int pool_size();

}  // namespace fp4lt
