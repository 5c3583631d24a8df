#include "plan/box_pairs.h"

#include <algorithm>
#include <numeric>
#include <utility>
#include <vector>

namespace dcpx::plan {
namespace {

using Index = std::uint32_t;
using List = std::vector<Index>;  // in the order in which they begin along dimension 0

// The fewest that are worth halving; a further dimension costs more than it saves for more of them.
std::size_t few(std::size_t dim) { return std::size_t{16} << std::min<std::size_t>(2 * dim, 24); }

// Of a box list, along one dimension.
struct Reach {
  std::int64_t first = INT64_MAX;  // where the first one begins
  std::int64_t last = INT64_MIN;   // where the last one begins
  std::int64_t end = INT64_MAX;    // where the first one ends
};

class Pairs {
 public:
  Pairs(std::size_t ndim, const BoxEnds& a, const BoxEnds& b, const VisitPair& visit)
      : ndim_(ndim), sets_{a, b}, visit_(visit) {}

  bool run() {
    List lists[2];
    for (std::size_t side = 0; side < 2; ++side) {
      lists[side].resize(sets_[side].count);
      std::iota(lists[side].begin(), lists[side].end(), Index{0});
      std::stable_sort(lists[side].begin(), lists[side].end(),
                       [&](Index x, Index y) { return begin(side, x, 0) < begin(side, y, 0); });
    }
    return visit_all(lists[0], lists[1], ndim_ - 1);
  }

 private:
  std::int64_t begin(std::size_t side, Index box, std::size_t dim) const {
    return sets_[side].begins[box * ndim_ + dim];
  }
  std::int64_t end(std::size_t side, Index box, std::size_t dim) const {
    return sets_[side].ends[box * ndim_ + dim];
  }

  bool meet(Index a, Index b) const {
    for (std::size_t d = 0; d < ndim_; ++d) {
      if (begin(0, a, d) >= end(1, b, d) || begin(1, b, d) >= end(0, a, d)) return false;
    }
    return true;
  }

  Reach reach_of(std::size_t side, const List& boxes, std::size_t dim, Reach reach) const {
    for (const Index box : boxes) {
      reach.first = std::min(reach.first, begin(side, box, dim));
      reach.last = std::max(reach.last, begin(side, box, dim));
      reach.end = std::min(reach.end, end(side, box, dim));
    }
    return reach;
  }

  // The pairs of a x b that meet along dimensions [0, dim]. As all that follow, false: ended.
  bool visit_all(const List& a, const List& b, std::size_t dim) {
    if (a.empty() || b.empty()) return true;
    if (dim == 0) return scan(a, b);
    if (std::min(a.size(), b.size()) <= few(dim)) return compare(a, b);
    const Reach reach = reach_of(1, b, dim, reach_of(0, a, dim, {}));
    if (reach.last < reach.end) return visit_all(a, b, dim - 1);  // all meet along this one
    return halve(0, a, b, dim) && halve(1, b, a, dim);
  }

  // The pairs of which the box of `points`, which are of set `side`, begins inside that of
  // `spans`: where both begin at one place, the box of set 0 does.
  bool halve(std::size_t side, const List& points, const List& spans, std::size_t dim) {
    const Reach reach = reach_of(side, points, dim, {});
    List whole;  // hold where all points begin
    List rest;   // hold some of that
    for (const Index box : spans) {
      const std::int64_t to = end(1 - side, box, dim);
      if (!starts_by(side, box, reach.last, dim) || to <= reach.first ||
          to <= begin(1 - side, box, dim)) {
        continue;
      }
      const bool is_whole = starts_by(side, box, reach.first, dim) && to > reach.last;
      (is_whole ? whole : rest).push_back(box);
    }
    if (!(side == 0 ? visit_all(points, whole, dim - 1) : visit_all(whole, points, dim - 1))) {
      return false;
    }
    if (rest.empty()) return true;
    whole = List();
    if (std::min(points.size(), rest.size()) <= few(dim)) {
      return compare_starts(side, points, rest, dim);
    }
    const std::int64_t cut = cut_of(side, points, dim, reach.first);
    List part;
    for (const bool is_upper : {false, true}) {
      part.clear();
      for (const Index box : points) {
        if ((begin(side, box, dim) >= cut) == is_upper) part.push_back(box);
      }
      if (!halve(side, part, rest, dim)) return false;
    }
    return true;
  }

  // Whether what begins at `place`, of set `side`, does not begin before the span.
  bool starts_by(std::size_t side, Index span, std::int64_t place, std::size_t dim) const {
    const std::int64_t from = begin(1 - side, span, dim);
    return side == 0 ? from <= place : from < place;
  }

  // Where to halve boxes that do not all begin at `first`: both parts have some. A part that is
  // more than half of them begins at one place but for less than half.
  std::int64_t cut_of(std::size_t side, const List& points, std::size_t dim, std::int64_t first) {
    places_.clear();
    for (const Index box : points) places_.push_back(begin(side, box, dim));
    const auto middle = places_.begin() + static_cast<std::ptrdiff_t>(places_.size() / 2);
    std::nth_element(places_.begin(), middle, places_.end());
    if (*middle > first) return *middle;
    std::int64_t next = INT64_MAX;
    for (const std::int64_t place : places_) {
      if (place > first) next = std::min(next, place);
    }
    return next;
  }

  // All pairs that meet along dimension 0, which all do along the others.
  bool scan(const List& a, const List& b) const {
    std::size_t next_a = 0;
    std::size_t next_b = 0;
    while (next_a < a.size() && next_b < b.size()) {
      if (begin(0, a[next_a], 0) <= begin(1, b[next_b], 0)) {
        const Index box = a[next_a++];
        for (std::size_t i = next_b; i < b.size() && begin(1, b[i], 0) < end(0, box, 0); ++i) {
          if (!visit(box, b[i])) return false;
        }
      } else {
        const Index box = b[next_b++];
        for (std::size_t i = next_a; i < a.size() && begin(0, a[i], 0) < end(1, box, 0); ++i) {
          if (!visit(a[i], box)) return false;
        }
      }
    }
    return true;
  }

  bool visit(Index a, Index b) const { return !meet(a, b) || visit_(a, b); }

  bool compare(const List& a, const List& b) const {
    for (const Index box : a) {
      for (const Index other : b) {
        if (begin(1, other, 0) >= end(0, box, 0)) break;
        if (!visit(box, other)) return false;
      }
    }
    return true;
  }

  bool compare_starts(std::size_t side, const List& points, const List& spans,
                      std::size_t dim) const {
    for (const Index point : points) {
      const std::int64_t place = begin(side, point, dim);
      for (const Index span : spans) {
        if (begin(1 - side, span, 0) >= end(side, point, 0)) break;
        if (!starts_by(side, span, place, dim)) continue;
        if (!(side == 0 ? visit(point, span) : visit(span, point))) return false;
      }
    }
    return true;
  }

  std::size_t ndim_;
  BoxEnds sets_[2];
  const VisitPair& visit_;
  std::vector<std::int64_t> places_;
};

}  // namespace

bool visit_meeting(std::size_t ndim, const BoxEnds& a, const BoxEnds& b, const VisitPair& visit) {
  return Pairs(ndim, a, b, visit).run();
}

}  // namespace dcpx::plan
