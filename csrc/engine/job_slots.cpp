#include "engine/job_slots.h"

#include "device/numa.h"

namespace dcpx::engine {

JobSlots::JobSlots(unsigned count, std::uint64_t slot_bytes, int device)
    : arena_(count, slot_bytes), is_for_device_(device >= 0) {
  if (device < 0) return;
  // First the node, then the pages: locking them is what makes them.
  device::prefer_node(arena_.slot(0), arena_.size_bytes(), device::numa_node_of(device));
  pinned_ = device::Pinned::try_pin(arena_.slot(0), arena_.size_bytes(), device);
}

}  // namespace dcpx::engine
