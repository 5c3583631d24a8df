#include "check.h"
#include "format/crc32.h"
#include "format/crc32_kernels.h"
#include "random_source.h"

namespace {

using dcpx::Crc32Implementation;

// Bit by bit, from the definition.
std::uint32_t slow_crc32(std::uint32_t crc, const std::byte* data, std::size_t nbytes) {
  crc = ~crc;
  for (std::size_t i = 0; i < nbytes; ++i) {
    crc ^= std::to_integer<std::uint32_t>(data[i]);
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0xEDB88320U : 0U);
  }
  return ~crc;
}

std::vector<std::byte> noise(std::size_t nbytes) {
  std::vector<std::byte> bytes(nbytes);
  std::uint64_t state = 88172645463325252U;
  for (std::byte& value : bytes) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    value = static_cast<std::byte>(state);
  }
  return bytes;
}

// Exactly sized allocations, so that ASan sees a load beyond either end.
TEST(crc32_every_implementation_agrees_with_the_definition_and_stays_inside) {
  const std::vector<std::byte> bytes = noise(2000);
  for (std::size_t nbytes = 0; nbytes < bytes.size(); ++nbytes) {
    const std::vector<std::byte> exact(bytes.begin(),
                                       bytes.begin() + static_cast<std::ptrdiff_t>(nbytes));
    const std::uint32_t from_0 = slow_crc32(0, exact.data(), nbytes);
    const std::uint32_t from_7 = slow_crc32(7, exact.data(), nbytes);
    for (const Crc32Implementation implementation : dcpx::crc32_implementations()) {
      CHECK_EQ(dcpx::crc32_with(implementation, 0, exact.data(), nbytes), from_0);
      CHECK_EQ(dcpx::crc32_with(implementation, 7, exact.data(), nbytes), from_7);
    }
  }
}

TEST(crc32_every_alignment_agrees_with_the_definition) {
  const std::vector<std::byte> bytes = noise(130 + 40000);
  for (std::size_t begin = 0; begin < 130; ++begin) {
    std::uint32_t want = 0xDEADBEEF;  // of the bytes from `begin` to `end`
    std::size_t end = 0;
    for (const std::size_t nbytes : {0UL, 1UL, 15UL, 16UL, 63UL, 64UL, 65UL, 255UL, 256UL, 257UL,
                                     511UL, 512UL, 513UL, 4099UL, 40000UL}) {
      want = slow_crc32(want, bytes.data() + begin + end, nbytes - end);
      end = nbytes;
      for (const Crc32Implementation implementation : dcpx::crc32_implementations()) {
        CHECK_EQ(dcpx::crc32_with(implementation, 0xDEADBEEF, bytes.data() + begin, nbytes), want);
      }
    }
  }
}

// The loop of the ARMv8 kernel, with its two instructions in software.
TEST(crc32_three_streams_agree_with_the_definition) {
  const std::vector<std::byte> bytes = noise(3 * 3072 + 29);
  const auto step1 = [](std::uint32_t raw, std::uint8_t value) {
    const std::byte one{value};
    return ~slow_crc32(~raw, &one, 1);
  };
  const auto step8 = [](std::uint32_t raw, std::uint64_t word) {
    std::byte eight[8];
    std::memcpy(eight, &word, sizeof(word));
    return ~slow_crc32(~raw, eight, sizeof(eight));
  };
  for (const std::size_t nbytes : {0UL, 1UL, 7UL, 8UL, 3071UL, 3072UL, 3073UL, 6150UL, 9245UL}) {
    CHECK_EQ(~dcpx::crc32_kernels::three_streams(~5U, bytes.data(), nbytes, step8, step1),
             slow_crc32(5, bytes.data(), nbytes));
  }
}

TEST(crc32_combine_and_shift_join_any_bytes) {
  RandomSource random(33);
  for (int round = 0; round < 300; ++round) {
    const std::vector<std::byte> bytes = random.bytes(random.below(70'000));
    const std::size_t cut = random.below(bytes.size() + 1);
    const std::uint64_t left = bytes.size() - cut;
    const std::uint32_t a = dcpx::crc32(0, bytes.data(), cut);
    const std::uint32_t b = dcpx::crc32(0, bytes.data() + cut, left);
    const std::uint32_t whole = dcpx::crc32(0, bytes.data(), bytes.size());
    CHECK_EQ(dcpx::crc32_combine(a, b, left), whole);
    CHECK_EQ(dcpx::Crc32Shift(left).combine(a, b), whole);
  }
}

TEST(crc32_combine_is_associative_for_any_length) {
  RandomSource random(34);
  const std::uint64_t most = std::uint64_t{1} << 62;
  for (int round = 0; round < 1000; ++round) {
    const auto a = static_cast<std::uint32_t>(random.engine()());
    const auto b = static_cast<std::uint32_t>(random.engine()());
    const auto c = static_cast<std::uint32_t>(random.engine()());
    const std::uint64_t b_bytes = random.chance(8) ? most : random.below(most);
    const std::uint64_t c_bytes = random.chance(8) ? most : random.below(most);
    CHECK_EQ(dcpx::crc32_combine(dcpx::crc32_combine(a, b, b_bytes), c, c_bytes),
             dcpx::crc32_combine(a, dcpx::crc32_combine(b, c, c_bytes), b_bytes + c_bytes));
  }
}

TEST(crc32_with_an_implementation_that_is_missing_throws) {
#if defined(__aarch64__)
  CHECK_THROWS(dcpx::crc32_with(Crc32Implementation::kPclmul, 0, nullptr, 0),
               dcpx::ErrorCode::kUnsupported);
#else
  CHECK_THROWS(dcpx::crc32_with(Crc32Implementation::kArmv8, 0, nullptr, 0),
               dcpx::ErrorCode::kUnsupported);
#endif
}

}  // namespace
