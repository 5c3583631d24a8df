#include <algorithm>
#include <numeric>
#include <vector>

#include "check.h"
#include "plan/overlap.h"
#include "random_source.h"

namespace {

using dcpx::ErrorCode;
using dcpx::plan::Boxes;
using dcpx::plan::Overlap;
using dcpx::plan::OverlapOrder;
using Numbers = std::vector<std::int64_t>;

struct Side {
  Numbers offsets;
  Numbers sizes;
  std::size_t count = 0;

  void add(const Numbers& at, const Numbers& size) {
    offsets.insert(offsets.end(), at.begin(), at.end());
    sizes.insert(sizes.end(), size.begin(), size.end());
    ++count;
  }
  Boxes boxes() const { return {offsets.data(), sizes.data(), count}; }
};

using Pairs = std::vector<std::pair<std::uint32_t, std::uint32_t>>;

// What both boxes hold along each dimension, against what `overlap_region` says.
void check_region(std::size_t ndim, const Side& wanted, const Side& stored, const Overlap& one) {
  Numbers dest(ndim), storage(ndim), lengths(ndim);
  dcpx::plan::overlap_region(ndim, wanted.boxes(), stored.boxes(), one, dest.data(), storage.data(),
                             lengths.data());
  for (std::size_t d = 0; d < ndim; ++d) {
    const std::size_t w = one.wanted * ndim + d;
    const std::size_t s = one.stored * ndim + d;
    const std::int64_t begin = std::max(wanted.offsets[w], stored.offsets[s]);
    const std::int64_t end = std::min(wanted.offsets[w] + wanted.sizes[w],  //
                                      stored.offsets[s] + stored.sizes[s]);
    CHECK_EQ(dest[d], begin - wanted.offsets[w]);
    CHECK_EQ(storage[d], begin - stored.offsets[s]);
    CHECK_EQ(lengths[d], end - begin);
  }
}

Pairs found(std::size_t ndim, const Side& wanted, const Side& stored, OverlapOrder order) {
  std::vector<Overlap> overlaps;
  dcpx::plan::find_overlaps(ndim, wanted.boxes(), stored.boxes(), order, &overlaps);
  Pairs pairs;
  for (const Overlap& one : overlaps) {
    check_region(ndim, wanted, stored, one);
    pairs.emplace_back(one.wanted, one.stored);
  }
  return pairs;
}

Pairs compared(std::size_t ndim, const Side& wanted, const Side& stored) {
  Pairs pairs;
  for (std::uint32_t w = 0; w < wanted.count; ++w) {
    for (std::uint32_t s = 0; s < stored.count; ++s) {
      bool meet = true;
      for (std::size_t d = 0; d < ndim && meet; ++d) {
        const std::size_t a = w * ndim + d;
        const std::size_t b = s * ndim + d;
        meet = wanted.offsets[a] < stored.offsets[b] + stored.sizes[b] &&
               stored.offsets[b] < wanted.offsets[a] + wanted.sizes[a];
      }
      if (meet) pairs.emplace_back(w, s);
    }
  }
  return pairs;
}

// The same boxes, each at the place that `places` gives it.
Side placed(std::size_t ndim, const Side& side, const std::vector<std::uint32_t>& places) {
  Side out{Numbers(side.offsets.size()), Numbers(side.sizes.size()), side.count};
  for (std::size_t i = 0; i < side.count; ++i) {
    for (std::size_t d = 0; d < ndim; ++d) {
      out.offsets[places[i] * ndim + d] = side.offsets[i * ndim + d];
      out.sizes[places[i] * ndim + d] = side.sizes[i * ndim + d];
    }
  }
  return out;
}

std::vector<std::uint32_t> shuffled(RandomSource& random, std::size_t count) {
  std::vector<std::uint32_t> places(count);
  std::iota(places.begin(), places.end(), 0U);
  std::shuffle(places.begin(), places.end(), random.engine());
  return places;
}

// Boxes anywhere, or the cells of a mesh in any order; sometimes one is missing or there twice.
Side random_side(RandomSource& random, std::size_t ndim) {
  Side side;
  if (random.chance(2)) {
    for (std::uint64_t i = random.below(70); i > 0; --i) {
      Numbers at, size;
      for (std::size_t d = 0; d < ndim; ++d) {
        at.push_back(static_cast<std::int64_t>(random.below(30)));
        size.push_back(static_cast<std::int64_t>(random.below(9)));
      }
      side.add(at, size);
    }
    return side;
  }
  std::vector<Numbers> begins(ndim);
  std::size_t cells = 1;
  for (Numbers& own : begins) {
    own.push_back(0);
    while (own.size() < 6 && !random.chance(4)) {
      own.push_back(own.back() + 1 + static_cast<std::int64_t>(random.below(7)));
    }
    cells *= own.size();
  }
  for (std::size_t cell = 0; cell < cells; ++cell) {
    if (random.chance(200)) continue;
    Numbers at, size;
    std::size_t rest = cell;
    for (const Numbers& own : begins) {
      const std::size_t place = rest % own.size();
      rest /= own.size();
      at.push_back(own[place]);
      size.push_back((place + 1 < own.size() ? own[place + 1] : own.back() + 4) - own[place]);
    }
    side.add(at, size);
    if (random.chance(300)) side.add(at, size);
  }
  return random.chance(2) ? placed(ndim, side, shuffled(random, side.count)) : side;
}

TEST(overlaps_are_those_that_comparing_every_pair_finds) {
  RandomSource random(77);
  for (int round = 0; round < 1500; ++round) {
    const std::size_t ndim = random.below(5);
    const Side wanted = random_side(random, ndim);
    const Side stored = random_side(random, ndim);
    const Pairs pairs = compared(ndim, wanted, stored);
    CHECK(found(ndim, wanted, stored, OverlapOrder::kNested) == pairs);
    Pairs swept = found(ndim, wanted, stored, OverlapOrder::kSwept);
    std::sort(swept.begin(), swept.end());
    CHECK(swept == pairs);
  }
}

TEST(box_that_ends_beyond_all_numbers_is_refused) {
  Side wanted, stored;
  wanted.add({0}, {1});
  stored.add({INT64_MAX}, {1});
  CHECK_THROWS(found(1, wanted, stored, OverlapOrder::kSwept), ErrorCode::kPlan);
  CHECK_THROWS(found(1, stored, wanted, OverlapOrder::kSwept), ErrorCode::kPlan);
}

}  // namespace
