// Any bytes: the parser throws dcpx::Error, or what it returns lies inside the item.
#include "zip_invariants.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
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
  return 0;
}
