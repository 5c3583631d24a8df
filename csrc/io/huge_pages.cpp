#include "io/huge_pages.h"

#include <fcntl.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "common/bytes.h"

namespace dcpx::io {
namespace {

// As <linux/fs.h> of Linux 6.7 and later has them; older headers lack them.
constexpr std::uint64_t kPageIsHuge = 1 << 6;
struct PageRegion {
  std::uint64_t start;
  std::uint64_t end;
  std::uint64_t categories;
};
struct PagemapScan {
  std::uint64_t size;
  std::uint64_t flags;
  std::uint64_t start;
  std::uint64_t end;
  std::uint64_t walk_end;
  std::uint64_t vec;
  std::uint64_t vec_len;
  std::uint64_t max_pages;
  std::uint64_t category_inverted;
  std::uint64_t category_mask;
  std::uint64_t category_anyof_mask;
  std::uint64_t return_mask;
};
constexpr unsigned long kPagemapScan = _IOWR('f', 16, PagemapScan);

}  // namespace

bool HugePages::hold(const std::byte* data, std::uint64_t nbytes) noexcept {
  if (!pagemap_.is_open()) {
    if (is_refused_) return false;
    pagemap_ = UniqueFd(::open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC));
    is_refused_ = !pagemap_.is_open();
    if (is_refused_) return false;
  }
  const std::uint64_t middle = reinterpret_cast<std::uintptr_t>(data) + nbytes / 2;
  const auto page_bytes = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  PageRegion found{};
  PagemapScan scan{};
  scan.size = sizeof(scan);
  scan.start = align_down(middle, page_bytes);
  scan.end = scan.start + page_bytes;
  scan.vec = reinterpret_cast<std::uintptr_t>(&found);
  scan.vec_len = 1;
  scan.category_mask = kPageIsHuge;
  scan.return_mask = kPageIsHuge;
  return ::ioctl(pagemap_.get(), kPagemapScan, &scan) == 1;  // one range of huge pages was found
}

}  // namespace dcpx::io
