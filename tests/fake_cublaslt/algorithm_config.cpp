// SPDX-License-Identifier: Apache-2.0
// The lower-level calls: making an algorithm by its id, and reading and writing its configuration.
#include <cstring>

#include "algorithms.h"
#include "report.h"

namespace fake {
namespace {

struct ConfigEntry {
  int id;
  size_t size;
};
constexpr ConfigEntry kConfigSizes[] = {
    {CONFIG_ID, 4},        {CONFIG_TILE, 4},        {CONFIG_SPLITK, 4},
    {CONFIG_REDUCTION, 4}, {CONFIG_SWIZZLE, 4},     {CONFIG_CUSTOM, 4},
    {CONFIG_STAGES, 4},    {CONFIG_INNER_SHAPE, 2}, {CONFIG_CLUSTER_SHAPE, 2},
};

size_t config_size(int attribute) {
  for (const ConfigEntry& entry : kConfigSizes) {
    if (entry.id == attribute) return entry.size;
  }
  refuse(INVALID_VALUE, "configuration attribute %d is unknown", attribute);
}

uint32_t config_value(const Config& config, int attribute) {
  switch (attribute) {
    case CONFIG_ID:
      return static_cast<uint32_t>(config.id);
    case CONFIG_TILE:
      return config.tile;
    case CONFIG_SPLITK:
      return static_cast<uint32_t>(config.splitk);
    case CONFIG_REDUCTION:
      return config.reduction;
    case CONFIG_SWIZZLE:
      return config.swizzle;
    case CONFIG_STAGES:
      return config.stages;
    default:
      return 0;
  }
}

void set_config(Config& config, int attribute, uint32_t value) {
  switch (attribute) {
    case CONFIG_ID:
      refuse(INVALID_VALUE, "the algorithm's id can only be read");
    case CONFIG_TILE:
      config.tile = value;
      break;
    case CONFIG_SPLITK:
      config.splitk = static_cast<int32_t>(value);
      break;
    case CONFIG_REDUCTION:
      config.reduction = value;
      break;
    case CONFIG_SWIZZLE:
      config.swizzle = value;
      break;
    case CONFIG_STAGES:
      config.stages = value;
      break;
    default:
      FAKE_REQUIRE(value == 0, NOT_SUPPORTED, "configuration attribute %d has one value here: 0",
                   attribute);
  }
}

// Capabilities that a shim may ask for.
uint32_t capability(const Config& config, int attribute) {
  switch (attribute) {
    case CAP_SPLITK:
      return config.id == kMain;
    case CAP_REDUCTION_MASK:
      return config.id == kMain ? REDUCTION_COMPUTE_TYPE : 0;
    case CAP_OUT_OF_PLACE:
      return 1;
    case CAP_POINTER_MODES:
      return 3;  // HOST and DEVICE
    case CAP_ALIGNMENT_A:
    case CAP_ALIGNMENT_B:
    case CAP_ALIGNMENT_C:
    case CAP_ALIGNMENT_D:
      return 16;
    case CAP_GROUPED:
      return config.id == kGrouped;
    default:
      refuse(INVALID_VALUE, "capability %d is unknown to this fake", attribute);
  }
}

void read(uint32_t value, size_t held, void* buffer, size_t size, size_t* written) {
  if (size == 0) {
    FAKE_REQUIRE(written != nullptr, INVALID_VALUE,
                 "size 0 asks for the size: sizeWritten is NULL");
  } else {
    FAKE_REQUIRE(buffer != nullptr, INVALID_VALUE, "the buffer is NULL");
    FAKE_REQUIRE(size == held, INVALID_VALUE, "%zu bytes given, %zu needed", size, held);
    std::memcpy(buffer, &value, size);
  }
  if (written != nullptr) *written = held;
}

// The types for which GetIds and Init have something to say.
bool known_types(int compute, int scale, int a, int b, int c, int d) {
  const bool inputs = a == b && (a == R_4F_E2M1 || a == R_16BF || a == R_16F);
  const bool outputs = c == d && (d == R_32F || d == R_16BF || d == R_16F);
  return compute == COMPUTE_32F && scale == R_32F && inputs && outputs;
}

}  // namespace
}  // namespace fake

using namespace fake;

FAKE_API int cublasLtMatmulAlgoGetIds(void* handle, int compute, int scale, int a, int b, int c,
                                      int d, int requested, int* ids, int* returned) {
  return guard("cublasLtMatmulAlgoGetIds", [&] {
    living_handle(handle);
    FAKE_REQUIRE(requested > 0, INVALID_VALUE, "%d ids are requested", requested);
    FAKE_REQUIRE(ids != nullptr && returned != nullptr, INVALID_VALUE, "no place for the ids");
    *returned = 0;
    if (!known_types(compute, scale, a, b, c, d)) return;
    for (int id : {kMain, kOther, kFrugal, kGrouped}) {
      if (*returned < requested) ids[(*returned)++] = id;
    }
  });
}

FAKE_API int cublasLtMatmulAlgoInit(void* handle, int compute, int scale, int a, int b, int c,
                                    int d, int id, Algo* algo) {
  return guard("cublasLtMatmulAlgoInit", [&] {
    living_handle(handle);
    FAKE_REQUIRE(algo != nullptr, INVALID_VALUE, "algo is NULL");
    const bool known = id == kMain || id == kOther || id == kFrugal || id == kGrouped;
    FAKE_REQUIRE(known, INVALID_VALUE, "algorithm %d is unknown", id);
    FAKE_REQUIRE(known_types(compute, scale, a, b, c, d), NOT_SUPPORTED,
                 "algorithm %d does not support these types", id);
    *algo = Algo{};
    algo->data[SIGNATURE] = kSignature;
    algo->data[TYPES] = hash_types(compute, scale, a, b, c, d);
    algo->data[VERSION] = static_cast<uint64_t>(pose().version);
    algo->data[ALIGNMENT] = 0x0001000100010001ULL;
    store(*algo, {id, 0, 1, REDUCTION_NONE, 0, 0});
  });
}

FAKE_API int cublasLtMatmulAlgoConfigSetAttribute(Algo* algo, int attribute, const void* buffer,
                                                  size_t size) {
  return guard("cublasLtMatmulAlgoConfigSetAttribute", [&] {
    FAKE_REQUIRE(algo != nullptr && buffer != nullptr, INVALID_VALUE, "algo or buffer is NULL");
    Config config = config_of(*algo);
    const size_t held = config_size(attribute);
    FAKE_REQUIRE(size == held, INVALID_VALUE, "%zu bytes given, %zu needed", size, held);
    uint32_t value = 0;
    std::memcpy(&value, buffer, size);
    set_config(config, attribute, value);
    store(*algo, config);
  });
}

FAKE_API int cublasLtMatmulAlgoConfigGetAttribute(const Algo* algo, int attribute, void* buffer,
                                                  size_t size, size_t* written) {
  return guard("cublasLtMatmulAlgoConfigGetAttribute", [&] {
    FAKE_REQUIRE(algo != nullptr, INVALID_VALUE, "algo is NULL");
    const Config config = config_of(*algo);
    read(config_value(config, attribute), config_size(attribute), buffer, size, written);
  });
}

FAKE_API int cublasLtMatmulAlgoCapGetAttribute(const Algo* algo, int attribute, void* buffer,
                                               size_t size, size_t* written) {
  return guard("cublasLtMatmulAlgoCapGetAttribute", [&] {
    FAKE_REQUIRE(algo != nullptr, INVALID_VALUE, "algo is NULL");
    read(capability(config_of(*algo), attribute), 4, buffer, size, written);
  });
}
