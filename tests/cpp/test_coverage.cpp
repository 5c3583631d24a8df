#include <algorithm>
#include <numeric>
#include <vector>

#include "check.h"
#include "plan/coverage.h"
#include "random_source.h"

namespace {

using dcpx::ErrorCode;
using dcpx::plan::BoxColumns;
using dcpx::plan::CoverageError;
using dcpx::plan::Offence;
using Numbers = std::vector<std::int64_t>;

constexpr std::int64_t kHuge = INT64_MAX;

struct Box {
  Numbers offsets;
  Numbers lengths;
};

struct Tensor {
  Numbers sizes;
  std::vector<Box> boxes;
};

struct Columns {
  Numbers ndims, sizes, box_counts, offsets, lengths;

  explicit Columns(const std::vector<Tensor>& tensors) {
    const auto append = [](Numbers& to, const Numbers& from) {
      to.insert(to.end(), from.begin(), from.end());
    };
    for (const Tensor& tensor : tensors) {
      ndims.push_back(static_cast<std::int64_t>(tensor.sizes.size()));
      box_counts.push_back(static_cast<std::int64_t>(tensor.boxes.size()));
      append(sizes, tensor.sizes);
      for (const Box& box : tensor.boxes)
        append(offsets, box.offsets), append(lengths, box.lengths);
    }
  }
  BoxColumns view() const {
    return {ndims.data(),   sizes.data(), box_counts.data(), offsets.data(),
            lengths.data(), ndims.size(), sizes.size(),      offsets.size()};
  }
};

std::vector<CoverageError> errors_of(const std::vector<Tensor>& tensors) {
  return dcpx::plan::check_coverage(Columns(tensors).view());
}

// Cuts a tensor's box in two, again and again: every piece of it once, in any order.
std::vector<Box> random_tiling(RandomSource& random, const Numbers& sizes) {
  std::vector<Box> boxes{{Numbers(sizes.size(), 0), sizes}};
  for (std::uint64_t cut = random.below(12); cut > 0 && !sizes.empty(); --cut) {
    const std::size_t at = random.below(boxes.size());
    const std::size_t d = random.below(sizes.size());
    Box& low = boxes[at];
    const auto length = static_cast<std::uint64_t>(low.lengths[d]);
    const auto place = static_cast<std::int64_t>(random.between(0, length));
    Box high = low;
    high.offsets[d] += place;
    high.lengths[d] -= place;
    low.lengths[d] = place;
    boxes.push_back(high);
  }
  std::shuffle(boxes.begin(), boxes.end(), random.engine());
  return boxes;
}

Numbers random_sizes(RandomSource& random) {
  Numbers sizes(random.below(5));
  for (std::int64_t& size : sizes) size = static_cast<std::int64_t>(random.below(7));
  return sizes;
}

// How often each element is held, in C order.
std::vector<int> counts_of(const Tensor& tensor) {
  std::int64_t numel = 1;
  for (const std::int64_t size : tensor.sizes) numel *= size;
  std::vector<int> counts(static_cast<std::size_t>(numel));
  for (std::int64_t at = 0; at < numel; ++at) {
    Numbers point(tensor.sizes.size());
    std::int64_t left = at;
    for (std::size_t d = point.size(); d-- > 0;) {
      point[d] = left % tensor.sizes[d];
      left /= tensor.sizes[d];
    }
    for (const Box& box : tensor.boxes) {
      bool is_in = true;
      for (std::size_t d = 0; d < point.size(); ++d) {
        is_in = is_in && point[d] >= box.offsets[d] && point[d] < box.offsets[d] + box.lengths[d];
      }
      counts[static_cast<std::size_t>(at)] += is_in;
    }
  }
  return counts;
}

std::int64_t place_of(const Numbers& point, const Numbers& sizes) {
  std::int64_t at = 0;
  for (std::size_t d = 0; d < sizes.size(); ++d) at = at * sizes[d] + point[d];
  return at;
}

TEST(any_tiling_of_a_tensor_is_in_order) {
  RandomSource random(21);
  std::vector<Tensor> tensors;
  for (int round = 0; round < 3000; ++round) {
    const Numbers sizes = random_sizes(random);
    tensors.push_back({sizes, random_tiling(random, sizes)});
  }
  CHECK(errors_of(tensors).empty());
}

TEST(holes_and_overlaps_are_found_exactly_and_named) {
  RandomSource random(22);
  int seen[4] = {};
  for (int round = 0; round < 6000; ++round) {
    Tensor tensor{random_sizes(random), {}};
    tensor.boxes = random_tiling(random, tensor.sizes);
    for (std::uint64_t change = random.between(1, 2); change > 0 && !tensor.boxes.empty();
         --change) {
      const std::size_t at = random.below(tensor.boxes.size());
      Box& box = tensor.boxes[at];
      const std::size_t d = tensor.sizes.empty() ? 0 : random.below(tensor.sizes.size());
      const std::uint64_t kind = tensor.sizes.empty() ? random.below(2) : random.below(4);
      if (kind == 0) {
        tensor.boxes.erase(tensor.boxes.begin() + static_cast<std::ptrdiff_t>(at));
      } else if (kind == 1) {
        tensor.boxes.push_back(Box(box));
      } else if (kind == 2) {
        box.offsets[d] -= box.offsets[d] > 0;
      } else {
        box.lengths[d] -= box.lengths[d] > 0;
      }
    }
    const std::vector<int> counts = counts_of(tensor);
    const std::vector<CoverageError> errors = errors_of({tensor});
    const bool is_overlapped =
        std::any_of(counts.begin(), counts.end(), [](int n) { return n > 1; });
    const auto hole = std::find(counts.begin(), counts.end(), 0);
    if (!is_overlapped && hole == counts.end()) {
      CHECK(errors.empty());
      continue;
    }
    CHECK_EQ(errors.size(), 1U);
    ++seen[static_cast<int>(errors[0].offence)];
    if (is_overlapped) {
      CHECK(errors[0].offence == Offence::kOverlap);
      CHECK(errors[0].box < errors[0].other);
      const Tensor pair{tensor.sizes,
                        {tensor.boxes.at(static_cast<std::size_t>(errors[0].box)),
                         tensor.boxes.at(static_cast<std::size_t>(errors[0].other))}};
      const std::vector<int> both = counts_of(pair);
      CHECK(std::find(both.begin(), both.end(), 2) != both.end());
    } else {
      CHECK(errors[0].offence == Offence::kHole);
      CHECK_EQ(place_of(errors[0].point, tensor.sizes), hole - counts.begin());
    }
  }
  CHECK(seen[static_cast<int>(Offence::kOverlap)] > 300);
  CHECK(seen[static_cast<int>(Offence::kHole)] > 300);
}

TEST(box_outside_of_its_tensor_is_named_by_tensor_and_number) {
  const Tensor whole{{4, 3}, {{{0, 0}, {4, 3}}}};
  for (const Box& box : std::vector<Box>{{{3, 0}, {2, 1}},
                                         {{-1, 0}, {1, 1}},
                                         {{0, 0}, {-1, 3}},
                                         {{0, 0}, {0, -3}},
                                         {{kHuge, 0}, {1, 1}},
                                         {{1, 0}, {kHuge, 1}},
                                         {{kHuge, kHuge}, {kHuge, kHuge}}}) {
    Tensor tensor = whole;
    tensor.boxes.push_back(box);
    const std::vector<CoverageError> errors = errors_of({whole, tensor, whole});
    CHECK_EQ(errors.size(), 1U);
    CHECK_EQ(errors[0].tensor, 1);
    CHECK(errors[0].offence == Offence::kOutside);
    CHECK_EQ(errors[0].box, 1);
  }
}

TEST(box_without_elements_may_lie_anywhere) {
  const Tensor tensor{{4, 3}, {{{0, 0}, {4, 3}}, {{9, 0}, {0, 3}}, {{2, 1}, {0, 1}}}};
  CHECK(errors_of({tensor}).empty());
  CHECK(errors_of({Tensor{{0, 3}, {}}}).empty());
  CHECK(errors_of({Tensor{{kHuge, kHuge, 0}, {}}}).empty());
}

TEST(tensor_of_more_elements_than_there_are_numbers_is_too_large) {
  for (const Numbers& sizes : {Numbers{kHuge, 2}, Numbers{kHuge, kHuge, kHuge}, Numbers{-1, 2}}) {
    const std::vector<CoverageError> errors = errors_of({Tensor{sizes, {}}});
    CHECK_EQ(errors.size(), 1U);
    CHECK(errors[0].offence == Offence::kTooLarge);
  }
  const Tensor largest{{kHuge}, {{{0}, {5}}, {{5}, {kHuge - 5}}}};
  CHECK(errors_of({largest}).empty());
}

TEST(scalar_wants_exactly_one_box) {
  const Tensor none{{}, {}};
  const Tensor one{{}, {{{}, {}}}};
  const Tensor two{{}, {{{}, {}}, {{}, {}}}};
  CHECK(errors_of({one}).empty());
  const std::vector<CoverageError> errors = errors_of({none, one, two});
  CHECK_EQ(errors.size(), 2U);
  CHECK(errors[0].offence == Offence::kHole && errors[0].tensor == 0);
  CHECK(errors[1].offence == Offence::kOverlap && errors[1].tensor == 2);
}

TEST(a_large_grid_takes_a_moment_and_its_one_hole_is_found) {
  constexpr std::int64_t kSide = 300;
  Tensor tensor{{2 * kSide, 3 * kSide}, {}};
  for (std::int64_t r = 0; r < kSide; ++r) {
    for (std::int64_t c = 0; c < kSide; ++c) tensor.boxes.push_back({{2 * r, 3 * c}, {2, 3}});
  }
  CHECK(errors_of({tensor}).empty());
  tensor.boxes[kSide * 17 + 40].lengths = {2, 2};
  const std::vector<CoverageError> errors = errors_of({tensor});
  CHECK_EQ(errors.size(), 1U);
  CHECK((errors[0].point == Numbers{34, 122}));
}

TEST(columns_that_contradict_themselves_are_refused) {
  Columns columns({Tensor{{4, 3}, {{{0, 0}, {4, 3}}}}});
  const auto throws = [](const Columns& bad) {
    CHECK_THROWS(dcpx::plan::check_coverage(bad.view()), ErrorCode::kPlan);
  };
  for (const std::int64_t wrong :
       {std::int64_t{-1}, std::int64_t{0}, std::int64_t{1}, std::int64_t{3}, kHuge}) {
    Columns bad = columns;
    bad.ndims[0] = wrong;
    throws(bad);
  }
  for (const std::int64_t wrong : {std::int64_t{-1}, std::int64_t{0}, std::int64_t{2}, kHuge}) {
    Columns bad = columns;
    bad.box_counts[0] = wrong;
    throws(bad);
  }
}

}  // namespace
