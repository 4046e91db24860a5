// SPDX-License-Identifier: Apache-2.0
#include "algorithms.h"

#include <algorithm>
#include <array>
#include <cinttypes>
#include <mutex>
#include <set>
#include <vector>

#include "device.h"
#include "report.h"

namespace fake {
namespace {

constexpr size_t kBaseWorkspace = 65536;

std::mutex mutex;
// (types, settings, m, k) that cublasLtMatmulAlgoCheck has passed, with the algorithm's words.
std::set<std::array<uint64_t, 8>> checked;

uint64_t mix(uint64_t seed, uint64_t value) {
  seed ^= value + 0x9e3779b97f4a7c15ULL + (seed << 12) + (seed >> 4);
  return seed * 0xff51afd7ed558ccdULL;
}

uint64_t types_of(const Problem& p) {
  return hash_types(p.desc.compute_type, p.desc.scale_type, p.a.type, p.b.type, p.c.type, p.d.type);
}

uint64_t settings_of(const Problem& p) {
  uint64_t h = 2;
  for (int value : {p.desc.op_a, p.desc.op_b, p.desc.epilogue, p.desc.pointer_mode,
                    p.desc.scale_mode[0], p.desc.scale_mode[1], static_cast<int>(p.grouped)}) {
    h = mix(h, static_cast<uint64_t>(value));
  }
  return h;
}

uint64_t shape_of(const Problem& p) {
  if (p.grouped) return static_cast<uint64_t>(p.a.batch_count);
  return static_cast<uint64_t>(p.m) << 32 | static_cast<uint64_t>(p.k);
}

Algo make(const Problem& p, const Config& config, const uint32_t (&alignment)[4]) {
  Algo algo{};
  algo.data[SIGNATURE] = kSignature;
  algo.data[TYPES] = types_of(p);
  algo.data[SETTINGS] = settings_of(p);
  algo.data[SHAPE] = shape_of(p);
  for (int i = 0; i < 4; ++i) {
    algo.data[ALIGNMENT] |= static_cast<uint64_t>(std::min(alignment[i], 65535U)) << (16 * i);
  }
  algo.data[VERSION] = static_cast<uint64_t>(pose().version);
  store(algo, config);
  return algo;
}

std::vector<Config> candidates(const Problem& p) {
  if (p.grouped) return {{kGrouped, kTile128x64, 1, REDUCTION_NONE, 0, 0}};
  std::vector<Config> all = {{kMain, kTile128x64, 1, REDUCTION_NONE, 0, 0}};
  if (p.k >= 256) all.push_back({kMain, kTile128x64, 2, REDUCTION_COMPUTE_TYPE, 0, 0});
  if (pose().version >= 130002) {
    all.push_back({kOther, kTile128x64, 1, REDUCTION_NONE, kStages768xAuto, 0});
  }
  all.push_back({kFrugal, kTile128x64, 1, REDUCTION_NONE, 0, 1});
  return all;
}

float waves(const Problem& p) {
  if (p.grouped) return 1.0F;
  return static_cast<float>((p.m + 127) / 128 * ((p.n + 63) / 64)) / 148.0F;
}

void check_config(const Config& config, const Problem& p) {
  FAKE_REQUIRE((config.id == kGrouped) == p.grouped, NOT_SUPPORTED, "algorithm %d %s grouped",
               config.id, p.grouped ? "is not" : "is only");
  FAKE_REQUIRE(config.splitk >= 1, NOT_SUPPORTED, "SPLITK_NUM is %d", config.splitk);
  FAKE_REQUIRE((config.splitk > 1) == (config.reduction == REDUCTION_COMPUTE_TYPE), NOT_SUPPORTED,
               "SPLITK_NUM %d with reduction scheme %u", config.splitk, config.reduction);
  FAKE_REQUIRE(config.splitk == 1 || config.id == kMain, NOT_SUPPORTED,
               "algorithm %d cannot split k", config.id);
}

void check_preference(const Preference& preference, const Problem& p) {
  FAKE_REQUIRE(preference.search_mode == 0, NOT_SUPPORTED,
               "SEARCH_MODE %u: this fake knows BEST_FIT (0)", preference.search_mode);
  FAKE_REQUIRE((preference.reduction_mask & ~kReductionMask) == 0, INVALID_VALUE,
               "REDUCTION_SCHEME_MASK is %u", preference.reduction_mask);
  FAKE_REQUIRE(preference.impl_mask != 0, NOT_SUPPORTED, "IMPL_MASK allows no implementation");
  const Layout* all[] = {&p.a, &p.b, &p.c, &p.d};
  for (int i = 0; i < 4; ++i) {
    const uint32_t bytes = preference.alignment[i];
    const uint32_t needed = p.nvfp4 ? 16 : static_cast<uint32_t>(element_bits(all[i]->type)) / 8;
    FAKE_REQUIRE(bytes != 0 && (bytes & (bytes - 1)) == 0, INVALID_VALUE,
                 "the minimal alignment of %c is %u: a power of two", "ABCD"[i], bytes);
    FAKE_REQUIRE(bytes >= needed, NOT_SUPPORTED,
                 "the minimal alignment of %c is %u: no algorithm works with less than %u",
                 "ABCD"[i], bytes, needed);
  }
  for (int i = 0; preference.has_averages && i < 3; ++i) {
    FAKE_REQUIRE(preference.average[i] == 0 || p.grouped, NOT_SUPPORTED,
                 "grouped averages are set for a plain matmul");
    FAKE_REQUIRE(preference.average[i] >= 0, INVALID_VALUE, "a grouped average is negative");
  }
}

void refuse_in_capture() {
  if (!pose().refuse_heuristic_in_capture) return;
  FAKE_REQUIRE(!device::capture_breaks(), INTERNAL_ERROR,
               "the heuristic was asked during a capture, which ends that capture");
}

void get_heuristic(void* handle, void* desc, void* a, void* b, void* c, void* d, void* preference,
                   int requested, HeuristicResult* results, int* returned) {
  living_handle(handle);
  const Preference& wanted = living_preference(preference);
  FAKE_REQUIRE(requested > 0, INVALID_VALUE, "%d results are requested", requested);
  FAKE_REQUIRE(results != nullptr && returned != nullptr, INVALID_VALUE,
               "there is no place for the results");
  *returned = 0;
  refuse_in_capture();
  const Problem p = describe(desc, a, b, c, d);
  check_preference(wanted, p);
  const float used = waves(p);
  for (const Config& config : candidates(p)) {
    const size_t workspace = workspace_needed(config, p);
    if (*returned == requested || workspace > wanted.max_workspace) continue;
    if (config.splitk > 1 && (config.reduction & wanted.reduction_mask) == 0) continue;
    if (wanted.max_waves > 0 && used > wanted.max_waves) continue;
    results[*returned] = {make(p, config, wanted.alignment), workspace, SUCCESS, used, {}};
    ++*returned;
  }
  FAKE_REQUIRE(*returned > 0, NOT_SUPPORTED,
               "no algorithm fits the preferences (workspace of %" PRIu64 " bytes)",
               wanted.max_workspace);
}

void check(void* handle, void* desc, void* a, void* b, void* c, void* d, const Algo* algo,
           HeuristicResult* result) {
  living_handle(handle);
  FAKE_REQUIRE(algo != nullptr && result != nullptr, INVALID_VALUE, "algo or result is NULL");
  const Config config = config_of(*algo);
  const Problem p = describe(desc, a, b, c, d);
  FAKE_REQUIRE(algo->data[TYPES] == types_of(p), INVALID_VALUE,
               "the algorithm was made for other types");
  FAKE_REQUIRE(algo->data[SETTINGS] == 0 || algo->data[SETTINGS] == settings_of(p), INVALID_VALUE,
               "the algorithm was made for another descriptor");
  check_config(config, p);
  result->workspace_size = workspace_needed(config, p);
  result->state = SUCCESS;
  result->waves = waves(p);
  std::array<uint64_t, 8> key{};
  std::copy(std::begin(algo->data), std::end(algo->data), key.begin());
  key[SETTINGS] = settings_of(p);
  key[SHAPE] = shape_of(p);
  const std::lock_guard<std::mutex> lock(mutex);
  checked.insert(key);
}

}  // namespace

uint64_t hash_types(int compute, int scale, int a, int b, int c, int d) {
  uint64_t h = 1;
  for (int value : {compute, scale, a, b, c, d}) h = mix(h, static_cast<uint64_t>(value));
  return h;
}

void store(Algo& algo, const Config& c) {
  algo.data[CONFIG] = static_cast<uint64_t>(c.id) | static_cast<uint64_t>(c.tile) << 16 |
                      static_cast<uint64_t>(c.splitk) << 32 |
                      static_cast<uint64_t>(c.reduction) << 48;
  algo.data[MORE] = static_cast<uint64_t>(c.stages) | static_cast<uint64_t>(c.swizzle) << 32;
}

Config config_of(const Algo& algo) {
  FAKE_REQUIRE(algo.data[SIGNATURE] == kSignature, INVALID_VALUE,
               "the algorithm was not filled by this library");
  const auto version = static_cast<uint64_t>(pose().version);
  FAKE_REQUIRE(algo.data[VERSION] == version, INVALID_VALUE,
               "the algorithm is of version %" PRIu64 ", this is %" PRIu64, algo.data[VERSION],
               version);
  Config c{};
  c.id = static_cast<int>(algo.data[CONFIG] & 0xffff);
  c.tile = static_cast<uint32_t>(algo.data[CONFIG] >> 16 & 0xffff);
  c.splitk = static_cast<int32_t>(algo.data[CONFIG] >> 32 & 0xffff);
  c.reduction = static_cast<uint32_t>(algo.data[CONFIG] >> 48);
  c.stages = static_cast<uint32_t>(algo.data[MORE] & 0xffffffff);
  c.swizzle = static_cast<uint32_t>(algo.data[MORE] >> 32);
  return c;
}

size_t workspace_needed(const Config& config, const Problem& p) {
  if (config.id == kFrugal) return 0;
  if (p.grouped) return kBaseWorkspace + static_cast<size_t>(p.a.batch_count) * 256;
  // Split-K keeps one fp32 partial sum for each part.
  const auto parts = static_cast<size_t>(config.splitk > 1 ? config.splitk : 0);
  const auto partial = parts * static_cast<size_t>(p.m) * static_cast<size_t>(p.n) * 4;
  return kBaseWorkspace + (partial + 255) / 256 * 256;
}

void require_belongs(const Algo& algo, const Problem& p) {
  check_config(config_of(algo), p);
  FAKE_REQUIRE(algo.data[TYPES] == types_of(p), NOT_SUPPORTED,
               "the algorithm was made for other types");
  FAKE_REQUIRE(algo.data[SETTINGS] == 0 || algo.data[SETTINGS] == settings_of(p), NOT_SUPPORTED,
               "the algorithm was made for another descriptor");
  if (algo.data[SETTINGS] == settings_of(p) && algo.data[SHAPE] == shape_of(p)) return;
  std::array<uint64_t, 8> key{};
  std::copy(std::begin(algo.data), std::end(algo.data), key.begin());
  key[SETTINGS] = settings_of(p);
  key[SHAPE] = shape_of(p);
  const std::lock_guard<std::mutex> lock(mutex);
  FAKE_REQUIRE(checked.count(key) != 0, NOT_SUPPORTED,
               "the algorithm was made for another m and k, and cublasLtMatmulAlgoCheck was not "
               "asked about these");
}

void promised_alignment(const Algo& algo, uint32_t (&bytes)[4]) {
  for (int i = 0; i < 4; ++i) bytes[i] = algo.data[ALIGNMENT] >> (16 * i) & 0xffff;
}

Algo implicit_algorithm(const Problem& p, size_t workspace_bytes) {
  refuse_in_capture();
  const uint32_t any[4] = {1, 1, 1, 1};
  for (const Config& config : candidates(p)) {
    if (workspace_needed(config, p) <= workspace_bytes) return make(p, config, any);
  }
  refuse(NOT_SUPPORTED, "no algorithm fits %zu bytes of workspace", workspace_bytes);
}

}  // namespace fake

using namespace fake;

FAKE_API int cublasLtMatmulAlgoGetHeuristic(void* handle, void* desc, void* a, void* b, void* c,
                                            void* d, void* preference, int requested,
                                            HeuristicResult* results, int* returned) {
  return guard("cublasLtMatmulAlgoGetHeuristic", [&] {
    get_heuristic(handle, desc, a, b, c, d, preference, requested, results, returned);
  });
}

FAKE_API int cublasLtMatmulAlgoCheck(void* handle, void* desc, void* a, void* b, void* c, void* d,
                                     const Algo* algo, HeuristicResult* result) {
  return guard("cublasLtMatmulAlgoCheck", [&] { check(handle, desc, a, b, c, d, algo, result); });
}

// 13.5 added the same calls for the context of a stream.
FAKE_API int cublasLtMatmulAlgoGetHeuristicForStream(void* handle, void* desc, void* a, void* b,
                                                     void* c, void* d, void* preference,
                                                     int requested, HeuristicResult* results,
                                                     int* returned, void*) {
  return guard("cublasLtMatmulAlgoGetHeuristicForStream", [&] {
    FAKE_REQUIRE(pose().version >= 130500, NOT_SUPPORTED, "this call exists from 13.5.0 on");
    get_heuristic(handle, desc, a, b, c, d, preference, requested, results, returned);
  });
}

FAKE_API int cublasLtMatmulAlgoCheckForStream(void* handle, void* desc, void* a, void* b, void* c,
                                              void* d, const Algo* algo, HeuristicResult* result,
                                              void*) {
  return guard("cublasLtMatmulAlgoCheckForStream", [&] {
    FAKE_REQUIRE(pose().version >= 130500, NOT_SUPPORTED, "this call exists from 13.5.0 on");
    check(handle, desc, a, b, c, d, algo, result);
  });
}
