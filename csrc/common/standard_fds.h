// Descriptors 0 to 2 are stdin, stdout and stderr to every library, even where the process was
// started without them: what is printed would go into the file that got such a number.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>

namespace dcpx {

constexpr int kStandardFds = 3;

// Returns the open file as a descriptor above 2; what is below is unchanged, -1 included, and costs
// nothing. A file that got 0, 1 or 2 moves, and /dev/null takes those that are free, for good: so
// the next file gets none of them, and nobody writes into this one before it has moved.
// `is_new`: the file was made by this open, so that what was printed into it meanwhile can go.
inline int above_standard_fds(int fd, bool is_new) noexcept {
  if (fd < 0 || fd >= kStandardFds) return fd;
  const int moved = ::fcntl(fd, F_DUPFD_CLOEXEC, kStandardFds);
  const int why = errno;
  int null = ::open("/dev/null", O_RDWR | O_CLOEXEC);
  if (null < 0 || ::dup3(null, fd, O_CLOEXEC) < 0) ::close(fd);
  while (null >= 0 && null < kStandardFds) null = ::open("/dev/null", O_RDWR | O_CLOEXEC);
  if (null >= 0) ::close(null);
  if (moved >= 0 && is_new) {  // by a device or a FIFO refused, which keeps nothing
    [[maybe_unused]] const bool is_empty =
        ::ftruncate(moved, 0) == 0 && ::lseek(moved, 0, SEEK_SET) == 0;
  }
  errno = why;
  return moved;
}

}  // namespace dcpx
