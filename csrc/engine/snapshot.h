// Copies many pieces of memory into one: the bytes of a state at one moment.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "common/worker_group.h"
#include "plan/region_copy.h"

namespace dcpx::engine {

// A tensor of host memory. Dense ones, whose elements fill one run of memory in any order, are
// copied as they lie; others are gathered in C order.
struct SnapshotRow {
  const std::byte* source = nullptr;  // null: only its place is wanted
  std::uint64_t nbytes = 0;
  std::uint64_t elem_bytes = 1;
  std::vector<std::int64_t> sizes;
  std::vector<std::int64_t> strides;  // elements; of C order where it is gathered
  bool is_dense = true;
  plan::Region gather;            // of the source, where it is not dense; not simplified
  std::uint64_t offset = 0;       // in the arena
  std::uint64_t copied_with = 0;  // the row whose bytes these are: itself, or one before it
};

// Fills in what follows from `sizes` and `strides` as they are in the source. Throws Error(kPlan)
// for negative strides and sizes that no memory has.
void describe(SnapshotRow& row);

// Gives each row its offset and returns the bytes of all. Large ones begin on a page, so that they
// can be written by O_DIRECT from where they lie; small ones on a cache line. What lies at one
// address in one form (tied weights) is placed once. REQUIRES: described rows.
std::uint64_t lay_out(std::vector<SnapshotRow>& rows);

// Copies all rows to `arena`, on `workers` threads; large rows are cut over all of them. Blocks.
// Throws what `poll` throws; the bytes are then unspecified. REQUIRES: the sources are valid, and
// `arena` has the bytes that lay_out returned.
void take_snapshot(const std::vector<SnapshotRow>& rows, std::byte* arena, unsigned workers,
                   const PollFunction& poll);

}  // namespace dcpx::engine
