// Polynomials over GF(2) modulo that of CRC-32, in its bit-reflected form: bit 31 is x^0 and
// bit 0 is x^31. All the constants of the fast kernels are computed from these few lines.
#pragma once

#include <array>
#include <cstdint>

namespace dcpx::crc32_poly {

constexpr std::uint32_t kPolynomial = 0xEDB88320;
constexpr std::uint32_t kOne = 0x80000000;

constexpr std::uint32_t times_x(std::uint32_t a) noexcept {
  return (a >> 1) ^ (kPolynomial & (0U - (a & 1U)));
}

constexpr std::uint32_t multiply(std::uint32_t a, std::uint32_t b) noexcept {
  std::uint32_t product = 0;
  for (int bit = 0; bit < 32; ++bit) {
    product ^= b & (0U - (a >> 31));
    a <<= 1;
    b = times_x(b);
  }
  return product;
}

// x^(2^k) for k < 32. The polynomial is primitive, so that x^(2^32) is x again and the table
// serves every k by k modulo 32.
constexpr std::array<std::uint32_t, 32> make_squares() noexcept {
  std::array<std::uint32_t, 32> squares{};
  squares[0] = times_x(kOne);
  for (std::size_t k = 1; k < 32; ++k) squares[k] = multiply(squares[k - 1], squares[k - 1]);
  return squares;
}
inline constexpr std::array<std::uint32_t, 32> kSquares = make_squares();

// x^(n * 2^first_square)
constexpr std::uint32_t x_to_the(std::uint64_t n, unsigned first_square = 0) noexcept {
  std::uint32_t power = kOne;
  for (unsigned k = first_square; n != 0; n >>= 1, ++k) {
    if ((n & 1) != 0) power = multiply(kSquares[k % 32], power);
  }
  return power;
}

// Appending n zero bytes multiplies the register by x_to_the_bytes(n). Two looks into a table give
// the power for all n below 64 KiB, the lengths that are joined by the thousand.
using BytePowers = std::array<std::array<std::uint32_t, 256>, 2>;

constexpr BytePowers make_byte_powers() noexcept {
  BytePowers powers{};
  for (unsigned place = 0; place < 2; ++place) {
    powers[place][0] = kOne;
    for (std::size_t n = 1; n < 256; ++n) {
      powers[place][n] = multiply(powers[place][n - 1], kSquares[3 + 8 * place]);
    }
  }
  return powers;
}
inline constexpr BytePowers kBytePowers = make_byte_powers();

constexpr std::uint32_t x_to_the_bytes(std::uint64_t n) noexcept {
  const std::uint32_t low = multiply(kBytePowers[1][(n >> 8) & 0xFF], kBytePowers[0][n & 0xFF]);
  return n >> 16 == 0 ? low : multiply(x_to_the(n >> 16, 3 + 16), low);
}

}  // namespace dcpx::crc32_poly
