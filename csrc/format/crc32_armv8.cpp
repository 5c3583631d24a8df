// CRC-32 by ARMv8's own instructions (zip's polynomial is the one without the `c`).
#include "format/crc32_kernels.h"

#if defined(__aarch64__)

#include <arm_acle.h>
#include <sys/auxv.h>

namespace dcpx::crc32_kernels {
namespace {

#if defined(__clang__)
// <arm_acle.h> has the intrinsics only where the whole file is compiled for the extension.
#define DCPX_TARGET_CRC __attribute__((target("crc")))
#define DCPX_CRC32D __builtin_arm_crc32d
#define DCPX_CRC32B __builtin_arm_crc32b
#else
#define DCPX_TARGET_CRC __attribute__((target("+crc")))
#define DCPX_CRC32D __crc32d
#define DCPX_CRC32B __crc32b
#endif

// Functors, not lambdas: a lambda does not inherit the target of the function around it.
struct Step8 {
  DCPX_TARGET_CRC std::uint32_t operator()(std::uint32_t raw, std::uint64_t word) const {
    return DCPX_CRC32D(raw, word);
  }
};
struct Step1 {
  DCPX_TARGET_CRC std::uint32_t operator()(std::uint32_t raw, std::uint8_t value) const {
    return DCPX_CRC32B(raw, value);
  }
};

// `flatten` pulls the template and the steps into the one function that has the target.
__attribute__((flatten)) DCPX_TARGET_CRC std::uint32_t armv8(std::uint32_t raw,
                                                             const std::byte* data,
                                                             std::size_t nbytes) noexcept {
  return three_streams(raw, data, nbytes, Step8{}, Step1{});
}

}  // namespace

Kernel find_armv8() noexcept {
  constexpr unsigned long kHasCrc32 = 1UL << 7;  // HWCAP_CRC32
  return (getauxval(AT_HWCAP) & kHasCrc32) != 0 ? &armv8 : nullptr;
}

}  // namespace dcpx::crc32_kernels

#else

namespace dcpx::crc32_kernels {
Kernel find_armv8() noexcept { return nullptr; }
}  // namespace dcpx::crc32_kernels

#endif
