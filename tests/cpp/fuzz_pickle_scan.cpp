// Any bytes: the scan throws dcpx::Error, or stops at a STOP inside them.
#include "common/error.h"
#include "format/pickle_scan.h"
#include "fuzz.h"

FUZZ(pickle_scan) {
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
}

// Each one with what may follow it, and with less.
TEST(pickle_scan_of_every_single_opcode_stays_inside) {
  for (unsigned op = 0; op < 256; ++op) {
    for (std::size_t nbytes = 0; nbytes < 12; ++nbytes) {
      for (const unsigned fill : {0U, 0xFFU, unsigned{'\n'}, unsigned{'1'}}) {
        std::vector<std::uint8_t> pickle(1 + nbytes, static_cast<std::uint8_t>(fill));
        pickle[0] = static_cast<std::uint8_t>(op);
        fuzz_pickle_scan(pickle.data(), pickle.size());
      }
    }
  }
}

TEST(pickle_scan_holds_the_limit_of_the_stack_to_the_last_unit) {
  dcpx::PickleLimits limits;
  limits.max_stack = 2;
  const std::byte three[] = {std::byte{'N'}, std::byte{'N'}, std::byte{'N'}, std::byte{'.'}};
  CHECK_EQ(dcpx::scan_pickle(three + 1, 3, limits).stop_bytes, 3U);
  CHECK_THROWS(dcpx::scan_pickle(three, 4, limits), dcpx::ErrorCode::kCorruption);
}
