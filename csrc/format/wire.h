// Numbers and texts of a message between the ranks of a job: LEB128, column by column, so that
// what repeats lies together and a general compressor finds it.
//
// Ranks of one job run one version of this library, so a message has no compatible forms: the first
// two bytes name the one there is.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "common/error.h"

namespace dcpx::wire {

// Throws Error(kPlan): the message says what it cannot.
[[noreturn]] void refuse(const char* what);

class Writer {
 public:
  void put(std::uint64_t value) {
    while (value >= 0x80) {
      out_.push_back(static_cast<char>(value | 0x80));
      value >>= 7;
    }
    out_.push_back(static_cast<char>(value));
  }
  // Of any sign: numbers near zero are short.
  void put_signed(std::int64_t value) {
    put((static_cast<std::uint64_t>(value) << 1) ^ static_cast<std::uint64_t>(value >> 63));
  }
  void put_text(std::string_view text) { out_.append(text); }
  const std::string& bytes() const { return out_; }

 private:
  std::string out_;
};

// Of untrusted bytes, which must outlive it. What cannot be read throws Error(kPlan).
class Reader {
 public:
  Reader() = default;
  explicit Reader(std::string_view bytes) : rest_(bytes) {}

  bool is_done() const { return rest_.empty(); }
  std::size_t left() const { return rest_.size(); }
  std::uint64_t get() {
    std::uint64_t value = 0;
    for (unsigned shift = 0; shift < 64; shift += 7) {
      if (rest_.empty()) refuse("a number is cut off");
      const auto byte = static_cast<unsigned char>(rest_.front());
      rest_.remove_prefix(1);
      if (shift == 63 && byte > 1) break;
      value |= static_cast<std::uint64_t>(byte & 0x7f) << shift;
      if (byte < 0x80) return value;
    }
    refuse("a number has more than 64 bits");
  }
  std::int64_t get_signed() {
    const std::uint64_t value = get();
    return static_cast<std::int64_t>((value >> 1) ^ (0 - (value & 1)));
  }
  // A number below `end`.
  std::size_t get_below(std::size_t end) {
    const std::uint64_t value = get();
    if (value >= end) refuse("a number has no row in its table");
    return static_cast<std::size_t>(value);
  }
  std::string_view get_text(std::uint64_t nbytes) {
    if (nbytes > rest_.size()) refuse("a text is cut off");
    const std::string_view text = rest_.substr(0, static_cast<std::size_t>(nbytes));
    rest_.remove_prefix(text.size());
    return text;
  }

 private:
  std::string_view rest_;
};

// The columns one after the other, with their lengths.
std::string join(const std::vector<Writer>& columns);

// Throws Error(kPlan) unless these are `count` columns and nothing else.
std::vector<Reader> split(std::string_view message, std::size_t count);

// Throws Error(kPlan) unless all columns were read to their ends.
void check_done(const std::vector<Reader>& columns);

// Rows of numbers, each of them once.
class RowTable {
 public:
  RowTable();
  // Returns the number of the row, and whether it is new.
  std::size_t add(const std::int64_t* values, std::size_t count, bool* is_new);

 private:
  bool is_row(std::size_t number, const std::int64_t* values, std::size_t count) const;
  void grow();

  std::vector<std::int64_t> values_;
  std::vector<std::size_t> ends_;      // of each row, in `values_`
  std::vector<std::uint64_t> hashes_;  // of each row
  std::vector<std::uint32_t> slots_;   // a hash table: the number of a row + 1, or 0
};

}  // namespace dcpx::wire
