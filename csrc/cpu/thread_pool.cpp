// SPDX-License-Identifier: Apache-2.0
#include "cpu/thread_pool.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>

#include "cpu/fp_mode.h"
#include "cpu/openmp.h"

namespace fp4lt {
namespace {

struct Job {
  const std::function<void(int64_t)>* fn;
  int64_t tasks;
  int seats;  // helpers that may still join; guarded by the pool's mutex
  std::atomic<int64_t> next{0};
  std::atomic<bool> failed{false};
  std::exception_ptr error;  // written once, by whoever sets `failed`
  int working = 0;           // helpers inside; guarded by the pool's mutex
  std::condition_variable idle;

  void work() noexcept {
    const DefaultFpMode mode;
    for (;;) {
      const int64_t i = next.fetch_add(1, std::memory_order_relaxed);
      if (i >= tasks || failed.load(std::memory_order_relaxed)) return;
      try {
        (*fn)(i);
      } catch (...) {
        if (!failed.exchange(true)) error = std::current_exception();
      }
    }
  }
};

class Pool {
 public:
  // Leaked on purpose: helpers may still be asleep in it while static objects are destroyed.
  static Pool& get() {
    Pool* pool = instance.load(std::memory_order_acquire);
    if (pool != nullptr) return *pool;
    static const int registered = pthread_atfork(nullptr, nullptr, [] {
      // The parent's helpers do not exist in the child, and its mutex may be locked for ever.
      instance.store(nullptr, std::memory_order_release);
    });
    static_cast<void>(registered);
    Pool* fresh = new Pool;
    if (instance.compare_exchange_strong(pool, fresh)) return *fresh;
    delete fresh;
    return *pool;
  }

  void run(Job& job, int helpers) {
    job.seats = helpers;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      while (static_cast<int>(size_) < helpers) {
        try {
          std::thread([this] { serve(); }).detach();
        } catch (const std::system_error&) {
          break;  // no more threads to be had: the caller and those there are do the work
        }
        ++size_;
      }
      jobs_.push_back(&job);
    }
    for (int i = 0; i < helpers; ++i) wake_.notify_one();
    job.work();
    std::unique_lock<std::mutex> lock(mutex_);
    jobs_.erase(std::remove(jobs_.begin(), jobs_.end(), &job), jobs_.end());
    job.idle.wait(lock, [&] { return job.working == 0; });
  }

  int size() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return size_;
  }

 private:
  [[noreturn]] void serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      Job* job = nullptr;
      wake_.wait(lock, [&] {
        const auto open = std::find_if(jobs_.begin(), jobs_.end(), [](const Job* j) {
          return j->seats > 0 && j->next.load(std::memory_order_relaxed) < j->tasks;
        });
        job = open == jobs_.end() ? nullptr : *open;
        return job != nullptr;
      });
      --job->seats;
      ++job->working;
      lock.unlock();
      job->work();
      lock.lock();
      if (--job->working == 0) job->idle.notify_all();
    }
  }

  static std::atomic<Pool*> instance;

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Job*> jobs_;
  int size_ = 0;
};

std::atomic<Pool*> Pool::instance{nullptr};

}  // namespace

void parallel_for(int64_t tasks, int threads, const std::function<void(int64_t)>& fn) {
  if (tasks <= 0) return;
  Job job;
  job.fn = &fn;
  job.tasks = tasks;
  const int helpers = static_cast<int>(std::min<int64_t>(std::max(threads, 1), tasks)) - 1;
  // The whole team, however few the tasks: one of another size would have to be formed anew.
  const auto work = [](void* shared) { static_cast<Job*>(shared)->work(); };
  if (helpers == 0) {
    job.work();
  } else if (!openmp_run(threads, work, &job)) {
    Pool::get().run(job, helpers);
  }
  if (job.error) std::rethrow_exception(job.error);
}

int pool_size() { return Pool::get().size(); }

}  // namespace fp4lt
