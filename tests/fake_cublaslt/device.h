// SPDX-License-Identifier: Apache-2.0
// Where the arithmetic runs: device_cuda.cu for a GPU, device_host.cpp for plain host memory.
#pragma once

#include "compute.h"

namespace fake::device {

// Makes the counters ready; called by cublasLtCreate, never during a capture.
void start();
int current();

// Whether the stream records a graph.
bool capturing(void* stream);

// Does what a heuristic may do to a capture: tries a call that captures forbid.  True when one
// was going on; as with the real library's bug, that capture is then broken.
bool capture_breaks();

// Whether the GPU or the host can read the pointer; always true in the host build.
bool device_reads(const void* pointer);
bool host_reads(const void* pointer);

// Queues the matmul on the stream of the handle's device.  Nothing waits.
void launch(const Matmul& matmul, int device, void* stream);

// Violations that matmuls have counted so far, without waiting for those still running.
Violations& violations();
void synchronize();

}  // namespace fake::device
