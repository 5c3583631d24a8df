#include <algorithm>
#include <set>
#include <vector>

#include "check.h"
#include "plan/balance.h"
#include "random_source.h"

namespace {

using dcpx::ErrorCode;
using dcpx::plan::balance;
using dcpx::plan::kMinSplitBytes;
using dcpx::plan::Share;
using dcpx::plan::SharedChunk;
using Loads = std::vector<std::int64_t>;

struct Case {
  std::vector<SharedChunk> chunks;
  std::vector<std::uint32_t> owners;

  void add(std::int64_t nbytes, std::int64_t rows, const std::vector<std::uint32_t>& own) {
    chunks.push_back({nbytes, rows, owners.size(), own.size()});
    owners.insert(owners.end(), own.begin(), own.end());
  }
};

TEST(every_row_of_every_chunk_is_written_once_by_one_of_its_owners) {
  RandomSource random(91);
  for (int round = 0; round < 400; ++round) {
    const auto world = static_cast<std::uint32_t>(1 + random.below(9));
    Case given;
    for (std::uint64_t i = random.below(30); i > 0; --i) {
      std::vector<std::uint32_t> own;
      for (std::uint32_t rank = 0; rank < world; ++rank) {
        if (random.chance(2)) own.push_back(rank);
      }
      if (own.empty()) own.push_back(0);
      const auto rows = static_cast<std::int64_t>(1 + random.below(300));
      given.add(rows * static_cast<std::int64_t>(random.below(5000)), rows, own);
    }
    Loads loads(world);
    for (std::int64_t& load : loads) load = static_cast<std::int64_t>(random.below(1 << 20));
    const Loads before = loads;
    const std::vector<Share> shares = balance(given.chunks, given.owners, &loads);
    std::vector<std::int64_t> next(given.chunks.size(), 0);
    std::vector<std::set<std::uint32_t>> ranks_of(given.chunks.size());
    for (const Share& share : shares) {
      const SharedChunk& chunk = given.chunks[share.chunk];
      CHECK_EQ(share.row, next[share.chunk]);
      CHECK(share.rows > 0);
      next[share.chunk] += share.rows;
      const auto* own = given.owners.data() + chunk.first_owner;
      CHECK(std::find(own, own + chunk.owner_count, share.rank) != own + chunk.owner_count);
      CHECK(ranks_of[share.chunk].insert(share.rank).second);
      CHECK(share.rows == chunk.rows || chunk.nbytes >= kMinSplitBytes);
    }
    for (std::size_t i = 0; i < next.size(); ++i) CHECK_EQ(next[i], given.chunks[i].rows);
    Loads again(before);
    const std::vector<Share> same = balance(given.chunks, given.owners, &again);
    CHECK(again == loads && same.size() == shares.size());
  }
}

TEST(owner_that_is_no_rank_is_refused) {
  Case given;
  given.add(10, 1, {3});
  Loads loads(3);
  CHECK_THROWS(balance(given.chunks, given.owners, &loads), ErrorCode::kPlan);
  given.chunks[0].owner_count = 2;
  Loads more(4);
  CHECK_THROWS(balance(given.chunks, given.owners, &more), ErrorCode::kPlan);
}

}  // namespace
