// Strided N-d copies between two pieces of memory, and their split into parts of bounded span.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace dcpx::plan {

// An N-d box that lies in two places. Strides are in bytes and may be zero; negative ones are
// refused. Dimensions outermost first; each length > 0.
struct Region {
  std::uint64_t elem_bytes = 1;
  std::vector<std::uint64_t> lengths;
  std::vector<std::uint64_t> src_strides;
  std::vector<std::uint64_t> dst_strides;

  std::size_t dims() const noexcept { return lengths.size(); }
};

// The same copy with the fewest dimensions: length-1 dimensions dropped, dimensions ordered by
// source stride (so that the source is walked forward), neighbours merged where both sides are
// contiguous, and the innermost contiguous run folded into `elem_bytes`.
// REQUIRES: equal sizes of the three vectors.
Region simplify(const Region& region);

// Bytes from the first to behind the last byte touched on the source side. Throws Error(kPlan) on
// overflow.
std::uint64_t src_span_bytes(const Region& region);
std::uint64_t dst_span_bytes(const Region& region);

// Copies every element. REQUIRES: the spans lie in valid memory and do not overlap.
void copy_region(const Region& region, const std::byte* src, std::byte* dst);

// Copies bytes [begin, end) of the C-order enumeration of `region`'s elements to the contiguous
// `dst`. REQUIRES: begin and end are multiples of elem_bytes within the whole;
// `region` is not simplified (its order of dimensions is the order of enumeration).
void gather_range(const Region& region, const std::byte* src, std::uint64_t begin,
                  std::uint64_t end, std::byte* dst);

// One part of a region: the box of `lengths` at these byte offsets from the region's origin.
struct RegionPart {
  std::vector<std::uint64_t> lengths;
  std::uint64_t src_offset = 0;
  std::uint64_t dst_offset = 0;
  std::uint64_t src_span = 0;
  std::uint64_t elem_bytes = 0;  // a part of a run where one run alone exceeds the bound
};

// Splits a simplified region into parts that lie each in one cell of the source: none crosses a
// multiple of `cell_bytes`, counted from `src_phase` before the region. So what is read for two
// parts, rounded to any unit that divides a cell, never overlaps where they lie in different cells.
// Runs that are further apart than `max_gap_bytes` are never put into one part. Only runs that
// cross a border are cut. In ascending order of the source offset within each outer index.
// REQUIRES: cell_bytes > 0.
std::vector<RegionPart> split_region(const Region& simplified, std::uint64_t cell_bytes,
                                     std::uint64_t max_gap_bytes, std::uint64_t src_phase);

}  // namespace dcpx::plan
