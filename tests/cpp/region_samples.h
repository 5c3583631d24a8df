// Random regions, and what a region means, byte by byte.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <utility>
#include <vector>

#include "plan/region_copy.h"
#include "random_source.h"

// Strides of a box without overlap: dimensions in random order, each with random room behind it.
inline std::vector<std::uint64_t> disjoint_strides(const std::vector<std::uint64_t>& lengths,
                                                   std::uint64_t elem_bytes, RandomSource& random) {
  std::vector<std::size_t> order(lengths.size());
  std::iota(order.begin(), order.end(), 0);
  if (random.chance(2)) std::shuffle(order.begin(), order.end(), random.engine());
  std::vector<std::uint64_t> strides(lengths.size());
  std::uint64_t next = elem_bytes;
  for (std::size_t i = order.size(); i-- > 0;) {
    if (random.chance(3)) next += random.below(24);
    strides[order[i]] = next;
    next *= std::max<std::uint64_t>(lengths[order[i]], 1);
  }
  return strides;
}

// 0 to 5 dimensions of 1 to 6 (0 where `may_be_empty`); sources permuted, padded, overlapping or
// expanded (stride 0), destinations permuted or padded.
inline dcpx::plan::Region random_region(RandomSource& random, bool may_be_empty = false) {
  dcpx::plan::Region region;
  region.elem_bytes = random.pick<std::uint64_t>({1, 2, 4, 8, 16, 3});
  const std::uint64_t dims = random.below(6);
  std::uint64_t numel = 1;
  for (std::uint64_t d = 0; d < dims; ++d) {
    std::uint64_t length = random.between(may_be_empty && random.chance(3) ? 0 : 1, 6);
    if (numel * length > 600) length = 1;
    numel *= length;
    region.lengths.push_back(length);
  }
  region.src_strides = disjoint_strides(region.lengths, region.elem_bytes, random);
  region.dst_strides = disjoint_strides(region.lengths, region.elem_bytes, random);
  for (std::uint64_t& stride : region.src_strides) {
    if (random.chance(10)) stride = 0;
    if (random.chance(20)) stride = random.below(40);
  }
  return region;
}

using BytePairs = std::vector<std::pair<std::uint64_t, std::uint64_t>>;

// Appends (destination byte, source byte) of every byte that the copy moves.
inline void append_pairs(const dcpx::plan::Region& region, std::uint64_t src, std::uint64_t dst,
                         BytePairs& pairs, std::size_t dim = 0) {
  if (dim == region.dims()) {
    for (std::uint64_t b = 0; b < region.elem_bytes; ++b) pairs.emplace_back(dst + b, src + b);
    return;
  }
  for (std::uint64_t i = 0; i < region.lengths[dim]; ++i) {
    append_pairs(region, src + i * region.src_strides[dim], dst + i * region.dst_strides[dim],
                 pairs, dim + 1);
  }
}

inline BytePairs sorted_pairs(const dcpx::plan::Region& region) {
  BytePairs pairs;
  append_pairs(region, 0, 0, pairs);
  std::sort(pairs.begin(), pairs.end());
  return pairs;
}
