// Random input for the C++ tests: seeded by DCPX_SEED, which check_main prints.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <random>
#include <vector>

class RandomSource {
 public:
  // `salt` keeps the cases of one suite from drawing the same numbers.
  explicit RandomSource(std::uint64_t salt) : engine_(seed() * 1000003 + salt) {}

  static std::uint64_t seed() {
    const char* text = std::getenv("DCPX_SEED");
    return text != nullptr ? std::strtoull(text, nullptr, 10) : 1;
  }

  // In [0, limit). REQUIRES: limit > 0.
  std::uint64_t below(std::uint64_t limit) { return engine_() % limit; }
  // In [low, high].
  std::uint64_t between(std::uint64_t low, std::uint64_t high) {
    return low + below(high - low + 1);
  }
  bool chance(unsigned one_in) { return below(one_in) == 0; }

  template <typename T>
  T pick(const std::vector<T>& values) {
    return values[below(values.size())];
  }

  std::vector<std::byte> bytes(std::uint64_t nbytes) {
    std::vector<std::byte> out(nbytes);
    std::uint64_t word = 0;
    for (std::uint64_t i = 0; i < nbytes; ++i, word >>= 8) {
      if (i % 8 == 0) word = engine_();
      out[i] = static_cast<std::byte>(word & 0xff);
    }
    return out;
  }

  std::mt19937_64& engine() { return engine_; }

 private:
  std::mt19937_64 engine_;
};
