// The one seam to the system: every mutating or reading call of the engines goes through here, is
// counted, and can be told to fail. Tests arm it to fail the n-th call, one after another, until
// none is left to fail; unarmed it costs one relaxed load and one increment a call.
#pragma once

#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>

#include <array>
#include <cstdint>
#include <string>

namespace dcpx::io {

enum class Call : unsigned {
  kOpen,
  kPwrite,
  kPread,
  kFallocate,
  kTruncate,
  kFsync,
  kSyncRange,
  kFstat,
  kClose,
  kUnlink,
  kCount,
};

inline constexpr std::size_t kCallKinds = static_cast<std::size_t>(Call::kCount);
const char* call_name(Call call);

// Fails the `nth` call (from 0) made from now on with `sys_errno`; with sys_errno 0 a read or write
// is cut to half its bytes instead. Of a `kind` other than kCount only such calls are counted:
// which call of all is the n-th depends on the workers' turns. Process-wide, for tests only.
// Thread-safe.
void arm_fault(std::int64_t nth, int sys_errno, Call kind = Call::kCount);
void disarm_fault();
// Number of calls by kind since the process started. Thread-safe.
std::array<std::uint64_t, kCallKinds> call_counts();

// As the system calls of the same name; EINTR is left to the caller.
int open_at(int dir_fd, const char* name, int flags, mode_t mode);
// openat2 with RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS | RESOLVE_NO_MAGICLINKS; -1 and ENOSYS where
// the kernel or a seccomp profile refuses it.
int open_beneath(int dir_fd, const char* path, int flags);
ssize_t pwrite(int fd, const void* data, std::size_t nbytes, off_t offset);
ssize_t preadv(int fd, const iovec* parts, int count, off_t offset);
int fallocate(int fd, off_t offset, off_t nbytes);
int truncate(int fd, off_t nbytes);  // ftruncate
int fsync(int fd);
int sync_range(int fd, off_t offset, off_t nbytes, unsigned flags);  // sync_file_range
int fstat(int fd, struct stat* out);
int close(int fd);
int unlink_at(int dir_fd, const char* name);

}  // namespace dcpx::io
