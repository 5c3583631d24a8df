#include <string>
#include <vector>

#include "check.h"
#include "common/siphash.h"

namespace {

using dcpx::SipHash;

// Exactly sized allocations, so that ASan sees a load beyond the end.
std::uint64_t hash_of(const SipHash::Key& key, const std::string& text) {
  const auto* begin = reinterpret_cast<const std::byte*>(text.data());
  const std::vector<std::byte> exact(begin, begin + text.size());
  return SipHash::of(key, exact.data(), exact.size());
}

// Python's hashes of bytes are SipHash-1-3, with PYTHONHASHSEED=0 by the key 0.
TEST(siphash_of_every_kind_of_end_is_what_python_gives) {
  CHECK_EQ(hash_of({0, 0}, "a"), 0x407448d2b89b1813U);
  CHECK_EQ(hash_of({0, 0}, "1234567"), 0xa33d651594fdae81U);
  CHECK_EQ(hash_of({0, 0}, "12345678"), 0x3489982430560a87U);
  CHECK_EQ(hash_of({0, 0}, "abcdefghijklmnopqrst"), 0xcad1d77b2c973cd5U);
}

TEST(siphash_depends_on_both_halves_of_the_key) {
  CHECK(hash_of({1, 0}, "") != hash_of({0, 0}, ""));
  CHECK(hash_of({0, 1}, "") != hash_of({0, 0}, ""));
}

TEST(siphash_of_words_is_that_of_their_bytes) {
  const std::int64_t words[] = {-1, 5, 1LL << 62};
  SipHash hash({3, 4});
  for (const std::int64_t word : words) hash.add(static_cast<std::uint64_t>(word));
  CHECK_EQ(hash.finish(),
           SipHash::of({3, 4}, reinterpret_cast<const std::byte*>(words), sizeof(words)));
}

}  // namespace
