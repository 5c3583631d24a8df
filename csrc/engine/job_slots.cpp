#include "engine/job_slots.h"

#include <algorithm>
#include <utility>

#include "device/cuda_driver.h"
#include "device/numa.h"
#include "device/pack_kernel.h"

namespace dcpx::engine {

JobSlots::JobSlots(unsigned count, std::uint64_t slot_bytes, int device)
    : memory_(std::make_shared<Memory>()), is_for_device_(device >= 0) {
  SlotArena& arena = memory_->arena;
  arena = SlotArena(count, slot_bytes);
  if (device < 0) return;
  // First the node, then the pages: locking them is what makes them.
  device::prefer_node(arena.slot(0), arena.size_bytes(), device::numa_node_of(device));
  memory_->pinned = device::Pinned::try_pin(arena.slot(0), arena.size_bytes(), device);
}

JobSlots& JobSlots::operator=(JobSlots&& other) noexcept {
  let_go();
  memory_ = std::move(other.memory_);
  is_for_device_ = other.is_for_device_;
  return *this;
}

JobSlots::~JobSlots() { let_go(); }

void JobSlots::let_go() noexcept {
  if (memory_ != nullptr && is_for_device_) device::let_go_when_unused(std::move(memory_));
  memory_.reset();
}

FittingWorkers fitting_workers(unsigned workers, unsigned turns, std::uint64_t slot_bytes,
                               std::size_t devices, std::uint64_t budget_bytes) noexcept {
  const auto fitting = [&](std::uint64_t slot_and_tables_bytes) {
    const std::uint64_t count = budget_bytes / (turns * slot_and_tables_bytes);
    return static_cast<unsigned>(std::min<std::uint64_t>(workers, count));
  };
  const unsigned with_tables = fitting(slot_bytes + devices * device::kPackTableBytes);
  if (with_tables > 0) return {with_tables, 1};
  return {std::max(fitting(slot_bytes), 1U), 0};
}

}  // namespace dcpx::engine
