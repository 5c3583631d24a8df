// Which stored boxes of a tensor hold which part of what is wanted?
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace dcpx::plan {

// Boxes of one tensor in elements, each `ndim` offsets and `ndim` sizes.
struct Boxes {
  const std::int64_t* offsets = nullptr;  // [count x ndim]
  const std::int64_t* sizes = nullptr;    // as `offsets`
  std::size_t count = 0;
};

// A wanted and a stored box that share elements, by their numbers.
struct Overlap {
  std::uint32_t wanted = 0;
  std::uint32_t stored = 0;
};

// In which order the planners of torch list them.
enum class OverlapOrder : std::uint8_t {
  kSwept,   // torch since its planner sweeps: wanted boxes by where they begin along the longest
            // dimension, and of each the stored ones by where they end there
  kNested,  // before: by the numbers of the wanted, then of the stored boxes
};

// Appends the overlaps of one tensor's boxes. A box without elements overlaps one that it lies
// strictly inside of, as it does for torch; what they share is empty.
//
// Few pairs are compared one by one. Else, where the stored boxes are the cells of a regular mesh,
// those that meet a wanted box are counted off along each dimension. Else the dimension along which
// the fewest pairs meet is found by counting them, and a tree over the stored boxes, by where they
// begin and how far they reach, gives those of each wanted box: O((N + M) log M + pairs that meet
// along that dimension). Where those are many, `visit_meeting` finds the pairs.
//
// Throws Error(kPlan) where a box ends beyond 2^63 - 1, or there are 2^32 boxes or more.
void find_overlaps(std::size_t ndim, const Boxes& wanted, const Boxes& stored, OverlapOrder order,
                   std::vector<Overlap>* overlaps);

// What two overlapping boxes share: [ndim] each, the first two relative to their boxes.
void overlap_region(std::size_t ndim, const Boxes& wanted, const Boxes& stored,
                    const Overlap& overlap, std::int64_t* dest_offsets,
                    std::int64_t* storage_offsets, std::int64_t* lengths);

}  // namespace dcpx::plan
