#include "io/page_cache.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <vector>

namespace dcpx::io {
namespace {

#ifdef SYS_cachestat
constexpr long kCachestat = SYS_cachestat;
#else
constexpr long kCachestat = 451;  // the same number on x86-64 and aarch64; Linux 6.5 and later
#endif

struct CachestatRange {
  std::uint64_t offset;
  std::uint64_t nbytes;
};
struct Cachestat {
  std::uint64_t cached;
  std::uint64_t dirty;
  std::uint64_t writeback;
  std::uint64_t evicted;
  std::uint64_t recently_evicted;
};

// Pages of 1 MiB: what mincore() is asked at a time.
constexpr std::uint64_t kMaxAtOnce = 256;

// Before Linux 6.5: a mapping that is never touched, and asked about its pages.
double sampled_fraction(int fd, std::uint64_t offset, std::uint64_t nbytes) {
  const auto page = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  const std::uint64_t begin = offset / page * page;
  const auto length = static_cast<std::size_t>(offset + nbytes - begin);
  void* memory = ::mmap(nullptr, length, PROT_READ, MAP_SHARED, fd, static_cast<off_t>(begin));
  if (memory == MAP_FAILED) return 1.0;
  const std::uint64_t pages = (length + page - 1) / page;
  // Short ranges in one call, of long ones a sample.
  const std::uint64_t at_once = pages <= kMaxAtOnce ? pages : 1;
  const std::uint64_t step = pages <= kMaxAtOnce ? pages : pages / 64;
  unsigned char state[kMaxAtOnce];
  std::uint64_t asked = 0;
  std::uint64_t resident = 0;
  for (std::uint64_t at = 0; at < pages; at += step) {
    if (::mincore(static_cast<char*>(memory) + at * page, static_cast<std::size_t>(at_once * page),
                  state) != 0) {
      continue;
    }
    asked += at_once;
    for (std::uint64_t i = 0; i < at_once; ++i) resident += state[i] & 1;
  }
  ::munmap(memory, length);
  return asked == 0 ? 1.0 : static_cast<double>(resident) / static_cast<double>(asked);
}

}  // namespace

double resident_fraction(int fd, std::uint64_t offset, std::uint64_t nbytes) {
  if (nbytes == 0) return 1.0;
  const CachestatRange range{offset, nbytes};
  Cachestat stat{};
  if (::syscall(kCachestat, fd, &range, &stat, 0u) != 0)
    return sampled_fraction(fd, offset, nbytes);
  const auto page = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  const std::uint64_t pages = (nbytes + page - 1) / page;
  return std::min(1.0, static_cast<double>(stat.cached) / static_cast<double>(pages));
}

bool has_hole(int fd, std::uint64_t offset, std::uint64_t end) {
  const off_t hole = ::lseek(fd, static_cast<off_t>(offset), SEEK_HOLE);
  return hole >= 0 && static_cast<std::uint64_t>(hole) < end;
}

}  // namespace dcpx::io
