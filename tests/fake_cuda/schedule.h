// Streams, events and the work in them: when it runs is the seed's choice, and whoever waits for
// it.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "abi.h"

namespace fake {

struct Stream;
struct Work;
using WorkPtr = std::shared_ptr<Work>;
using StreamPtr = std::shared_ptr<Stream>;
using Clock = std::chrono::steady_clock;

// When work starts that nobody waits for. Whoever waits for it (an event's query as well) makes
// it, and all that it stands behind, start at once.
enum Pace : int {
  kPaceBySeed = -1,  // a stream is eager, uneven or late, as the seed says
  kPaceEager = 0,    // as soon as a thread gets to it
  kPaceUneven = 1,   // within 0.3 ms
  kPaceLate = 2,     // between 1 and 30 ms later
  kPaceHeld = 3,     // never
  kPaceHung = 4,     // not before release_hung(), whoever waits
};

// One thing in a stream. Over when it has run, or when it never will.
struct Work {
  std::string what;           // "cuMemcpyDtoHAsync 4096 B", for reports
  std::function<void()> run;  // without the world's mutex; null: a mark
  bool is_engines = true;     // queued by a driver call, not by the test
  std::vector<std::uint64_t> allocations;
  std::vector<std::pair<Address, std::uint64_t>> host_ranges;  // registered when it was queued

  std::weak_ptr<Stream> stream;
  WorkPtr before;              // in its stream
  std::vector<WorkPtr> after;  // what else it stands behind
  std::vector<StreamPtr> waiters;
  Clock::time_point not_before;
  bool is_wanted = false;
  bool is_hung = false;
  bool is_running = false;
  bool is_over = false;
  Result failure = kSuccess;
};

struct Stream {
  Handle handle = nullptr;
  int device = 0;
  bool is_blocking = true;  // keeps step with the legacy default stream
  bool is_legacy = false;
  bool is_tests = false;  // made by the test: a caller's stream
  int priority = 0;
  bool is_capturing = false;
  bool is_capture_broken = false;
  Pace pace = kPaceBySeed;  // where has_pace; else the world's
  bool has_pace = false;
  std::uint64_t ordinal = 0;  // what the seed is mixed with
  std::uint64_t queued = 0;   // works so far

  std::deque<WorkPtr> queue;
  WorkPtr last;
  bool has_thread = false;
  std::condition_variable wake;
};

struct Event {
  Handle handle = nullptr;
  int device = 0;
  WorkPtr recorded;  // null: never
};

// All of these: REQUIRES the world's mutex, held by `lock` where one is taken.

// Puts the work behind the stream's and, by the rules of the legacy default stream, behind others'.
void enqueue(const StreamPtr& stream, const WorkPtr& work);
// Makes the work, and all that it stands behind, start without delay.
void want(const WorkPtr& work);
// Wants the work and waits until it is over. Reports and returns kLaunchTimeout after a minute.
Result wait_for(std::unique_lock<std::mutex>& lock, WorkPtr work);
// Lets hung work run.
void release_hung();
// Ends everything queued on the device, which has run or is running excepted, with `failure`.
void fail_queued(int device, Result failure);
// Releases, wants and waits for everything queued anywhere. Nothing in a forked child.
void drain(std::unique_lock<std::mutex>& lock);

}  // namespace fake
