// CRC-32 by eight table look-ups for eight bytes: the implementation that every CPU has, and the
// one that finishes the last few bytes for the others.
#include <array>

#include "format/crc32_kernels.h"

namespace dcpx::crc32_kernels {
namespace {

using Table = std::array<std::array<std::uint32_t, 256>, 8>;

// table[k][v] is the register after the byte v and k zero bytes.
constexpr Table make_table() {
  Table table{};
  for (std::uint32_t value = 0; value < 256; ++value) {
    std::uint32_t raw = value;
    for (int bit = 0; bit < 8; ++bit) raw = crc32_poly::times_x(raw);
    table[0][value] = raw;
  }
  for (std::size_t k = 1; k < 8; ++k) {
    for (std::size_t value = 0; value < 256; ++value) {
      const std::uint32_t before = table[k - 1][value];
      table[k][value] = (before >> 8) ^ table[0][before & 0xFF];
    }
  }
  return table;
}
constexpr Table kTable = make_table();

}  // namespace

std::uint32_t table(std::uint32_t raw, const std::byte* data, std::size_t nbytes) noexcept {
  for (; nbytes >= 8; data += 8, nbytes -= 8) {
    const std::uint64_t word = load_u64(data) ^ raw;
    raw = kTable[7][word & 0xFF] ^ kTable[6][(word >> 8) & 0xFF] ^ kTable[5][(word >> 16) & 0xFF] ^
          kTable[4][(word >> 24) & 0xFF] ^ kTable[3][(word >> 32) & 0xFF] ^
          kTable[2][(word >> 40) & 0xFF] ^ kTable[1][(word >> 48) & 0xFF] ^ kTable[0][word >> 56];
  }
  for (; nbytes > 0; ++data, --nbytes) {
    raw = (raw >> 8) ^ kTable[0][(raw ^ std::to_integer<std::uint32_t>(*data)) & 0xFF];
  }
  return raw;
}

}  // namespace dcpx::crc32_kernels
