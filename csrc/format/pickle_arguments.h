// Where a scan of a pickle is, and what its opcodes take from behind them: each throws where the
// bytes end, or say what no pickler writes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

#include "common/bytes.h"
#include "format/pickle_scan.h"

namespace dcpx {

class PickleArguments {  // Not thread-safe. Borrows the bytes.
 protected:
  PickleArguments(const std::byte* data, std::size_t nbytes)
      : begin_(data), at_(data), end_(data + nbytes) {}

  [[noreturn]] void fail(const std::string& what) const {
    throw corruption_error("pickle", op_at_ - begin_, std::min<std::ptrdiff_t>(1, end_ - op_at_),
                           what);
  }

  void skip(std::uint64_t nbytes) {
    if (nbytes > static_cast<std::uint64_t>(end_ - at_)) fail("declares more bytes than follow");
    at_ += nbytes;
  }

  template <typename T>
  T number() {
    const std::byte* from = at_;
    skip(sizeof(T));
    return get<T>(from);
  }

  std::size_t line() {  // returns its length without the newline
    const void* found = std::memchr(at_, '\n', static_cast<std::size_t>(end_ - at_));
    if (found == nullptr) fail("has a text argument without end");
    const std::byte* newline = static_cast<const std::byte*>(found);
    const auto nbytes = static_cast<std::size_t>(newline - at_);
    at_ = newline + 1;
    return nbytes;
  }

  std::uint64_t index_line() {
    const std::byte* from = at_;
    const std::size_t nbytes = line();
    if (nbytes == 0 || nbytes > 10) fail("has a malformed memo index");
    std::uint64_t index = 0;
    for (std::size_t i = 0; i < nbytes; ++i) {
      const auto digit = std::to_integer<unsigned>(from[i]) - unsigned{'0'};
      if (digit > 9) fail("has a malformed memo index");
      index = index * 10 + digit;
    }
    return index;
  }

  void check_protocol() {
    if (number<std::uint8_t>() > 5) fail("is of an unknown protocol");
  }

  void check_frame() {
    const auto nbytes = number<std::uint64_t>();
    if (nbytes > static_cast<std::uint64_t>(end_ - at_)) fail("declares a frame beyond its end");
  }

  const std::byte* begin_;
  const std::byte* at_;
  const std::byte* end_;
  const std::byte* op_at_ = nullptr;  // start of the current opcode, for messages
};

}  // namespace dcpx
