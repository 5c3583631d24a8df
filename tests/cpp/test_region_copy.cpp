#include "check.h"
#include "region_samples.h"

namespace {

using dcpx::ErrorCode;
using dcpx::plan::Region;
using dcpx::plan::RegionPart;

constexpr int kRounds = 4000;
constexpr std::byte kCanary{0xA5};

bool is_one_run(const RegionPart& part) {
  return std::all_of(part.lengths.begin(), part.lengths.end(), [](auto n) { return n == 1; });
}

TEST(simplified_region_moves_the_same_bytes) {
  RandomSource random(1);
  for (int round = 0; round < kRounds; ++round) {
    const Region region = random_region(random);
    const Region simplified = dcpx::plan::simplify(region);
    CHECK(simplified.dims() <= region.dims());
    CHECK(sorted_pairs(simplified) == sorted_pairs(region));
    CHECK(std::is_sorted(simplified.src_strides.rbegin(), simplified.src_strides.rend()));
    CHECK(std::find(simplified.lengths.begin(), simplified.lengths.end(), 1U) ==
          simplified.lengths.end());
  }
}

TEST(contiguous_region_in_any_order_of_dimensions_becomes_one_run) {
  RandomSource random(2);
  for (int round = 0; round < kRounds; ++round) {
    Region region = random_region(random);
    std::vector<std::size_t> order(region.dims());
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random.engine());
    std::uint64_t nbytes = region.elem_bytes;
    for (const std::size_t d : order) {
      region.src_strides[d] = region.dst_strides[d] = nbytes;
      nbytes *= region.lengths[d];
    }
    const Region simplified = dcpx::plan::simplify(region);
    CHECK_EQ(simplified.dims(), 0U);
    CHECK_EQ(simplified.elem_bytes, nbytes);
  }
}

TEST(copy_moves_what_the_definition_says_and_nothing_else) {
  RandomSource random(3);
  for (int round = 0; round < kRounds; ++round) {
    const Region region = random_region(random, /*may_be_empty=*/true);
    const std::uint64_t src_bytes = dcpx::plan::src_span_bytes(region);
    const std::uint64_t dst_bytes = dcpx::plan::dst_span_bytes(region);
    const BytePairs pairs = sorted_pairs(region);
    CHECK_EQ(pairs.empty(), src_bytes == 0);
    if (!pairs.empty()) CHECK_EQ(pairs.back().first + 1, dst_bytes);
    const std::vector<std::byte> src = random.bytes(src_bytes);
    std::vector<std::byte> expected(dst_bytes, kCanary);
    std::vector<std::byte> found(dst_bytes, kCanary);
    for (const auto& [to, from] : pairs) expected[to] = src.at(from);
    dcpx::plan::copy_region(region, src.data(), found.data());
    CHECK(found == expected);
    std::fill(found.begin(), found.end(), kCanary);
    if (!pairs.empty()) {
      dcpx::plan::copy_region(dcpx::plan::simplify(region), src.data(), found.data());
      CHECK(found == expected);
    }
  }
}

TEST(gather_gives_any_range_of_the_elements_in_c_order) {
  RandomSource random(4);
  for (int round = 0; round < kRounds; ++round) {
    Region region = random_region(random);
    std::uint64_t nbytes = region.elem_bytes;
    for (std::size_t d = region.dims(); d-- > 0; nbytes *= region.lengths[d]) {
      region.dst_strides[d] = nbytes;
    }
    const std::vector<std::byte> src = random.bytes(dcpx::plan::src_span_bytes(region));
    std::vector<std::byte> whole(nbytes);
    for (const auto& [to, from] : sorted_pairs(region)) whole[to] = src.at(from);
    const std::uint64_t numel = nbytes / region.elem_bytes;
    for (int part = 0; part < 4; ++part) {
      const std::uint64_t begin = random.between(0, numel) * region.elem_bytes;
      const std::uint64_t end =
          begin + random.between(0, numel - begin / region.elem_bytes) * region.elem_bytes;
      std::vector<std::byte> found(end - begin + 1, kCanary);
      dcpx::plan::gather_range(region, src.data(), begin, end, found.data());
      CHECK(std::equal(found.begin(), found.end() - 1, whole.data() + begin));
      CHECK(found.back() == kCanary);
    }
  }
}

TEST(gather_refuses_to_cut_an_element) {
  const Region region{4, {3}, {8}, {0}};
  const std::vector<std::byte> src(20);
  std::vector<std::byte> out(12);
  CHECK_THROWS(dcpx::plan::gather_range(region, src.data(), 2, 8, out.data()), ErrorCode::kPlan);
  CHECK_THROWS(dcpx::plan::gather_range(region, src.data(), 0, 7, out.data()), ErrorCode::kPlan);
}

TEST(split_covers_every_byte_once_within_all_bounds) {
  RandomSource random(5);
  int multi_run_parts = 0;
  int cut_runs = 0;
  for (int round = 0; round < 4 * kRounds; ++round) {
    const Region region = dcpx::plan::simplify(random_region(random));
    const std::uint64_t max_span =
        random.chance(2) ? random.between(1, 40) : random.between(1, 4000);
    const std::uint64_t max_gap = random.chance(2) ? random.below(8) : random.below(4000);
    const std::uint64_t phase = random.below(3 * max_span);
    BytePairs pairs;
    for (const RegionPart& part : dcpx::plan::split_region(region, max_span, max_gap, phase)) {
      const Region box{part.elem_bytes, part.lengths, region.src_strides, region.dst_strides};
      CHECK_EQ(part.lengths.size(), region.dims());
      BytePairs own;
      append_pairs(box, part.src_offset, part.dst_offset, own);
      std::vector<std::uint64_t> touched;
      for (const auto& pair : own) touched.push_back(pair.second);
      std::sort(touched.begin(), touched.end());
      CHECK_EQ(touched.front(), part.src_offset);
      CHECK_EQ(touched.back() + 1 - touched.front(), part.src_span);
      CHECK(part.src_span <= max_span);
      for (std::size_t i = 1; i < touched.size(); ++i) {
        CHECK(touched[i] - touched[i - 1] <= max_gap + 1);
      }
      CHECK_EQ((phase + touched.front()) / max_span, (phase + touched.back()) / max_span);
      multi_run_parts += !is_one_run(part);
      cut_runs += part.elem_bytes < region.elem_bytes;
      pairs.insert(pairs.end(), own.begin(), own.end());
    }
    std::sort(pairs.begin(), pairs.end());
    CHECK(pairs == sorted_pairs(region));
  }
  CHECK(multi_run_parts > kRounds && cut_runs > kRounds);  // the cases that matter did come up
}

TEST(spans_that_overflow_are_refused) {
  constexpr std::uint64_t kHalf = 1UL << 63;  // both spans are 2^64 + 1, which wraps to 1
  const Region region{1, {kHalf + 1, 2}, {2, 0}, {1, kHalf}};
  CHECK_THROWS(dcpx::plan::src_span_bytes(region), ErrorCode::kPlan);
  CHECK_THROWS(dcpx::plan::dst_span_bytes(region), ErrorCode::kPlan);
}

}  // namespace
