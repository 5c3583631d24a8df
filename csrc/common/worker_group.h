// Runs one function on several threads and brings the first error back to the caller.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>

namespace dcpx {

// Called about ten times a second on the waiting thread; may throw to stop the job (a signal),
// and is then not called again.
using PollFunction = std::function<void()>;

// Told to every worker: true once one of them failed or the caller asked to stop. Thread-safe.
// To be asked often: work that runs on the caller's own thread, for want of another, polls here.
class StopFlag {
 public:
  // Throws what the poll throws, only where the caller's own thread works.
  bool is_set() const {
    if (inline_poll_ != nullptr) poll_sometimes();
    return is_set_.load(std::memory_order_relaxed);
  }
  void set() noexcept { is_set_.store(true, std::memory_order_relaxed); }
  // REQUIRES: one thread works, the one that calls; `poll` outlives the flag.
  void poll_inline(const PollFunction& poll);

 private:
  void poll_sometimes() const;

  std::atomic<bool> is_set_{false};
  const PollFunction* inline_poll_ = nullptr;
  mutable std::chrono::steady_clock::time_point next_poll_;
};

// The number of the worker that calls; 0 outside of run_workers().
unsigned current_worker() noexcept;

using WorkFunction = std::function<void(unsigned worker, StopFlag& stop)>;

// Runs `work(0) .. work(count - 1)`, each on its own thread, one alone on the caller's, and waits
// for all of them. The first exception of a worker (or of `poll`) sets the flag and is thrown again
// when all have ended: no thread outlives the call. Where the system gives fewer threads than asked
// for, fewer run; `work` must therefore take its share from a common queue. Blocks.
void run_workers(unsigned count, const WorkFunction& work, const PollFunction& poll);

}  // namespace dcpx
