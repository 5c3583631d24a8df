// An owned file descriptor. close() reports what close(2) says; the destructor cannot.
#pragma once

#include <unistd.h>

#include <utility>

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
