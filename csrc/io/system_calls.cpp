#include "io/system_calls.h"

#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>
#if __has_include(<linux/openat2.h>)  // Linux 5.6
#include <linux/openat2.h>
#endif

#include <atomic>
#include <cerrno>

#include "common/standard_fds.h"

namespace dcpx::io {
namespace {

std::array<std::atomic<std::uint64_t>, kCallKinds> g_counts{};
std::atomic<bool> g_is_armed{false};
std::atomic<std::int64_t> g_calls_left{0};
std::atomic<int> g_errno{0};
std::atomic<Call> g_kind{Call::kCount};

enum class Verdict { kGo, kFail, kShorten };

Verdict before(Call call) {
  g_counts[static_cast<std::size_t>(call)].fetch_add(1, std::memory_order_relaxed);
  if (!g_is_armed.load(std::memory_order_relaxed)) return Verdict::kGo;
  const Call kind = g_kind.load(std::memory_order_relaxed);
  if (kind != Call::kCount && kind != call) return Verdict::kGo;
  if (g_calls_left.fetch_sub(1, std::memory_order_acq_rel) != 0) return Verdict::kGo;
  const int sys_errno = g_errno.load(std::memory_order_acquire);
  if (sys_errno == 0) return Verdict::kShorten;
  errno = sys_errno;
  return Verdict::kFail;
}

}  // namespace

const char* call_name(Call call) {
  switch (call) {
    case Call::kOpen:
      return "open";
    case Call::kPwrite:
      return "pwrite";
    case Call::kPread:
      return "pread";
    case Call::kFallocate:
      return "fallocate";
    case Call::kTruncate:
      return "ftruncate";
    case Call::kFsync:
      return "fsync";
    case Call::kSyncRange:
      return "sync_file_range";
    case Call::kFstat:
      return "fstat";
    case Call::kClose:
      return "close";
    case Call::kUnlink:
      return "unlink";
    case Call::kCount:
      break;
  }
  return "unknown";
}

void arm_fault(std::int64_t nth, int sys_errno, Call kind) {
  g_kind.store(kind, std::memory_order_relaxed);
  g_errno.store(sys_errno, std::memory_order_release);
  g_calls_left.store(nth, std::memory_order_release);
  g_is_armed.store(true, std::memory_order_release);
}

void disarm_fault() { g_is_armed.store(false, std::memory_order_release); }

std::array<std::uint64_t, kCallKinds> call_counts() {
  std::array<std::uint64_t, kCallKinds> counts{};
  for (std::size_t i = 0; i < kCallKinds; ++i)
    counts[i] = g_counts[i].load(std::memory_order_relaxed);
  return counts;
}

int open_at(int dir_fd, const char* name, int flags, mode_t mode) {
  if (before(Call::kOpen) == Verdict::kFail) return -1;
  return above_standard_fds(::openat(dir_fd, name, flags, mode), (flags & O_EXCL) != 0);
}

int open_beneath(int dir_fd, const char* path, int flags) {
#if defined(SYS_openat2) && defined(RESOLVE_BENEATH)
  if (before(Call::kOpen) == Verdict::kFail) return -1;
  open_how how{};
  how.flags = static_cast<std::uint64_t>(static_cast<unsigned>(flags));
  how.resolve = RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS | RESOLVE_NO_MAGICLINKS;
  const long fd = ::syscall(SYS_openat2, dir_fd, path, &how, sizeof(how));
  return above_standard_fds(static_cast<int>(fd), false);
#else
  (void)dir_fd, (void)path, (void)flags;
  errno = ENOSYS;
  return -1;
#endif
}

ssize_t pwrite(int fd, const void* data, std::size_t nbytes, off_t offset) {
  const Verdict verdict = before(Call::kPwrite);
  if (verdict == Verdict::kFail) return -1;
  if (verdict == Verdict::kShorten && nbytes > 8192) nbytes = nbytes / 2 / 4096 * 4096;
  return ::pwrite(fd, data, nbytes, offset);
}

ssize_t preadv(int fd, const iovec* parts, int count, off_t offset) {
  const Verdict verdict = before(Call::kPread);
  if (verdict == Verdict::kFail) return -1;
  if (verdict == Verdict::kShorten) {
    iovec first = parts[0];
    if (first.iov_len > 8192) first.iov_len = first.iov_len / 2 / 4096 * 4096;
    return ::preadv(fd, &first, 1, offset);
  }
  return ::preadv(fd, parts, count, offset);
}

int fallocate(int fd, off_t offset, off_t nbytes) {
  if (before(Call::kFallocate) == Verdict::kFail) return -1;
  return ::fallocate(fd, 0, offset, nbytes);
}

int truncate(int fd, off_t nbytes) {
  if (before(Call::kTruncate) == Verdict::kFail) return -1;
  return ::ftruncate(fd, nbytes);
}

int fsync(int fd) {
  if (before(Call::kFsync) == Verdict::kFail) return -1;
  return ::fsync(fd);
}

int sync_range(int fd, off_t offset, off_t nbytes, unsigned flags) {
  if (before(Call::kSyncRange) == Verdict::kFail) return -1;
  return ::sync_file_range(fd, offset, nbytes, flags);
}

int fstat(int fd, struct stat* out) {
  if (before(Call::kFstat) == Verdict::kFail) return -1;
  return ::fstat(fd, out);
}

int close(int fd) {
  if (before(Call::kClose) == Verdict::kFail) {
    const int sys_errno = errno;
    ::close(fd);  // as Linux does: the descriptor is gone even where close() reports an error
    errno = sys_errno;
    return -1;
  }
  return ::close(fd);
}

int unlink_at(int dir_fd, const char* name) {
  if (before(Call::kUnlink) == Verdict::kFail) return -1;
  return ::unlinkat(dir_fd, name, 0);
}

}  // namespace dcpx::io
