#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <random>

#include "fuzz.h"

namespace check {

namespace {

using Bytes = std::vector<std::uint8_t>;

constexpr std::size_t kShortBytes = 2048;

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

std::uint64_t number_from(const char* variable, std::uint64_t otherwise) {
  const char* text = std::getenv(variable);
  return text != nullptr ? std::strtoull(text, nullptr, 10) : otherwise;
}

}  // namespace

void replay(const char* name, Target target) {
  // A copy of the exact size, so that ASan sees a read beyond its end.
  const auto run = [target](const Bytes& bytes) {
    const Bytes exact(bytes.begin(), bytes.end());
    target(exact.data(), exact.size());
  };
  std::mt19937_64 random(number_from("DCPX_SEED", 1));
  std::vector<std::string> files;
  for (const auto& entry : std::filesystem::directory_iterator(std::string(DCPX_CORPUS "/") + name))
    files.push_back(entry.path());
  std::sort(files.begin(), files.end());
  for (const std::string& path : files) {
    std::ifstream file(path, std::ios::binary);
    const Bytes bytes{std::istreambuf_iterator<char>(file), {}};
    run(bytes);
    for (std::size_t at = 0; at < bytes.size() && bytes.size() <= kShortBytes; ++at) {
      run({bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(at)});
      for (const unsigned change : {0x01U, 0x80U, 0xFFU}) {
        Bytes changed = bytes;
        changed[at] = static_cast<std::uint8_t>(changed[at] ^ change);
        run(changed);
      }
    }
    for (std::uint64_t left = number_from("DCPX_FUZZ_ROUNDS", 2500); left > 0; --left) {
      Bytes mutant = bytes;
      mutate(mutant, random);
      run(mutant);
    }
  }
  CHECK(!files.empty());
}

}  // namespace check
