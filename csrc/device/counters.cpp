#include "device/counters.h"

namespace dcpx::device {
namespace {

std::array<std::atomic<std::uint64_t>, kCounts> counts{};

constexpr std::array<const char*, kCounts> kNames = {
    "copies_1d",     "copies_2d",     "batches",         "batch_pieces",    "kernels",
    "kernel_pieces", "bytes_to_host", "bytes_to_device", "events_recorded",
};

}  // namespace

const char* count_name(Count count) noexcept { return kNames[static_cast<std::size_t>(count)]; }

void add_count(Count count, std::uint64_t by) noexcept {
  counts[static_cast<std::size_t>(count)].fetch_add(by, std::memory_order_relaxed);
}

std::array<std::uint64_t, kCounts> counters() noexcept {
  std::array<std::uint64_t, kCounts> out{};
  for (std::size_t i = 0; i < kCounts; ++i) out[i] = counts[i].load(std::memory_order_relaxed);
  return out;
}

void clear_counters() noexcept {
  for (auto& count : counts) count.store(0, std::memory_order_relaxed);
}

}  // namespace dcpx::device
