// The one error type of the C++ side. `bind` maps its code to a Python class and its fields to
// attributes (docs/reference/errors.md, "From C++"); nothing else in csrc knows Python's errors.
#pragma once

#include <cstdint>
#include <exception>
#include <string>
#include <string_view>

namespace dcpx {

enum class ErrorCode {
  kPlan,         // PlanError: items, regions or lengths that contradict each other
  kStorage,      // StorageError: a system call failed; `sys_errno` says how
  kShortRead,    // ShortReadError: the file ended before the range did
  kCorruption,   // CorruptionError: the bytes are not what was written
  kUnsupported,  // UnsupportedError: valid, but not served by this build
  kStaging,      // StagingError: a copy between host and device memory failed, or its driver
};

// What went wrong, in words and in numbers. Copyable, so that the first error of several workers
// can be kept and thrown again by the thread that waits for them.
class Error : public std::exception {
 public:
  Error(ErrorCode code, std::string message) : code_(code), message_(std::move(message)) {}

  const char* what() const noexcept override { return message_.c_str(); }
  ErrorCode code() const noexcept { return code_; }

  // Fields that the Python class carries as attributes; -1 or empty where they do not apply.
  int sys_errno = 0;
  std::string path;
  std::int64_t offset = -1;  // bytes from the start of the file
  std::int64_t nbytes = -1;
  std::string fqn;
  std::string expected;
  std::string found;

 private:
  ErrorCode code_;
  std::string message_;
};

// "pwrite 8388608 B at offset 4096 of 'name': No space left on device". `offset` and `nbytes`
// are left out of the text where they are negative.
[[nodiscard]] Error storage_error(std::string_view verb, std::string_view path, int sys_errno,
                                  std::int64_t offset = -1, std::int64_t nbytes = -1);

// The bytes at [offset, offset + nbytes) of `path` are not what was written.
[[nodiscard]] Error corruption_error(std::string_view path, std::int64_t offset,
                                     std::int64_t nbytes, std::string_view what,
                                     std::string_view expected = {}, std::string_view found = {});

[[noreturn]] void throw_check_failed(const char* condition, const char* file, int line,
                                     const std::string& message);

}  // namespace dcpx

// An invariant of the program itself. Always compiled: CPython extensions are built with
// -DNDEBUG, which would drop assert().
#define DCPX_CHECK(condition, message)                                                       \
  do {                                                                                       \
    if (!(condition)) ::dcpx::throw_check_failed(#condition, __FILE__, __LINE__, (message)); \
  } while (false)
