// Any bytes: the parser throws dcpx::Error, or what it returns lies inside the item.
#include <algorithm>

#include "common/error.h"
#include "format/zip_parse.h"
#include "fuzz.h"

namespace {

// Reads from memory.
class MemoryReader : public dcpx::RangeReader {
 public:
  MemoryReader(const std::byte* data, std::size_t nbytes) : data_(data), nbytes_(nbytes) {}

  void read(std::uint64_t offset, std::size_t nbytes, std::byte* into) override {
    if (offset > nbytes_ || nbytes > nbytes_ - offset) __builtin_trap();  // the contract of read()
    std::copy_n(data_ + offset, nbytes, into);
  }

 private:
  const std::byte* data_;
  std::uint64_t nbytes_;
};

bool lies_inside(const dcpx::ParsedTensor& tensor, std::uint64_t item_bytes) {
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

}  // namespace

FUZZ(zip_parse) {
  MemoryReader reader(reinterpret_cast<const std::byte*>(data), size);
  try {
    dcpx::ParsedTensor tensor;
    if (dcpx::parse_zip_item(reader, size, &tensor) == dcpx::ZipShape::kPlainTensor &&
        !lies_inside(tensor, size)) {
      __builtin_trap();
    }
  } catch (const dcpx::Error& error) {
    if (error.code() != dcpx::ErrorCode::kCorruption) __builtin_trap();
  }
}
