// Whether memory lies on huge pages: what decides whether a direct write takes it where it lies.
//
// The device is given physical pages. Small ones lie scattered, so that a direct write from them
// falls apart after some 250 pieces of 4 KiB, while a huge page is one piece. Linux says which it
// is since 6.7 (ioctl PAGEMAP_SCAN on /proc/self/pagemap, no privilege needed); before, and where
// /proc or the call is missing or forbidden, the answer is no, and the memory is copied. An answer
// costs 5 us, and the first one 55: a tensor is asked about once, by one page in its midst.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/unique_fd.h"

namespace dcpx::io {

class HugePages {  // Not thread-safe.
 public:
  // Whether the middle of [data, data + nbytes) lies on a huge page, and so, most likely, all of it
  // but its ends. False where the system cannot say. Reads no byte of it.
  bool hold(const std::byte* data, std::uint64_t nbytes) noexcept;

 private:
  UniqueFd pagemap_;  // opened by the first question
  bool is_refused_ = false;
};

}  // namespace dcpx::io
