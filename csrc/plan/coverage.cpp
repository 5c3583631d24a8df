#include "plan/coverage.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "common/bytes.h"
#include "plan/box_pairs.h"

namespace dcpx::plan {
namespace {

using Index = std::uint32_t;

// Elements of a box; false where they are 2^63 or more, or a length is negative.
bool multiply(const std::int64_t* lengths, std::size_t ndim, std::int64_t* numel) {
  *numel = 1;
  if (std::any_of(lengths, lengths + ndim, [](std::int64_t n) { return n < 0; })) return false;
  // A length of 0 makes everything small, whatever the others multiply to.
  if (std::find(lengths, lengths + ndim, 0) != lengths + ndim) {
    *numel = 0;
    return true;
  }
  for (std::size_t d = 0; d < ndim; ++d) {
    if (__builtin_mul_overflow(*numel, lengths[d], numel)) return false;
  }
  return true;
}

// One tensor and its boxes.
class Tiling {
 public:
  Tiling(const std::int64_t* sizes, std::size_t ndim, const std::int64_t* offsets,
         const std::int64_t* lengths, std::size_t count)
      : sizes_(sizes), ndim_(ndim), offsets_(offsets), lengths_(lengths), count_(count) {}

  // Whether there is an offence; fills in all but `error->tensor`.
  bool find_offence(CoverageError* error) {
    std::int64_t numel = 0;
    if (!multiply(sizes_, ndim_, &numel)) {
      error->offence = Offence::kTooLarge;
      return true;
    }
    if (ndim_ == 0) {  // one element, which every box holds: nothing to list or to sort
      if (count_ == 1) return false;
      error->offence = count_ == 0 ? Offence::kHole : Offence::kOverlap;
      if (count_ > 1) error->box = 0, error->other = 1;
      return true;
    }
    if (find_outside(error)) return true;
    if (find_overlap(error)) return true;
    if (covered_ == numel) return false;  // disjoint and inside: the sum decides
    find_hole(error);
    return true;
  }

 private:
  std::int64_t begin(Index box, std::size_t d) const { return offsets_[box * ndim_ + d]; }
  std::int64_t length(Index box, std::size_t d) const { return lengths_[box * ndim_ + d]; }
  std::int64_t end(Index box, std::size_t d) const { return begin(box, d) + length(box, d); }

  // Notes the boxes with elements in `boxes_`.
  bool find_outside(CoverageError* error) {
    boxes_.reserve(count_);
    for (std::size_t b = 0; b < count_; ++b) {
      const std::int64_t* offset = offsets_ + b * ndim_;
      const std::int64_t* extent = lengths_ + b * ndim_;
      bool is_empty = false;
      bool is_inside = true;
      for (std::size_t d = 0; d < ndim_; ++d) {
        is_empty = is_empty || extent[d] == 0;
        is_inside = is_inside && offset[d] >= 0 && extent[d] <= sizes_[d] &&
                    offset[d] <= sizes_[d] - extent[d];
      }
      const bool has_negative =
          std::any_of(extent, extent + ndim_, [](std::int64_t n) { return n < 0; });
      if (has_negative || (!is_empty && !is_inside)) {
        error->offence = Offence::kOutside;
        error->box = static_cast<std::int64_t>(b);
        return true;
      }
      if (!is_empty) boxes_.push_back(static_cast<Index>(b));
    }
    return false;
  }

  // Whether the boxes follow one another along some dimension, as the shards of ranks do.
  bool is_row() const {
    for (std::size_t d = 0; d < ndim_; ++d) {
      std::size_t i = 1;
      while (i < boxes_.size() && begin(boxes_[i], d) >= end(boxes_[i - 1], d)) ++i;
      if (i >= boxes_.size()) return true;
    }
    return false;
  }

  // Finds two boxes that share elements. Sums the elements of all in `covered_`: no more than the
  // tensor's while none do.
  bool find_overlap(CoverageError* error) {
    if (!is_row()) {
      std::vector<std::int64_t> begins(boxes_.size() * ndim_);
      std::vector<std::int64_t> ends(begins.size());
      for (std::size_t i = 0; i < begins.size(); ++i) {
        begins[i] = begin(boxes_[i / ndim_], i % ndim_);
        ends[i] = end(boxes_[i / ndim_], i % ndim_);
      }
      const BoxEnds all{begins.data(), ends.data(), boxes_.size()};
      const bool are_disjoint = visit_meeting(ndim_, all, all, [&](Index a, Index b) {
        if (a == b) return true;
        error->offence = Offence::kOverlap;
        error->box = std::min(boxes_[a], boxes_[b]);
        error->other = std::max(boxes_[a], boxes_[b]);
        return false;
      });
      if (!are_disjoint) return true;
    }
    for (const Index box : boxes_) {
      std::int64_t numel = 0;
      multiply(lengths_ + box * ndim_, ndim_, &numel);
      covered_ += numel;
    }
    return false;
  }

  // Finds the first element, in C order, that no box holds. Slab by slab along each dimension: the
  // first slab whose boxes do not fill it holds it. REQUIRES: disjoint boxes inside, and a hole.
  void find_hole(CoverageError* error) {
    error->offence = Offence::kHole;
    std::vector<Index> boxes(boxes_);
    for (std::size_t d = 0; d < ndim_; ++d) {
      std::int64_t slice = 1;  // elements of the tensor at one place of dimension d
      for (std::size_t i = d + 1; i < ndim_; ++i) slice *= sizes_[i];
      std::vector<std::pair<std::int64_t, std::int64_t>> changes{{0, 0}};  // place, elements more
      for (const Index box : boxes) {
        std::int64_t numel = 0;
        multiply(lengths_ + box * ndim_ + d + 1, ndim_ - d - 1, &numel);
        changes.emplace_back(begin(box, d), numel);
        changes.emplace_back(end(box, d), -numel);
      }
      std::sort(changes.begin(), changes.end());
      std::int64_t held = 0;
      std::int64_t place = 0;
      for (std::size_t i = 0; i < changes.size(); ++i) {
        held += changes[i].second;
        place = changes[i].first;
        const bool is_last = i + 1 == changes.size() || changes[i + 1].first != place;
        if (is_last && held < slice) break;
      }
      error->point.push_back(place);
      boxes.erase(
          std::remove_if(boxes.begin(), boxes.end(),
                         [&](Index box) { return place < begin(box, d) || place >= end(box, d); }),
          boxes.end());
    }
  }

  const std::int64_t* sizes_;
  std::size_t ndim_;
  const std::int64_t* offsets_;
  const std::int64_t* lengths_;
  std::size_t count_;
  std::vector<Index> boxes_;  // with elements, by number
  std::int64_t covered_ = 0;
};

}  // namespace

std::vector<CoverageError> check_coverage(const BoxColumns& columns) {
  std::vector<CoverageError> errors;
  std::uint64_t size_at = 0;
  std::uint64_t cell_at = 0;
  for (std::size_t t = 0; t < columns.tensor_count; ++t) {
    DCPX_CHECK(columns.ndims[t] >= 0 && columns.box_counts[t] >= 0, "a negative count of boxes");
    const auto ndim = static_cast<std::size_t>(columns.ndims[t]);
    const auto count = static_cast<std::size_t>(columns.box_counts[t]);
    DCPX_CHECK(count <= UINT32_MAX, "more boxes of a tensor than can be numbered");
    const std::uint64_t size_end = checked_add(size_at, ndim);
    const std::uint64_t cell_end = checked_add(cell_at, checked_mul(ndim, count));
    DCPX_CHECK(size_end <= columns.size_count && cell_end <= columns.cell_count,
               "columns of boxes are shorter than they say");
    CoverageError error;
    Tiling tiling(columns.sizes + size_at, ndim, columns.offsets + cell_at,
                  columns.lengths + cell_at, count);
    if (tiling.find_offence(&error)) {
      error.tensor = static_cast<std::int64_t>(t);
      errors.push_back(std::move(error));
    }
    size_at = size_end;
    cell_at = cell_end;
  }
  DCPX_CHECK(size_at == columns.size_count && cell_at == columns.cell_count,
             "columns of boxes are longer than they say");
  return errors;
}

}  // namespace dcpx::plan
