#include "format/crc32.h"

#include <string>

#include "common/error.h"
#include "format/crc32_kernels.h"

namespace dcpx {
namespace {

using crc32_kernels::Kernel;

Kernel find_kernel(Crc32Implementation implementation) noexcept {
  switch (implementation) {
    case Crc32Implementation::kTable:
      return &crc32_kernels::table;
    case Crc32Implementation::kPclmul:
      return crc32_kernels::find_pclmul();
    case Crc32Implementation::kVpclmul:
      return crc32_kernels::find_vpclmul();
    case Crc32Implementation::kArmv8:
      return crc32_kernels::find_armv8();
  }
  return nullptr;
}

constexpr Crc32Implementation kSlowestFirst[] = {
    Crc32Implementation::kTable, Crc32Implementation::kArmv8, Crc32Implementation::kPclmul,
    Crc32Implementation::kVpclmul};

Kernel find_fastest() noexcept {
  Kernel fastest = nullptr;
  for (const Crc32Implementation implementation : kSlowestFirst) {
    if (const Kernel kernel = find_kernel(implementation)) fastest = kernel;
  }
  return fastest;
}

}  // namespace

std::uint32_t crc32(std::uint32_t crc, const std::byte* data, std::size_t nbytes) noexcept {
  static const Kernel kernel = find_fastest();
  return ~kernel(~crc, data, nbytes);
}

std::vector<Crc32Implementation> crc32_implementations() {
  std::vector<Crc32Implementation> found;
  for (const Crc32Implementation implementation : kSlowestFirst) {
    if (find_kernel(implementation) != nullptr) found.push_back(implementation);
  }
  return found;
}

std::string_view crc32_implementation_name(Crc32Implementation implementation) noexcept {
  switch (implementation) {
    case Crc32Implementation::kTable:
      return "table";
    case Crc32Implementation::kPclmul:
      return "pclmul";
    case Crc32Implementation::kVpclmul:
      return "vpclmul";
    case Crc32Implementation::kArmv8:
      return "armv8";
  }
  return "unknown";
}

std::uint32_t crc32_with(Crc32Implementation implementation, std::uint32_t crc,
                         const std::byte* data, std::size_t nbytes) {
  const Kernel kernel = find_kernel(implementation);
  if (kernel == nullptr) {
    throw Error(ErrorCode::kUnsupported,
                "CRC-32 by " + std::string(crc32_implementation_name(implementation)) +
                    " needs instructions that this CPU or build lacks");
  }
  return ~kernel(~crc, data, nbytes);
}

std::uint32_t crc32_combine(std::uint32_t a, std::uint32_t b, std::uint64_t b_bytes) noexcept {
  return crc32_poly::multiply(crc32_poly::x_to_the_bytes(b_bytes), a) ^ b;
}

Crc32Shift::Crc32Shift(std::uint64_t b_bytes) noexcept {
  columns_[31] = crc32_poly::x_to_the_bytes(b_bytes);
  for (std::size_t bit = 31; bit > 0; --bit) {
    columns_[bit - 1] = crc32_poly::times_x(columns_[bit]);
  }
}

std::uint32_t Crc32Shift::combine(std::uint32_t a, std::uint32_t b) const noexcept {
  std::uint32_t shifted = 0;
  for (unsigned bit = 0; bit < 32; ++bit) shifted ^= columns_[bit] & (0U - ((a >> bit) & 1U));
  return shifted ^ b;
}

}  // namespace dcpx
