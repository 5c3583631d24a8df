// An owned file descriptor. close() reports what close(2) says; the destructor cannot.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "common/standard_fds.h"

namespace dcpx {

class UniqueFd {  // Movable, not copyable. Not thread-safe.
 public:
  UniqueFd() = default;
  explicit UniqueFd(int fd) : fd_(fd) {}
  UniqueFd(UniqueFd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept {
    if (this != &other) {
      reset();
      fd_ = std::exchange(other.fd_, -1);
    }
    return *this;
  }
  UniqueFd(const UniqueFd&) = delete;
  UniqueFd& operator=(const UniqueFd&) = delete;
  ~UniqueFd() { reset(); }

  // Another descriptor of the same open file, not inherited; where it is not open, errno says why.
  static UniqueFd copy_of(int fd) noexcept {
    int copy = -1;
    do {
      copy = ::fcntl(fd, F_DUPFD_CLOEXEC, kStandardFds);
    } while (copy < 0 && errno == EINTR);
    return UniqueFd(copy);
  }

  int get() const noexcept { return fd_; }
  bool is_open() const noexcept { return fd_ >= 0; }
  int release() noexcept { return std::exchange(fd_, -1); }

 private:
  void reset() noexcept {
    if (fd_ >= 0) ::close(fd_);  // reached on error paths only: the first error is already known
    fd_ = -1;
  }
  int fd_ = -1;
};

}  // namespace dcpx
