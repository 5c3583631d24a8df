// SipHash-1-3 (Aumasson and Bernstein): a hash whose values nobody can foresee, or make meet, who
// does not know the key. For tables whose keys a file chooses.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace dcpx {

class SipHash {
 public:
  using Key = std::array<std::uint64_t, 2>;

  explicit SipHash(const Key& key)
      : a_(key[0] ^ 0x736f6d6570736575U),
        b_(key[1] ^ 0x646f72616e646f6dU),
        c_(key[0] ^ 0x6c7967656e657261U),
        d_(key[1] ^ 0x7465646279746573U) {}

  // Adds 8 bytes, little-endian.
  void add(std::uint64_t word) {
    d_ ^= word;
    mix();
    a_ ^= word;
    words_ += 1;
  }

  // The hash of what was added and of `count` < 8 bytes behind it; once.
  std::uint64_t finish(const std::byte* rest = nullptr, std::size_t count = 0) {
    std::uint64_t last = 0;
    if (count > 0) std::memcpy(&last, rest, count);
    add(last | (words_ * 8 + count) << 56);
    c_ ^= 0xff;
    for (int round = 0; round < 3; ++round) mix();
    return a_ ^ b_ ^ c_ ^ d_;
  }

  static std::uint64_t of(const Key& key, const std::byte* data, std::size_t nbytes) {
    SipHash hash(key);
    for (; nbytes >= sizeof(std::uint64_t); data += sizeof(std::uint64_t)) {
      std::uint64_t word = 0;
      std::memcpy(&word, data, sizeof(word));
      hash.add(word);
      nbytes -= sizeof(word);
    }
    return hash.finish(data, nbytes);
  }

 private:
  static std::uint64_t rotated(std::uint64_t value, int bits) {
    return value << bits | value >> (64 - bits);
  }

  void mix() {
    a_ += b_;
    c_ += d_;
    b_ = rotated(b_, 13) ^ a_;
    d_ = rotated(d_, 16) ^ c_;
    a_ = rotated(a_, 32) + d_;
    c_ += b_;
    d_ = rotated(d_, 21) ^ a_;
    b_ = rotated(b_, 17) ^ c_;
    c_ = rotated(c_, 32);
  }

  std::uint64_t a_, b_, c_, d_;
  std::uint64_t words_ = 0;
};

}  // namespace dcpx
