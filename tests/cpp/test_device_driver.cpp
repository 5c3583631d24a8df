// The driver as it is found: old ones, none, a forked child's.
#include <sys/wait.h>
#include <unistd.h>

#include <functional>

#include "device_samples.h"

namespace {

using dcpx::Error;
using dcpx::ErrorCode;
using dcpx::device::ContextGuard;
using dcpx::device::CopyStream;
using dcpx::device::Direction;
using dcpx::device::Driver;
using dcpx::device::SourceEvents;

// Whether `run` returns true in a forked child.
bool holds_in_child(const std::function<bool()>& run) {
  const ::pid_t child = ::fork();
  if (child == 0) {
    bool holds = false;
    try {
      holds = run();
    } catch (const std::exception&) {
      holds = false;
    }
    ::_exit(holds ? 0 : 1);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

TEST(a_driver_has_the_entry_points_of_its_version) {
  for (const auto& [version, has_12080, has_13000] : {std::tuple(12000, false, false),
                                                      {12040, false, false},
                                                      {12080, true, false},
                                                      {12090, true, false},
                                                      {13000, false, true},
                                                      {13010, false, true}}) {
    FakeDriver fake(1, version);
    const Driver& driver = Driver::get();
    CHECK_EQ(driver.version(), version);
    CHECK_EQ(driver.device_count(), 2);
    CHECK_EQ(driver.api().batch_12080 != nullptr, has_12080);
    CHECK_EQ(driver.api().batch_13000 != nullptr, has_13000);
    CHECK(driver.api().cuMemcpyDtoHAsync != nullptr);
  }
}

TEST(a_driver_that_does_not_start_is_told_again_without_being_asked_again) {
  FakeDriver fake(2);
  dcpx::device::forget_driver();
  fake_fail("cuInit", 1, dcpx::device::kNoDevice, 0);
  const std::int64_t before = fake_count("cuInit");
  for (int i = 0; i < 3; ++i) {
    const std::string failure = dcpx::device::driver_failure();
    CHECK(failure.find("cuInit: CUDA_ERROR_NO_DEVICE (100): ") == 0);
  }
  CHECK_EQ(fake_count("cuInit"), before + 1);
}

TEST(a_forked_child_refuses_the_parents_driver_and_leaves_the_parents_objects) {
  FakeDriver fake(4);
  HostMemory host(1 << 16, true);
  const DeviceMemory memory(0, 1 << 16);
  {
    SourceEvents after({{0, 0}});
    CopyStream copies(0, &after);
    copies.copy(Direction::kToHost, host.address(), memory.address(), 1 << 16);
    copies.submit();
    CHECK(holds_in_child([&] {
      copies.~CopyStream();
      after.~SourceEvents();
      try {
        Driver::get();
        return false;
      } catch (const Error& error) {
        return error.code() == ErrorCode::kStaging &&
               std::string(error.what()).find("forked child") != std::string::npos;
      }
    }));
    copies.finish({}, "copies of the parent");
  }
  CHECK(host.is_pinned());
  CHECK_EQ(FakeDriver::text(fake_reports), std::string());
}

TEST(a_child_of_a_process_without_a_driver_is_told_the_parents_reason) {
  FakeDriver fake(5);
  ::setenv("DCPX_CUDA_DRIVER", "/no/such/libcuda.so", 1);
  dcpx::device::forget_driver();
  const std::string failure = dcpx::device::driver_failure();
  CHECK(holds_in_child([&] { return dcpx::device::driver_failure() == failure; }));
}

TEST(a_guard_gives_back_the_context_and_the_capture_mode_of_its_thread) {
  FakeDriver fake(6);
  {
    const ContextGuard outer(1);
    CHECK_EQ(fake_context_depth(), 1);
    CHECK_EQ(fake_capture_mode(), 2);
    {
      const ContextGuard inner(0);
      CHECK_EQ(fake_context_depth(), 2);
    }
    CHECK_EQ(fake_context_depth(), 1);
    CHECK_EQ(fake_capture_mode(), 2);
  }
  CHECK_EQ(fake_context_depth(), 0);
  CHECK_EQ(fake_capture_mode(), 0);
}

}  // namespace
