#include "check.h"
#include "plan/range_boxes.h"
#include "region_samples.h"

namespace {

using dcpx::ErrorCode;
using dcpx::plan::RangeBox;
using dcpx::plan::Region;

TEST(boxes_of_any_range_move_its_bytes_in_c_order) {
  RandomSource random(6);
  int cut_rows = 0;
  for (int round = 0; round < 4000; ++round) {
    Region region = random_region(random);
    std::uint64_t nbytes = region.elem_bytes;
    for (std::size_t d = region.dims(); d-- > 0; nbytes *= region.lengths[d]) {
      region.dst_strides[d] = nbytes;
    }
    const BytePairs whole = sorted_pairs(region);
    const std::uint64_t begin = random.chance(3) ? 0 : random.below(nbytes + 1);
    const std::uint64_t end = random.chance(3) ? nbytes : random.between(begin, nbytes);
    const std::vector<RangeBox> boxes = dcpx::plan::range_boxes(region, begin, end);
    CHECK(boxes.size() <= 2 * region.dims() + 1);
    CHECK_EQ(boxes.empty(), begin == end);
    if (begin == 0 && end == nbytes) CHECK_EQ(boxes.size(), 1U);
    cut_rows += boxes.size() > 1;
    BytePairs found;
    for (const RangeBox& box : boxes) {
      const std::size_t before = found.size();
      CHECK_EQ(box.dst_offset, before);  // without a gap: one pair a byte
      append_pairs(box.region, box.src_offset, box.dst_offset, found);
    }
    std::sort(found.begin(), found.end());
    const auto first = whole.begin() + static_cast<std::ptrdiff_t>(begin);
    BytePairs expected(first, first + static_cast<std::ptrdiff_t>(end - begin));
    for (auto& pair : expected) pair.first -= begin;
    CHECK(found == expected);
  }
  CHECK(cut_rows > 500);
}

TEST(contiguous_dimensions_are_one_run) {
  const Region region{4, {3, 5, 7}, {7 * 5 * 4, 7 * 4, 4}, {0, 0, 0}};
  const std::vector<RangeBox> boxes = dcpx::plan::range_boxes(region, 5, 333);
  CHECK_EQ(boxes.size(), 1U);
  CHECK_EQ(boxes[0].region.dims(), 0U);
  CHECK_EQ(boxes[0].region.elem_bytes, 328U);
  CHECK_EQ(boxes[0].src_offset, 5U);
}

TEST(range_behind_its_region_is_refused) {
  const Region region{4, {3}, {8}, {0}};
  CHECK_THROWS(dcpx::plan::range_boxes(region, 4, 16), ErrorCode::kPlan);
}

}  // namespace
