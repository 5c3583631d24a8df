#include <algorithm>
#include <numeric>
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

std::vector<std::uint32_t> ranks(std::uint32_t count, std::uint32_t step = 1) {
  std::vector<std::uint32_t> all;
  for (std::uint32_t rank = 0; rank < count; rank += step) all.push_back(rank);
  return all;
}

double imbalance(const Loads& loads) {
  const double sum = static_cast<double>(std::accumulate(loads.begin(), loads.end(), INT64_C(0)));
  return static_cast<double>(*std::max_element(loads.begin(), loads.end())) *
         static_cast<double>(loads.size()) / sum;
}

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

TEST(one_large_chunk_is_shared_by_rows) {
  Case given;
  given.add(64 << 20, 4096, ranks(8));
  for (int i = 0; i < 20; ++i) given.add(3000, 1, ranks(8));
  Loads loads(8);
  balance(given.chunks, given.owners, &loads);
  CHECK(imbalance(loads) < 1.01);
}

TEST(what_a_rank_writes_anyway_counts) {
  Case given;
  given.add(8 << 20, 1024, ranks(4));
  Loads loads{6 << 20, 0, 0, 1 << 20};
  balance(given.chunks, given.owners, &loads);
  CHECK_EQ(loads[0], 6 << 20);
  CHECK(loads[1] + loads[2] + loads[3] >= 9 << 20);
  CHECK(*std::max_element(loads.begin() + 1, loads.end()) < (3 << 20) + (1 << 16));
}

TEST(groups_of_replicas_are_balanced_each_in_itself) {
  Case given;
  for (int i = 0; i < 40; ++i) {
    given.add((1 + i) << 16, 64, ranks(8, 2));
    given.add((1 + i) << 16, 64, {1, 3, 5, 7});
  }
  Loads loads(8);
  balance(given.chunks, given.owners, &loads);
  CHECK(imbalance(loads) < 1.03);
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
