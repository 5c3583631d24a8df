#include <algorithm>

#include "check.h"
#include "common/slot.h"
#include "common/worker_group.h"
#include "engine/segment_fill.h"
#include "format/crc32.h"
#include "random_source.h"

namespace {

using namespace dcpx::engine;
using dcpx::crc32;
using dcpx::StopFlag;

// One item whose body is a segment of its own, and what summing that gives.
struct InPlace {
  static constexpr std::uint64_t kBytes = (20 << 20) + 3 * 4096;  // no multiple of a step

  std::vector<WriteItem> items{1};
  WriteLayout layout;
  PayloadSums sums;
  SegmentSummer summer;

  // REQUIRES: `memory` begins on a page.
  InPlace(const std::byte* memory, std::uint64_t cursor) {
    items[0].row.kind = dcpx::ItemKind::kBytes;
    items[0].row.payload_bytes = kBytes;
    items[0].source = memory;
    items[0].is_in_place = true;
    lay_out(items, 0, 1, cursor, {21 << 20, 21 << 20}, layout);
    sums.of_pieces.assign(layout.pieces.size(), 0);
  }
  bool sum(const StopFlag& stop) {
    return sum_in_place(layout, layout.segments.at(0), items, sums, summer, stop);
  }
};

TEST(sums_of_a_segment_in_place_are_those_of_its_bytes) {
  RandomSource random(60);
  const dcpx::Slot memory(InPlace::kBytes);
  const std::vector<std::byte> bytes = random.bytes(InPlace::kBytes);
  std::copy(bytes.begin(), bytes.end(), memory.data());
  for (const std::uint64_t cursor : {0UL, 4096UL, 5 * dcpx::kBlockBytes - 4096}) {
    InPlace whole(memory.data(), cursor);
    CHECK(whole.layout.segments.size() == 1 && whole.layout.segments[0].is_in_place);
    CHECK(whole.sum(StopFlag()));
    CHECK_EQ(whole.sums.of_pieces[0], crc32(0, bytes.data(), bytes.size()));
    std::uint64_t next = cursor;
    for (const BlockPart& part : whole.summer.take()) {
      CHECK_EQ(part.begin, next);
      CHECK_EQ(part.crc, crc32(0, bytes.data() + (part.begin - cursor), part.nbytes));
      next += part.nbytes;
    }
    CHECK_EQ(next, cursor + InPlace::kBytes);
  }
}

TEST(stopped_sum_of_a_segment_in_place_says_so_and_reads_no_further) {
  const dcpx::Slot memory(InPlace::kBytes);
  InPlace whole(memory.data(), 0);
  StopFlag stop;
  stop.set();
  CHECK(!whole.sum(stop));
  CHECK(whole.summer.take().empty());
}

}  // namespace
