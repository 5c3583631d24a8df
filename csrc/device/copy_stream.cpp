// The life of a stream: made, waited for, given up. What it queues is in copy_submit.cpp.
#include "device/copy_stream.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>

#include "device/counters.h"
#include "device/pack_kernel.h"

namespace dcpx::device {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::microseconds kSpin(50);  // copies of a slot take longer: then sleep
constexpr std::chrono::microseconds kLongestSleep(200);
constexpr int kMaxFailedQueries = 3;
constexpr const char* kKept =
    ". Their memory is kept until they have ended, and may change as long as they have not";

std::atomic<double> the_copy_timeout_s{1800};
std::atomic<double> the_unwind_timeout_s{60};

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

// Short sleeps for short waits: a fraction of what was waited already.
void pause(Clock::time_point begin) {
  const auto waited = std::chrono::duration_cast<std::chrono::microseconds>(Clock::now() - begin);
  if (waited < kSpin) return std::this_thread::yield();
  std::this_thread::sleep_for(std::min(waited / 8, kLongestSleep));
}

std::string on_device(int device) { return " of device " + std::to_string(device); }

}  // namespace

double copy_timeout_s() noexcept { return the_copy_timeout_s.load(std::memory_order_relaxed); }
double unwind_timeout_s() noexcept { return the_unwind_timeout_s.load(std::memory_order_relaxed); }

void set_copy_timeouts(double copy_timeout_s, double unwind_timeout_s) noexcept {
  the_copy_timeout_s.store(copy_timeout_s, std::memory_order_relaxed);
  the_unwind_timeout_s.store(unwind_timeout_s, std::memory_order_relaxed);
}

CopyStream::CopyStream(int device, const SourceEvents* after, std::size_t max_tables)
    : device_(device), driver_(Driver::get()), max_tables_(max_tables) {
  driver_.check_device(device);
  const ContextGuard guard(device);
  const Api& api = driver_.api();
  const std::string doing = "making a stream for copies" + on_device(device);
  int least = 0;
  int greatest = 0;
  driver_.check(api.cuCtxGetStreamPriorityRange(&least, &greatest), "cuCtxGetStreamPriorityRange",
                doing);
  driver_.check(api.cuStreamCreateWithPriority(&stream_, kStreamNonBlocking, least),
                "cuStreamCreateWithPriority", doing);
  try {
    driver_.check(api.cuEventCreate(&event_, kEventDisableTiming), "cuEventCreate", doing);
    if (after != nullptr && after->has(device)) {
      after->order_behind(device, stream_);
      is_ordered_ = false;
    }
  } catch (const Error&) {
    if (event_ != nullptr) api.cuEventDestroy(event_);
    api.cuStreamDestroy(stream_);
    throw;
  }
}

CopyStream::~CopyStream() {
  drain();
  if (stream_ == nullptr) return;
  try {
    const ContextGuard guard(device_);
    driver_.api().cuEventDestroy(event_);
    driver_.api().cuStreamDestroy(stream_);
  } catch (const std::exception&) {  // the driver is gone, or this is a forked child
    stream_ = nullptr;
  }
}

void CopyStream::copy(Direction direction, std::uint64_t dst, std::uint64_t src,
                      std::uint64_t nbytes) {
  list_.add(direction, dst, src, nbytes);
}

void CopyStream::copy_region(Direction direction, const plan::Region& region, std::uint64_t dst,
                             std::uint64_t src) {
  list_.add(direction, region, dst, src);
}

void CopyStream::submit(const StopFlag* stop) {
  if (list_.empty()) return;
  try {
    submit_collected(stop);
  } catch (...) {  // whoever catches it frees the memory: nothing may still write there
    list_.clear();
    drain();
    throw;
  }
}

void CopyStream::record() {
  if (is_recorded_) return;
  const ContextGuard guard(device_);
  const Result result = driver_.api().cuEventRecord(event_, stream_);
  if (is_lost(result)) is_queued_ = false;
  driver_.check(result, "cuEventRecord", "marking the end of the copies" + on_device(device_));
  add_count(Count::kEventsRecorded);
  is_recorded_ = true;
}

bool CopyStream::is_done() {
  if (!is_queued_) return true;
  record();
  const ContextGuard guard(device_);
  const Result result = driver_.api().cuEventQuery(event_);
  if (result == kNotReady) return false;
  if (is_lost(result)) is_queued_ = false;
  driver_.check(result, "cuEventQuery", "waiting for the copies" + on_device(device_));
  is_queued_ = false;
  uses_memory_ = false;
  is_ordered_ = true;
  if (tables_.empty()) return true;
  tables_.resize(1);
  tables_.front()->reset();
  return true;
}

void CopyStream::wait(double timeout_s, const StopFlag* stop, const char* what) {
  const Clock::time_point begin = Clock::now();
  std::exception_ptr interrupted;
  double limit_s = timeout_s;
  while (!is_done()) {
    const double waited_s = seconds_since(begin);
    if (waited_s > limit_s) {
      const std::string why = "waiting for " + std::string(what) + ": the copies" +
                              on_device(device_) + " were not done after " +
                              std::to_string(static_cast<std::int64_t>(waited_s)) +
                              " s; what the caller's stream had queued before them may hang" +
                              (uses_memory_ ? kKept : "");
      give_up(why);
      if (interrupted) std::rethrow_exception(interrupted);
      throw Error(ErrorCode::kStaging, why);
    }
    if (stop != nullptr && !interrupted) {
      const bool may_go = !uses_memory_;  // only the caller's work is waited for
      try {
        if (stop->is_set()) {
          if (may_go) is_queued_ = false;
          if (may_go) return;
          limit_s = std::min(limit_s, waited_s + unwind_timeout_s());
          stop = nullptr;
        }
      } catch (...) {  // thrown again once the memory is not used any more
        if (may_go) is_queued_ = false;
        if (may_go) throw;
        interrupted = std::current_exception();
        limit_s = std::min(limit_s, waited_s + unwind_timeout_s());
      }
    }
    pause(begin);
  }
  if (interrupted) std::rethrow_exception(interrupted);
}

// The driver keeps the stream and its event, to see when the copies have ended after all. Nothing
// is to be seen where only the caller's work was waited for.
void CopyStream::give_up(const std::string& why) noexcept {
  if (uses_memory_) {
    try {
      record();  // else nobody can see the end
    } catch (const Error&) {
      is_recorded_ = false;
    }
  }
  is_queued_ = false;
  if (!uses_memory_) return;
  driver_.give_up(device_, why, stream_, is_recorded_ ? event_ : nullptr);
  stream_ = nullptr;
  event_ = nullptr;
  uses_memory_ = false;
}

void CopyStream::finish(const StopFlag& stop, const char* what, double timeout_s) {
  try {
    if (stop.is_set()) list_.clear();
  } catch (...) {
    list_.clear();
    drain();
    throw;
  }
  submit(&stop);
  try {
    wait(timeout_s, &stop, what);
  } catch (...) {
    drain();
    throw;
  }
}

// A query that fails without the device being lost says nothing about the copies: asked again.
void CopyStream::drain() noexcept {
  if (!driver_.is_of_this_process()) return;
  if (!uses_memory_) is_queued_ = false;
  for (int failed = 0; is_queued_; ++failed) {
    try {
      if (failed == kMaxFailedQueries)
        give_up("its state could not be asked for while copies were under way");
      if (failed == kMaxFailedQueries) return;
      wait(unwind_timeout_s(), nullptr, "copies of a job that has failed");
    } catch (const std::exception&) {  // the error that led here is the one to tell
      continue;
    }
  }
}

void CopyStream::hold_back(Stream stream) {
  if (!is_queued_) return;
  record();
  const ContextGuard guard(device_);
  driver_.check(driver_.api().cuStreamWaitEvent(stream, event_, 0), "cuStreamWaitEvent",
                "ordering the caller's stream behind the copies" + on_device(device_));
}

CopyStream& CopyStreams::on(int device) {
  std::unique_ptr<CopyStream>& stream = streams_[device];
  if (stream == nullptr) stream = std::make_unique<CopyStream>(device, after_, max_tables_);
  return *stream;
}

void CopyStreams::submit_all(const StopFlag* stop) {
  for (auto& [device, stream] : streams_) stream->submit(stop);
}

bool CopyStreams::are_done() {
  return std::all_of(streams_.begin(), streams_.end(),
                     [](auto& entry) { return entry.second->is_done(); });
}

void CopyStreams::finish_all(const StopFlag& stop, const char* what, double timeout_s) {
  submit_all(&stop);  // of all, so that they copy beside each other
  for (auto& [device, stream] : streams_) stream->finish(stop, what, timeout_s);
}

}  // namespace dcpx::device
