// What the caller's streams had queued when a save, load or snapshot began.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "device/cuda_abi.h"

namespace dcpx::device {

// CUDA ordinal, and the stream's handle there (0: the legacy default stream).
using CallerStream = std::pair<int, std::uintptr_t>;

// One event a stream, recorded in the constructor, on the caller's thread: work ordered behind
// them sees all that the caller had queued by then. Immutable, so thread-safe. Whoever hands it to
// a CopyStream keeps it alive until that is constructed.
class SourceEvents {
 public:
  // Throws Error(kStaging), also where a stream is capturing a graph, which it names.
  explicit SourceEvents(const std::vector<CallerStream>& streams);
  SourceEvents(const SourceEvents&) = delete;
  ~SourceEvents();

  bool has(int device) const noexcept;
  std::vector<int> devices() const;  // ascending, each once
  // Queues on `stream` a wait for the events of `device`; nothing where there are none.
  // REQUIRES: the device's context is current (ContextGuard).
  void order_behind(int device, Stream stream) const;
  // The caller's stream on `device`: the last one given. REQUIRES: has(device).
  Stream caller_stream(int device) const;

 private:
  struct Entry {
    int device = -1;
    Stream stream = nullptr;
    Event event = nullptr;
  };
  void add(int device, Stream stream);
  void destroy() noexcept;

  std::vector<Entry> entries_;
};

}  // namespace dcpx::device
