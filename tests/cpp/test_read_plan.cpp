#include "check.h"
#include "common/bytes.h"
#include "engine/read_plan.h"
#include "format/file_footer.h"
#include "region_samples.h"

namespace {

using dcpx::ErrorCode;
using dcpx::kBlockBytes;
using dcpx::engine::CellRange;
using dcpx::engine::CellReads;
using dcpx::engine::Extent;
using dcpx::engine::plan_cell;
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

// A plan with the reads of all its cells, as workers find them one by one.
struct AllReads {
  ReadPlan plan;
  std::vector<ReadPart> parts;
  std::vector<Extent> extents;
};

AllReads plan_all(const std::vector<ReadRegion>& regions, const std::vector<bool>& is_checked,
                  bool is_direct = false) {
  AllReads all{plan_reads(regions, is_checked.size(), kSlotBytes), {}, {}};
  CellReads reads;
  std::uint32_t next_part = 0;
  for (const CellRange& cell : all.plan.cells) {
    CHECK_EQ(cell.first_part, next_part);
    CHECK(cell.part_count > 0);
    next_part += cell.part_count;
    plan_cell(all.plan, cell, {is_checked[cell.file], is_direct}, kSlotBytes, reads);
    CHECK_EQ(reads.extents.front().begin, cell.begin);
    CHECK_EQ(reads.extents.back().end, cell.end);
    CHECK_EQ(cell.begin / kSlotBytes, (cell.end - 1) / kSlotBytes);
    for (Extent extent : reads.extents) {
      CHECK_EQ(extent.file, cell.file);
      extent.first_part += static_cast<std::uint32_t>(all.parts.size());
      all.extents.push_back(extent);
    }
    all.parts.insert(all.parts.end(), reads.parts.begin(), reads.parts.end());
  }
  CHECK_EQ(next_part, all.plan.parts.size());
  return all;
}

// Does by memory copies what ReadJob does by reads: each extent into a slot, its parts out of it.
void carry_out(const AllReads& all, const std::vector<ReadRegion>& regions,
               const std::vector<std::vector<std::byte>>& files,
               std::vector<std::vector<std::byte>>& found) {
  std::uint64_t moved_bytes = 0;
  std::uint32_t next_part = 0;
  for (const Extent& extent : all.extents) {
    CHECK_EQ(extent.begin / kSlotBytes, (extent.end - 1) / kSlotBytes);
    CHECK_EQ(extent.first_part, next_part);
    CHECK(extent.part_count > 0);
    // Exactly as large as what was read, so that ASan sees a part that reaches further.
    const auto* data = files[extent.file].data();
    const std::vector<std::byte> slot(data + extent.begin, data + extent.end);
    std::uint64_t end = extent.begin;
    bool is_disjoint = true;
    for (; next_part < extent.first_part + extent.part_count; ++next_part) {
      const ReadPart& part = all.parts[next_part];
      const Region& simplified = all.plan.regions[part.region];
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
  CHECK_EQ(next_part, all.parts.size());
  CHECK_EQ(moved_bytes, all.plan.needed_bytes);
}

// Extents ascend, and no block of a checked file, and no page of one that is read directly, is
// read by two of them.
void check_order(const std::vector<Extent>& extents, const std::vector<bool>& is_checked,
                 bool is_direct) {
  for (std::size_t e = 1; e < extents.size(); ++e) {
    const Extent& last = extents[e - 1];
    const Extent& next = extents[e];
    CHECK(last.file < next.file || (last.file == next.file && last.end < next.begin) ||
          (last.file == next.file && last.end == next.begin && next.begin % kSlotBytes == 0));
    const std::uint64_t unit = is_checked[next.file] ? kBlockBytes : is_direct ? 4096 : 1;
    if (last.file == next.file) CHECK((last.end - 1) / unit < next.begin / unit);
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
    const bool is_direct = round % 2 == 1;
    const AllReads all = plan_all(regions, is_checked, is_direct);
    CHECK_EQ(all.plan.needed_bytes, needed_bytes);
    CHECK_EQ(all.plan.regions.size(), regions.size());
    check_order(all.extents, is_checked, is_direct);
    carry_out(all, regions, files, found);
    CHECK(found == expected);
    extents += all.extents.size();
    disjoint += static_cast<std::size_t>(std::count_if(
        all.extents.begin(), all.extents.end(), [](auto& extent) { return extent.is_disjoint; }));
  }
  CHECK(disjoint > 50 && extents - disjoint > 50);
}

TEST(runs_apart_are_read_apart_and_neighbours_together) {
  for (const bool is_checked : {true, false}) {
    for (const bool is_direct : {true, false}) {
      for (const std::uint64_t run : {4096UL, 8192UL, 32768UL, 64UL, 4095UL}) {
        const std::uint64_t gap = dcpx::engine::merge_gap_bytes(run, is_direct);
        const std::uint64_t unit = is_checked ? kBlockBytes : is_direct ? 4096 : 1;
        const std::uint64_t next = dcpx::align_up(run, unit) + dcpx::align_down(gap, unit) + unit;
        const auto extents = [&](std::uint64_t stride) {
          const ReadRegion columns{0, 0, {run, {2}, {stride}, {run}}, nullptr, "w"};
          const ReadRegion first{0, 0, {run, {}, {}, {}}, nullptr, "w"};
          const ReadRegion second{0, stride, {run, {}, {}, {}}, nullptr, "w"};
          const std::size_t apart =
              plan_all({second, first}, {is_checked}, is_direct).extents.size();
          CHECK_EQ(plan_all({columns}, {is_checked}, is_direct).extents.size(), apart);
          return apart;
        };
        CHECK_EQ(extents(next - 1), 1U);
        CHECK_EQ(extents(next), 2U);
      }
    }
  }
}

// Reads of columns of `run` bytes every `stride` bytes of a file; to elements that lie apart where
// `elem_bytes` is less than the run.
AllReads read_columns(std::uint64_t run, std::uint64_t stride, std::uint64_t elem_bytes) {
  const std::uint64_t rows = kFileBytes / stride;
  const ReadRegion columns{
      0,
      5,
      {elem_bytes, {rows, run / elem_bytes}, {stride, elem_bytes}, {2 * run, 2 * elem_bytes}},
      nullptr,
      "w"};
  return plan_all({columns}, {false});
}

TEST(plan_of_many_runs_has_a_few_parts_a_cell) {
  for (const std::uint64_t elem_bytes : {4096UL, 4UL}) {
    const AllReads all = read_columns(4096, 3 * 4096, elem_bytes);
    const std::uint64_t cells = kFileBytes / kSlotBytes + 1;
    CHECK(all.extents.size() > 5 * cells);
    CHECK(all.plan.cells.size() <= cells);
    CHECK(all.plan.parts.size() <= 8 * cells);
  }
}

TEST(read_plan_refuses_slots_that_hold_no_blocks) {
  for (const std::uint64_t slot_bytes : {0UL, 4096UL, 3 * kBlockBytes, 4 * kBlockBytes + 4096}) {
    CHECK_THROWS(plan_reads({}, 0, slot_bytes), ErrorCode::kPlan);
  }
}

}  // namespace
