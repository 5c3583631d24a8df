#include "plan/range_boxes.h"

#include "common/error.h"

namespace dcpx::plan {
namespace {

// The region with the fewest dimensions in the same order, and the innermost run as `elem_bytes`.
Region merge_in_order(const Region& region) {
  Region out;
  out.elem_bytes = region.elem_bytes;
  for (std::size_t d = 0; d < region.dims(); ++d) {
    const std::uint64_t length = region.lengths[d];
    if (length == 1) continue;
    if (!out.lengths.empty() && out.src_strides.back() == length * region.src_strides[d]) {
      out.lengths.back() *= length;
      out.src_strides.back() = region.src_strides[d];
    } else {
      out.lengths.push_back(length);
      out.src_strides.push_back(region.src_strides[d]);
    }
  }
  if (!out.lengths.empty() && out.src_strides.back() == out.elem_bytes) {
    out.elem_bytes *= out.lengths.back();
    out.lengths.pop_back();
    out.src_strides.pop_back();
  }
  return out;
}

class Cutter {
 public:
  explicit Cutter(const Region& merged)
      : merged_(merged), sub_bytes_(merged.dims() + 1, merged.elem_bytes) {
    for (std::size_t d = merged.dims(); d-- > 0;) {
      sub_bytes_[d] = sub_bytes_[d + 1] * merged.lengths[d];
    }
  }

  std::vector<RangeBox> cut(std::uint64_t begin, std::uint64_t end) {
    DCPX_CHECK(begin <= end && end <= sub_bytes_[0], "a range outside of its region");
    if (begin < end) cut_dims(0, begin, end, 0);
    return std::move(boxes_);
  }

 private:
  // Bytes [begin, end) of what one index of the dimension before `dim` has, which lies at `src`.
  void cut_dims(std::size_t dim, std::uint64_t begin, std::uint64_t end, std::uint64_t src) {
    if (dim == merged_.dims()) return add(dim, 0, end - begin, src + begin);
    const std::uint64_t inner = sub_bytes_[dim + 1];
    const std::uint64_t stride = merged_.src_strides[dim];
    std::uint64_t first = begin / inner;
    const std::uint64_t last = end / inner;
    if (first == last) return cut_dims(dim + 1, begin % inner, end % inner, src + first * stride);
    if (begin % inner > 0) cut_dims(dim + 1, begin % inner, inner, src + first++ * stride);
    if (first < last) add(dim, last - first, merged_.elem_bytes, src + first * stride);
    if (end % inner > 0) cut_dims(dim + 1, 0, end % inner, src + last * stride);
  }

  // `count` indices of `dim` with all of the dimensions behind it; none of any where `count` is 0.
  void add(std::size_t dim, std::uint64_t count, std::uint64_t elem_bytes, std::uint64_t src) {
    RangeBox box;
    box.src_offset = src;
    box.dst_offset = at_;
    box.region.elem_bytes = elem_bytes;
    at_ += count > 0 ? count * sub_bytes_[dim + 1] : elem_bytes;
    for (std::size_t d = dim; d < merged_.dims(); ++d) {
      const std::uint64_t length = d == dim ? count : merged_.lengths[d];
      if (length == 1) continue;
      box.region.lengths.push_back(length);
      box.region.src_strides.push_back(merged_.src_strides[d]);
      box.region.dst_strides.push_back(sub_bytes_[d + 1]);
    }
    boxes_.push_back(std::move(box));
  }

  const Region& merged_;
  std::vector<std::uint64_t> sub_bytes_;  // of one index of the dimension before
  std::uint64_t at_ = 0;                  // of the range, behind the last box
  std::vector<RangeBox> boxes_;
};

}  // namespace

std::vector<RangeBox> range_boxes(const Region& region, std::uint64_t begin, std::uint64_t end) {
  const Region merged = merge_in_order(region);
  return Cutter(merged).cut(begin, end);
}

}  // namespace dcpx::plan
