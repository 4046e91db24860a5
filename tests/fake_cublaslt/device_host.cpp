// SPDX-License-Identifier: Apache-2.0
// The build without CUDA: pointers are host memory, streams are ignored, nothing is asynchronous.
#include <atomic>

#include "device.h"

namespace fake::device {
namespace {
Violations counted{};
std::atomic<bool> pretend_capture{false};
}  // namespace

void start() {}
int current() { return 0; }
bool capturing(void*) { return pretend_capture; }
bool capture_breaks() { return pretend_capture; }
bool device_reads(const void*) { return true; }
bool host_reads(const void*) { return true; }
Violations& violations() { return counted; }
void synchronize() {}

void launch(const Matmul& p, int, void*) {
  if (p.workspace != nullptr) *p.workspace = p.ticket;
  const int groups = p.groups > 0 ? p.groups : 1;
  for (int i = 0; i < groups; ++i) {
    const Group group = group_of(p, i);
    const Violations found = check_group(p, group, 0, 1);
    for (int kind = 0; kind < VIOLATION_KINDS; ++kind) {
      p.violations->counts[kind] += found.counts[kind];
    }
    compute_group(p, group, 0, 1);
  }
}

}  // namespace fake::device

// Makes every stream look as if it recorded a graph, for tests without a GPU.
FAKE_API void fake_pretend_capture(int yes) { fake::device::pretend_capture = yes != 0; }
