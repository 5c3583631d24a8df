// Drives a libFuzzer target without libFuzzer: every file given, then `rounds` mutations of each,
// drawn from DCPX_SEED (1 by default).  replay_<target> ROUNDS FILE...
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <random>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace {

using Bytes = std::vector<std::uint8_t>;

// Numbers that parsers get wrong, as one to eight bytes.
constexpr std::uint64_t kEdges[] = {
    0,          1,           0x7F,       0x80,           0xFF,
    0x7FFF,     0xFFFF,      0x7FFFFFFF, 0x80000000,     0xFFFFFFFE,
    0xFFFFFFFF, 0x100000000, INT64_MAX,  UINT64_MAX - 1, UINT64_MAX};

void mutate(Bytes& bytes, std::mt19937_64& random) {
  const auto below = [&random](std::size_t limit) {
    return static_cast<std::size_t>(random() % limit);
  };
  for (std::size_t left = 1 + below(4); left > 0 && !bytes.empty(); --left) {
    const std::size_t at = below(bytes.size());
    const std::size_t nbytes = std::min<std::size_t>(1 + below(16), bytes.size() - at);
    const auto first = bytes.begin() + static_cast<std::ptrdiff_t>(at);
    const auto last = first + static_cast<std::ptrdiff_t>(nbytes);
    switch (below(6)) {
      case 0:
        bytes[at] = static_cast<std::uint8_t>(random());
        break;
      case 1:
        bytes[at] = static_cast<std::uint8_t>(bytes[at] ^ (1U << below(8)));
        break;
      case 2:
        bytes.erase(first, last);
        break;
      case 3:
        bytes.resize(at);
        break;
      case 4: {
        const Bytes copy(first, last);
        const auto to = bytes.begin() + static_cast<std::ptrdiff_t>(below(bytes.size()));
        bytes.insert(to, copy.begin(), copy.end());
        break;
      }
      default: {
        std::uint64_t edge = kEdges[below(std::size(kEdges))];
        for (std::size_t i = 0; i < std::min<std::size_t>(nbytes, 8); ++i, edge >>= 8) {
          bytes[at + i] = static_cast<std::uint8_t>(edge);
        }
      }
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) return 2;
  const long rounds = std::strtol(argv[1], nullptr, 10);
  const char* seed_text = std::getenv("DCPX_SEED");
  const unsigned long seed = seed_text != nullptr ? std::strtoul(seed_text, nullptr, 10) : 1;
  std::mt19937_64 random(seed);
  for (int i = 2; i < argc; ++i) {
    std::ifstream file(argv[i], std::ios::binary);
    if (!file) return 2;
    const Bytes bytes{std::istreambuf_iterator<char>(file), {}};
    LLVMFuzzerTestOneInput(bytes.data(), bytes.size());
    for (long round = 0; round < rounds; ++round) {
      Bytes mutant = bytes;
      mutate(mutant, random);
      LLVMFuzzerTestOneInput(mutant.data(), mutant.size());
    }
  }
  std::printf("%s: %d files, %ld mutations each, DCPX_SEED=%lu\n", argv[0], argc - 2, rounds, seed);
  return 0;
}
