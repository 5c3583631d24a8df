// The slots of a job's workers, page-locked where a device copies to or from them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "common/slot.h"
#include "device/pinned.h"

namespace dcpx::engine {

class JobSlots {  // Not thread-safe, but for slot().
 public:
  JobSlots() = default;
  // `device` is the ordinal of one that uses them, -1 for none. Where page-locking is refused the
  // slots stay as they are, and copies are slower. Throws Error (ENOMEM).
  JobSlots(unsigned count, std::uint64_t slot_bytes, int device);
  JobSlots(JobSlots&& other) noexcept = default;
  JobSlots& operator=(JobSlots&& other) noexcept;
  // The memory stays as long as copies that took too long may still use it.
  ~JobSlots();

  std::byte* slot(unsigned number) noexcept { return memory_->arena.slot(number); }
  bool holds(unsigned count, std::uint64_t slot_bytes, bool is_for_device) const noexcept {
    return memory_ != nullptr && memory_->arena.holds(count, slot_bytes) &&
           (is_for_device_ || !is_for_device);
  }
  std::uint64_t size_bytes() const noexcept {
    return memory_ == nullptr ? 0 : memory_->arena.size_bytes();
  }

 private:
  struct Memory {
    SlotArena arena;
    device::Pinned pinned;  // ends before its memory does
  };
  void let_go() noexcept;

  std::shared_ptr<Memory> memory_;
  bool is_for_device_ = false;
};

// How many workers fit into a budget with what each of them holds.
struct FittingWorkers {
  unsigned workers = 0;
  std::size_t tables = 1;  // of the pack kernel, for each stream; 0: it is not used
};

// Each worker has `turns` slots, and for each of these a stream on each of `devices` devices, whose
// kernel has a table. At least one worker fits; where its tables do not, the kernel is not used.
FittingWorkers fitting_workers(unsigned workers, unsigned turns, std::uint64_t slot_bytes,
                               std::size_t devices, std::uint64_t budget_bytes) noexcept;

}  // namespace dcpx::engine
