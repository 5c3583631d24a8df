// Whether a range of a file is in the page cache: what decides between buffered and direct reads.
// And whether it is on the disk at all.
#pragma once

#include <cstdint>

namespace dcpx::io {

// Fraction of [offset, offset + nbytes) that is resident, in [0, 1]; 1 where the system cannot say
// (buffered reads are then the safe choice). Cheap: no data is touched.
double resident_fraction(int fd, std::uint64_t offset, std::uint64_t nbytes);

// Whether nothing was ever written to some part of [offset, end) of a file; false where the system
// cannot say. Moves the descriptor's position.
bool has_hole(int fd, std::uint64_t offset, std::uint64_t end);

}  // namespace dcpx::io
