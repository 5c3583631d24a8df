#include <cerrno>
#include <filesystem>

#include "check.h"
#include "io/file.h"
#include "io/system_calls.h"
#include "scratch_dir.h"

namespace {

using dcpx::ErrorCode;
using dcpx::io::kReserveBytes;
using dcpx::io::OutputFile;

class FailingCall {
 public:
  FailingCall(std::int64_t nth, int sys_errno) { dcpx::io::arm_fault(nth, sys_errno); }
  FailingCall(const FailingCall&) = delete;
  ~FailingCall() { dcpx::io::disarm_fault(); }
};

TEST(preallocation_of_gigabytes_ends_when_stopped) {
  const ScratchDir dir;
  OutputFile file = OutputFile::create(dir.fd(), dir.path(), {"f"}, false);
  int asked = 0;
  CHECK(!file.preallocate(4096, 3 * kReserveBytes, [&] { return ++asked > 1; }));
  CHECK_EQ(asked, 2);
  CHECK_EQ(std::filesystem::file_size(dir.path() + "/f"), 4096 + kReserveBytes);
  CHECK(file.preallocate(4096 + kReserveBytes, 5, [] { return false; }));
  CHECK_EQ(std::filesystem::file_size(dir.path() + "/f"), 4096 + kReserveBytes + 5);
}

TEST(preallocation_without_room_names_the_whole_range) {
  const ScratchDir dir;
  OutputFile file = OutputFile::create(dir.fd(), dir.path(), {"f"}, false);
  const std::uint64_t nbytes = kReserveBytes + 4096;
  const FailingCall second_piece(1, ENOSPC);
  try {
    file.preallocate(8192, nbytes, [] { return false; });
    CHECK(false);
  } catch (const dcpx::Error& error) {
    CHECK(error.code() == ErrorCode::kStorage && error.sys_errno == ENOSPC);
    CHECK_EQ(error.offset, 8192);
    CHECK_EQ(error.nbytes, static_cast<std::int64_t>(nbytes));
    const std::string text = error.what();
    CHECK(text.find("(needed " + std::to_string(nbytes) + " B, free ") != std::string::npos);
  }
}

TEST(what_is_said_of_room_is_what_room_would_cure) {
  const ScratchDir dir;
  OutputFile file = OutputFile::create(dir.fd(), dir.path(), {"f"}, false);
  const auto text_of = [&](int sys_errno) -> std::string {
    const FailingCall failing(0, sys_errno);
    try {
      file.sync();
    } catch (const dcpx::Error& error) {
      return error.what();
    }
    return "";
  };
  CHECK(text_of(EDQUOT).find("(needed 0 B, a quota of") != std::string::npos);
  CHECK(text_of(EDQUOT).find("free") == std::string::npos);
  CHECK(text_of(EIO).find("free") == std::string::npos);
  CHECK(text_of(ENOSPC).find(" B, so full is a quota") != std::string::npos);  // this disk has room
}

TEST(write_back_that_is_refused_is_done_without_and_one_that_fails_is_an_error) {
  const ScratchDir dir;
  OutputFile file = OutputFile::create(dir.fd(), dir.path(), {"f"}, false);
  for (const int refusal : {ENOSYS, EPERM, EINVAL}) {  // EPERM: a seccomp profile's
    const FailingCall refused(0, refusal);
    file.start_write_back(0, 4096);
    const FailingCall waiting(0, refusal);
    file.wait_write_back(0, 4096);
  }
  for (const int failure : {EIO, ENOSPC, EDQUOT}) {
    const FailingCall failing(0, failure);
    CHECK_THROWS(file.wait_write_back(0, 4096), ErrorCode::kStorage);
  }
}

}  // namespace
