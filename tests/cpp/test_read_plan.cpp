#include "check.h"
#include "common/bytes.h"
#include "engine/read_plan.h"
#include "format/file_footer.h"
#include "region_samples.h"

namespace {

using dcpx::ErrorCode;
using dcpx::kBlockBytes;
using dcpx::engine::Extent;
using dcpx::engine::plan_reads;
using dcpx::engine::ReadPart;
using dcpx::engine::ReadPlan;
using dcpx::engine::ReadRegion;
using dcpx::plan::Region;

constexpr std::uint64_t kSlotBytes = 4 * kBlockBytes;
constexpr std::uint64_t kFileBytes = 40 * kBlockBytes + 1234;

// A box of a matrix or of a 3-d tensor that lies somewhere in a file; runs from a few bytes to many
// slots long, sometimes with the source's dimensions permuted.
ReadRegion random_wanted(RandomSource& random) {
  ReadRegion wanted;
  wanted.file = static_cast<std::uint32_t>(random.below(3));
  Region& region = wanted.region;
  region.elem_bytes = random.pick<std::uint64_t>({1, 2, 4, 12, 16});
  const std::uint64_t room = kFileBytes / region.elem_bytes;
  const std::uint64_t rows = random.pick<std::uint64_t>({1, 3, 100, 2000});
  const std::uint64_t columns = random.between(1, std::min<std::uint64_t>(room / rows, 1 << 18));
  const std::uint64_t wide = random.between(columns, room / rows);
  region.lengths = {rows, columns};
  region.src_strides = {wide * region.elem_bytes, region.elem_bytes};
  region.dst_strides = {columns * region.elem_bytes, region.elem_bytes};
  if (random.chance(4)) std::swap(region.src_strides[0], region.src_strides[1]);
  if (region.src_strides[0] < region.src_strides[1]) {
    region.src_strides[1] = rows * region.elem_bytes;
    region.lengths[1] = std::min<std::uint64_t>(columns, 3000);
  }
  if (random.chance(6)) region.lengths[random.below(2)] = 0;
  const std::uint64_t span = dcpx::plan::src_span_bytes(region);
  wanted.src_offset = random.below(kFileBytes - span + 1);
  return wanted;
}

std::uint64_t region_bytes(const Region& region) {
  return std::accumulate(region.lengths.begin(), region.lengths.end(), region.elem_bytes,
                         std::multiplies<>());
}

// Does by memory copies what ReadJob does by reads: each extent into a slot, its parts out of it.
void carry_out(const ReadPlan& plan, const std::vector<ReadRegion>& regions,
               const std::vector<std::vector<std::byte>>& files,
               std::vector<std::vector<std::byte>>& found) {
  std::uint64_t moved_bytes = 0;
  std::uint32_t next_part = 0;
  for (const Extent& extent : plan.extents) {
    CHECK_EQ(extent.begin / kSlotBytes, (extent.end - 1) / kSlotBytes);
    CHECK_EQ(extent.first_part, next_part);
    CHECK(extent.part_count > 0);
    // Exactly as large as what was read, so that ASan sees a part that reaches further.
    const auto* data = files[extent.file].data();
    const std::vector<std::byte> slot(data + extent.begin, data + extent.end);
    std::uint64_t end = extent.begin;
    bool is_disjoint = true;
    for (; next_part < extent.first_part + extent.part_count; ++next_part) {
      const ReadPart& part = plan.parts[next_part];
      const Region& simplified = plan.regions[part.region];
      CHECK_EQ(part.file, extent.file);
      CHECK_EQ(regions[part.region].file, extent.file);
      CHECK(part.begin >= extent.begin && part.end <= extent.end);
      const Region box{part.elem_bytes, part.lengths, simplified.src_strides,
                       simplified.dst_strides};
      CHECK_EQ(dcpx::plan::src_span_bytes(box), part.end - part.begin);
      is_disjoint = is_disjoint && part.begin >= end;
      end = std::max(end, part.end);
      moved_bytes += region_bytes(box);
      dcpx::plan::copy_region(box, slot.data() + (part.begin - extent.begin),
                              found[part.region].data() + part.dest_offset);
    }
    CHECK_EQ(end, extent.end);
    CHECK_EQ(extent.is_disjoint, is_disjoint);
  }
  CHECK_EQ(next_part, plan.parts.size());
  CHECK_EQ(moved_bytes, plan.needed_bytes);
}

// A turn is a cell's extents, and no block of a checked file is read by two of them.
void check_turns(const ReadPlan& plan, const std::vector<bool>& is_checked) {
  CHECK_EQ(plan.turn_count() == 0, plan.extents.empty());
  if (plan.extents.empty()) return;
  CHECK_EQ(plan.turns.front(), 0U);
  CHECK_EQ(plan.turns.back(), plan.extents.size());
  for (std::uint32_t turn = 0; turn < plan.turn_count(); ++turn) {
    CHECK(plan.turns[turn] < plan.turns[turn + 1]);
    const Extent& first = plan.extents[plan.turns[turn]];
    for (std::uint32_t e = plan.turns[turn]; e < plan.turns[turn + 1]; ++e) {
      CHECK_EQ(plan.extents[e].file, first.file);
      CHECK_EQ(plan.extents[e].begin / kSlotBytes, first.begin / kSlotBytes);
    }
  }
  for (std::size_t e = 1; e < plan.extents.size(); ++e) {
    const Extent& last = plan.extents[e - 1];
    const Extent& next = plan.extents[e];
    CHECK(last.file < next.file || (last.file == next.file && last.end < next.begin) ||
          (last.file == next.file && last.end == next.begin && next.begin % kSlotBytes == 0));
    if (last.file == next.file && is_checked[next.file]) {
      CHECK((last.end - 1) / kBlockBytes < next.begin / kBlockBytes);
    }
  }
}

TEST(read_plan_brings_every_byte_once_and_fits_its_slots) {
  RandomSource random(10);
  std::vector<std::vector<std::byte>> files;
  for (int f = 0; f < 3; ++f) files.push_back(random.bytes(kFileBytes));
  const std::vector<bool> is_checked{true, false, true};
  std::size_t disjoint = 0;
  std::size_t extents = 0;
  for (int round = 0; round < 60; ++round) {
    std::vector<ReadRegion> regions;
    const std::uint64_t count = random.between(0, 6);
    for (std::uint64_t r = 0; r < count; ++r) {
      regions.push_back(r > 0 && random.chance(5) ? regions[0] : random_wanted(random));
    }
    std::uint64_t needed_bytes = 0;
    std::vector<std::vector<std::byte>> expected;
    for (const ReadRegion& wanted : regions) {
      needed_bytes += region_bytes(wanted.region);
      expected.emplace_back(dcpx::plan::dst_span_bytes(wanted.region), std::byte{0xA5});
      dcpx::plan::copy_region(wanted.region, files[wanted.file].data() + wanted.src_offset,
                              expected.back().data());
    }
    std::vector<std::vector<std::byte>> found;
    for (const auto& bytes : expected) found.emplace_back(bytes.size(), std::byte{0xA5});
    const ReadPlan plan = plan_reads(regions, is_checked, kSlotBytes);
    CHECK_EQ(plan.needed_bytes, needed_bytes);
    CHECK_EQ(plan.regions.size(), regions.size());
    check_turns(plan, is_checked);
    carry_out(plan, regions, files, found);
    CHECK(found == expected);
    extents += plan.extents.size();
    disjoint += static_cast<std::size_t>(std::count_if(
        plan.extents.begin(), plan.extents.end(), [](auto& extent) { return extent.is_disjoint; }));
  }
  CHECK(disjoint > 50 && extents - disjoint > 50);
}

TEST(one_long_run_is_cut_at_slots_and_read_exactly) {
  const ReadRegion wanted{0, 777, {1, {kFileBytes - 777}, {1}, {1}}, nullptr, "w"};
  const ReadPlan plan = plan_reads({wanted}, {true}, kSlotBytes);
  std::uint64_t at = 777;
  for (const Extent& extent : plan.extents) {
    CHECK_EQ(extent.begin, at);
    CHECK(extent.is_disjoint);
    CHECK(extent.end == kFileBytes || extent.end % kSlotBytes == 0);
    at = extent.end;
  }
  CHECK_EQ(at, kFileBytes);
  CHECK_EQ(plan.extents.size(), kFileBytes / kSlotBytes + 1);
}

TEST(runs_apart_are_read_apart_and_neighbours_together) {
  for (const bool is_checked : {true, false}) {
    for (const std::uint64_t run : {64UL, 4095UL, 4096UL, 32768UL}) {
      const std::uint64_t gap =
          is_checked ? dcpx::engine::kCheckedGapBytes : dcpx::engine::merge_gap_bytes(run);
      const auto extents = [&](std::uint64_t stride) {
        const ReadRegion columns{0, 0, {run, {2}, {stride}, {run}}, nullptr, "w"};
        const ReadRegion first{0, 0, {run, {}, {}, {}}, nullptr, "w"};
        const ReadRegion second{0, stride, {run, {}, {}, {}}, nullptr, "w"};
        const std::size_t apart =
            plan_reads({second, first}, {is_checked}, kSlotBytes).extents.size();
        CHECK_EQ(plan_reads({columns}, {is_checked}, kSlotBytes).extents.size(), apart);
        return apart;
      };
      CHECK_EQ(extents(run + gap), 1U);
      CHECK_EQ(extents(run + gap + 1), 2U);
    }
  }
}

TEST(columns_of_long_runs_are_read_with_half_as_much_again_at_most) {
  for (const std::uint64_t run : {4096UL, 6000UL, 20'000UL, 100'000UL}) {
    for (const std::uint64_t stride : {run + 64, run + run / 2, run + run / 2 + 1, 2 * run}) {
      const std::uint64_t rows = kFileBytes / stride;
      const ReadRegion columns{0, 5, {run, {rows}, {stride}, {run}}, nullptr, "w"};
      std::uint64_t read_bytes = 0;
      for (const Extent& extent : plan_reads({columns}, {false}, kSlotBytes).extents) {
        read_bytes += extent.end - extent.begin;
      }
      // Runs that a cell's border cuts are short ones: 8 KiB beside each is allowed for.
      CHECK(read_bytes <= rows * run * 3 / 2 + (kFileBytes / kSlotBytes) * 16384);
    }
  }
}

TEST(read_plan_refuses_slots_that_hold_no_blocks) {
  for (const std::uint64_t slot_bytes : {0UL, 4096UL, 3 * kBlockBytes, 4 * kBlockBytes + 4096}) {
    CHECK_THROWS(plan_reads({}, {}, slot_bytes), ErrorCode::kPlan);
  }
}

}  // namespace
