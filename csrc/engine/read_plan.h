// From wanted regions to file extents: what is read, in which order, and where it lands. No I/O.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "plan/region_copy.h"

namespace dcpx::engine {

// A box of one stored payload and the memory it goes to.
struct ReadRegion {
  std::uint32_t file = 0;
  std::uint64_t src_offset = 0;  // byte of the file at which the box begins
  plan::Region region;           // strides in bytes: source in the file, destination in memory
  std::byte* dest = nullptr;     // must stay valid until read() returns
  std::string fqn;               // for messages
};

// One piece of a region, small enough for a slot.
struct ReadPart {
  std::uint32_t region = 0;
  std::uint64_t begin = 0;  // file range that holds it
  std::uint64_t end = 0;
  std::uint64_t dest_offset = 0;
  std::vector<std::uint64_t> lengths;  // of the simplified region
  std::uint64_t elem_bytes = 0;

  bool is_run() const noexcept { return end - begin == elem_bytes; }
};

// A file range that one worker reads at once; parts [first_part, first_part + part_count).
struct Extent {
  std::uint32_t file = 0;
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
  std::uint32_t first_part = 0;
  std::uint32_t part_count = 0;
  bool is_in_place = false;  // every part is a run of some length and none overlap
};

struct ReadPlan {
  std::vector<plan::Region> regions;  // simplified, one per ReadRegion
  std::vector<ReadPart> parts;        // sorted by file and offset
  std::vector<Extent> extents;
  std::uint64_t needed_bytes = 0;  // sum over the regions
};

// Neighbours closer than this are read together: cheaper to read than to skip.
inline constexpr std::uint64_t kMergeGapBytes = 64 << 10;
// Shorter runs are copied out of a slot, longer ones are read straight to where they belong.
inline constexpr std::uint64_t kInPlaceRunBytes = 4 << 10;

// `slot_bytes` bounds an extent after rounding both ends to block borders. Throws Error(kPlan).
ReadPlan plan_reads(const std::vector<ReadRegion>& regions, std::uint64_t slot_bytes);

}  // namespace dcpx::engine
