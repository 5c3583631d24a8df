#include "check.h"
#include "engine/block_sums.h"
#include "format/crc32.h"
#include "format/file_footer.h"
#include "random_source.h"

namespace {

using dcpx::crc32;
using dcpx::ErrorCode;
using dcpx::kBlockBytes;
using dcpx::engine::BlockTable;
using dcpx::engine::SegmentSummer;

std::vector<std::uint32_t> plain_sums(const std::vector<std::byte>& file) {
  std::vector<std::uint32_t> sums;
  for (std::uint64_t at = 0; at < file.size(); at += kBlockBytes) {
    sums.push_back(crc32(0, file.data() + at, std::min(kBlockBytes, file.size() - at)));
  }
  return sums;
}

std::uint64_t random_length(RandomSource& random) {
  return random.pick<std::uint64_t>({0, 1, 63, 4096, kBlockBytes - 1, kBlockBytes, kBlockBytes + 1,
                                     3 * kBlockBytes, random.below(5 * kBlockBytes)});
}

TEST(sums_of_pieces_join_to_the_sums_of_whole_blocks) {
  RandomSource random(20);
  for (int round = 0; round < 200; ++round) {
    std::vector<std::byte> file;
    BlockTable table;
    for (std::uint64_t segments = random.below(6); segments > 0; --segments) {
      file.resize(file.size() + random_length(random));  // a gap of zeros
      SegmentSummer summer;
      for (std::uint64_t pieces = random.below(6); pieces > 0; --pieces) {
        const std::uint64_t offset = file.size();
        const std::vector<std::byte> piece = random.bytes(random_length(random));
        file.insert(file.end(), piece.begin(), piece.end());
        if (random.chance(2)) {
          summer.add_frame(offset, piece.data(), piece.size());
          continue;
        }
        CHECK_EQ(summer.add(offset, piece.data(), piece.size()),
                 crc32(0, piece.data(), piece.size()));
      }
      table.append(summer.take());
    }
    file.resize(file.size() + random_length(random));
    CHECK(table.finish(file.size()) == plain_sums(file));
  }
}

TEST(parts_of_a_segment_cross_no_block_border) {
  RandomSource random(21);
  const std::vector<std::byte> data = random.bytes(10 * kBlockBytes);
  for (int round = 0; round < 100; ++round) {
    SegmentSummer summer;
    const std::uint64_t begin = random.below(4 * kBlockBytes);
    std::uint64_t at = begin;
    for (int piece = 0; piece < 4; ++piece) {
      const std::uint64_t nbytes = random.below(kBlockBytes + 5000);
      summer.add(at, data.data() + at, nbytes);
      at += nbytes;
    }
    std::uint64_t next = begin;
    for (const auto& part : summer.take()) {
      CHECK_EQ(part.begin, next);
      CHECK(part.nbytes > 0);
      CHECK_EQ(part.begin / kBlockBytes, (part.begin + part.nbytes - 1) / kBlockBytes);
      CHECK_EQ(part.crc, crc32(0, data.data() + part.begin, part.nbytes));
      next += part.nbytes;
    }
    CHECK_EQ(next, at);
  }
}

TEST(table_of_an_empty_file_is_empty_and_parts_behind_the_end_are_refused) {
  CHECK(BlockTable().finish(0).empty());
  BlockTable table;
  table.append({{100, 50, 7}});
  CHECK_THROWS(table.finish(149), ErrorCode::kPlan);
}

}  // namespace
