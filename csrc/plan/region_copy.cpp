#include "plan/region_copy.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "common/bytes.h"

namespace dcpx::plan {
namespace {

std::uint64_t span_bytes(const Region& region, const std::vector<std::uint64_t>& strides) {
  std::uint64_t last = 0;
  for (std::size_t d = 0; d < region.dims(); ++d) {
    if (region.lengths[d] == 0) return 0;
    last = checked_add(last, checked_mul(region.lengths[d] - 1, strides[d]));
  }
  return checked_add(last, region.elem_bytes);
}

// The innermost loop of most copies; fixed sizes let the compiler use single moves.
template <std::size_t kElemBytes>
void copy_row(const std::byte* src, std::uint64_t src_stride, std::byte* dst,
              std::uint64_t dst_stride, std::uint64_t count) {
  for (std::uint64_t i = 0; i < count; ++i) {
    std::memcpy(dst + i * dst_stride, src + i * src_stride, kElemBytes);
  }
}

void copy_row(std::uint64_t elem_bytes, const std::byte* src, std::uint64_t src_stride,
              std::byte* dst, std::uint64_t dst_stride, std::uint64_t count) {
  switch (elem_bytes) {
    case 1:
      return copy_row<1>(src, src_stride, dst, dst_stride, count);
    case 2:
      return copy_row<2>(src, src_stride, dst, dst_stride, count);
    case 4:
      return copy_row<4>(src, src_stride, dst, dst_stride, count);
    case 8:
      return copy_row<8>(src, src_stride, dst, dst_stride, count);
    case 16:
      return copy_row<16>(src, src_stride, dst, dst_stride, count);
    default:
      for (std::uint64_t i = 0; i < count; ++i) {
        std::memcpy(dst + i * dst_stride, src + i * src_stride, elem_bytes);
      }
  }
}

void copy_dims(const Region& region, std::size_t dim, const std::byte* src, std::byte* dst) {
  if (dim == region.dims()) {
    std::memcpy(dst, src, region.elem_bytes);
    return;
  }
  if (dim + 1 == region.dims()) {
    copy_row(region.elem_bytes, src, region.src_strides[dim], dst, region.dst_strides[dim],
             region.lengths[dim]);
    return;
  }
  for (std::uint64_t i = 0; i < region.lengths[dim]; ++i) {
    copy_dims(region, dim + 1, src + i * region.src_strides[dim],
              dst + i * region.dst_strides[dim]);
  }
}

// Cuts a region at the borders of cells, outermost dimension first.
class Splitter {
 public:
  Splitter(const Region& region, std::uint64_t cell_bytes, std::uint64_t max_gap_bytes,
           std::uint64_t src_phase)
      : region_(region),
        cell_bytes_(cell_bytes),
        phase_(src_phase % cell_bytes),
        spans_(region.dims() + 1, region.elem_bytes),
        is_dense_(region.dims() + 1, true) {
    for (std::size_t d = region.dims(); d-- > 0;) {
      const std::uint64_t stride = region.src_strides[d];
      spans_[d] = checked_add(spans_[d + 1], checked_mul(region.lengths[d] - 1, stride));
      is_dense_[d] = is_dense_[d + 1] && stride <= checked_add(spans_[d + 1], max_gap_bytes);
    }
  }

  std::vector<RegionPart> split() {
    split_dims(0, 0, 0);
    return std::move(parts_);
  }

 private:
  // Bytes from `src` to the end of its cell.
  std::uint64_t room(std::uint64_t src) const { return cell_bytes_ - (phase_ + src) % cell_bytes_; }

  void split_dims(std::size_t dim, std::uint64_t src, std::uint64_t dst) {
    if (is_dense_[dim] && spans_[dim] <= room(src)) return add(dim, 0, src, dst);
    if (dim == region_.dims()) return cut_run(src, dst);
    const std::uint64_t stride = region_.src_strides[dim];
    const std::uint64_t inner = spans_[dim + 1];
    for (std::uint64_t i = 0; i < region_.lengths[dim];) {
      const std::uint64_t at = src + i * stride;
      const std::uint64_t to = dst + i * region_.dst_strides[dim];
      const std::uint64_t left = region_.lengths[dim] - i;
      std::uint64_t count = 1;
      if (is_dense_[dim] && inner <= room(at)) {
        count = stride == 0 ? left : std::min(left, (room(at) - inner) / stride + 1);
        add(dim + 1, count, at, to);
      } else {
        split_dims(dim + 1, at, to);
      }
      i += count;
    }
  }

  // Dimensions [keep, dims) whole; of the one before them `count` indices, where `count` > 0.
  void add(std::size_t keep, std::uint64_t count, std::uint64_t src, std::uint64_t dst) {
    RegionPart part;
    part.lengths.assign(region_.dims(), 1);
    std::copy(region_.lengths.begin() + static_cast<std::ptrdiff_t>(keep), region_.lengths.end(),
              part.lengths.begin() + static_cast<std::ptrdiff_t>(keep));
    part.src_span = spans_[keep];
    if (count > 0) {
      part.lengths[keep - 1] = count;
      part.src_span += (count - 1) * region_.src_strides[keep - 1];
    }
    part.src_offset = src;
    part.dst_offset = dst;
    part.elem_bytes = region_.elem_bytes;
    parts_.push_back(std::move(part));
  }

  void cut_run(std::uint64_t src, std::uint64_t dst) {
    for (std::uint64_t at = 0; at < region_.elem_bytes;) {
      RegionPart part;
      part.lengths.assign(region_.dims(), 1);
      part.elem_bytes = part.src_span = std::min(room(src + at), region_.elem_bytes - at);
      part.src_offset = src + at;
      part.dst_offset = dst + at;
      at += part.elem_bytes;
      parts_.push_back(std::move(part));
    }
  }

  const Region& region_;
  std::uint64_t cell_bytes_;
  std::uint64_t phase_;
  std::vector<std::uint64_t> spans_;  // of dimensions [d, dims)
  std::vector<bool> is_dense_;        // no gap of [d, dims) is too wide
  std::vector<RegionPart> parts_;
};

}  // namespace

Region simplify(const Region& region) {
  std::vector<std::size_t> order;
  for (std::size_t d = 0; d < region.dims(); ++d) {
    if (region.lengths[d] != 1) order.push_back(d);
  }
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return region.src_strides[a] > region.src_strides[b];
  });
  Region out;
  out.elem_bytes = region.elem_bytes;
  for (const std::size_t d : order) {
    const std::uint64_t length = region.lengths[d];
    if (!out.lengths.empty() && out.src_strides.back() == length * region.src_strides[d] &&
        out.dst_strides.back() == length * region.dst_strides[d]) {
      out.lengths.back() *= length;
      out.src_strides.back() = region.src_strides[d];
      out.dst_strides.back() = region.dst_strides[d];
    } else {
      out.lengths.push_back(length);
      out.src_strides.push_back(region.src_strides[d]);
      out.dst_strides.push_back(region.dst_strides[d]);
    }
  }
  if (!out.lengths.empty() && out.src_strides.back() == out.elem_bytes &&
      out.dst_strides.back() == out.elem_bytes) {
    out.elem_bytes *= out.lengths.back();
    out.lengths.pop_back();
    out.src_strides.pop_back();
    out.dst_strides.pop_back();
  }
  return out;
}

std::uint64_t src_span_bytes(const Region& region) {
  return span_bytes(region, region.src_strides);
}
std::uint64_t dst_span_bytes(const Region& region) {
  return span_bytes(region, region.dst_strides);
}

void copy_region(const Region& region, const std::byte* src, std::byte* dst) {
  for (const std::uint64_t length : region.lengths) {
    if (length == 0) return;
  }
  copy_dims(region, 0, src, dst);
}

void gather_range(const Region& region, const std::byte* src, std::uint64_t begin,
                  std::uint64_t end, std::byte* dst) {
  if (begin == end) return;
  DCPX_CHECK(begin % region.elem_bytes == 0 && end % region.elem_bytes == 0,
             "a gather must not cut an element");
  const std::size_t dims = region.dims();
  if (dims == 0) {
    std::memcpy(dst, src, region.elem_bytes);
    return;
  }
  std::vector<std::uint64_t> index(dims);
  std::uint64_t left = (end - begin) / region.elem_bytes;
  for (std::uint64_t rest = begin / region.elem_bytes, d = dims; d-- > 0;) {
    index[d] = rest % region.lengths[d];
    rest /= region.lengths[d];
  }
  while (left > 0) {
    std::uint64_t at = 0;
    for (std::size_t d = 0; d < dims; ++d) at += index[d] * region.src_strides[d];
    const std::size_t inner = dims - 1;
    const std::uint64_t count = std::min(left, region.lengths[inner] - index[inner]);
    if (region.src_strides[inner] == region.elem_bytes) {
      std::memcpy(dst, src + at, count * region.elem_bytes);
    } else {
      copy_row(region.elem_bytes, src + at, region.src_strides[inner], dst, region.elem_bytes,
               count);
    }
    dst += count * region.elem_bytes;
    left -= count;
    index[inner] += count;
    for (std::size_t d = inner; d > 0 && index[d] == region.lengths[d]; --d) {
      index[d] = 0;
      ++index[d - 1];
    }
  }
}

std::vector<RegionPart> split_region(const Region& region, std::uint64_t cell_bytes,
                                     std::uint64_t max_gap_bytes, std::uint64_t src_phase) {
  Splitter splitter(region, cell_bytes, max_gap_bytes, src_phase);
  return splitter.split();
}

}  // namespace dcpx::plan
