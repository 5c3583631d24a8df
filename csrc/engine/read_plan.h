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
  std::byte* dest = nullptr;     // memory of `device`; must stay valid until read() returns
  std::string fqn;               // for messages
  int device = -1;               // -1: host memory. Else a CUDA device's, not to be touched here
};

// One piece of a region: a box of runs of `elem_bytes`.
struct ReadPart {
  std::uint32_t file = 0;
  std::uint32_t region = 0;
  std::uint64_t begin = 0;  // file range that holds it
  std::uint64_t end = 0;
  std::uint64_t dest_offset = 0;
  std::vector<std::uint64_t> lengths;  // of the simplified region
  std::uint64_t elem_bytes = 0;
};

// A file range that one worker reads at once; parts [first_part, first_part + part_count).
struct Extent {
  std::uint32_t file = 0;
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
  std::uint32_t first_part = 0;
  std::uint32_t part_count = 0;
  bool is_disjoint = false;  // no byte is wanted twice
};

// What a worker takes at a time: what is wanted of one cell of a file, as parts of the plan.
struct CellRange {
  std::uint32_t file = 0;
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
  std::uint32_t first_part = 0;
  std::uint32_t part_count = 0;
};

// A plan of many short runs stays small: a part is all that a region wants of a cell, whatever lies
// between, and only the worker that takes the cell lists what is read apart.
struct ReadPlan {
  std::vector<plan::Region> regions;  // simplified, one per ReadRegion
  std::vector<ReadPart> parts;        // sorted by file and offset; each lies in one cell
  std::vector<CellRange> cells;
  std::uint64_t needed_bytes = 0;  // sum over the regions
};

// The reads of one cell.
struct CellReads {
  std::vector<ReadPart> parts;  // sorted by offset
  std::vector<Extent> extents;
};

// Shorter runs are copied out of a slot; longer ones are read straight to where they belong, but
// for direct reads.
inline constexpr std::uint64_t kInPlaceRunBytes = 4 << 10;
// Gaps that cost less to read than the call that skips them. Measured, two workers: the time of
// reads apart over that of reads over the gaps, in cells of 1 MiB.
//                    through the page cache       by O_DIRECT
//   gaps of KiB        1    4    8   16   64      1    4    8   16   64
//   runs of  1 KiB   2.8  1.6  1.0  0.8  0.3     28   13  9.2  4.2  1.2
//   runs of  4 KiB   2.2  1.6  1.2  0.8  0.3     11  8.4  5.6  4.1  1.3
//   runs of 16 KiB   1.4  1.3  1.2  1.0  0.5    4.7  3.5  3.0  2.2  1.2
//   runs of 64 KiB   1.1  1.1  1.0  1.0  0.8    1.9  2.2  1.9  1.5  1.1
inline constexpr std::uint64_t kCachedGapBytes = 8 << 10;
inline constexpr std::uint64_t kDirectGapBytes = 64 << 10;
// Of a store, whatever the runs: measured, see docs/develop/measurements.md.
inline constexpr std::uint64_t kObjectGapBytes = 512 << 10;

// How the bytes of a cell are read.
struct CellMode {
  bool is_checked = false;  // whole blocks, to verify them
  bool is_direct = false;   // by O_DIRECT, in whole pages
  bool is_object = false;   // by requests to a store
};

// The gap between runs of this length that is read and not skipped: no more than half a run, but
// for short ones, so that never more than half as much again is read as is needed. Counted between
// what is read anyway: from the end of a block or page to the begin of another.
std::uint64_t merge_gap_bytes(std::uint64_t run_bytes, bool is_direct);

// `slot_bytes` is the size of a cell: no extent crosses a multiple of it, and so each fits a slot
// also when both ends are rounded to blocks. Throws Error(kPlan).
// REQUIRES: regions name files below `file_count`.
ReadPlan plan_reads(const std::vector<ReadRegion>& regions, std::size_t file_count,
                    std::uint64_t slot_bytes);

// Cuts what is wanted of `cell` into extents; `reads` is overwritten. No block or page is read for
// two of them.
void plan_cell(const ReadPlan& plan, const CellRange& cell, CellMode mode, std::uint64_t slot_bytes,
               CellReads& reads);

}  // namespace dcpx::engine
