#include "plan/balance.h"

#include <algorithm>
#include <functional>
#include <map>
#include <numeric>
#include <queue>
#include <utility>

#include "common/error.h"

namespace dcpx::plan {
namespace {

using Rank = std::uint32_t;

// The chunks that the same ranks hold, and those ranks.
class Family {
 public:
  Family(const std::vector<SharedChunk>& chunks, const Rank* owners, std::size_t count,
         std::vector<std::int64_t>* loads)
      : chunks_(chunks), owners_(owners, owners + count), loads_(*loads) {}

  void add(std::uint32_t chunk) { members_.push_back(chunk); }
  std::size_t owner_count() const noexcept { return owners_.size(); }

  void share_out(std::vector<Share>* shares) {
    std::stable_sort(members_.begin(), members_.end(), [&](std::uint32_t a, std::uint32_t b) {
      return chunks_[a].nbytes > chunks_[b].nbytes;
    });
    const std::int64_t level = even_level();
    Heap heap;
    for (const Rank owner : owners_) heap.emplace(loads_[owner], owner);
    for (const std::uint32_t chunk : members_) share_out(chunk, level, &heap, shares);
    for (; !heap.empty(); heap.pop()) loads_[heap.top().second] = heap.top().first;
  }

 private:
  using Entry = std::pair<std::int64_t, Rank>;  // load, owner
  using Heap = std::priority_queue<Entry, std::vector<Entry>, std::greater<>>;

  void share_out(std::uint32_t number, std::int64_t level, Heap* heap,
                 std::vector<Share>* shares) const {
    const SharedChunk& chunk = chunks_[number];
    const bool is_splittable =
        chunk.rows > 1 && chunk.nbytes >= kMinSplitBytes && chunk.nbytes >= chunk.rows;
    const std::int64_t row_bytes = is_splittable ? chunk.nbytes / chunk.rows : 0;
    std::vector<Entry> served;
    for (std::int64_t row = 0; row < chunk.rows;) {
      auto [load, owner] = heap->top();
      heap->pop();
      const std::int64_t left = chunk.rows - row;
      std::int64_t rows = left;
      const std::int64_t rest_bytes = is_splittable ? left * row_bytes : chunk.nbytes;
      const bool is_last = heap->empty();
      if (is_splittable && !is_last && load + rest_bytes + kItemBytes > level + level / 50) {
        const std::int64_t room = std::max<std::int64_t>(level - load - kItemBytes, 0);
        // No share is so small that its item costs more than it evens out.
        const std::int64_t fewest = std::max<std::int64_t>(1, kMinSplitBytes / 4 / row_bytes);
        rows = std::min(left, std::max(fewest, (room + row_bytes - 1) / row_bytes));
        if (left - rows < fewest) rows = left;
      }
      shares->push_back({number, owner, row, rows});
      load += (is_splittable ? rows * row_bytes : chunk.nbytes) + kItemBytes;
      served.emplace_back(load, owner);
      row += rows;
    }
    for (const Entry& entry : served) heap->push(entry);
  }

  // The load that every owner below it would have if all chunks could be cut at any byte.
  std::int64_t even_level() const {
    std::vector<std::int64_t> loads;
    for (const Rank owner : owners_) loads.push_back(loads_[owner]);
    std::sort(loads.begin(), loads.end());
    std::int64_t sum = 0;
    for (const std::uint32_t chunk : members_) sum += chunks_[chunk].nbytes + kItemBytes;
    for (std::size_t i = 0; i < loads.size(); ++i) {
      sum += loads[i];
      const std::int64_t level = sum / static_cast<std::int64_t>(i + 1);
      if (i + 1 == loads.size() || level <= loads[i + 1]) return level;
    }
    return sum;
  }

  const std::vector<SharedChunk>& chunks_;
  std::vector<Rank> owners_;
  std::vector<std::int64_t>& loads_;
  std::vector<std::uint32_t> members_;
};

}  // namespace

std::vector<Share> balance(const std::vector<SharedChunk>& chunks,
                           const std::vector<std::uint32_t>& owners,
                           std::vector<std::int64_t>* loads) {
  std::map<std::vector<Rank>, std::size_t> number_of;
  std::vector<Family> families;
  DCPX_CHECK(chunks.size() < UINT32_MAX, "more chunks than can be numbered");
  for (std::uint32_t number = 0; number < chunks.size(); ++number) {
    const SharedChunk& chunk = chunks[number];
    DCPX_CHECK(chunk.owner_count > 0 && chunk.first_owner <= owners.size() &&
                   chunk.owner_count <= owners.size() - chunk.first_owner,
               "a chunk that nobody holds");
    DCPX_CHECK(chunk.nbytes >= 0 && chunk.rows >= 1, "a chunk of less than nothing");
    const Rank* own = owners.data() + chunk.first_owner;
    const std::vector<Rank> key(own, own + chunk.owner_count);
    for (const Rank owner : key) DCPX_CHECK(owner < loads->size(), "an owner that is no rank");
    const auto [at, is_new] = number_of.try_emplace(key, families.size());
    if (is_new) families.emplace_back(chunks, own, chunk.owner_count, loads);
    families[at->second].add(number);
  }
  std::vector<Family*> order;
  for (Family& family : families) order.push_back(&family);
  std::stable_sort(order.begin(), order.end(), [](const Family* a, const Family* b) {
    return a->owner_count() < b->owner_count();
  });
  std::vector<Share> shares;
  shares.reserve(chunks.size());
  for (Family* family : order) family->share_out(&shares);
  std::stable_sort(shares.begin(), shares.end(), [](const Share& a, const Share& b) {
    return a.chunk != b.chunk ? a.chunk < b.chunk : a.row < b.row;
  });
  return shares;
}

}  // namespace dcpx::plan
