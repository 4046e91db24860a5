// SPDX-License-Identifier: Apache-2.0
// Streams beside the caller's: lent for one call, forked from its stream by an event and joined to
// it by events, so that the call works in eager mode and in a capture alike.
#pragma once

#include <memory>
#include <vector>

#include "cuda/stream.h"

struct CUevent_st;

namespace fp4lt::cublaslt {

using cuda::Stream;

// Non-blocking streams of one device with an event each, and one for the fork.
struct StreamSet {
  explicit StreamSet(int streams);
  ~StreamSet();
  StreamSet(const StreamSet&) = delete;
  StreamSet& operator=(const StreamSet&) = delete;

  std::vector<Stream> streams;
  std::vector<CUevent_st*> joined;
  CUevent_st* forked = nullptr;
  // Once forked into a capture, a stream belongs to it until the capture ends.
  bool was_captured = false;
};

constexpr int kMaxStreams = 32;

// A loan of up to kMaxStreams streams.  Sets are cached per device; two callers at once get two,
// and a set that is still part of somebody's capture is lent to that capture only.
class StreamLoan {
 public:
  // `device` is current.
  StreamLoan(int device, Stream caller, int streams);
  // Streams that are part of no capture, to begin one with.
  explicit StreamLoan(int device);
  ~StreamLoan();
  StreamLoan(const StreamLoan&) = delete;
  StreamLoan& operator=(const StreamLoan&) = delete;

  // Lets the streams wait for what the caller's stream has been given so far.
  void fork();
  // Lets the caller's stream wait for all of them.  The destructor does it where an error came
  // between: a capture that is left with a stream outside could not be ended.
  void join();

  int size() const { return size_; }
  Stream operator[](int i) const { return set_->streams[i]; }
  bool capturing() const { return capture_ != 0; }

 private:
  void join_quietly() noexcept;

  int device_;
  Stream caller_;
  int size_;
  unsigned long long capture_ = 0;
  bool forked_ = false;
  std::unique_ptr<StreamSet> set_;
};

// The number of the capture that the stream is part of; 0 outside.
unsigned long long capture_of(Stream stream);

// While it lives, calls of this thread that a capture forbids (creating things, loading kernels) do
// not break a capture that another stream is in.
class RelaxedCapture {
 public:
  RelaxedCapture();
  ~RelaxedCapture();
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  int mode_;
};

}  // namespace fp4lt::cublaslt
