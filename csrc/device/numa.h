// Host memory near a device: copies to another node's memory run at 70 % of the rate.
#pragma once

#include <cstdint>

namespace dcpx::device {

// The NUMA node that the device hangs on; -1 where it is not known or there is one node only.
int numa_node_of(int device) noexcept;

// Asks the system to place the pages of [data, data + nbytes), when they are first touched, on
// `node`, and elsewhere where that is full. False where it does not (node -1, no such call): the
// pages then lie where they would have. REQUIRES: page-aligned memory.
bool prefer_node(void* data, std::uint64_t nbytes, int node) noexcept;

}  // namespace dcpx::device
