// Do the boxes of a tensor cover it exactly once? Of many tensors at once, in columns.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace dcpx::plan {

// Boxes of many tensors, in elements. The columns are those of our `.metadata`: tensors behind one
// another, the boxes of each behind one another, each box `ndims[t]` numbers.
struct BoxColumns {
  const std::int64_t* ndims = nullptr;       // [tensors]
  const std::int64_t* sizes = nullptr;       // [sum of ndims], of the tensors
  const std::int64_t* box_counts = nullptr;  // [tensors]
  const std::int64_t* offsets = nullptr;     // [sum of ndims x box_counts]
  const std::int64_t* lengths = nullptr;     // as `offsets`
  std::size_t tensor_count = 0;
  std::size_t size_count = 0;  // of `sizes`
  std::size_t cell_count = 0;  // of `offsets` and of `lengths`
};

enum class Offence : std::uint8_t {
  kTooLarge,  // the tensor has 2^63 elements or more, or a negative size
  kOutside,   // `box` leaves the tensor, or has a negative offset or length
  kOverlap,   // `box` and `other` share elements
  kHole,      // no box holds the element at `point`
};

// What is wrong with one tensor. Numbers of boxes count from the tensor's first.
struct CoverageError {
  std::int64_t tensor = 0;
  Offence offence = Offence::kHole;
  std::int64_t box = -1;
  std::int64_t other = -1;          // > box
  std::vector<std::int64_t> point;  // [ndim]
};

// The first offence of each tensor that has one, in the order of the tensors and of `Offence`.
// Boxes without elements cover nothing and may lie anywhere. Exact, and n log n for boxes that are
// cut along two dimensions, however they lie (`box_pairs.h`).
// Throws Error(kPlan) where the columns differ in length from what they say.
std::vector<CoverageError> check_coverage(const BoxColumns& columns);

}  // namespace dcpx::plan
