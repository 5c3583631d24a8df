// Memory that nobody has touched yet, taken from the system on pages of the cheaper kind.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace dcpx {

// What 2 MiB of small pages cost, in ns of a thread's CPU time: 1'050'000 to 1'470'000, measured as
// docs/develop/performance.md says. A huge page costs 300'000 where it is at hand, and 3'900'000
// where the system must first move pages about for it, or a hypervisor must find the memory that it
// took from a free one. Which of them it is shows only once some were taken.
constexpr std::uint64_t kSmallPagesNs = 1'200'000;

// The first touch of one mapping, by several threads. It begins on huge pages, where the mapping is
// advised to have them, and goes on on small ones once those have cost more than `small_pages_ns`
// for 2 MiB, on the mean. What was taken stays, and in the end the whole is advised to be huge
// again: the kernel then joins the small pages in the background (khugepaged). Thread-safe; lives
// shorter than the mapping.
class FirstTouch {
 public:
  // `huge_bytes` of the mapping from `data` on are advised to be huge.
  FirstTouch(std::byte* data, std::uint64_t huge_bytes,
             std::uint64_t small_pages_ns = kSmallPagesNs) noexcept
      : data_(data), huge_bytes_(huge_bytes), small_pages_ns_(small_pages_ns) {}
  FirstTouch(const FirstTouch&) = delete;
  FirstTouch& operator=(const FirstTouch&) = delete;
  ~FirstTouch();

  // Takes the pages of [begin, end), in bytes from `data` on, and changes no byte of them. False
  // where the system has no call for that (before Linux 5.14, or in some containers): the memory
  // is then taken by whoever writes to it. Throws Error(kStorage) where there is not enough.
  bool take(std::uint64_t begin, std::uint64_t end);

  bool is_small() const noexcept { return is_small_.load(std::memory_order_relaxed); }
  // Bytes that `take` has taken, again where they were there already.
  std::uint64_t taken_bytes() const noexcept {
    return taken_bytes_.load(std::memory_order_relaxed);
  }

 private:
  void note(std::uint64_t spent_ns, std::uint64_t nbytes) noexcept;

  std::byte* data_;
  std::uint64_t huge_bytes_;
  std::uint64_t small_pages_ns_;
  std::atomic<std::uint64_t> taken_bytes_{0};
  std::atomic<std::uint64_t> tried_bytes_{0};  // on huge pages, and what they cost
  std::atomic<std::uint64_t> spent_ns_{0};
  std::atomic<bool> is_small_{false};
};

}  // namespace dcpx
