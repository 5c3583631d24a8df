// What a snapshot takes of one tensor.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "plan/region_copy.h"

namespace dcpx::engine {

// A tensor. Dense ones, whose elements fill one run of memory in any order, are copied as they lie;
// others are gathered in C order.
struct SnapshotRow {
  // Null: only its place is wanted. An address that the CPU may not follow where `device` >= 0.
  const std::byte* source = nullptr;
  int device = -1;  // the CUDA ordinal of the source's memory; -1: host memory
  std::uint64_t nbytes = 0;
  std::uint64_t elem_bytes = 1;
  std::vector<std::int64_t> sizes;
  std::vector<std::int64_t> strides;  // elements; of C order where it is gathered
  bool is_dense = true;
  plan::Region gather;            // of the source, where it is not dense; not simplified
  std::uint64_t offset = 0;       // in the arena
  std::uint64_t copied_with = 0;  // the row whose bytes these are: itself, or one before it
};

}  // namespace dcpx::engine
