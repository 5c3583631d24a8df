#include <fcntl.h>
#include <sys/statvfs.h>
#include <time.h>

#include <algorithm>
#include <cerrno>

#include "common/bytes.h"
#include "io/file.h"
#include "io/system_calls.h"

namespace dcpx::io {
namespace {

// Linux moves at most 0x7ffff000 bytes a call; a smaller bound keeps a cancelled save responsive.
constexpr std::uint64_t kMaxWriteBytes = 64ull << 20;

// What may be said about room, "" where it cures nothing. Not of EIO: where a thin volume has no
// more, or a server fails, what is free here says nothing. The same as in storage/room.py.
// `beside` is anything in the file system; `nbytes` is negative where nobody knows; `held_bytes` of
// them are reserved already and count as room.
std::string room_text(int sys_errno, const std::string& beside, std::int64_t nbytes,
                      std::uint64_t held_bytes) {
  if (sys_errno == EDQUOT)
    return "a quota of the user, the group, the project or the directory is used up";
  struct statvfs fs{};
  if ((sys_errno != ENOSPC && sys_errno != EFBIG) || ::statvfs(beside.c_str(), &fs) != 0) return "";
  const std::uint64_t free_bytes =
      held_bytes + static_cast<std::uint64_t>(fs.f_bavail) * fs.f_frsize;
  const bool is_elsewhere =
      sys_errno == ENOSPC && nbytes >= 0 && static_cast<std::uint64_t>(nbytes) <= free_bytes;
  return "free " + std::to_string(free_bytes) + " B" +
         (is_elsewhere ? ", so full is a quota, the inodes, or what lies beneath the file system"
                       : "");
}

Error write_error(const char* verb, const std::string& path, int sys_errno,
                  const std::string& beside, std::int64_t offset, std::int64_t nbytes,
                  std::uint64_t held_bytes = 0) {
  const Error error = storage_error(verb, path, sys_errno, offset, nbytes);
  const std::string room = room_text(sys_errno, beside, nbytes, held_bytes);
  if (room.empty()) return error;
  const std::string needed = nbytes < 0 ? "" : "needed " + std::to_string(nbytes) + " B, ";
  Error with_room(ErrorCode::kStorage, std::string(error.what()) + " (" + needed + room +
                                           "; saving over a checkpoint needs room for both)");
  with_room.sys_errno = error.sys_errno;
  with_room.path = error.path;
  with_room.offset = error.offset;
  with_room.nbytes = error.nbytes;
  return with_room;
}

bool is_aligned(const std::byte* data, std::uint64_t nbytes, std::uint64_t offset) {
  return ((reinterpret_cast<std::uintptr_t>(data) | nbytes | offset) & (kDirectAlignment - 1)) == 0;
}

bool set_direct_flag(int fd, bool is_direct) {
  const int flags = ::fcntl(fd, F_GETFL);
  if (flags < 0) return false;
  int failed = 0;
  do {
    failed = ::fcntl(fd, F_SETFL, is_direct ? flags | O_DIRECT : flags & ~O_DIRECT);
  } while (failed != 0 && errno == EINTR);
  return failed == 0;
}

// Opens a name that is new beneath a directory. Where another node has just made that directory,
// this one may have a stale handle of it for a second: then it is opened anew, by its path.
int create_at(int dir_fd, const std::string& dir_path, const char* name, int flags) {
  constexpr long kPausesMs[] = {0, 50, 200, 800, 1500};
  int fd = open_at(dir_fd, name, flags, 0666);
  for (const long pause_ms : kPausesMs) {
    if (fd >= 0 || errno != ESTALE) return fd;
    const timespec pause{pause_ms / 1000, pause_ms % 1000 * 1000000};
    ::nanosleep(&pause, nullptr);
    const UniqueFd anew(open_at(AT_FDCWD, dir_path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0));
    struct stat stale{};
    struct stat found{};
    if (!anew.is_open() || io::fstat(anew.get(), &found) != 0) continue;
    const bool is_known = io::fstat(dir_fd, &stale) == 0;
    errno = ESTALE;
    if (is_known && (stale.st_ino != found.st_ino || stale.st_dev != found.st_dev)) return -1;
    fd = open_at(anew.get(), name, flags, 0666);
  }
  return fd;
}

}  // namespace

OutputFile::OutputFile(OutputFile&& other) noexcept { *this = std::move(other); }

OutputFile& OutputFile::operator=(OutputFile&& other) noexcept {
  fd_ = std::move(other.fd_);
  name_ = std::move(other.name_);
  path_ = std::move(other.path_);
  is_direct_.store(other.is_direct_.load());
  return *this;
}

OutputFile OutputFile::create(int dir_fd, const std::string& dir_path,
                              const std::vector<std::string>& names, bool use_direct) {
  DCPX_CHECK(!names.empty(), "a file needs a name");
  constexpr int kFlags = O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC;
  for (std::size_t i = 0; i < names.size();) {
    const int fd = create_at(dir_fd, dir_path, names[i].c_str(), kFlags);
    if (fd >= 0) {
      OutputFile file;
      file.fd_ = UniqueFd(fd);
      file.name_ = names[i];
      file.path_ = dir_path + "/" + names[i];
      // Not by an open flag: where it is refused, O_CREAT would leave the file behind.
      if (use_direct) file.is_direct_.store(set_direct_flag(fd, true));
      return file;
    }
    if (errno == EINTR) continue;
    if (errno == EEXIST && i + 1 < names.size()) {
      ++i;
      continue;
    }
    throw write_error("create", dir_path + "/" + names[i], errno, dir_path, -1, -1);
  }
  throw storage_error("create", dir_path + "/" + names.back(), EEXIST);
}

OutputFile OutputFile::open(int dir_fd, const std::string& dir_path, const std::string& name,
                            bool use_direct) {
  constexpr int kFlags = O_WRONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK | O_NOCTTY;
  OutputFile file;
  file.name_ = name;
  file.path_ = dir_path + "/" + name;
  for (;;) {
    const int fd = open_at(dir_fd, name.c_str(), kFlags, 0);
    if (fd >= 0) {
      file.fd_ = UniqueFd(fd);
      if (use_direct) file.is_direct_.store(set_direct_flag(fd, true));
      return file;
    }
    if (errno != EINTR) throw storage_error("open", file.path_, errno);
  }
}

bool OutputFile::preallocate(std::uint64_t offset, std::uint64_t nbytes,
                             const std::function<bool()>& is_stopped) {
  for (std::uint64_t held = 0; held < nbytes;) {
    if (is_stopped()) return false;
    const std::uint64_t count = std::min(kReserveBytes, nbytes - held);
    if (io::fallocate(fd_.get(), static_cast<off_t>(offset + held), static_cast<off_t>(count)) ==
        0) {
      held += count;
      continue;
    }
    if (errno == EINTR) continue;
    // EPERM: a container's filter of system calls. Then the room is found while it is written.
    if (errno == EOPNOTSUPP || errno == ENOSYS || errno == EINVAL || errno == EPERM) return true;
    throw write_error("fallocate", path_, errno, path_, static_cast<std::int64_t>(offset),
                      static_cast<std::int64_t>(nbytes), held);
  }
  return true;
}

void OutputFile::grow_to(std::uint64_t nbytes) {
  const auto wanted = static_cast<off_t>(nbytes);
  struct stat status{};
  while (io::fstat(fd_.get(), &status) != 0) {
    if (errno != EINTR) throw write_error("fstat", path_, errno, path_, 0, wanted);
  }
  if (status.st_size >= wanted) return;
  while (io::truncate(fd_.get(), wanted) != 0) {
    if (errno != EINTR) throw write_error("ftruncate", path_, errno, path_, 0, wanted);
  }
}

void OutputFile::write_at(const std::byte* data, std::uint64_t nbytes, std::uint64_t offset) {
  while (nbytes > 0) {
    // As it was before the call: another thread may meet the same refusal and switch it off first.
    const bool was_direct = is_direct();
    if (was_direct && !is_aligned(data, nbytes, offset)) {
      // Only after a short count that ended off the grid: the page cache takes the rest.
      if (!set_direct_flag(fd_.get(), false)) throw storage_error("fcntl", path_, errno);
      is_direct_.store(false);
    }
    const ssize_t written =
        io::pwrite(fd_.get(), data, std::min(nbytes, kMaxWriteBytes), static_cast<off_t>(offset));
    if (written < 0) {
      if (errno == EINTR) continue;
      // EFAULT: memory that a device maps takes copies, but no direct writes.
      const bool is_refusal = errno == EINVAL || errno == EFAULT;
      const int sys_errno = errno;
      if (is_refusal && was_direct && set_direct_flag(fd_.get(), false)) {
        is_direct_.store(false);
        continue;
      }
      throw write_error("pwrite", path_, sys_errno, path_, static_cast<std::int64_t>(offset),
                        static_cast<std::int64_t>(nbytes));
    }
    if (written == 0)
      throw storage_error("pwrite", path_, EIO, static_cast<std::int64_t>(offset),
                          static_cast<std::int64_t>(nbytes));
    data += written;
    nbytes -= static_cast<std::uint64_t>(written);
    offset += static_cast<std::uint64_t>(written);
  }
}

void OutputFile::start_write_back(std::uint64_t offset, std::uint64_t nbytes) {
  sync_range(offset, nbytes, SYNC_FILE_RANGE_WRITE);
}

void OutputFile::wait_write_back(std::uint64_t offset, std::uint64_t nbytes) {
  sync_range(offset, nbytes, SYNC_FILE_RANGE_WAIT_BEFORE);
}

void OutputFile::sync_range(std::uint64_t offset, std::uint64_t nbytes, unsigned flags) {
  while (io::sync_range(fd_.get(), static_cast<off_t>(offset), static_cast<off_t>(nbytes), flags) !=
         0) {
    if (errno == EINTR) continue;
    if (errno == EOPNOTSUPP || errno == ENOSYS || errno == EINVAL || errno == ESPIPE ||
        errno == EPERM)
      return;
    throw write_error("sync_file_range", path_, errno, path_, static_cast<std::int64_t>(offset),
                      static_cast<std::int64_t>(nbytes));
  }
}

void OutputFile::sync() {
  while (io::fsync(fd_.get()) != 0) {
    if (errno == EINTR) continue;
    const int sys_errno = errno;
    struct stat status{};
    const bool is_known = ::fstat(fd_.get(), &status) == 0;
    throw write_error("fsync", path_, sys_errno, path_, 0, is_known ? status.st_size : -1);
  }
}

void OutputFile::close(std::uint64_t expected_bytes) {
  struct stat status{};
  while (io::fstat(fd_.get(), &status) != 0) {
    if (errno != EINTR)
      throw write_error("fstat", path_, errno, path_, 0, static_cast<std::int64_t>(expected_bytes));
  }
  if (static_cast<std::uint64_t>(status.st_size) != expected_bytes) {
    throw storage_error("size check (found " + std::to_string(status.st_size) + " B)", path_, EIO,
                        0, static_cast<std::int64_t>(expected_bytes));
  }
  // Interrupted or not, the descriptor is gone on Linux; what a write lost, sync() has reported.
  if (io::close(fd_.release()) != 0 && errno != EINTR)
    throw write_error("close", path_, errno, path_, 0, static_cast<std::int64_t>(expected_bytes));
}

}  // namespace dcpx::io
