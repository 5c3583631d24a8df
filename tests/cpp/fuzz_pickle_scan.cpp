// Any bytes: the scan throws dcpx::Error, or stops at a STOP inside them.
#include "common/error.h"
#include "format/pickle_scan.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  dcpx::PickleLimits limits;
  limits.allow_persid = true;
  try {
    const dcpx::PickleScan scan =
        dcpx::scan_pickle(reinterpret_cast<const std::byte*>(data), size, limits);
    if (scan.stop_bytes == 0 || scan.stop_bytes > size || data[scan.stop_bytes - 1] != '.') {
      __builtin_trap();
    }
  } catch (const dcpx::Error& error) {
    if (error.code() != dcpx::ErrorCode::kCorruption || error.offset < 0) __builtin_trap();
  }
  return 0;
}
