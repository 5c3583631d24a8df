// A run of a region's C-order enumeration, as boxes: for copiers that are told of strides and not
// of single elements.
#pragma once

#include <cstdint>
#include <vector>

#include "plan/region_copy.h"

namespace dcpx::plan {

// One box of a range. Its destination strides are those of the enumeration, in which the boxes of a
// range follow one another without a gap.
struct RangeBox {
  Region region;
  std::uint64_t src_offset = 0;  // bytes from the region's origin
  std::uint64_t dst_offset = 0;  // bytes from the range's begin
};

// Returns bytes [begin, end) of the C-order enumeration of `region`'s elements, in order: at most
// two boxes a dimension beside the whole ones between. Neighbouring dimensions that are contiguous
// in the source are merged first. The region's destination strides play no part.
// REQUIRES: begin <= end within the whole; each length > 0.
std::vector<RangeBox> range_boxes(const Region& region, std::uint64_t begin, std::uint64_t end);

}  // namespace dcpx::plan
