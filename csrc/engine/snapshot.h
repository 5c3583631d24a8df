// Copies many pieces of memory into one: the bytes of a state at one moment.
//
// Host memory is copied here, by threads. Rows on a device go the way of DeviceCopies: a copy of
// theirs is queued, and ends when it ends.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "common/first_touch.h"
#include "common/worker_group.h"
#include "engine/device_copies.h"
#include "engine/snapshot_row.h"

namespace dcpx::engine {

// Fills in what follows from `sizes` and `strides` as they are in the source. Throws Error(kPlan)
// for negative strides and sizes that no memory has.
void describe(SnapshotRow& row);

// Gives each row its offset and returns the bytes of all. Large ones begin on a page, so that they
// can be written by O_DIRECT from where they lie; small ones on a cache line. What lies at one
// address in one form (tied weights) is placed once. Rows that touch in device memory touch in the
// arena as well, so that one copy takes them all. REQUIRES: described rows.
std::uint64_t lay_out(std::vector<SnapshotRow>& rows);

// Copies all rows of host memory to `arena`, on `workers` threads; large rows are cut over all of
// them. Queues `copies`, if given, on a thread a device meanwhile. Blocks until the former are
// copied and the latter are queued. `pages`, if given, takes the memory of each piece before it is
// copied there. Throws what `poll` throws, Error(kStaging), and Error(kStorage) where there is no
// memory; the bytes are then unspecified. REQUIRES: the sources are valid, and `arena` has the
// bytes that lay_out returned.
void take_snapshot(const std::vector<SnapshotRow>& rows, std::byte* arena, unsigned workers,
                   const PollFunction& poll, DeviceCopies* copies = nullptr,
                   FirstTouch* pages = nullptr);

}  // namespace dcpx::engine
