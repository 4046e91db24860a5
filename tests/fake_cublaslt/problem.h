// SPDX-License-Identifier: Apache-2.0
// One matmul as its descriptors state it, checked against the documented rules.
#pragma once

#include "objects.h"

namespace fake {

struct Problem {
  Desc desc;
  Layout a, b, c, d;
  bool grouped;
  bool nvfp4;
  int64_t m, n, k;  // 0 where grouped: the sizes are on the device
};

// What the host can see of a description.  Throws Refused at the first broken rule.
Problem describe(void* desc, void* a, void* b, void* c, void* d);

int element_bits(int type);
inline bool has_bias(const Desc& desc) { return (desc.epilogue & EPILOGUE_BIAS) != 0; }
inline bool has_relu(const Desc& desc) { return (desc.epilogue & EPILOGUE_RELU) != 0; }

// Type of the bias vector: as set, else that of D.
int bias_type(const Problem& problem);

// Parts of describe(), each for one subject.
void check_types(const Problem& problem);
void check_operations(const Problem& problem);
void check_shape(Problem& problem);
void check_scales(const Problem& problem);
void check_epilogue(const Problem& problem);
void check_grouped(const Problem& problem);
void check_device(const Problem& problem);

}  // namespace fake
