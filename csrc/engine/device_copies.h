// The copies of a snapshot's rows that lie on devices: queued now, done later.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "common/error.h"
#include "common/worker_group.h"
#include "device/copy_stream.h"
#include "device/pinned.h"
#include "device/source_events.h"
#include "engine/snapshot_row.h"

namespace dcpx::engine {

// One stream a device, on which all of its rows are copied behind what the caller's streams had
// queued. First queue() is called once for each device, by any threads; from then on all calls are
// thread-safe. Sources and arena stay valid until it is done or drained.
class DeviceCopies {
 public:
  // Queues nothing yet. `after` and `pinned` (of the arena, or null) live until all is queued.
  // Throws Error(kPlan) where `after` knows nothing of a device that a row is on.
  DeviceCopies(const std::vector<SnapshotRow>& rows, std::byte* arena,
               const device::SourceEvents* after, const device::Pinned* pinned);

  std::size_t devices() const noexcept { return queues_.size(); }
  // Queues the copies of one of the devices, in the order of the arena. Blocks until the arena is
  // registered, and where it could not be, until it is copied. Throws Error(kStaging).
  void queue(std::size_t number, const StopFlag& stop);

  // Whether nothing is copied any more, well or not. Never blocks, never throws.
  bool is_done() noexcept;
  // Blocks until all is copied. Throws Error(kStaging), each time, where a copy failed or
  // `timeout_s` passed, and what `poll` throws, though copies may then go on.
  void wait(const PollFunction& poll, double timeout_s = device::copy_timeout_s());
  // Waits, with a bound, for what still goes on, and forgets it. False where that did not end: the
  // arena may be written to for as long as the process lives.
  bool drain() noexcept;
  // Lets the streams go on only behind the copies of their devices; the host goes on at once. Where
  // the driver cannot do that, blocks as wait() does. What failed is wait()'s to say. Throws what
  // `poll` throws, and Error(kStaging) where copies go on and a stream is capturing a graph, which
  // cannot hold such a wait.
  void hold_back(const std::vector<device::CallerStream>& streams, const PollFunction& poll);

 private:
  struct Queue {
    int device = -1;
    std::vector<const SnapshotRow*> rows;
    std::unique_ptr<device::CopyStream> stream;
  };
  void forget() noexcept;

  std::byte* arena_;
  const device::SourceEvents* after_;
  const device::Pinned* pinned_;
  std::mutex mutex_;
  std::vector<Queue> queues_;
  std::optional<Error> error_;
  bool is_hung_ = false;
};

}  // namespace dcpx::engine
