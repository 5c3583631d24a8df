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

std::vector<RegionPart> split_region(const Region& region, std::uint64_t max_span_bytes,
                                     std::uint64_t max_gap_bytes, std::uint64_t src_phase) {
  const std::size_t dims = region.dims();
  // Inner dimensions [keep, dims) go whole into a part; dimension keep - 1 is cut into pieces of
  // `step` indices; everything further out is enumerated.
  std::size_t keep = dims;
  std::uint64_t span = region.elem_bytes;
  std::uint64_t step = 1;
  while (keep > 0) {
    const std::size_t d = keep - 1;
    const bool is_near = region.src_strides[d] <= checked_add(span, max_gap_bytes);
    const std::uint64_t whole =
        checked_add(span, checked_mul(region.lengths[d] - 1, region.src_strides[d]));
    if (!is_near) break;
    if (whole > max_span_bytes) {
      if (span < max_span_bytes && region.src_strides[d] > 0) {
        step = (max_span_bytes - span) / region.src_strides[d] + 1;
      }
      break;
    }
    span = whole;
    --keep;
  }

  std::vector<RegionPart> parts;
  std::vector<std::uint64_t> index(keep, 0);
  const std::vector<std::uint64_t> inner(region.lengths.begin() + static_cast<std::ptrdiff_t>(keep),
                                         region.lengths.end());
  while (true) {
    RegionPart part;
    part.elem_bytes = region.elem_bytes;
    bool is_one_run = keep == dims;
    part.lengths.assign(keep, 1);
    part.lengths.insert(part.lengths.end(), inner.begin(), inner.end());
    part.src_span = span;
    for (std::size_t d = 0; d < keep; ++d) {
      part.src_offset += index[d] * region.src_strides[d];
      part.dst_offset += index[d] * region.dst_strides[d];
    }
    if (keep > 0) {
      const std::size_t d = keep - 1;
      const std::uint64_t count = std::min(step, region.lengths[d] - index[d]);
      part.lengths[d] = count;
      is_one_run = is_one_run && count == 1;
      part.src_span = span + (count - 1) * region.src_strides[d];
      index[d] += count;
    }
    if (is_one_run &&
        (src_phase + part.src_offset) % max_span_bytes + region.elem_bytes > max_span_bytes) {
      // A run that crosses the grid is cut there, so that no block of the file is read twice.
      for (std::uint64_t at = 0; at < region.elem_bytes;) {
        RegionPart piece = part;
        const std::uint64_t to_grid =
            max_span_bytes - (src_phase + part.src_offset + at) % max_span_bytes;
        piece.elem_bytes = std::min(to_grid, region.elem_bytes - at);
        piece.src_span = piece.elem_bytes;
        piece.src_offset += at;
        piece.dst_offset += at;
        at += piece.elem_bytes;
        parts.push_back(std::move(piece));
      }
    } else {
      parts.push_back(std::move(part));
    }
    std::size_t d = keep;
    while (d > 0 && index[d - 1] == region.lengths[d - 1]) {
      if (--d == 0) return parts;
      index[d] = 0;
      ++index[d - 1];
    }
    if (keep == 0) return parts;
  }
}

}  // namespace dcpx::plan
