#include "common/error.h"

#include <system_error>

namespace dcpx {

Error storage_error(std::string_view verb, std::string_view path, int sys_errno,
                    std::int64_t offset, std::int64_t nbytes) {
  std::string message(verb);
  if (nbytes >= 0) message += ' ' + std::to_string(nbytes) + " B";
  if (offset >= 0) message += " at offset " + std::to_string(offset);
  if (nbytes >= 0 || offset >= 0) message += " of";
  message += " '" + std::string(path) + "': " + std::generic_category().message(sys_errno);
  Error error(ErrorCode::kStorage, std::move(message));
  error.sys_errno = sys_errno;
  error.path = std::string(path);
  error.offset = offset;
  error.nbytes = nbytes;
  return error;
}

Error corruption_error(std::string_view path, std::int64_t offset, std::int64_t nbytes,
                       std::string_view what, std::string_view expected, std::string_view found) {
  // Unsigned: both numbers may come from a hostile file, and their sum then has no sign to keep.
  const auto end = static_cast<std::uint64_t>(offset) + static_cast<std::uint64_t>(nbytes);
  std::string message = "'" + std::string(path) + "' is corrupt at bytes [" +
                        std::to_string(offset) + ", " + std::to_string(end) +
                        "): " + std::string(what);
  if (!expected.empty()) {
    message += " (expected " + std::string(expected) + ", found " + std::string(found) + ")";
  }
  Error error(ErrorCode::kCorruption, std::move(message));
  error.path = std::string(path);
  error.offset = offset;
  error.nbytes = nbytes;
  error.expected = std::string(expected);
  error.found = std::string(found);
  return error;
}

void throw_check_failed(const char* condition, const char* file, int line,
                        const std::string& message) {
  throw Error(ErrorCode::kPlan,
              message + " [" + condition + " is false, " + file + ":" + std::to_string(line) + "]");
}

}  // namespace dcpx
