// The slots of a job's workers, page-locked where a device copies to or from them.
#pragma once

#include <cstdint>

#include "common/slot.h"
#include "device/pinned.h"

namespace dcpx::engine {

class JobSlots {  // Not thread-safe, but for slot().
 public:
  JobSlots() = default;
  // `device` is the ordinal of one that uses them, -1 for none. Where page-locking is refused the
  // slots stay as they are, and copies are slower. Throws std::bad_alloc.
  JobSlots(unsigned count, std::uint64_t slot_bytes, int device);

  std::byte* slot(unsigned number) noexcept { return arena_.slot(number); }
  bool holds(unsigned count, std::uint64_t slot_bytes, bool is_for_device) const noexcept {
    return arena_.holds(count, slot_bytes) && (is_for_device_ || !is_for_device);
  }
  std::uint64_t size_bytes() const noexcept { return arena_.size_bytes(); }

 private:
  SlotArena arena_;
  device::Pinned pinned_;  // ends before its memory does
  bool is_for_device_ = false;
};

}  // namespace dcpx::engine
