// Any bytes: a `.metadata` is declined, or its columns fit each other and its texts lie in it.
#include "unpickled_invariants.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  dcpx::UnpickledColumns columns;
  const auto* bytes = reinterpret_cast<const std::byte*>(data);
  if (dcpx::unpickle_metadata(bytes, size, {1, 2}, &columns) &&
      !check::are_whole(columns, bytes, size)) {
    __builtin_trap();
  }
  return 0;
}
