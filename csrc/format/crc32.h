// CRC-32 with zip's polynomial, at memory speed, and the arithmetic that joins CRCs of pieces.
// Every byte of a checkpoint is summed once, in pieces cut at item and block borders; the sums of
// larger ranges follow by combination, without a second look at the bytes.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

namespace dcpx {

enum class Crc32Implementation { kTable, kPclmul, kVpclmul, kArmv8 };

// zlib's convention: `crc` is 0 for the first piece, then the result of the piece before.
// Uses the fastest implementation that this CPU has. Thread-safe.
std::uint32_t crc32(std::uint32_t crc, const std::byte* data, std::size_t nbytes) noexcept;

// What this CPU can run, slowest first; crc32() uses the last one.
std::vector<Crc32Implementation> crc32_implementations();

std::string_view crc32_implementation_name(Crc32Implementation implementation) noexcept;

// crc32() by one named implementation, so that tests reach each of them.
// Throws Error(kUnsupported) where the CPU or the build lacks it.
std::uint32_t crc32_with(Crc32Implementation implementation, std::uint32_t crc,
                         const std::byte* data, std::size_t nbytes);

// The CRC of the bytes of `a` followed by the `b_bytes` bytes of `b`.
std::uint32_t crc32_combine(std::uint32_t a, std::uint32_t b, std::uint64_t b_bytes) noexcept;

// crc32_combine() for one length, prepared once: CRC blocks all have the same size, and a large
// item has tens of thousands of them. Immutable after construction: safe to share.
class Crc32Shift {
 public:
  explicit Crc32Shift(std::uint64_t b_bytes) noexcept;

  std::uint32_t combine(std::uint32_t a, std::uint32_t b) const noexcept;

 private:
  std::array<std::uint32_t, 32> columns_;  // what appending b_bytes zeros does to each bit of `a`
};

}  // namespace dcpx
