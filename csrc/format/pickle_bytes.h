// What a pickle's opcodes take from behind them. Each step returns false where the bytes end.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "common/bytes.h"

namespace dcpx {

class PickleBytes {  // Not thread-safe. Keeps a view of the pickle.
 public:
  PickleBytes(const std::byte* data, std::size_t nbytes)
      : rest_(reinterpret_cast<const char*>(data), nbytes) {}

  std::size_t size() const { return rest_.size(); }  // of what is left

  bool take(std::size_t nbytes, std::string_view* into) {
    if (rest_.size() < nbytes) return false;
    *into = rest_.substr(0, nbytes);
    rest_.remove_prefix(nbytes);
    return true;
  }

  bool take_line(std::string_view* into) {
    const std::size_t end = rest_.find('\n');
    if (end == std::string_view::npos) return false;
    *into = rest_.substr(0, end);
    rest_.remove_prefix(end + 1);
    return true;
  }

  template <typename T>
  bool take_number(T* into) {
    std::string_view raw;
    if (!take(sizeof(T), &raw)) return false;
    *into = get<T>(reinterpret_cast<const std::byte*>(raw.data()));
    return true;
  }

  // LONG1's number: little-endian two's complement of 0 to 8 bytes. False for more.
  bool take_long(std::int64_t* into) {
    std::uint8_t nbytes = 0;
    std::string_view raw;
    if (!take_number(&nbytes) || nbytes > 8 || !take(nbytes, &raw)) return false;
    const bool is_negative = nbytes > 0 && (static_cast<unsigned char>(raw.back()) & 0x80) != 0;
    *into = is_negative ? -1 : 0;
    std::copy(raw.begin(), raw.end(), reinterpret_cast<char*>(into));
    return true;
  }

  // A text behind its length, a number of type `Length`.
  template <typename Length>
  bool take_text(std::string_view* into) {
    Length nbytes{};
    return take_number(&nbytes) && take(nbytes, into);
  }

 private:
  std::string_view rest_;
};

}  // namespace dcpx
