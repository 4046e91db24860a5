// SPDX-License-Identifier: Apache-2.0
// The library's objects with owners.  Setting one costs tens of nanoseconds and no driver call, so
// each caller has its own and changes it from product to product: nothing is shared, nothing
// locked.
#pragma once

#include <utility>

#include "cublaslt/library.h"

namespace fp4lt::cublaslt {

template <typename Object, auto Destroy>
class Owned {
 public:
  explicit Owned(const Library& library) : library_(&library) {}
  ~Owned() {
    if (object_ != nullptr) static_cast<void>(((**library_).*Destroy)(object_));
  }
  Owned(Owned&& other) noexcept
      : library_(other.library_), object_(std::exchange(other.object_, nullptr)) {}
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
  Owned& operator=(Owned&&) = delete;

  Object get() const { return object_; }

 protected:
  const Library* library_;
  Object object_ = nullptr;
};

class MatmulDesc : public Owned<abi::Desc, &abi::Functions::MatmulDescDestroy> {
 public:
  MatmulDesc(const Library& library, int compute_type, int scale_type) : Owned(library) {
    FP4LT_CUBLASLT_CALL(library, MatmulDescCreate, &object_, compute_type, scale_type);
  }
  template <typename T>
  void set(abi::DescAttribute attribute, const T& value) {
    FP4LT_CUBLASLT_CALL(*library_, MatmulDescSetAttribute, object_, attribute, &value,
                        sizeof value);
  }
  template <typename T>
  T get_attribute(abi::DescAttribute attribute) const {
    T value{};
    size_t written = 0;
    FP4LT_CUBLASLT_CALL(*library_, MatmulDescGetAttribute, object_, attribute, &value, sizeof value,
                        &written);
    return value;
  }
};

class MatrixLayout : public Owned<abi::Layout, &abi::Functions::MatrixLayoutDestroy> {
 public:
  // Column-major `rows` x `cols`; `ld` in elements.
  MatrixLayout(const Library& library, int type, int64_t rows, int64_t cols, int64_t ld)
      : Owned(library) {
    FP4LT_CUBLASLT_CALL(library, MatrixLayoutCreate, &object_, type, static_cast<uint64_t>(rows),
                        static_cast<uint64_t>(cols), ld);
  }
  void set_rows(int64_t rows) { set(abi::kLayoutRows, static_cast<uint64_t>(rows)); }
  void set_cols(int64_t cols) { set(abi::kLayoutCols, static_cast<uint64_t>(cols)); }
  template <typename T>
  T get_attribute(abi::LayoutAttribute attribute) const {
    T value{};
    size_t written = 0;
    FP4LT_CUBLASLT_CALL(*library_, MatrixLayoutGetAttribute, object_, attribute, &value,
                        sizeof value, &written);
    return value;
  }

 private:
  template <typename T>
  void set(abi::LayoutAttribute attribute, const T& value) {
    FP4LT_CUBLASLT_CALL(*library_, MatrixLayoutSetAttribute, object_, attribute, &value,
                        sizeof value);
  }
};

class MatmulPreference : public Owned<abi::Preference, &abi::Functions::MatmulPreferenceDestroy> {
 public:
  explicit MatmulPreference(const Library& library) : Owned(library) {
    FP4LT_CUBLASLT_CALL(library, MatmulPreferenceCreate, &object_);
  }
  template <typename T>
  void set(abi::PreferenceAttribute attribute, const T& value) {
    FP4LT_CUBLASLT_CALL(*library_, MatmulPreferenceSetAttribute, object_, attribute, &value,
                        sizeof value);
  }
  template <typename T>
  T get_attribute(abi::PreferenceAttribute attribute) const {
    T value{};
    size_t written = 0;
    FP4LT_CUBLASLT_CALL(*library_, MatmulPreferenceGetAttribute, object_, attribute, &value,
                        sizeof value, &written);
    return value;
  }
};

}  // namespace fp4lt::cublaslt
