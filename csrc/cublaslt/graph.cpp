// SPDX-License-Identifier: Apache-2.0
// The loop as conditional nodes of a graph, for sizes that only the device knows.
//
//   set conditions -> chain 0: [IF group 0] -> [IF group S] -> ...
//                     chain 1: [IF group 1] -> ...            in each group, one after the other:
//                                                             [SWITCH expert over its buckets]
//
// Groups make idle experts cheap: the front end takes conditional nodes one by one.  Experts of a
// chain run one after the other and share its slot, so memory grows with chains, not with experts.
#include <algorithm>

#include "cublaslt/looped_worker.h"
#include "cublaslt/streams.h"
#include "cuda/check.h"
#include "cuda/slots.h"

namespace fp4lt::cublaslt {

// What a chain has beside the workspace of a stream: room for the most rows.
struct LoopedGemm::Slot {
  int64_t bucket;      // the largest
  int64_t row_bytes;   // of the activations
  int64_t out_stride;  // of the sums, in elements
  int64_t line;        // bytes of a row of scale tiles; 0 without
  int64_t rows_at, sums_at, tiles_at, bytes;
};

LoopedGemm::Slot LoopedGemm::slot(int64_t rows) const {
  const bool codes = shape_.weights == Weights::kCodes;
  Slot s{};
  s.bucket = row_bucket(rows);
  s.row_bytes = codes ? shape_.k / 2 : shape_.k * 2;
  s.out_stride = round_up(shape_.n, 8);
  s.line = codes ? padded_blocks(shape_.k / 16) * kTileRows : 0;
  s.rows_at = stream_bytes();
  s.sums_at = s.rows_at + round_up(s.bucket * s.row_bytes, 256);
  s.tiles_at = s.sums_at + round_up(s.bucket * s.out_stride * size_of(shape_.out), 256);
  s.bytes = s.tiles_at + round_up(ceil_div(s.bucket, kTileRows) * s.line, 256);
  return s;
}

int64_t LoopedGemm::graph_bytes(int64_t rows) const { return slot(rows).bytes; }

#if CUDART_VERSION >= 13000
namespace {

// More experts to a group make idle ones cheaper and active ones of a group wait longer.
constexpr int64_t kGroup = 16;

// A conditional node with its bodies.
struct Conditional {
  cudaGraphNode_t node;
  cudaGraph_t* bodies;
};

Conditional add(cudaGraph_t graph, const std::vector<cudaGraphNode_t>& after,
                cudaGraphConditionalHandle handle, unsigned bodies) {
  cudaGraphNodeParams p{};
  p.type = cudaGraphNodeTypeConditional;
  p.conditional.handle = handle;
  p.conditional.type = bodies == 1 ? cudaGraphCondTypeIf : cudaGraphCondTypeSwitch;
  p.conditional.size = bodies;
  Conditional c{};
  FP4LT_CUDA_CHECK(cudaGraphAddNode(&c.node, graph, after.data(), nullptr, after.size(), &p));
  c.bodies = p.conditional.phGraph_out;
  return c;
}

// Captures what is enqueued to `stream` while it lives into a body.
class BodyCapture {
 public:
  BodyCapture(Stream stream, cudaGraph_t body) : stream_(stream) {
    FP4LT_CUDA_CHECK(cudaStreamBeginCaptureToGraph(stream, body, nullptr, nullptr, 0,
                                                   cudaStreamCaptureModeRelaxed));
  }
  void end() {
    cudaGraph_t body = nullptr;
    ended_ = true;
    FP4LT_CUDA_CHECK(cudaStreamEndCapture(stream_, &body));
  }
  ~BodyCapture() {
    cudaGraph_t body = nullptr;
    if (!ended_) static_cast<void>(cudaStreamEndCapture(stream_, &body));
  }
  BodyCapture(const BodyCapture&) = delete;
  BodyCapture& operator=(const BodyCapture&) = delete;

 private:
  Stream stream_;
  bool ended_ = false;
};

struct Capture {
  cudaGraph_t graph;
  std::vector<cudaGraphNode_t> last;
};

Capture capture_at(Stream stream) {
  cudaStreamCaptureStatus state = cudaStreamCaptureStatusNone;
  cudaGraph_t graph = nullptr;
  const cudaGraphNode_t* nodes = nullptr;
  const cudaGraphEdgeData* edges = nullptr;
  size_t count = 0;
  FP4LT_CUDA_CHECK(
      cudaStreamGetCaptureInfo(stream, &state, nullptr, &graph, &nodes, &edges, &count));
  FP4LT_CHECK(state == cudaStreamCaptureStatusActive, "graph: the stream is not capturing");
  return {graph, {nodes, nodes + count}};
}

std::vector<cudaGraphConditionalHandle> handles(cudaGraph_t graph, int64_t count,
                                                unsigned initial) {
  std::vector<cudaGraphConditionalHandle> made(static_cast<size_t>(count));
  for (auto& handle : made) {
    FP4LT_CUDA_CHECK(cudaGraphConditionalHandleCreate(&handle, graph, initial, 0));
  }
  return made;
}

}  // namespace

void LoopedGemm::add_to_graph(const LoopedCall& call, const int* ends, int64_t rows) {
  if (rows == 0) return;
  int driver = 0;
  FP4LT_CUDA_CHECK(cudaDriverGetVersion(&driver));
  if (driver < 12080) {
    throw UnsupportedError(
        concat("graph: sizes on the device need a driver for CUDA 12.8 or "
               "later, and this one is for ",
               driver / 1000, ".", driver % 1000 / 10));
  }
  const cuda::DeviceGuard guard(device_);
  const Slot s = slot(rows);
  std::vector<int64_t> buckets;
  for (int64_t b = row_bucket(1); b < s.bucket; b = row_bucket(b + 1)) buckets.push_back(b);
  buckets.push_back(s.bucket);

  // The call as each chain sees it: rows and sums in its slot.
  const auto chain_call = [&](int64_t chain) {
    LoopedCall own = call;
    own.workspace = at(call.workspace, chain * s.bytes);
    own.rows = at(own.workspace, s.rows_at);
    own.row_stride = shape_.k;
    own.out = at(own.workspace, s.sums_at);
    own.out_row_stride = s.out_stride;
    if (s.line != 0) {
      own.row_scales = reinterpret_cast<const uint8_t*>(at(own.workspace, s.tiles_at));
    }
    return own;
  };
  const LoopedCall first = chain_call(0);
  const std::vector<Part> parts = plan(first, buckets, true);

  const int64_t experts = call.experts;
  const int64_t chains = std::min<int64_t>(call.streams, experts);
  const int64_t groups = std::max(ceil_div(experts, kGroup), chains);
  const RelaxedCapture relaxed;
  const StreamLoan loan(device_);
  Capture root = capture_at(call.stream);
  cuda::Conditions conditions{ends, rows, handles(root.graph, experts, 0),
                              handles(root.graph, groups, 0), buckets};
  cuda::set_conditions(conditions, call.stream);
  root = capture_at(call.stream);

  const auto body = [&](const LoopedCall& own, int64_t expert, int64_t bucket, cudaGraph_t graph) {
    BodyCapture capture(loan[0], graph);
    auto* slot_rows = const_cast<char*>(static_cast<const char*>(own.rows));
    cuda::SlotCopy copy{};
    copy.ends = ends;
    copy.expert = expert;
    copy.rows = rows;
    copy.bucket = bucket;
    copy.packed = const_cast<char*>(static_cast<const char*>(call.rows));
    copy.slot = slot_rows;
    copy.packed_stride = call.row_stride * s.row_bytes / shape_.k;
    copy.slot_stride = copy.row_bytes = s.row_bytes;
    copy.to_slot = true;
    cuda::copy_slot(copy, loan[0]);
    if (s.line != 0) {
      cuda::copy_tiles({ends, expert, rows, bucket, reinterpret_cast<const char*>(call.row_scales),
                        at(own.workspace, s.tiles_at), s.line},
                       loan[0]);
    }
    Worker worker(*this, own, parts, loan[0], own.workspace, true);
    worker.run(expert, bucket, {own.rows, own.row_scales, own.out});
    copy.packed = static_cast<char*>(call.out);
    copy.slot = static_cast<char*>(own.out);
    copy.packed_stride = call.out_row_stride * size_of(shape_.out);
    copy.slot_stride = s.out_stride * size_of(shape_.out);
    copy.row_bytes = std::min(copy.packed_stride, copy.slot_stride);
    copy.to_slot = false;
    cuda::copy_slot(copy, loan[0]);
    capture.end();
  };

  std::vector<std::vector<cudaGraphNode_t>> last(static_cast<size_t>(chains), root.last);
  const auto count = static_cast<unsigned>(buckets.size());
  for (int64_t g = 0; g < groups; ++g) {
    auto& before = last[static_cast<size_t>(g % chains)];
    const LoopedCall own = chain_call(g % chains);
    const Conditional group = add(root.graph, before, conditions.groups[g], 1);
    before.assign(1, group.node);
    std::vector<cudaGraphNode_t> previous;
    for (int64_t e = g; e < experts; e += groups) {
      const Conditional expert = add(group.bodies[0], previous, conditions.experts[e], count);
      previous.assign(1, expert.node);
      for (unsigned b = 0; b < count; ++b) body(own, e, buckets[b], expert.bodies[b]);
    }
  }
  std::vector<cudaGraphNode_t> tails;
  for (const auto& nodes : last) tails.insert(tails.end(), nodes.begin(), nodes.end());
  std::sort(tails.begin(), tails.end());
  tails.erase(std::unique(tails.begin(), tails.end()), tails.end());
  FP4LT_CUDA_CHECK(cudaStreamUpdateCaptureDependencies(
      call.stream, tails.data(), nullptr, tails.size(), cudaStreamSetCaptureDependencies));
}

#else

void LoopedGemm::add_to_graph(const LoopedCall&, const int*, int64_t) {
  throw UnsupportedError(concat("graph: sizes on the device need a build with CUDA 13.0 or later, ",
                                "and this one is built with ", CUDART_VERSION / 1000, ".",
                                CUDART_VERSION % 1000 / 10));
}

#endif

}  // namespace fp4lt::cublaslt
