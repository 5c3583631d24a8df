// How the process has used the device, for reports and for tests that ask for exact counts.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace dcpx::device {

enum class Count : std::size_t {
  kCopies1d,      // calls of cuMemcpyDtoHAsync and cuMemcpyHtoDAsync
  kCopies2d,      // calls of cuMemcpy2DAsync
  kBatches,       // calls of cuMemcpyBatchAsync
  kBatchPieces,   // copies in them
  kKernels,       // launches of the pack kernel
  kKernelPieces,  // pieces and boxes in them
  kBytesToHost,   // of all of these
  kBytesToDevice,
  kEventsRecorded,  // on callers' streams and on own ones
  kNumber,
};
constexpr std::size_t kCounts = static_cast<std::size_t>(Count::kNumber);

const char* count_name(Count count) noexcept;  // "copies_1d"
void add_count(Count count, std::uint64_t by = 1) noexcept;
// All of them, since the process began or since they were cleared.
std::array<std::uint64_t, kCounts> counters() noexcept;
void clear_counters() noexcept;

}  // namespace dcpx::device
