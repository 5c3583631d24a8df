#include "format/column_checks.h"

#include <algorithm>

namespace dcpx {

bool have_ends(const RawNumbers& begins, const RawNumbers& lengths) {
  for (std::size_t at = 0; at < begins.count(); ++at) {
    std::int64_t end = 0;
    if (__builtin_add_overflow(begins[at], lengths[at], &end)) return false;
  }
  return true;
}

bool are_within(const RawNumbers& numbers, std::int64_t low, std::int64_t high) {
  bool is_inside = true;
  for (std::size_t at = 0; at < numbers.count(); ++at) {
    is_inside &= numbers[at] >= low && numbers[at] <= high;
  }
  return is_inside;
}

std::uint8_t highest(const RawColumn& column) {
  std::byte found{0};
  for (std::size_t at = 0; at < column.nbytes; ++at) found = std::max(found, column.begin[at]);
  return static_cast<std::uint8_t>(found);
}

std::uint64_t total(const RawNumbers& counts, const RawNumbers* widths) {
  std::uint64_t sum = 0;
  for (std::size_t at = 0; at < counts.count(); ++at) {
    std::int64_t cells = 0;
    if (counts[at] <= 0) continue;
    const std::int64_t width = widths == nullptr ? 1 : (*widths)[at];
    if (__builtin_mul_overflow(counts[at], width, &cells)) return kTooMany;
    sum += static_cast<std::uint64_t>(std::max<std::int64_t>(cells, 0));
    if (sum >= kTooMany) return kTooMany;
  }
  return sum;
}

bool are_keys(const RawColumn& tags, const RawNumbers& values, std::int64_t strings) {
  for (std::size_t at = 0; at < tags.nbytes; ++at) {
    const bool is_text = tags.begin[at] == std::byte{0};
    if (is_text && (values[at] < 0 || values[at] >= strings)) return false;
  }
  return true;
}

std::uint64_t longest_list(const RawColumn& tags, const RawNumbers& values) {
  std::uint64_t longest = 0;
  for (std::size_t at = 0; at < tags.nbytes; ++at) {
    if (tags.begin[at] == std::byte{0}) continue;
    const std::int64_t value = values[at];
    longest = std::max(longest, value < 0 ? kTooMany : static_cast<std::uint64_t>(value) + 1);
  }
  return longest;
}

}  // namespace dcpx
