// Time spent in a scope.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace dcpx {

// Adds the nanoseconds of a scope to a clock of a report.
class Stopwatch {
 public:
  explicit Stopwatch(std::atomic<std::uint64_t>& clock) : clock_(clock) {}
  Stopwatch(const Stopwatch&) = delete;
  ~Stopwatch() {
    const auto passed = std::chrono::steady_clock::now() - begin_;
    clock_.fetch_add(static_cast<std::uint64_t>(
                         std::chrono::duration_cast<std::chrono::nanoseconds>(passed).count()),
                     std::memory_order_relaxed);
  }

 private:
  std::atomic<std::uint64_t>& clock_;
  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

}  // namespace dcpx
