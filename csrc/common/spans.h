// What the workers of a job did, and when: for reports, and for traces.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <vector>

#include "common/mutex.h"

namespace dcpx {

// kEngine is the caller's call around all others.
enum class SpanKind : std::uint32_t { kEngine, kCopy, kWrite, kSync, kLocate, kRead, kVerify };
constexpr std::array<const char*, 7> kSpanKinds{"engine", "copy", "write", "sync",
                                                "locate", "read", "verify"};

// Both go to Python as they are (torch_dcpx/timelines.py). Times by the steady clock.
struct Span {
  std::uint64_t begin_ns, end_ns, nbytes;
  SpanKind kind;
  std::uint32_t worker;
};
struct SpanSum {
  std::uint64_t count, busy_ns, nbytes;
  SpanKind kind;
  std::uint32_t worker;
};
static_assert(sizeof(Span) == 32 && sizeof(SpanSum) == 32);

// The spans of one job, in bounded memory. Sums hold every span; the list has the first kMaxSpans
// of those that last kListedNs or longer. kEngine and kSync end a job: the last kLateSpans places
// are theirs, so that a long job lists them, too. Thread-safe.
class SpanLog {
 public:
  static constexpr std::size_t kMaxSpans = 2048;
  static constexpr std::size_t kLateSpans = 256;
  static constexpr std::uint64_t kListedNs = 20'000;
  static constexpr std::uint32_t kWorkers = 64;  // with sums of their own; more share these

  SpanLog() { spans_.reserve(kMaxSpans); }  // memory that nobody touches costs none
  // Adds a span of the calling worker. Locks only for what it lists.
  void add(SpanKind kind, std::uint64_t begin_ns, std::uint64_t end_ns,
           std::uint64_t nbytes) noexcept;
  std::uint64_t total_ns(SpanKind kind) const noexcept;
  std::vector<Span> spans() const;
  std::vector<SpanSum> sums() const;  // none of zeros

 private:
  struct Sum {
    std::atomic<std::uint64_t> count{0}, busy_ns{0}, nbytes{0};
  };
  struct alignas(64) WorkerSums {
    std::array<Sum, kSpanKinds.size()> of_kind;
  };
  std::array<WorkerSums, kWorkers> sums_;
  mutable Mutex mutex_;
  std::vector<Span> spans_ DCPX_GUARDED_BY(mutex_);
};

// Adds the time of a scope to a log.
class Stopwatch {
 public:
  Stopwatch(SpanLog& log, SpanKind kind, std::uint64_t nbytes = 0)
      : log_(log), kind_(kind), nbytes_(nbytes) {}
  Stopwatch(const Stopwatch&) = delete;
  ~Stopwatch() { log_.add(kind_, begin_ns_, now_ns(), nbytes_); }

 private:
  static std::uint64_t now_ns() {
    return static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(
                                          std::chrono::steady_clock::now().time_since_epoch())
                                          .count());
  }

  SpanLog& log_;
  SpanKind kind_;
  std::uint64_t nbytes_;
  std::uint64_t begin_ns_ = now_ns();
};

}  // namespace dcpx
