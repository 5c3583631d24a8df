// Arithmetic on byte counts that cannot overflow silently, and little-endian fields.
#pragma once

#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "common/error.h"

namespace dcpx {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "torch-dcpx writes little-endian files");

// REQUIRES: `alignment` is a power of two.
constexpr std::uint64_t align_down(std::uint64_t value, std::uint64_t alignment) {
  return value & ~(alignment - 1);
}
constexpr std::uint64_t align_up(std::uint64_t value, std::uint64_t alignment) {
  return (value + alignment - 1) & ~(alignment - 1);
}

// What mmap and munmap count in: 4 KiB on x86-64, up to 64 KiB on aarch64.
inline std::uint64_t system_page_bytes() {
  static const auto bytes = static_cast<std::uint64_t>(::getpagesize());
  return bytes;
}

// Throws Error(kPlan) on overflow.
inline std::uint64_t checked_add(std::uint64_t a, std::uint64_t b) {
  std::uint64_t sum = 0;
  DCPX_CHECK(!__builtin_add_overflow(a, b, &sum), "byte count overflows 64 bits");
  return sum;
}
inline std::uint64_t checked_mul(std::uint64_t a, std::uint64_t b) {
  std::uint64_t product = 0;
  DCPX_CHECK(!__builtin_mul_overflow(a, b, &product), "byte count overflows 64 bits");
  return product;
}

template <typename T>
void put(std::vector<std::byte>& out, T value) {
  static_assert(std::is_integral_v<T>);
  const auto* raw = reinterpret_cast<const std::byte*>(&value);
  out.insert(out.end(), raw, raw + sizeof(T));
}
inline void put_bytes(std::vector<std::byte>& out, std::string_view text) {
  const auto* raw = reinterpret_cast<const std::byte*>(text.data());
  out.insert(out.end(), raw, raw + text.size());
}

// REQUIRES: sizeof(T) readable bytes at `from`.
template <typename T>
T get(const std::byte* from) {
  static_assert(std::is_integral_v<T>);
  T value;
  std::memcpy(&value, from, sizeof(T));
  return value;
}

}  // namespace dcpx
