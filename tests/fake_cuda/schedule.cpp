#include "schedule.h"

#include <algorithm>
#include <thread>

#include "world.h"

namespace fake {

namespace {

constexpr std::chrono::milliseconds kThreadLingers{5};  // with nothing to do, before it ends
constexpr std::chrono::seconds kLongestWait{60};

Clock::time_point start_of(const Stream& stream, Work& work) {
  const Settings& settings = world().settings;
  const Clock::time_point now = Clock::now();
  const std::uint64_t draw = drawn(settings.seed, stream.ordinal, stream.queued);
  Pace pace = stream.has_pace ? stream.pace : settings.pace;
  if (pace == kPaceBySeed) {
    constexpr Pace kPaces[] = {kPaceEager, kPaceUneven, kPaceLate, kPaceLate};
    pace = kPaces[drawn(settings.seed, stream.ordinal, 0) % 4];
  }
  if (!work.run) return now;  // a mark takes no time
  work.is_hung = pace == kPaceHung;
  switch (pace) {
    case kPaceUneven:
      return now + std::chrono::microseconds(draw % 300);
    case kPaceLate:
      return now + std::chrono::microseconds(1000 + draw % 29000);
    case kPaceHeld:
    case kPaceHung:
      return Clock::time_point::max();
    default:
      return now;
  }
}

void finish(const WorkPtr& work, Result failure) {
  work->is_over = true;
  work->failure = failure;
  work->before.reset();
  work->after.clear();
  work->run = nullptr;
  for (const StreamPtr& waiter : work->waiters) waiter->wake.notify_all();
  work->waiters.clear();
  world().host_wake.notify_all();
}

// Returns when the stream's first work may run or is over; false: the queue is empty, for long.
bool await_first(std::unique_lock<std::mutex>& lock, const StreamPtr& stream) {
  for (;;) {
    if (stream->queue.empty()) {
      const bool has_work =
          stream->wake.wait_for(lock, kThreadLingers, [&] { return !stream->queue.empty(); });
      if (!has_work) return false;
      continue;
    }
    const WorkPtr work = stream->queue.front();
    if (work->is_over) return true;
    const auto blocking = std::find_if(work->after.begin(), work->after.end(),
                                       [](const WorkPtr& other) { return !other->is_over; });
    if (blocking != work->after.end()) {
      (*blocking)->waiters.push_back(stream);
      stream->wake.wait(lock);
    } else if ((work->is_wanted && !work->is_hung) || Clock::now() >= work->not_before) {
      return true;
    } else if (work->not_before == Clock::time_point::max()) {
      stream->wake.wait(lock);
    } else {
      stream->wake.wait_until(lock, work->not_before);
    }
  }
}

// Reports what has become of the memory between the call and now. Returns whether the work can
// run: not in host memory that may be somebody else's, or nobody's.
bool check_memory(const Work& work) {
  World& w = world();
  if (!work.is_engines) return true;
  for (const std::uint64_t id : work.allocations)
    if (w.memory.by_id(id) == nullptr)
      w.report(work.what + ": runs after its device memory was freed");
  bool can_run = true;
  int pieces = 0;
  for (const auto& [address, nbytes] : work.host_ranges) {
    const bool is_pinned = w.memory.is_pinned(address, nbytes, -1, pieces);
    if (is_pinned && is_mapped(address, nbytes)) continue;
    const char* became = is_pinned ? "unmapped" : "unregistered";
    w.report(work.what + ": would run after its host memory was " + became);
    can_run = false;
  }
  return can_run;
}

void run_first(std::unique_lock<std::mutex>& lock, const StreamPtr& stream) {
  World& w = world();
  const WorkPtr work = stream->queue.front();
  if (!work->is_over) {
    if (work->run) {
      const bool can_run = check_memory(*work);
      const std::function<void()> run = std::move(work->run);
      work->is_running = true;
      ++w.running;
      lock.unlock();
      if (can_run) run();
      lock.lock();
      --w.running;
      ++w.totals["works_run"];
      DeviceState& device = w.devices[stream->device];
      if (device.runs_left > 0) --device.runs_left;
      if (device.runs_left == 0 && device.lost_then != kSuccess)
        lose_device(stream->device, device.lost_then);
    }
    if (!work->is_over) finish(work, w.devices[stream->device].lost);
  }
  stream->queue.pop_front();
}

void run_stream(const StreamPtr& stream) {
  std::unique_lock lock(world().mutex);
  while (await_first(lock, stream)) run_first(lock, stream);
  stream->has_thread = false;
  world().host_wake.notify_all();
}

}  // namespace

void enqueue(const StreamPtr& stream, const WorkPtr& work) {
  World& w = world();
  work->stream = stream;
  work->before = stream->last && !stream->last->is_over ? stream->last : nullptr;
  const auto put_behind = [&](const WorkPtr& other) {
    if (other && !other->is_over) work->after.push_back(other);
  };
  if (stream->is_legacy) {
    for (const StreamPtr& other : w.living_streams())
      if (other->device == stream->device && other->is_blocking) put_behind(other->last);
  } else if (stream->is_blocking && w.devices[stream->device].legacy) {
    put_behind(w.devices[stream->device].legacy->last);
  }
  ++stream->queued;
  work->not_before = start_of(*stream, *work);
  stream->last = work;
  stream->queue.push_back(work);
  stream->wake.notify_all();
  if (stream->has_thread) return;
  stream->has_thread = true;
  // Detached: a thread that waits for its end is not what ends a stream. drain() knows of it.
  std::thread([stream] { run_stream(stream); }).detach();
}

void want(const WorkPtr& work) {
  std::vector<WorkPtr> open{work};
  while (!open.empty()) {
    const WorkPtr next = open.back();
    open.pop_back();
    if (!next || next->is_over || next->is_wanted) continue;
    next->is_wanted = true;
    if (const StreamPtr stream = next->stream.lock()) stream->wake.notify_all();
    open.push_back(next->before);
    open.insert(open.end(), next->after.begin(), next->after.end());
  }
}

Result wait_for(std::unique_lock<std::mutex>& lock, WorkPtr work) {
  if (!work) return kSuccess;
  if (is_forked_child()) return kNotInitialized;  // the threads are the parent's
  want(work);
  const bool is_over =
      world().host_wake.wait_for(lock, kLongestWait, [&] { return work->is_over; });
  if (is_over) return work->failure;
  world().report(work->what + ": not over after a minute");
  return kLaunchTimeout;
}

void release_hung() {
  for (const StreamPtr& stream : world().living_streams()) {
    for (const WorkPtr& work : stream->queue) {
      if (!work->is_hung) continue;
      work->is_hung = false;
      work->is_wanted = true;
    }
    stream->wake.notify_all();
  }
}

void fail_queued(int device, Result failure) {
  World& w = world();
  const auto fail = [&](const StreamPtr& stream) {
    for (const WorkPtr& work : stream->queue)
      if (!work->is_over && !work->is_running) finish(work, failure);
    stream->wake.notify_all();
  };
  for (const StreamPtr& stream : w.living_streams())
    if (stream->device == device) fail(stream);
}

void drain(std::unique_lock<std::mutex>& lock) {
  if (is_forked_child()) return;
  release_hung();
  for (const StreamPtr& stream : world().living_streams()) wait_for(lock, stream->last);
}

}  // namespace fake
