// Runs one function on several threads and brings the first error back to the caller.
#pragma once

#include <atomic>
#include <functional>

namespace dcpx {

// Told to every worker: true once one of them failed or the caller asked to stop. Thread-safe.
class StopFlag {
 public:
  bool is_set() const noexcept { return is_set_.load(std::memory_order_relaxed); }
  void set() noexcept { is_set_.store(true, std::memory_order_relaxed); }

 private:
  std::atomic<bool> is_set_{false};
};

// Called about ten times a second on the waiting thread; may throw to stop the job (a signal).
using PollFunction = std::function<void()>;
using WorkFunction = std::function<void(unsigned worker, StopFlag& stop)>;

// Runs `work(0) .. work(count - 1)`, each on its own thread, and waits for all of them. The
// first exception of a worker (or of `poll`) sets the flag and is thrown again when all have ended:
// no thread outlives the call. Where the system gives fewer threads than asked for, fewer run;
// `work` must therefore take its share from a common queue. Blocks.
void run_workers(unsigned count, const WorkFunction& work, const PollFunction& poll);

}  // namespace dcpx
