// SPDX-License-Identifier: Apache-2.0
// Algorithms: what the heuristic hands out, and whether one belongs to a problem.
#pragma once

#include "problem.h"

namespace fake {

// An algorithm's eight words.
enum Word { SIGNATURE, TYPES, SETTINGS, SHAPE, ALIGNMENT, CONFIG, MORE, VERSION };
constexpr uint64_t kSignature = 0x6f676c41656b6146ULL;

// Two ways to run a plain matmul, one that never needs a workspace, and a grouped one.
constexpr int kMain = 66;
constexpr int kOther = 67;
constexpr int kFrugal = 65;
constexpr int kGrouped = 70;

struct Config {
  int id;
  uint32_t tile;
  int32_t splitk;
  uint32_t reduction;
  uint32_t stages;
  uint32_t swizzle;
};

void store(Algo& algo, const Config& config);
uint64_t hash_types(int compute, int scale, int a, int b, int c, int d);

// The configuration in an algorithm; refuses memory that no call of this library filled.
Config config_of(const Algo& algo);

// Bytes of workspace that the configuration needs for the problem.
size_t workspace_needed(const Config& config, const Problem& problem);

// Refuses with `status` an algorithm of other types, descriptor settings, version or, unless
// cublasLtMatmulAlgoCheck has passed it for them, other m and k.
void require_belongs(const Algo& algo, const Problem& problem);

// Bytes to which A, B, C and D are promised to be aligned: the preference that found it.
void promised_alignment(const Algo& algo, uint32_t (&bytes)[4]);

// What a NULL algorithm stands for: the heuristic's first choice with this much workspace.
Algo implicit_algorithm(const Problem& problem, size_t workspace_bytes);

}  // namespace fake
