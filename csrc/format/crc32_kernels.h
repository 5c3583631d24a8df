// What the implementations of CRC-32 share with their dispatcher; nothing else includes this.
// Kernels take and give the raw register (zlib's value with all bits inverted).
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "format/crc32_poly.h"

namespace dcpx::crc32_kernels {

using Kernel = std::uint32_t (*)(std::uint32_t raw, const std::byte* data,
                                 std::size_t nbytes) noexcept;

std::uint32_t table(std::uint32_t raw, const std::byte* data, std::size_t nbytes) noexcept;

// nullptr where the build or the CPU lacks the instructions.
Kernel find_pclmul() noexcept;
Kernel find_vpclmul() noexcept;
Kernel find_armv8() noexcept;

inline std::uint64_t load_u64(const std::byte* from) noexcept {
  std::uint64_t value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}

// A CRC instruction has a latency of about 3 and one result per cycle: three streams side by
// side hide it. `Step8` takes 8 bytes, `Step1` one. A template, so that the tests can run it with
// steps in software on machines without the instruction.
template <typename Step8, typename Step1>
std::uint32_t three_streams(std::uint32_t raw, const std::byte* data, std::size_t nbytes,
                            Step8 step8, Step1 step1) noexcept {
  constexpr std::size_t kStream = 1024;  // long enough that two multiplications are cheap
  constexpr std::uint32_t kShift = crc32_poly::x_to_the_bytes(kStream);
  while (nbytes >= 3 * kStream) {
    std::uint32_t second = 0;
    std::uint32_t third = 0;
    for (std::size_t i = 0; i < kStream; i += 8) {
      raw = step8(raw, load_u64(data + i));
      second = step8(second, load_u64(data + kStream + i));
      third = step8(third, load_u64(data + 2 * kStream + i));
    }
    raw = crc32_poly::multiply(kShift, raw) ^ second;
    raw = crc32_poly::multiply(kShift, raw) ^ third;
    data += 3 * kStream;
    nbytes -= 3 * kStream;
  }
  for (; nbytes >= 8; data += 8, nbytes -= 8) raw = step8(raw, load_u64(data));
  for (; nbytes > 0; ++data, --nbytes) raw = step1(raw, std::to_integer<std::uint8_t>(*data));
  return raw;
}

}  // namespace dcpx::crc32_kernels
