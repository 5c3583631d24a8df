// Who writes what several ranks hold, so that all write about as many bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace dcpx::plan {

// A chunk that several ranks hold. Any of them may write it, or rows of it.
struct SharedChunk {
  std::int64_t nbytes = 0;      // >= 0
  std::int64_t rows = 1;        // of equal bytes; 1: it is written in one piece
  std::size_t first_owner = 0;  // of `owners`
  std::size_t owner_count = 0;  // >= 1
};

// Rows [row, row + rows) of a chunk, written by a rank.
struct Share {
  std::uint32_t chunk = 0;
  std::uint32_t rank = 0;
  std::int64_t row = 0;
  std::int64_t rows = 0;
};

inline constexpr std::int64_t kItemBytes = 1024;          // what an item costs beside its payload
inline constexpr std::int64_t kMinSplitBytes = 64 << 10;  // smaller chunks are never split

// Assigns every row of every chunk to one of its owners, and adds it to the owner's load. A rank
// has one share of a chunk at most.
//
// Chunks with the same owners are shared out together, those with fewer owners first: from the
// largest to the smallest, each to the owner with the least so far. Where it would lift that one
// more than 2 % over the level at which all of them would be even, and has rows, the owner gets as
// many as reach the level, and the next one the rest. A row is the smallest piece: chunks that
// cannot be split, and rows that are large beside the level (of 3 rows on 8 ranks, 2.7 times a
// rank's part), are the reasons for a rank to write more than its part. The same input gives the
// same shares.
//
//   owners: ranks of each chunk, ascending, without repetition
//   loads: bytes that each rank writes anyway
// Throws Error(kPlan) where an owner is no rank.
std::vector<Share> balance(const std::vector<SharedChunk>& chunks,
                           const std::vector<std::uint32_t>& owners,
                           std::vector<std::int64_t>* loads);

}  // namespace dcpx::plan
