#include "engine/device_copies.h"

#include <algorithm>
#include <chrono>
#include <string>
#include <thread>

#include "device/cuda_driver.h"

namespace dcpx::engine {
namespace {

using Clock = std::chrono::steady_clock;
using device::Direction;

constexpr std::chrono::microseconds kMinPause(20);
constexpr std::chrono::microseconds kMaxPause(500);
constexpr std::chrono::milliseconds kPollInterval(100);
// Of a device: a snapshot that goes on after the call does not wait for its first launches. 32 MiB
// for 753,664 small pieces, as long as they are copied.
constexpr std::size_t kMaxTables = 64;

std::uint64_t address_of(const std::byte* place) { return reinterpret_cast<std::uintptr_t>(place); }

// What gathers the row's elements, to where C order puts them.
plan::Region packed(const SnapshotRow& row) {
  plan::Region region = row.gather;
  std::uint64_t stride = region.elem_bytes;
  for (std::size_t d = region.dims(); d-- > 0;) {
    region.dst_strides[d] = stride;
    stride *= region.lengths[d];
  }
  return region;
}

// Of the legacy default stream also where a stream that keeps step with it is. A driver that fails
// here in another way fails again at what the answer is for.
bool is_capturing(const device::CallerStream& stream) {
  try {
    const device::ContextGuard context(stream.first);
    device::CaptureStatus status = device::CaptureStatus::kNone;
    const device::Result result = device::Driver::get().api().cuStreamIsCapturing(
        reinterpret_cast<device::Stream>(stream.second), &status);
    return result == device::kCaptureImplicit ||
           (result == device::kSuccess && status != device::CaptureStatus::kNone);
  } catch (const Error&) {
    return false;
  }
}

bool is_given_up(int device) noexcept {
  try {
    device::Driver::get().check_device(device);
    return false;
  } catch (const Error&) {
    return true;
  }
}

}  // namespace

DeviceCopies::DeviceCopies(const std::vector<SnapshotRow>& rows, std::byte* arena,
                           const device::SourceEvents* after, const device::Pinned* pinned)
    : arena_(arena), after_(after), pinned_(pinned) {
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const SnapshotRow& row = rows[i];
    if (row.device < 0 || row.source == nullptr || row.nbytes == 0 || row.copied_with != i)
      continue;
    auto queue = std::find_if(queues_.begin(), queues_.end(),
                              [&](const Queue& known) { return known.device == row.device; });
    if (queue == queues_.end()) {
      DCPX_CHECK(after != nullptr && after->has(row.device), "no event of the caller's stream");
      queue = queues_.insert(queue, Queue{row.device, {}, nullptr});
    }
    queue->rows.push_back(&row);
  }
}

void DeviceCopies::queue(std::size_t number, const StopFlag& stop) {
  Queue& queue = queues_[number];
  std::sort(queue.rows.begin(), queue.rows.end(),
            [](const SnapshotRow* a, const SnapshotRow* b) { return a->offset < b->offset; });
  auto stream = std::make_unique<device::CopyStream>(queue.device, after_, kMaxTables);
  if (pinned_ != nullptr) pinned_->wait();
  for (const SnapshotRow* row : queue.rows) {
    if (stop.is_set()) return;
    const std::uint64_t to = address_of(arena_ + row->offset);
    if (row->is_dense) {
      stream->copy(Direction::kToHost, to, address_of(row->source), row->nbytes);
    } else {
      stream->copy_region(Direction::kToHost, packed(*row), to, address_of(row->source));
    }
  }
  stream->submit(&stop);
  queue.rows.clear();
  queue.stream = std::move(stream);
}

bool DeviceCopies::is_done() noexcept {
  const std::lock_guard lock(mutex_);
  try {
    for (Queue& queue : queues_) {
      if (queue.stream != nullptr && !queue.stream->is_done()) return false;
    }
  } catch (const Error& error) {
    error_ = error;
  }
  forget();
  return true;
}

// Ends the streams, which wait for what they still copy. REQUIRES: the mutex is held.
void DeviceCopies::forget() noexcept {
  std::vector<int> devices;
  for (const Queue& queue : queues_) {
    if (queue.stream != nullptr) devices.push_back(queue.device);
  }
  queues_.clear();
  for (const int device : devices) {
    is_hung_ = is_hung_ || is_given_up(device);
  }
}

bool DeviceCopies::drain() noexcept {
  const std::lock_guard lock(mutex_);
  forget();
  return !is_hung_;
}

void DeviceCopies::wait(const PollFunction& poll, double timeout_s) {
  const auto begin = Clock::now();
  auto next_poll = begin + kPollInterval;
  auto pause = kMinPause;
  while (!is_done()) {
    const auto now = Clock::now();
    if (std::chrono::duration<double>(now - begin).count() > timeout_s) {
      const std::lock_guard lock(mutex_);
      try {
        for (Queue& queue : queues_) {
          if (queue.stream != nullptr) queue.stream->finish(StopFlag(), "a snapshot's copies", 0);
        }
      } catch (const Error& error) {
        error_ = error;
        forget();
      }
    }
    if (poll && now >= next_poll) {
      poll();
      next_poll = Clock::now() + kPollInterval;
    }
    std::this_thread::sleep_for(pause);
    pause = std::min(pause * 2, kMaxPause);
  }
  const std::lock_guard lock(mutex_);
  if (error_) throw Error(*error_);
}

void DeviceCopies::hold_back(const std::vector<device::CallerStream>& streams,
                             const PollFunction& poll) {
  for (const device::CallerStream& stream : streams) {
    if (!is_capturing(stream)) continue;
    if (!is_done())
      throw Error(ErrorCode::kStaging,
                  "the current stream of device " + std::to_string(stream.first) +
                      " is capturing a graph, which cannot wait for the copies of a save: wait for "
                      "them before the capture");
    return;  // an event that is over would break the capture as well
  }
  try {
    const std::lock_guard lock(mutex_);
    for (const auto& [device, handle] : streams) {
      for (Queue& queue : queues_) {
        if (queue.device == device && queue.stream != nullptr)
          queue.stream->hold_back(reinterpret_cast<device::Stream>(handle));
      }
    }
    return;
  } catch (const Error&) {  // a driver that cannot order them: the host waits
    if (is_done()) return;
  }
  try {
    wait(poll);
  } catch (const Error&) {  // nothing is copied any more, and whoever saves hears why
    return;
  }
}

}  // namespace dcpx::engine
