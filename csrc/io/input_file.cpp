#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <functional>
#include <utility>

#include "common/bytes.h"
#include "io/file.h"
#include "io/system_calls.h"

namespace dcpx::io {
namespace {

// O_NONBLOCK: opening a FIFO that somebody planted must not wait for its other end.
constexpr int kReadFlags = O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY;
constexpr int kDirectFlags = O_RDONLY | O_CLOEXEC | O_DIRECT;

Error bad_path(const std::string& path, const std::string& why) {
  Error error(ErrorCode::kCorruption, "file name '" + path + "' in the metadata " + why);
  error.path = path;
  return error;
}

std::vector<std::string> components(const std::string& path) {
  if (path.empty() || path.size() > 4096) throw bad_path(path, "is empty or too long");
  if (path.front() == '/') throw bad_path(path, "is absolute");
  if (path.find('\0') != std::string::npos) throw bad_path(path, "holds a NUL byte");
  std::vector<std::string> parts;
  for (std::size_t begin = 0; begin <= path.size();) {
    const std::size_t end = std::min(path.find('/', begin), path.size());
    parts.push_back(path.substr(begin, end - begin));
    if (parts.back().empty() || parts.back() == "." || parts.back() == "..") {
      throw bad_path(path, "leaves the checkpoint directory or holds an empty component");
    }
    begin = end + 1;
  }
  return parts;
}

int retry_open(int dir_fd, const std::string& name, int flags) {
  int fd = -1;
  do {
    fd = open_at(dir_fd, name.c_str(), flags, 0);
  } while (fd < 0 && errno == EINTR);
  return fd;
}

// Where the kernel or a container refuses openat2: one O_NOFOLLOW step per component.
UniqueFd open_by_steps(int dir_fd, const std::vector<std::string>& parts) {
  UniqueFd at;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const bool is_last = i + 1 == parts.size();
    const int from = at.is_open() ? at.get() : dir_fd;
    const int flags = is_last ? kReadFlags : (O_PATH | O_CLOEXEC | O_NOFOLLOW);
    UniqueFd next(retry_open(from, parts[i], flags));
    if (!next.is_open()) return next;
    struct stat status{};  // O_PATH opens a link itself: say that it is one
    if (!is_last && io::fstat(next.get(), &status) == 0 && S_ISLNK(status.st_mode)) {
      errno = ELOOP;
      return UniqueFd();
    }
    at = std::move(next);
  }
  return at;
}

}  // namespace

InputFile InputFile::open(int dir_fd, const std::string& dir_path,
                          const std::string& relative_path) {
  const std::vector<std::string> parts = components(relative_path);
  InputFile file;
  file.path_ = dir_path + "/" + relative_path;
  // EAGAIN: a rename somewhere on the system raced with the look-up; rare, so a bound is no loss.
  for (int attempt = 0; attempt < 1000; ++attempt) {
    file.fd_ = UniqueFd(open_beneath(dir_fd, relative_path.c_str(), kReadFlags));
    if (file.fd_.is_open() || (errno != EINTR && errno != EAGAIN)) break;
  }
  if (!file.fd_.is_open() && (errno == ENOSYS || errno == EPERM || errno == EINVAL)) {
    file.fd_ = open_by_steps(dir_fd, parts);
  }
  if (!file.fd_.is_open()) {
    if (errno == ELOOP || errno == EXDEV) {
      Error error(ErrorCode::kCorruption, "'" + file.path_ +
                                              "' is or passes through a symbolic link: refused, "
                                              "it could lead out of the checkpoint");
      error.path = file.path_;
      throw error;
    }
    throw storage_error("open", file.path_, errno);
  }
  struct stat status{};
  while (io::fstat(file.fd_.get(), &status) != 0) {
    if (errno != EINTR) throw storage_error("fstat", file.path_, errno);
  }
  if (!S_ISREG(status.st_mode)) {
    Error error(ErrorCode::kCorruption, "'" + file.path_ + "' is no regular file");
    error.path = file.path_;
    throw error;
  }
  file.size_bytes_ = static_cast<std::uint64_t>(status.st_size);
  file.inode_ = status.st_ino;
  return file;
}

InputFile InputFile::open(const std::shared_ptr<ObjectStore>& store, const std::string& dir_path,
                          const std::string& relative_path) {
  components(relative_path);
  InputFile file;
  file.path_ = dir_path + "/" + relative_path;
  ObjectStore::Object object = store->look(relative_path, kObjectEndBytes);
  DCPX_CHECK(object.end.size() == std::min(kObjectEndBytes, object.size_bytes),
             "the end of an object has another length");
  file.store_ = store;
  file.name_ = relative_path;
  file.size_bytes_ = object.size_bytes;
  file.inode_ = std::hash<std::string>{}(object.tag);
  file.tag_ = std::move(object.tag);
  file.kept_.push_back({object.size_bytes - object.end.size(), std::move(object.end)});
  return file;
}

const std::byte* InputFile::kept(std::uint64_t offset, std::uint64_t nbytes) const noexcept {
  for (const Kept& range : kept_) {
    if (offset >= range.begin && offset - range.begin <= range.bytes.size() &&
        nbytes <= range.bytes.size() - (offset - range.begin))
      return range.bytes.data() + (offset - range.begin);
  }
  return nullptr;
}

void InputFile::keep(std::uint64_t offset, std::uint64_t nbytes, std::uint64_t ahead) {
  if (store_ == nullptr || nbytes == 0 || kept(offset, nbytes) != nullptr) return;
  const std::uint64_t behind = size_bytes_ - std::min(size_bytes_, checked_add(offset, nbytes));
  const std::uint64_t count = nbytes + std::min(ahead, behind);
  const ObjectStore::Bytes found = fetch(offset, count);
  if (kept_.size() > 2) kept_.erase(kept_.begin() + 1);
  kept_.push_back({offset, {found.data, found.data + count}});
}

ObjectStore::Bytes InputFile::fetch(std::uint64_t offset, std::uint64_t nbytes) const {
  if (checked_add(offset, nbytes) > size_bytes_) {
    Error error(ErrorCode::kShortRead, "'" + path_ + "' ends at " + std::to_string(size_bytes_) +
                                           " B, before the range that is read: truncated");
    error.path = path_;
    error.offset = static_cast<std::int64_t>(offset);
    error.nbytes = static_cast<std::int64_t>(nbytes);
    throw error;
  }
  return store_->read(name_, tag_, offset, nbytes);
}

void InputFile::read_at(iovec* parts, int count, std::uint64_t offset, bool is_direct) const {
  if (store_ != nullptr) {
    std::uint64_t nbytes = 0;
    for (int i = 0; i < count; ++i) nbytes += parts[i].iov_len;
    if (nbytes == 0) return;
    ObjectStore::Bytes fetched;
    const std::byte* from = kept(offset, nbytes);
    if (from == nullptr) {
      fetched = fetch(offset, nbytes);
      from = fetched.data;
    }
    for (int i = 0; i < count; ++i) {
      if (parts[i].iov_len > 0) std::memcpy(parts[i].iov_base, from, parts[i].iov_len);
      from += parts[i].iov_len;
    }
    return;
  }
  int fd = is_direct && has_direct() ? direct_fd_.get() : fd_.get();
  while (count > 0) {
    if (parts[0].iov_len == 0) {
      ++parts, --count;
      continue;
    }
    const ssize_t got = io::preadv(fd, parts, count, static_cast<off_t>(offset));
    if (got < 0) {
      if (errno == EINTR) continue;
      // EFAULT: memory that a device maps takes copies, but no direct reads.
      if ((errno == EINVAL || errno == EFAULT) && fd != fd_.get()) {
        fd = fd_.get();
        continue;
      }
      throw storage_error("pread", path_, errno, static_cast<std::int64_t>(offset),
                          static_cast<std::int64_t>(parts[0].iov_len));
    }
    if (got == 0) {
      Error error(ErrorCode::kShortRead, "'" + path_ + "' ends at " + std::to_string(offset) +
                                             " B, before the range that is read: truncated");
      error.path = path_;
      error.offset = static_cast<std::int64_t>(offset);
      error.nbytes = static_cast<std::int64_t>(parts[0].iov_len);
      throw error;
    }
    offset += static_cast<std::uint64_t>(got);
    for (std::size_t left = static_cast<std::size_t>(got); left > 0 && count > 0;) {
      const std::size_t taken = std::min(left, parts[0].iov_len);
      parts[0].iov_base = static_cast<std::byte*>(parts[0].iov_base) + taken;
      parts[0].iov_len -= taken;
      left -= taken;
      if (parts[0].iov_len == 0) ++parts, --count;
    }
  }
}

void InputFile::read_at(std::byte* into, std::uint64_t nbytes, std::uint64_t offset) const {
  iovec part{into, static_cast<std::size_t>(nbytes)};
  read_at(&part, 1, offset);
}

// By the descriptor that is there, and not by name: what lies under the name may have changed.
void InputFile::open_direct() {
  if (has_direct()) return;
  const std::string own = "/proc/self/fd/" + std::to_string(fd_.get());
  direct_fd_ = UniqueFd(open_at(AT_FDCWD, own.c_str(), kDirectFlags, 0));
}

}  // namespace dcpx::io
