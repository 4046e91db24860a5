// SPDX-License-Identifier: Apache-2.0
// One JSON object a line, to the file that RECORD_CUBLASLT_OUT names.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>

namespace record {

// The function of the real library, or NULL where it has none: of the file RECORD_CUBLASLT_REAL,
// else of the copy that the process has mapped, else of the next library in the search order.
void* real(const char* name);

// A line under construction.
class Line {
 public:
  explicit Line(const char* call);
  Line& number(const char* key, long long value);
  Line& real_number(const char* key, double value);
  Line& pointer(const char* key, const void* value);
  Line& bytes(const char* key, const void* data, size_t size);
  Line& words(const char* key, const uint64_t* data, size_t count);
  Line& raw(const char* key, const std::string& json);
  std::string json() const { return text_ + "}"; }
  void write() const;

 private:
  std::string text_;
};

// Objects are told apart by numbers, in the order of their making: addresses are used again.
int made(const void* object);
int known(const void* object);  // 0 for NULL, -1 for one made before the recording

// The pointer mode that was last set on a descriptor says whether alpha may be read here.
void set_pointer_mode(int descriptor, int mode);
bool scalars_on_host(int descriptor);

}  // namespace record
