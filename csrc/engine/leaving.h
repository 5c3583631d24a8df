// Lets the caller of a job leave it, while its workers are in system calls that may never return.
#pragma once

#include <atomic>
#include <cerrno>
#include <mutex>
#include <shared_mutex>
#include <string>

#include "common/error.h"
#include "common/worker_group.h"

namespace dcpx::engine {

class Leaving {  // Thread-safe. Outlives the workers.
 public:
  explicit Leaving(bool is_possible) : is_possible_(is_possible) {}

  bool is_possible() const noexcept { return is_possible_; }
  // When this has returned, nobody who stays is left. Blocks while somebody stays.
  void leave() {
    DCPX_CHECK(is_possible_, "a job that nobody may leave");
    has_left_.store(true);  // first: who stays again and again would keep the lock from ever coming
    const std::lock_guard lock(mutex_);
  }
  // For whoever writes to the caller's memory: holds the caller back, unless has_left() by then.
  std::shared_lock<std::shared_mutex> stay() {
    std::shared_lock<std::shared_mutex> lock(mutex_, std::defer_lock);
    if (is_possible_) lock.lock();
    return lock;
  }
  bool has_left() const noexcept { return has_left_.load(std::memory_order_relaxed); }
  // Polls as `poll`, and stops the workers when the caller has left. REQUIRES: `poll` outlives it.
  PollFunction poll_with(const PollFunction& poll, const std::string& path) const {
    if (!is_possible_) return poll;
    return [this, &poll, path] {
      if (has_left()) throw storage_error("read", path, ECANCELED);
      if (poll) poll();
    };
  }

 private:
  const bool is_possible_;
  std::shared_mutex mutex_;
  std::atomic<bool> has_left_{false};
};

}  // namespace dcpx::engine
