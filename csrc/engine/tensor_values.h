// The numbers of tensors: how two differ, and what one holds. Elements lie one behind the other;
// who reads a large tensor gives it slice by slice and joins what the slices give.
#pragma once

#include <cstddef>
#include <cstdint>

#include "engine/numbers.h"

namespace dcpx::engine {

// How A and B differ. Two NaNs are equal, and so are -0.0 and 0.0: `is_same_bits` tells these.
struct Differences {
  std::uint64_t different = 0;  // elements of other values
  std::uint64_t beyond = 0;     // of these, the ones outside of the tolerances
  bool is_same_bits = true;     // of kinds that are alike
  double max_abs = 0;           // of A - B; NaN where one side alone is NaN
  double norm = 0;              // of A - B where that is finite
  double norm_a = 0;            // of the finite elements of A
};

// An element is within the tolerances if |A - B| <= atol + rtol * |B|, as of torch.isclose.
// Integers are compared exactly; against another kind as doubles. REQUIRES: both hold `count`
// elements.
Differences compare_values(NumberKind kind_a, const std::byte* a, NumberKind kind_b,
                           const std::byte* b, std::uint64_t count, double rtol,
                           double atol) noexcept;

// How many elements have other bytes. REQUIRES: both hold `count` elements of `elem_bytes`.
std::uint64_t unlike_elements(const std::byte* a, const std::byte* b, std::uint64_t count,
                              std::uint64_t elem_bytes) noexcept;

struct Statistics {
  std::uint64_t finite = 0;  // elements
  std::uint64_t nan = 0;
  std::uint64_t infinite = 0;
  bool is_integer = false;
  Wide min_integer = 0, max_integer = 0;  // where it is
  double min = 0, max = 0, mean = 0;      // of finite elements; of no complex ones
  double norm = 0;                        // of finite elements
};

Statistics statistics(NumberKind kind, const std::byte* data, std::uint64_t count) noexcept;

}  // namespace dcpx::engine
