#include <algorithm>
#include <utility>
#include <vector>

#include "check.h"
#include "plan/box_pairs.h"
#include "random_source.h"

namespace {

using dcpx::plan::BoxEnds;
using Numbers = std::vector<std::int64_t>;
using Pairs = std::vector<std::pair<std::uint32_t, std::uint32_t>>;

struct Set {
  Numbers begins;
  Numbers ends;
  std::size_t count = 0;

  BoxEnds view() const { return {begins.data(), ends.data(), count}; }
};

Pairs found(std::size_t ndim, const Set& a, const Set& b) {
  Pairs pairs;
  const bool is_whole = dcpx::plan::visit_meeting(ndim, a.view(), b.view(), [&](auto x, auto y) {
    pairs.emplace_back(x, y);
    return true;
  });
  CHECK(is_whole);
  std::sort(pairs.begin(), pairs.end());
  return pairs;
}

Pairs compared(std::size_t ndim, const Set& a, const Set& b) {
  Pairs pairs;
  for (std::uint32_t x = 0; x < a.count; ++x) {
    for (std::uint32_t y = 0; y < b.count; ++y) {
      bool meet = true;
      for (std::size_t d = 0; d < ndim && meet; ++d) {
        meet = a.begins[x * ndim + d] < b.ends[y * ndim + d] &&
               b.begins[y * ndim + d] < a.ends[x * ndim + d];
      }
      if (meet) pairs.emplace_back(x, y);
    }
  }
  return pairs;
}

// Small, long and flat boxes, many of which begin at one place; some have no elements, or fewer.
Set random_set(RandomSource& random, std::size_t ndim, std::int64_t side) {
  Set set;
  set.count = random.between(1, 400);
  const auto limit = static_cast<std::uint64_t>(side);
  for (std::size_t i = 0; i < set.count; ++i) {
    const std::size_t long_dim = random.below(2 * ndim);
    for (std::size_t d = 0; d < ndim; ++d) {
      const auto begin = static_cast<std::int64_t>(random.chance(4) ? 0 : random.below(limit));
      const auto size = static_cast<std::int64_t>(random.below(d == long_dim ? limit : 4));
      set.begins.push_back(begin);
      set.ends.push_back(begin + (random.chance(200) ? -size : size));
    }
  }
  return set;
}

TEST(pairs_that_meet_are_visited_once_each) {
  RandomSource random(91);
  std::size_t most = 0;
  for (int round = 0; round < 120; ++round) {
    const std::size_t ndim = random.between(1, 4);
    const std::int64_t side = random.pick<std::int64_t>({3, 20, 1000});
    const Set a = random_set(random, ndim, side);
    const Set b = random_set(random, ndim, side);
    const Pairs pairs = found(ndim, a, b);
    CHECK(pairs == compared(ndim, a, b));
    most = std::max(most, pairs.size());
  }
  CHECK(most > 1000);
}

TEST(boxes_as_far_as_numbers_reach_meet) {
  Set all;
  for (int i = 0; i < 300; ++i) {
    all.begins.insert(all.begins.end(), {INT64_MIN, i % 2 == 0 ? INT64_MIN : INT64_MAX - 1});
    all.ends.insert(all.ends.end(), {INT64_MAX, i % 2 == 0 ? INT64_MIN + 1 : INT64_MAX});
    ++all.count;
  }
  CHECK(found(2, all, all) == compared(2, all, all));
}

TEST(visitor_that_has_enough_ends_it) {
  RandomSource random(92);
  for (int round = 0; round < 40; ++round) {
    const Set set = random_set(random, 3, 20);
    const Pairs pairs = compared(3, set, set);
    if (pairs.empty()) continue;
    const std::size_t wanted = random.between(1, pairs.size());
    std::size_t seen = 0;
    CHECK(!dcpx::plan::visit_meeting(3, set.view(), set.view(),
                                     [&](auto, auto) { return ++seen < wanted; }));
    CHECK_EQ(seen, wanted);
  }
}

// Along either dimension half of the boxes meet one another: all of them compared are 2^34 pairs.
TEST(columns_over_rows_take_a_moment) {
  constexpr std::int64_t kSide = 1 << 16;
  Set set;
  for (std::int64_t i = 0; i < kSide; ++i) {
    set.begins.insert(set.begins.end(), {0, i, kSide + i, 0});
    set.ends.insert(set.ends.end(), {kSide, i + 1, kSide + i + 1, kSide});
    set.count += 2;
  }
  std::size_t seen = 0;
  CHECK(dcpx::plan::visit_meeting(2, set.view(), set.view(), [&](auto a, auto b) {
    seen += a == b ? 1 : set.count;
    return true;
  }));
  CHECK_EQ(seen, set.count);
}

}  // namespace
