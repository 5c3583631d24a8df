// A number that stands for the contents of a tensor: of all of a small one, of samples of a larger
// one. Equal numbers have one hash: NaNs of any bits are one, and so are both zeros.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace dcpx {

constexpr std::uint64_t kSampleBytes = 64;     // of one sample: a line of memory
constexpr std::uint64_t kWholeBytes = 4096;    // up to here all is looked at
constexpr std::uint64_t kStratumBytes = 4096;  // of which one sample is taken, within the bounds
constexpr std::uint64_t kMinSamples = 32;
constexpr std::uint64_t kMaxSamples = 1024;

inline std::uint64_t mixed(std::uint64_t value) noexcept {  // splitmix64's end: a bijection
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9U;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebU;
  return value ^ (value >> 31);
}

// Where the samples of so many bytes lie. They spread evenly, and not by a fixed step, which could
// be that of the rows of a matrix. The last bytes, short of a sample, are in none.
class Samples {
 public:
  explicit Samples(std::uint64_t nbytes) : blocks_(nbytes / kSampleBytes) {
    count_ = std::clamp(nbytes / kStratumBytes, kMinSamples, kMaxSamples);
  }
  std::uint64_t count() const noexcept { return count_; }
  // Of sample `number`, in bytes.
  std::uint64_t begin(std::uint64_t number) const noexcept {
    const std::uint64_t width = blocks_ / count_;  // of a stratum
    const std::uint64_t more = blocks_ % count_;   // strata that are wider by one
    const std::uint64_t own = width + (number < more ? 1 : 0);
    const std::uint64_t first = number * width + std::min(number, more);
    return (first + mixed(number + 1) % own) * kSampleBytes;
  }

 private:
  std::uint64_t blocks_;
  std::uint64_t count_ = 0;
};
static_assert(kMinSamples * kSampleBytes <= kWholeBytes, "each stratum has a block");

// Hashes lines of memory, elements of `Part` each. `top` is the greatest magnitude of a number, as
// bits; all above is NaN. 0: any bits are a value.
template <typename Part>
class LineHash {
 public:
  LineHash(std::uint64_t seed, Part top) : top_(top) {
    for (std::uint64_t lane = 0; lane < kWords; ++lane) lanes_[lane] = mixed(seed + lane);
  }

  void add(const std::byte* line, std::size_t nbytes) noexcept {
    std::uint64_t words[kWords] = {};
    std::memcpy(words, line, nbytes);
    if (top_ != 0) {
      Part parts[kSampleBytes / sizeof(Part)];
      std::memcpy(parts, words, kSampleBytes);
      for (Part& part : parts) part = told(part);
      std::memcpy(words, parts, kSampleBytes);
    }
    for (std::size_t lane = 0; lane < kWords; ++lane) {
      const std::uint64_t next = (lanes_[lane] ^ words[lane]) * 0x9e3779b97f4a7c15U;
      lanes_[lane] = next ^ (next >> 32);
    }
  }

  std::uint64_t result() const noexcept {
    std::uint64_t all = 0;
    for (const std::uint64_t lane : lanes_) all = mixed(all ^ lane) + 0x9e3779b97f4a7c15U;
    return all;
  }

 private:
  static constexpr std::size_t kWords = kSampleBytes / sizeof(std::uint64_t);

  Part told(Part part) const noexcept {
    const auto magnitude =
        static_cast<Part>(part & static_cast<Part>(static_cast<Part>(~Part{}) >> 1));
    const Part number = magnitude == 0 ? Part{0} : part;
    return magnitude > top_ ? static_cast<Part>(~Part{}) : number;
  }

  Part top_;
  std::uint64_t lanes_[kWords];
};

template <typename Part>
std::uint64_t content_hash(const std::byte* data, std::uint64_t nbytes, bool is_whole,
                           std::uint64_t seed, std::uint64_t top) {
  LineHash<Part> hash(seed, static_cast<Part>(top));
  if (is_whole || nbytes <= kWholeBytes) {
    for (std::uint64_t at = 0; at < nbytes; at += kSampleBytes) {
      hash.add(data + at, std::min(kSampleBytes, nbytes - at));
    }
    return hash.result();
  }
  const Samples samples(nbytes);
  constexpr std::uint64_t kAhead = 16;  // samples that memory is asked for at one time
  for (std::uint64_t i = 0; i < samples.count() + kAhead; ++i) {
    if (i < samples.count()) __builtin_prefetch(data + samples.begin(i));
    if (i >= kAhead) hash.add(data + samples.begin(i - kAhead), kSampleBytes);
  }
  return hash.result();
}

}  // namespace dcpx
