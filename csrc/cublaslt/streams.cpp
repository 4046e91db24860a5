// SPDX-License-Identifier: Apache-2.0
#include "cublaslt/streams.h"

#include <algorithm>
#include <map>
#include <mutex>

#include "cuda/check.h"

namespace fp4lt::cublaslt {
namespace {

constexpr unsigned long long kBroken = ~0ULL;  // a capture that can only be ended

struct Pool {
  std::mutex mutex;
  std::map<int, std::vector<std::unique_ptr<StreamSet>>> idle;  // by device
};

// Never destroyed: at the process's end the driver may be gone before it.
Pool& pool() {
  static Pool* const instance = new Pool;
  return *instance;
}

// Whether the set may work for a caller in `capture` (0: in none).
bool free_for(StreamSet& set, unsigned long long capture) {
  if (!set.was_captured) return true;
  bool inside = false;
  for (const Stream stream : set.streams) {
    const unsigned long long own = capture_of(stream);
    if (own != 0 && own != capture) return false;
    inside |= own != 0;
  }
  set.was_captured = inside;
  return !inside || capture != 0;
}

std::unique_ptr<StreamSet> take(int device, unsigned long long capture) {
  {
    Pool& p = pool();
    const std::lock_guard<std::mutex> lock(p.mutex);
    auto& idle = p.idle[device];
    const auto found = std::find_if(idle.begin(), idle.end(),
                                    [&](const auto& set) { return free_for(*set, capture); });
    if (found != idle.end()) {
      std::unique_ptr<StreamSet> set = std::move(*found);
      idle.erase(found);
      return set;
    }
  }
  const RelaxedCapture relaxed;
  return std::make_unique<StreamSet>(kMaxStreams);
}

}  // namespace

StreamSet::StreamSet(int count) : streams(count), joined(count) {
  for (Stream& stream : streams) {
    FP4LT_CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  }
  for (cudaEvent_t& event : joined) {
    FP4LT_CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  }
  FP4LT_CUDA_CHECK(cudaEventCreateWithFlags(&forked, cudaEventDisableTiming));
}

StreamSet::~StreamSet() {
  for (const Stream stream : streams) static_cast<void>(cudaStreamDestroy(stream));
  for (const cudaEvent_t event : joined) static_cast<void>(cudaEventDestroy(event));
  static_cast<void>(cudaEventDestroy(forked));
}

unsigned long long capture_of(Stream stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long id = 0;
#if CUDART_VERSION >= 13000
  const cudaError_t error =
      cudaStreamGetCaptureInfo(stream, &status, &id, nullptr, nullptr, nullptr, nullptr);
#else
  const cudaError_t error =
      cudaStreamGetCaptureInfo_v2(stream, &status, &id, nullptr, nullptr, nullptr);
#endif
  if (error != cudaSuccess) {
    // The legacy default stream cannot be asked while another stream is captured.
    static_cast<void>(cudaGetLastError());
    return 0;
  }
  if (status == cudaStreamCaptureStatusInvalidated) return kBroken;
  return status == cudaStreamCaptureStatusActive ? id : 0;
}

StreamLoan::StreamLoan(int device, Stream caller, int streams)
    : device_(device),
      caller_(caller),
      size_(std::clamp(streams, 1, kMaxStreams)),
      capture_(capture_of(caller)),
      set_(take(device, capture_)) {}

StreamLoan::StreamLoan(int device)
    : device_(device), caller_(nullptr), size_(kMaxStreams), set_(take(device, 0)) {}

StreamLoan::~StreamLoan() {
  if (forked_) join_quietly();
  Pool& p = pool();
  const std::lock_guard<std::mutex> lock(p.mutex);
  p.idle[device_].push_back(std::move(set_));
}

void StreamLoan::fork() {
  FP4LT_CUDA_CHECK(cudaEventRecord(set_->forked, caller_));
  forked_ = true;
  set_->was_captured |= capture_ != 0;
  for (int i = 0; i < size_; ++i) {
    FP4LT_CUDA_CHECK(cudaStreamWaitEvent(set_->streams[i], set_->forked, 0));
  }
}

void StreamLoan::join() {
  forked_ = false;
  for (int i = 0; i < size_; ++i) {
    FP4LT_CUDA_CHECK(cudaEventRecord(set_->joined[i], set_->streams[i]));
    FP4LT_CUDA_CHECK(cudaStreamWaitEvent(caller_, set_->joined[i], 0));
  }
}

void StreamLoan::join_quietly() noexcept {
  for (int i = 0; i < size_; ++i) {
    if (cudaEventRecord(set_->joined[i], set_->streams[i]) == cudaSuccess) {
      static_cast<void>(cudaStreamWaitEvent(caller_, set_->joined[i], 0));
    }
  }
  static_cast<void>(cudaGetLastError());
}

RelaxedCapture::RelaxedCapture() {
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  FP4LT_CUDA_CHECK(cudaThreadExchangeStreamCaptureMode(&mode));
  mode_ = static_cast<int>(mode);
}

RelaxedCapture::~RelaxedCapture() {
  auto mode = static_cast<cudaStreamCaptureMode>(mode_);
  static_cast<void>(cudaThreadExchangeStreamCaptureMode(&mode));
}

}  // namespace fp4lt::cublaslt
