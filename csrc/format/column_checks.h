// Questions to columns of a `.metadata` as they lie in the file, before anything in it is believed.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/bytes.h"

namespace dcpx {

// A column's bytes. The owner keeps them alive.
struct RawColumn {
  const std::byte* begin = nullptr;
  std::size_t nbytes = 0;
};

// int64 behind one another, which may begin anywhere; bytes behind the last whole one are left out.
class RawNumbers {
 public:
  explicit RawNumbers(const RawColumn& column)
      : begin_(column.begin), count_(column.nbytes / sizeof(std::int64_t)) {}
  std::size_t count() const { return count_; }
  // REQUIRES: at < count().
  std::int64_t operator[](std::size_t at) const {
    return get<std::int64_t>(begin_ + at * sizeof(std::int64_t));
  }

 private:
  const std::byte* begin_;
  std::size_t count_;
};

// Whether no sum of two numbers leaves int64. REQUIRES: as many of both.
bool have_ends(const RawNumbers& begins, const RawNumbers& lengths);

// Whether all are in [low, high].
bool are_within(const RawNumbers& numbers, std::int64_t low, std::int64_t high);

// The highest byte, 0 of none.
std::uint8_t highest(const RawColumn& column);

// The sum of what is positive in `counts`, each times its width (nullptr: 1); kTooMany where it is
// that or more, and where a product leaves int64. REQUIRES: as many widths as counts.
inline constexpr std::uint64_t kTooMany = std::uint64_t{1} << 63;
std::uint64_t total(const RawNumbers& counts, const RawNumbers* widths);

// Whether each value with tag 0 numbers one of so many strings. REQUIRES: a tag a value.
bool are_keys(const RawColumn& tags, const RawNumbers& values, std::int64_t strings);

// The length of the longest list that values with another tag index; kTooMany where one is
// negative. REQUIRES: a tag a value.
std::uint64_t longest_list(const RawColumn& tags, const RawNumbers& values);

}  // namespace dcpx
