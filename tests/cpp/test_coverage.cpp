#include <algorithm>
#include <numeric>
#include <vector>

#include "check.h"
#include "plan/coverage.h"
#include "random_source.h"

namespace {

using dcpx::plan::BoxColumns;
using dcpx::plan::CoverageError;
using dcpx::plan::Offence;
using Numbers = std::vector<std::int64_t>;

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

}  // namespace
