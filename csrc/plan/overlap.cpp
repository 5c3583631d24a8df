#include "plan/overlap.h"

#include <algorithm>
#include <numeric>

#include "common/bytes.h"
#include "plan/box_pairs.h"

namespace dcpx::plan {
namespace {

using Index = std::uint32_t;
using Numbers = std::vector<std::int64_t>;

constexpr std::uint64_t kFewPairs = 512;  // compared sooner than anything is sorted
constexpr std::uint64_t kManyPairs = 4;   // a box: along one dimension, of those that may meet

// Where each box ends, along each dimension.
Numbers ends_of(std::size_t ndim, const Boxes& boxes) {
  DCPX_CHECK(boxes.count < UINT32_MAX, "more boxes of a tensor than can be numbered");
  Numbers ends(boxes.count * ndim);
  for (std::size_t i = 0; i < ends.size(); ++i) {
    DCPX_CHECK(!__builtin_add_overflow(boxes.offsets[i], boxes.sizes[i], &ends[i]),
               "a box ends beyond 2^63 - 1");
  }
  return ends;
}

// Stored boxes along one dimension, as a balanced tree in the order of where they begin.
class ReachTree {
 public:
  ReachTree(const std::int64_t* begins, const std::int64_t* ends, std::size_t stride,
            std::size_t count)
      : order_(count), begins_(count), ends_(count), reach_(count) {
    std::iota(order_.begin(), order_.end(), Index{0});
    std::stable_sort(order_.begin(), order_.end(),
                     [&](Index a, Index b) { return begins[a * stride] < begins[b * stride]; });
    for (std::size_t i = 0; i < count; ++i) {
      begins_[i] = begins[order_[i] * stride];
      ends_[i] = ends[order_[i] * stride];
    }
    build(0, count);
  }

  // Calls `visit` with each box that begins before `end` and ends after `begin`.
  template <typename Visit>
  void visit(std::int64_t begin, std::int64_t end, const Visit& visit_box) const {
    visit_part(0, order_.size(), begin, end, visit_box);
  }

 private:
  // The node of [low, high) is its middle; `reach_` is how far the boxes of its part reach.
  std::int64_t build(std::size_t low, std::size_t high) {
    if (low >= high) return INT64_MIN;
    const std::size_t middle = low + (high - low) / 2;
    const std::int64_t below = std::max(build(low, middle), build(middle + 1, high));
    return reach_[middle] = std::max(ends_[middle], below);
  }

  template <typename Visit>
  void visit_part(std::size_t low, std::size_t high, std::int64_t begin, std::int64_t end,
                  const Visit& visit_box) const {
    while (low < high) {
      const std::size_t middle = low + (high - low) / 2;
      if (reach_[middle] <= begin) return;
      visit_part(low, middle, begin, end, visit_box);
      if (begins_[middle] >= end) return;
      if (ends_[middle] > begin) visit_box(order_[middle]);
      low = middle + 1;
    }
  }

  std::vector<Index> order_;
  Numbers begins_;
  Numbers ends_;
  Numbers reach_;
};

// Stored boxes that are the cells of a regular mesh: one in each, none left over.
class Mesh {
 public:
  // Returns whether the boxes are such.
  bool build(std::size_t ndim, const Boxes& boxes, const Numbers& ends) {
    begins_.assign(ndim, {});
    ends_.assign(ndim, {});
    std::size_t cells = 1;
    for (std::size_t d = 0; d < ndim; ++d) {
      Numbers& begins = begins_[d];
      for (std::size_t i = 0; i < boxes.count; ++i) begins.push_back(boxes.offsets[i * ndim + d]);
      std::sort(begins.begin(), begins.end());
      begins.erase(std::unique(begins.begin(), begins.end()), begins.end());
      if (boxes.count % begins.size() != 0) return false;
      if (__builtin_mul_overflow(cells, begins.size(), &cells) || cells > boxes.count) return false;
      ends_[d].assign(begins.size(), INT64_MIN);
    }
    if (cells != boxes.count) return false;
    box_at_.assign(cells, kNone);
    for (std::size_t i = 0; i < boxes.count; ++i) {
      std::size_t cell = 0;
      for (std::size_t d = 0; d < ndim; ++d) {
        const Numbers& begins = begins_[d];
        const std::int64_t begin = boxes.offsets[i * ndim + d];
        const auto at = static_cast<std::size_t>(
            std::lower_bound(begins.begin(), begins.end(), begin) - begins.begin());
        std::int64_t& end = ends_[d][at];
        if (end == INT64_MIN) end = ends[i * ndim + d];
        // Ascending ends make what meets a range of places one range of cells.
        const bool is_alone = at + 1 == begins.size() || end <= begins[at + 1];
        if (end != ends[i * ndim + d] || end <= begin || !is_alone) return false;
        cell = cell * begins.size() + at;
      }
      if (box_at_[cell] != kNone) return false;
      box_at_[cell] = static_cast<Index>(i);
    }
    return true;
  }

  // Calls `visit_box` with each box that overlaps the wanted one.
  template <typename Visit>
  void visit(const std::int64_t* begin, const std::int64_t* end, const Visit& visit_box) const {
    const std::size_t ndim = begins_.size();
    std::vector<std::size_t> low(ndim);
    std::vector<std::size_t> high(ndim);
    for (std::size_t d = 0; d < ndim; ++d) {
      low[d] = static_cast<std::size_t>(
          std::upper_bound(ends_[d].begin(), ends_[d].end(), begin[d]) - ends_[d].begin());
      high[d] = static_cast<std::size_t>(
          std::lower_bound(begins_[d].begin(), begins_[d].end(), end[d]) - begins_[d].begin());
      if (low[d] >= high[d]) return;
    }
    std::vector<std::size_t> at(low);
    for (bool is_more = true; is_more;) {
      std::size_t cell = 0;
      for (std::size_t d = 0; d < ndim; ++d) cell = cell * begins_[d].size() + at[d];
      visit_box(box_at_[cell]);
      is_more = false;
      for (std::size_t d = ndim; d-- > 0 && !is_more;) {
        is_more = ++at[d] < high[d];
        if (!is_more) at[d] = low[d];
      }
    }
  }

 private:
  static constexpr Index kNone = UINT32_MAX;
  std::vector<Numbers> begins_;  // of the cells, along each dimension
  std::vector<Numbers> ends_;
  std::vector<Index> box_at_;
};

// The boxes of one tensor.
class Matching {
 public:
  Matching(std::size_t ndim, const Boxes& wanted, const Boxes& stored)
      : ndim_(ndim),
        wanted_(wanted),
        stored_(stored),
        wanted_ends_(ends_of(ndim, wanted)),
        stored_ends_(ends_of(ndim, stored)) {}

  // In any order.
  void find(std::vector<Overlap>* overlaps) {
    const auto add = [&](std::size_t wanted, Index stored) {
      overlaps->push_back({static_cast<Index>(wanted), stored});
    };
    const std::uint64_t pairs = checked_mul(wanted_.count, stored_.count);
    if (ndim_ == 0 || wanted_.count <= 2 || pairs <= kFewPairs) {
      for (std::size_t w = 0; w < wanted_.count; ++w) {
        for (Index s = 0; s < stored_.count; ++s) {
          if (meet(w, s)) add(w, s);
        }
      }
      return;
    }
    std::uint64_t fewest = UINT64_MAX;
    std::size_t axis = 0;
    for (std::size_t d = 0; d < ndim_; ++d) {
      const std::uint64_t meeting = pairs_along(d);
      if (meeting < fewest) fewest = meeting, axis = d;
    }
    // Along one dimension a mesh of several is met in whole rows of cells, and what is cut in many
    // ways in much of all.
    const std::uint64_t many = kManyPairs * (wanted_.count + stored_.count);
    Mesh mesh;
    if (ndim_ > 1 && fewest > many && mesh.build(ndim_, stored_, stored_ends_)) {
      for (std::size_t w = 0; w < wanted_.count; ++w) {
        mesh.visit(wanted_.offsets + w * ndim_, wanted_ends_.data() + w * ndim_,
                   [&](Index s) { add(w, s); });
      }
      return;
    }
    if (ndim_ > 1 && fewest > 16 * many) {
      visit_meeting(ndim_, {wanted_.offsets, wanted_ends_.data(), wanted_.count},
                    {stored_.offsets, stored_ends_.data(), stored_.count}, [&](Index w, Index s) {
                      add(w, s);
                      return true;
                    });
      return;
    }
    const ReachTree tree(stored_.offsets + axis, stored_ends_.data() + axis, ndim_, stored_.count);
    for (std::size_t w = 0; w < wanted_.count; ++w) {
      tree.visit(wanted_.offsets[w * ndim_ + axis], wanted_ends_[w * ndim_ + axis], [&](Index s) {
        if (meet(w, s)) add(w, s);
      });
    }
  }

  // As torch's planner lists them.
  void sort(std::vector<Overlap>* overlaps, std::size_t first, OverlapOrder order) const {
    const auto begin = overlaps->begin() + static_cast<std::ptrdiff_t>(first);
    if (order == OverlapOrder::kNested || ndim_ == 0) {
      std::sort(begin, overlaps->end(), [](const Overlap& a, const Overlap& b) {
        return a.wanted != b.wanted ? a.wanted < b.wanted : a.stored < b.stored;
      });
      return;
    }
    const std::size_t axis = longest_dim();
    const auto begin_of = [&](const Overlap& one) {
      return wanted_.offsets[one.wanted * ndim_ + axis];
    };
    const auto end_of = [&](const Overlap& one) { return stored_ends_[one.stored * ndim_ + axis]; };
    std::sort(begin, overlaps->end(), [&](const Overlap& a, const Overlap& b) {
      if (a.wanted != b.wanted) {
        const std::int64_t left = begin_of(a);
        const std::int64_t right = begin_of(b);
        return left != right ? left < right : a.wanted < b.wanted;
      }
      const std::int64_t left = end_of(a);
      const std::int64_t right = end_of(b);
      return left != right ? left < right : a.stored < b.stored;
    });
  }

 private:
  bool meet(std::size_t w, Index s) const {
    for (std::size_t d = 0; d < ndim_; ++d) {
      if (wanted_.offsets[w * ndim_ + d] >= stored_ends_[s * ndim_ + d]) return false;
      if (stored_.offsets[s * ndim_ + d] >= wanted_ends_[w * ndim_ + d]) return false;
    }
    return true;
  }

  // How many pairs meet along a dimension; about, where boxes have no elements.
  std::uint64_t pairs_along(std::size_t d) const {
    Numbers begins(stored_.count);
    Numbers ends(stored_.count);
    for (std::size_t s = 0; s < stored_.count; ++s) {
      begins[s] = stored_.offsets[s * ndim_ + d];
      ends[s] = stored_ends_[s * ndim_ + d];
    }
    std::sort(begins.begin(), begins.end());
    std::sort(ends.begin(), ends.end());
    std::int64_t pairs = 0;
    for (std::size_t w = 0; w < wanted_.count; ++w) {
      const std::int64_t begin = wanted_.offsets[w * ndim_ + d];
      const std::int64_t end = wanted_ends_[w * ndim_ + d];
      pairs += std::lower_bound(begins.begin(), begins.end(), end) - begins.begin();
      pairs -= std::upper_bound(ends.begin(), ends.end(), begin) - ends.begin();
    }
    return static_cast<std::uint64_t>(std::max<std::int64_t>(pairs, 0));
  }

  // Along which torch sweeps: the first of those that reach furthest.
  std::size_t longest_dim() const {
    std::size_t longest = 0;
    std::int64_t furthest = 0;
    for (std::size_t d = 0; d < ndim_ && ndim_ > 1; ++d) {
      std::int64_t reach = INT64_MIN;
      for (std::size_t i = d; i < wanted_ends_.size(); i += ndim_)
        reach = std::max(reach, wanted_ends_[i]);
      for (std::size_t i = d; i < stored_ends_.size(); i += ndim_)
        reach = std::max(reach, stored_ends_[i]);
      if (reach > furthest) furthest = reach, longest = d;
    }
    return longest;
  }

  std::size_t ndim_;
  const Boxes& wanted_;
  const Boxes& stored_;
  Numbers wanted_ends_;
  Numbers stored_ends_;
};

}  // namespace

void find_overlaps(std::size_t ndim, const Boxes& wanted, const Boxes& stored, OverlapOrder order,
                   std::vector<Overlap>* overlaps) {
  const std::size_t first = overlaps->size();
  Matching matching(ndim, wanted, stored);
  matching.find(overlaps);
  if (overlaps->size() - first > 1) matching.sort(overlaps, first, order);
}

void overlap_region(std::size_t ndim, const Boxes& wanted, const Boxes& stored,
                    const Overlap& overlap, std::int64_t* dest_offsets,
                    std::int64_t* storage_offsets, std::int64_t* lengths) {
  const std::size_t w = overlap.wanted * ndim;
  const std::size_t s = overlap.stored * ndim;
  for (std::size_t d = 0; d < ndim; ++d) {
    const std::int64_t begin = std::max(wanted.offsets[w + d], stored.offsets[s + d]);
    const std::int64_t end = std::min(wanted.offsets[w + d] + wanted.sizes[w + d],
                                      stored.offsets[s + d] + stored.sizes[s + d]);
    dest_offsets[d] = begin - wanted.offsets[w + d];
    storage_offsets[d] = begin - stored.offsets[s + d];
    lengths[d] = end - begin;
  }
}

}  // namespace dcpx::plan
