#include "common/first_touch.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <ctime>

#include "common/bytes.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // Linux 5.14; older C libraries do not name it
#endif

namespace dcpx {
namespace {

constexpr std::uint64_t kHugePageBytes = 2 << 20;
constexpr std::uint64_t kTriedBytes = 8 << 20;  // on huge pages, before their cost is believed

// Of this thread alone: waiting for a core says nothing about pages.
std::uint64_t cpu_ns() noexcept {
  struct ::timespec now{};
  if (::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now) != 0) return 0;
  return static_cast<std::uint64_t>(now.tv_sec) * 1'000'000'000U +
         static_cast<std::uint64_t>(now.tv_nsec);
}

}  // namespace

FirstTouch::~FirstTouch() {
  // Advice: where it is refused, the pages stay small.
  if (is_small()) ::madvise(data_, static_cast<std::size_t>(huge_bytes_), MADV_HUGEPAGE);
}

bool FirstTouch::take(std::uint64_t begin, std::uint64_t end) {
  begin = align_down(begin, system_page_bytes());
  while (begin < end) {
    const bool is_tried = !is_small() && begin < huge_bytes_;
    const std::uint64_t next =
        is_tried ? std::min(end, align_down(begin, kHugePageBytes) + kHugePageBytes) : end;
    const std::uint64_t before = is_tried ? cpu_ns() : 0;
    if (::madvise(data_ + begin, static_cast<std::size_t>(next - begin), MADV_POPULATE_WRITE) !=
        0) {
      if (errno == EINVAL || errno == ENOSYS || errno == EPERM) return false;
      throw storage_error("madvise", "dcpx-arena", errno, static_cast<std::int64_t>(begin),
                          static_cast<std::int64_t>(next - begin));
    }
    taken_bytes_.fetch_add(next - begin, std::memory_order_relaxed);
    if (is_tried) note(cpu_ns() - before, next - begin);
    begin = next;
  }
  return true;
}

void FirstTouch::note(std::uint64_t spent_ns, std::uint64_t nbytes) noexcept {
  const std::uint64_t spent = spent_ns_.fetch_add(spent_ns, std::memory_order_relaxed) + spent_ns;
  const std::uint64_t tried = tried_bytes_.fetch_add(nbytes, std::memory_order_relaxed) + nbytes;
  if (tried < kTriedBytes || spent / (tried / (kHugePageBytes / 2)) < small_pages_ns_ / 2) return;
  if (is_small_.exchange(true, std::memory_order_relaxed)) return;
  // Of pages that are still to come. Where it is refused, they are huge as those before.
  ::madvise(data_, static_cast<std::size_t>(huge_bytes_), MADV_NOHUGEPAGE);
}

}  // namespace dcpx
