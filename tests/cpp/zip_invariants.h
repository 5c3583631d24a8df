// What must hold for whatever the zip parser returns without throwing, for tests and fuzzers.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "format/zip_parse.h"

// Reads from memory, and counts the reads.
class MemoryReader : public dcpx::RangeReader {
 public:
  MemoryReader(const std::byte* data, std::size_t nbytes) : data_(data), nbytes_(nbytes) {}
  explicit MemoryReader(const std::vector<std::byte>& bytes)
      : MemoryReader(bytes.data(), bytes.size()) {}

  void read(std::uint64_t offset, std::size_t nbytes, std::byte* into) override {
    ++reads;
    if (offset > nbytes_ || nbytes > nbytes_ - offset) __builtin_trap();  // the contract of read()
    std::copy_n(data_ + offset, nbytes, into);
  }

  int reads = 0;

 private:
  const std::byte* data_;
  std::uint64_t nbytes_;
};

inline bool lies_inside(const dcpx::ParsedTensor& tensor, std::uint64_t item_bytes) {
  if (tensor.payload_offset > item_bytes ||
      tensor.payload_bytes > item_bytes - tensor.payload_offset ||
      tensor.sizes.size() != tensor.strides.size() || tensor.storage_offset < 0) {
    return false;
  }
  unsigned __int128 last = static_cast<std::uint64_t>(tensor.storage_offset);
  bool is_empty = false;
  for (std::size_t dim = 0; dim < tensor.sizes.size(); ++dim) {
    if (tensor.sizes[dim] < 0 || tensor.strides[dim] < 0) return false;
    if (tensor.sizes[dim] == 0) {
      is_empty = true;
      continue;
    }
    last += static_cast<unsigned __int128>(tensor.sizes[dim] - 1) *
            static_cast<std::uint64_t>(tensor.strides[dim]);
  }
  return is_empty || (last + 1) * tensor.elem_bytes <= tensor.payload_bytes;
}
