// One segment's bytes: packed, gathered and framed into a slot, and checksummed on the way.
#pragma once

#include <cstdint>
#include <vector>

#include "common/worker_group.h"
#include "engine/block_sums.h"
#include "engine/write_layout.h"

namespace dcpx::engine {

// What the workers of one call share. Each element is written by one worker only.
struct PayloadSums {
  std::vector<std::uint32_t> of_pieces;  // CRCs of kPayload pieces

  // The CRC of an item's payload: what fill_segment noted for a packed one, else joined from its
  // pieces, which must all be summed.
  std::uint32_t of_item(const WriteLayout& layout, const WriteItem& item,
                        std::uint32_t index) const;
};

// Fills `to` with the segment [begin, end) of the file and adds its content to `summer`; a payload
// is summed in blocks while they are in cache. Notes payload CRCs in `sums` and in the rows of
// packed items. False if `stop` was set meanwhile: the segment is then unfinished.
// REQUIRES: `to` has segment.end - segment.begin bytes, and holds the payloads that lie in device
// memory already (device_fill.h); what the segment waits for is summed.
bool fill_segment(const WriteLayout& layout, const Segment& segment, std::vector<WriteItem>& items,
                  PayloadSums& sums, SegmentSummer& summer, const StopFlag& stop, std::byte* to);

// The same checksums for a segment that is written from its item's own memory; nothing is copied.
// REQUIRES: segment.is_in_place.
bool sum_in_place(const WriteLayout& layout, const Segment& segment,
                  const std::vector<WriteItem>& items, PayloadSums& sums, SegmentSummer& summer,
                  const StopFlag& stop);

}  // namespace dcpx::engine
