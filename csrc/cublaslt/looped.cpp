// SPDX-License-Identifier: Apache-2.0
#include "cublaslt/looped.h"

#include <algorithm>

#include "core/scale_layout.h"
#include "cpu/thread_pool.h"
#include "cublaslt/looped_worker.h"
#include "cublaslt/streams.h"
#include "cuda/check.h"
#include "cuda/operand.h"

namespace fp4lt::cublaslt {
namespace {

// Products that a host thread should have, at least, to be worth its waking.
constexpr int64_t kJobsPerThread = 8;

abi::DataType data_type(DType type) {
  return type == DType::kF32 ? abi::kR32F : type == DType::kF16 ? abi::kR16F : abi::kR16BF;
}

// The largest power of two, up to 256, that divides all of them.
uint32_t alignment_of(const void* base, int64_t stride) {
  const uint64_t bits = reinterpret_cast<uintptr_t>(base) | static_cast<uint64_t>(stride) | 256u;
  return static_cast<uint32_t>(bits & (~bits + 1));
}

// Not restored, unlike with a guard: a helper thread begins with device 0, and setting that again
// would open a context there.  The thread that calls has a guard of its own.
void use_device(int device) {
  int current = 0;
  FP4LT_CUDA_CHECK(cudaGetDevice(&current));
  if (current != device) FP4LT_CUDA_CHECK(cudaSetDevice(device));
}

struct Job {
  int64_t expert, start, rows;
};

}  // namespace

LoopedGemm::LoopedGemm(std::shared_ptr<const Library> library, int device, const LoopedShape& shape)
    : library_(std::move(library)), device_(device), shape_(shape) {
  FP4LT_CHECK(shape.n > 0 && shape.k > 0 && shape.k % 16 == 0, "looped: N=", shape.n,
              " K=", shape.k, "; K must be a multiple of 16");
  if (shape_.weights != Weights::kExpanded) shape_.slice = shape_.n;
  FP4LT_CHECK(shape_.slice > 0 && (shape_.slice % kTileRows == 0 || shape_.slice >= shape_.n),
              "looped: slices of ", shape_.slice, " rows; a multiple of ", kTileRows, " is needed");
  shape_.slice = std::min(shape_.slice, round_up(shape_.n, kTileRows));
  const cuda::DeviceGuard guard(device);
  const RelaxedCapture relaxed;
  handle_ = library_->handle(device);
  zero_one_ = cuda::zero_and_one(device);
}

int64_t LoopedGemm::stream_bytes() const {
  const int64_t expanded =
      shape_.weights == Weights::kExpanded ? round_up(shape_.slice, 8) * shape_.k * 2 : 0;
  return round_up(shape_.library_workspace, 256) + round_up(expanded, 256);
}

MatmulDescription LoopedGemm::describe(const LoopedCall& call, int64_t m, int64_t rows) const {
  const bool codes = shape_.weights == Weights::kCodes;
  const bool dense = shape_.weights == Weights::kDense;
  MatmulDescription d;
  d.operand = codes ? abi::kR4FE2M1 : data_type(shape_.type);
  d.out = data_type(shape_.out);
  d.m = m;
  d.n = rows;
  d.k = shape_.k;
  d.lda = dense ? call.dense.row_stride : shape_.k;
  d.ldb = call.row_stride;
  d.ldd = call.out_row_stride;
  if (dense) {
    d.a_alignment = alignment_of(call.dense.data, call.dense.expert_stride * 2);
  } else if (codes) {
    d.a_alignment = alignment_of(call.nvfp4.codes, call.nvfp4.codes_expert_stride);
  }
  d.b_alignment = alignment_of(call.rows, codes ? call.row_stride / 2 : call.row_stride * 2);
  // Slices begin at multiples of 128 columns.
  d.d_alignment = alignment_of(call.out, call.out_row_stride * size_of(shape_.out));
  d.workspace_bytes = shape_.library_workspace;
  return d;
}

std::vector<LoopedGemm::Part> LoopedGemm::parts(const LoopedCall& call) const {
  std::vector<Part> parts;
  for (int64_t row0 = 0; row0 < shape_.n; row0 += shape_.slice) {
    const int64_t rows = std::min(shape_.slice, shape_.n - row0);
    // Expanded rows may be padded, which keeps columns of the sums at 16 bytes.
    const int64_t m =
        shape_.weights == Weights::kExpanded && row0 + round_up(rows, 8) <= call.out_row_stride
            ? round_up(rows, 8)
            : rows;
    parts.push_back({row0, rows, m - rows, describe(call, m, 1), {}});
  }
  return parts;
}

void LoopedGemm::set_any_scales(Matmul& matmul, const LoopedCall& call) const {
  // A question about FP4 needs scale pointers; which ones makes no difference.
  if (matmul.description().block_scaled()) matmul.set_scales(call.nvfp4.scales, call.row_scales);
}

Algorithm LoopedGemm::find(Matmul& matmul, int64_t rows, bool capturing) const {
  if (capturing && shape_.filters.no_query_in_capture) {
    throw UnsupportedError(
        concat("this version of libcublasLt (", library_->version(),
               ") breaks a graph capture "
               "when it is asked for algorithms: run the same sizes once before the capture, or "
               "install 13.6.1 or later.  Asked for: ",
               to_string(matmul.description())));
  }
  matmul.set_rows(rows);
  return find_algorithms(*library_, handle_, matmul, 1, shape_.filters).front();
}

Algorithm LoopedGemm::choose(Table& table, Matmul& matmul, int64_t rows, bool capturing) {
  const auto known = table.by_rows.find(rows);
  if (known != table.by_rows.end()) return known->second;
  const int64_t bucket = row_bucket(rows);
  // Pinned ones were chosen for aligned operands, and AlgoCheck knows nothing of pointers.
  const MatmulDescription& d = matmul.description();
  const bool aligned = std::min({d.a_alignment, d.b_alignment, d.d_alignment}) >= 16;
  const auto pinned = aligned ? pinned_.find(bucket) : pinned_.end();
  const abi::Algo* proposal = pinned != pinned_.end() ? &pinned->second : nullptr;
  if (proposal == nullptr) {
    auto found = table.buckets.find(bucket);
    if (found == table.buckets.end()) {
      found = table.buckets.emplace(bucket, find(matmul, bucket, capturing)).first;
    }
    proposal = &found->second.algo;
  }
  matmul.set_rows(rows);
  const auto checked = check_algorithm(*library_, handle_, matmul, *proposal);
  // One that was kept in a file has passed no filter of this process.
  const bool serves = checked && dropped(*checked, shape_.k, shape_.filters) == nullptr;
  return table.by_rows.emplace(rows, serves ? *checked : find(matmul, rows, capturing))
      .first->second;
}

std::vector<LoopedGemm::Part> LoopedGemm::plan(const LoopedCall& call,
                                               const std::vector<int64_t>& sizes, bool capturing) {
  FP4LT_CHECK(reinterpret_cast<uintptr_t>(call.workspace) % 256 == 0,
              "looped: the workspace must lie at a multiple of 256 bytes");
  FP4LT_CHECK(shape_.weights != Weights::kExpanded ||
                  (reinterpret_cast<uintptr_t>(call.nvfp4.codes) % 8 == 0 &&
                   call.nvfp4.codes_expert_stride % 8 == 0),
              "looped: codes must lie at multiples of 8 bytes; these do not: .clone() the tensor");
  // The first expert's scales are looked at by set_scales(), before anything is launched.
  FP4LT_CHECK(
      shape_.weights != Weights::kCodes || call.nvfp4.scales_expert_stride % 16 == 0,
      "looped: each expert's scales must lie at multiples of 16 bytes for FP4, and these are ",
      call.nvfp4.scales_expert_stride, " bytes apart: .clone() the tensor");
  std::vector<Part> parts = this->parts(call);
  const std::lock_guard<std::mutex> lock(mutex_);
  const RelaxedCapture relaxed;
  for (Part& part : parts) {
    const MatmulDescription& d = part.description;
    Table& table =
        tables_[Key{d.m, d.lda, d.ldb, d.ldd, d.a_alignment, d.b_alignment, d.d_alignment}];
    Matmul matmul(*library_, d);
    set_any_scales(matmul, call);
    for (const int64_t rows : sizes) {
      if (part.algorithms.count(rows) != 0) continue;
      part.algorithms[rows] = choose(table, matmul, rows, capturing);
    }
  }
  return parts;
}

void LoopedGemm::run(const LoopedCall& call) {
  std::vector<Job> jobs;
  std::vector<int64_t> sizes;
  int64_t start = 0;
  for (int64_t e = 0; e < call.experts; ++e) {
    FP4LT_CHECK(call.ends[e] >= start, "looped: end offset ", e, " is ", call.ends[e],
                ", less than ", start, " before it");
    if (call.ends[e] > start) {
      jobs.push_back({e, start, call.ends[e] - start});
      sizes.push_back(call.ends[e] - start);
    }
    start = call.ends[e];
  }
  if (jobs.empty()) return;

  const cuda::DeviceGuard guard(device_);
  const bool capturing = capture_of(call.stream) != 0;
  // Everything that may fail for want of an algorithm comes before the first launch.
  const std::vector<Part> parts = plan(call, sizes, capturing);
  const bool codes = shape_.weights == Weights::kCodes;
  const int64_t line = padded_blocks(shape_.k / 16) * kTileRows;
  const auto place_of = [&](const Job& job) -> Worker::Place {
    return {at(call.rows, job.start * call.row_stride * (codes ? 1 : 4) / 2),
            codes ? call.row_scales + first_tile(job.start, job.expert) * line : nullptr,
            at(call.out, job.start * call.out_row_stride * size_of(shape_.out))};
  };

  const auto count = static_cast<int64_t>(jobs.size());
  const int streams = static_cast<int>(std::min<int64_t>(call.streams, count));
  // An event between writing alpha and reading it holds where the order in one stream does not.
  const bool needs_event = call.alpha != nullptr && shape_.filters.reads_alpha_early;
  if (streams == 1 && !needs_event) {
    Worker worker(*this, call, parts, call.stream, call.workspace, false);
    for (const Job& job : jobs) worker.run(job.expert, job.rows, place_of(job));
    return;
  }
  StreamLoan loan(device_, call.stream, streams);
  loan.fork();
  const int threads =
      capturing ? 1
                : static_cast<int>(std::clamp<int64_t>(count / kJobsPerThread, 1, call.threads));
  parallel_for(loan.size(), threads, [&](int64_t s) {
    use_device(device_);
    Worker worker(*this, call, parts, loan[static_cast<int>(s)],
                  at(call.workspace, s * stream_bytes()), false);
    for (int64_t j = s; j < count; j += loan.size()) {
      worker.run(jobs[j].expert, jobs[j].rows, place_of(jobs[j]));
    }
  });
  loan.join();
}

std::vector<Algorithm> LoopedGemm::candidates(const LoopedCall& call, int64_t rows, int count) {
  const cuda::DeviceGuard guard(device_);
  const std::vector<Part> parts = this->parts(call);
  Matmul matmul(*library_, parts.front().description);
  set_any_scales(matmul, call);
  matmul.set_rows(rows);
  return find_algorithms(*library_, handle_, matmul, count, shape_.filters);
}

void LoopedGemm::pin(int64_t bucket, const abi::Algo& algo) {
  const std::lock_guard<std::mutex> lock(mutex_);
  pinned_[bucket] = algo;
  tables_.clear();
}

}  // namespace fp4lt::cublaslt
