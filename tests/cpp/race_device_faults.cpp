// What goes wrong on a device: a typed error, nothing left behind, and the next copy works.
#include <memory>
#include <thread>

#include "device_samples.h"
#include "random_source.h"

namespace {

using dcpx::Error;
using dcpx::ErrorCode;
using dcpx::StopFlag;
using dcpx::device::CopyStream;
using dcpx::device::CopyStreams;
using dcpx::device::Count;
using dcpx::device::Direction;
using dcpx::device::SourceEvents;

constexpr std::uint64_t kBytes = 256 << 10;
constexpr int kInvalidValue = 1;
const StopFlag kGoOn;

// One of each way to copy: a run, a batch, the kernel, rows; to the host. Returns the error's text.
std::string copy_in_all_ways(bool is_pinned = true) {
  const std::vector<std::byte> bytes = RandomSource(5).bytes(kBytes);
  HostMemory host(2 * kBytes, is_pinned);
  const DeviceMemory memory(0, kBytes);
  const std::uint64_t stream = fake_make_stream(0, 1);
  fake_stream_write(0, stream, memory.address(), bytes.data(), kBytes);
  std::vector<std::byte> wanted(kBytes + 16 * 33);
  const auto add = [&](CopyStream& copies, std::uint64_t dst, std::uint64_t src,
                       std::uint64_t nbytes) {
    copies.copy(Direction::kToHost, host.address() + dst, memory.address() + src, nbytes);
    std::copy_n(bytes.begin() + static_cast<std::ptrdiff_t>(src), nbytes,
                wanted.begin() + static_cast<std::ptrdiff_t>(dst));
  };
  std::string message;
  try {
    const SourceEvents after({{0, stream}});
    CopyStream copies(0, &after);
    for (std::uint64_t i = 0; i < 16; ++i) add(copies, i * 1033, i * 1000, 1000);
    add(copies, 64 << 10, 64 << 10, 40 << 10);
    add(copies, 128 << 10, 105 << 10, 40 << 10);
    const dcpx::plan::Region rows{1, {5, 8192}, {9000, 1}, {8192, 1}};
    copies.copy_region(Direction::kToHost, rows, host.address() + (200 << 10),
                       memory.address() + (150 << 10));
    for (std::uint64_t i = 0; i < 5; ++i)
      std::copy_n(bytes.begin() + (150 << 10) + static_cast<std::ptrdiff_t>(i) * 9000, 8192,
                  wanted.begin() + (200 << 10) + static_cast<std::ptrdiff_t>(i) * 8192);
    copies.finish(kGoOn, "copies in all ways");
  } catch (const Error& error) {
    CHECK(error.code() == ErrorCode::kStaging);
    message = error.what();
  }
  if (message.empty()) {
    std::vector<std::byte> found = host.read();
    found.resize(wanted.size());
    CHECK(found == wanted);
  }
  return message;
}

TEST(a_copy_in_all_ways_takes_one_call_of_each) {
  FakeDriver driver(1);
  CHECK_EQ(copy_in_all_ways(), std::string());
  CHECK_EQ(counted(Count::kKernels), 1U);
  CHECK_EQ(counted(Count::kBatches), 1U);
  CHECK_EQ(counted(Count::kCopies2d), 1U);
  CHECK_EQ(counted(Count::kCopies1d), 0U);
  driver.check_clean();
}

// Entry points without which copies are made in another way, or memory is slower.
bool is_replaced(const std::string& name) {
  for (const char* other :
       {"cuMemHostRegister", "cuMemHostUnregister", "cuModuleLoadData", "cuModuleGetFunction",
        "cuLaunchKernel", "cuPointerGetAttributes", "cuEventDestroy", "cuStreamDestroy",
        "cuCtxPopCurrent", "cuInit", "cuDriverGetVersion", "cuDeviceGet", "cuDeviceGetAttribute",
        "cuGetProcAddress"})
    if (name == other) return true;
  return false;
}

// On a thread of its own, as a call that fails may be the one that restores the thread's state.
std::string fail_and_copy_again(const std::string& name, std::int64_t nth, bool is_pinned) {
  std::string message;
  std::string wrong;
  std::thread([&] {
    try {
      fake_fail(name.c_str(), nth, kInvalidValue, 0);
      message = copy_in_all_ways(is_pinned);
      fake_clear_failures();
      CHECK_EQ(copy_in_all_ways(is_pinned), std::string());
      CHECK_EQ(fake_context_depth(), 0);
      CHECK(fake_capture_mode() == 0 || name == "cuThreadExchangeStreamCaptureMode");
    } catch (const std::exception& error) {
      wrong = error.what();
    }
  }).join();
  CHECK_EQ(name + ": " + wrong, name + ": ");
  fake_sync_all();
  CHECK_EQ(FakeDriver::text(fake_reports), std::string());
  return message;
}

TEST(every_entry_point_may_fail_at_any_call_and_the_next_copy_works) {
  std::istringstream names(FakeDriver::text(fake_entry_points));
  int failures = 0;
  for (std::string name; names >> name;) {
    for (const bool is_pinned : {true, false}) {
      int raised = 0;
      int reached = 0;
      for (std::int64_t nth = 1; nth <= 4; ++nth) {
        FakeDriver driver(7 + static_cast<std::uint64_t>(nth));
        const std::string message = fail_and_copy_again(name, nth, is_pinned);
        reached += fake_count(name.c_str()) >= nth ? 1 : 0;
        if (message.empty()) continue;
        ++raised;
        CHECK(message.find("CUDA_ERROR_INVALID_VALUE (1)") != std::string::npos);
      }
      failures += raised;
      if (reached > 0 && raised == 0 && !is_replaced(name))
        check::fail(__FILE__, __LINE__, "no error of " + name);
    }
  }
  CHECK(failures > 30);
}

TEST(a_lost_device_is_named_by_its_first_error_and_ends_no_process) {
  FakeDriver driver(2);
  CHECK_EQ(copy_in_all_ways(), std::string());
  fake_lose_device(0, dcpx::device::kIllegalAddress, 0);
  const std::string first = copy_in_all_ways(false);
  CHECK(first.find("CUDA_ERROR_ILLEGAL_ADDRESS (700)") != std::string::npos);
  CHECK(first.find("earlier") == std::string::npos);
  const std::string second = copy_in_all_ways(false);
  CHECK(second.find("an earlier error had lost the device: " + first) != std::string::npos);
}

TEST(a_device_that_is_lost_while_it_copies_raises_and_lets_the_memory_go) {
  for (std::int64_t works = 0; works < 5; ++works) {
    FakeDriver driver(30 + static_cast<std::uint64_t>(works));
    CHECK(dcpx::device::driver_failure().empty());
    fake_lose_device(0, dcpx::device::kEccUncorrectable, works);
    const std::string message = copy_in_all_ways();
    CHECK(message.empty() || message.find("CUDA_ERROR_ECC_UNCORRECTABLE") != std::string::npos);
    CHECK(works > 1 || !message.empty());
    CHECK(copy_in_all_ways().find("not used any more") == std::string::npos);
  }
}

TEST(memory_that_a_lost_device_keeps_registered_is_not_copied_to_until_it_is_taken_back) {
  FakeDriver driver(8);
  const dcpx::Slot slot(kBytes);
  {
    const dcpx::device::Pinned pinned = dcpx::device::Pinned::try_pin(slot.data(), kBytes, 0);
    CHECK(pinned.is_pinned());
    fake_lose_device(0, dcpx::device::kIllegalAddress, 0);
  }
  const auto address = reinterpret_cast<std::uintptr_t>(slot.data());
  CHECK(dcpx::device::is_stale_range(address + kBytes - 1, 1));
  CHECK(!dcpx::device::is_stale_range(address + kBytes, 1));
  CHECK(!dcpx::device::is_stale_range(address - 1, 1));
  const DeviceMemory memory(1, kBytes);
  CopyStream copies(1, nullptr);
  const auto copy = [&] {
    copies.copy(Direction::kToHost, address, memory.address(), kBytes);
    copies.finish(kGoOn, "a copy to where memory was registered");
  };
  CHECK_THROWS(copy(), ErrorCode::kStaging);
  const dcpx::device::Pinned again = dcpx::device::Pinned::try_pin(slot.data(), kBytes, 1);
  CHECK(again.is_pinned());  // device 1 could take it back
  copy();
}

TEST(a_capturing_stream_is_refused_by_name_and_its_capture_not_broken) {
  FakeDriver driver(3);
  const std::uint64_t capturing = fake_make_stream(0, 1);
  fake_set_capturing(capturing, 1);
  try {
    const SourceEvents after({{0, capturing}});
    CHECK(false);
  } catch (const Error& error) {
    CHECK(error.code() == ErrorCode::kStaging);
    const std::string message = error.what();
    CHECK(message.find("stream " + std::to_string(capturing)) != std::string::npos);
    CHECK(message.find("graph") != std::string::npos);
  }
  CHECK_EQ(copy_in_all_ways(), std::string());  // beside the capture, from another stream
  CHECK_EQ(fake_is_capture_broken(capturing), 0);
  driver.check_clean();
}

// A caller's stream whose work does not end, as far as can be asked, before let_end().
std::uint64_t hanging_stream(const DeviceMemory& memory) {
  const std::uint64_t stream = fake_make_stream(0, 1);
  fake_set_stream_pace(0, stream, 3);  // held
  const std::byte byte{1};
  CHECK_EQ(fake_stream_write(0, stream, memory.address(), &byte, 1), 0);
  CHECK_EQ(fake_fail("cuEventQuery", 1, dcpx::device::kNotReady, 1), 0);
  return stream;
}

void let_end() {
  fake_clear_failures();
  fake_sync_all();
}

TEST(copies_that_do_not_end_in_time_give_the_device_up_and_leave_its_memory_pinned) {
  FakeDriver driver(4);
  auto host = std::make_unique<HostMemory>(kBytes, true);
  const HostMemory of_another_device(kBytes, true, 1);
  const DeviceMemory memory(0, kBytes);
  const std::uint64_t stream = hanging_stream(memory);
  const std::uint64_t address = host->address();
  {
    const SourceEvents after({{0, stream}});
    CopyStream copies(0, &after);
    copies.copy(Direction::kToHost, address, memory.address(), kBytes);
    try {
      copies.finish(kGoOn, "copies that hang", 0);
      CHECK(false);
    } catch (const Error& error) {
      CHECK(error.code() == ErrorCode::kStaging);
      CHECK(std::string(error.what()).find("waiting for copies that hang") == 0);
    }
  }
  CHECK(copy_in_all_ways().find("device 0 is not used until copies that took too long") == 0);
  dcpx::device::Driver::get().check_device(1);
  host.reset();  // no device takes the registration back while the copy may still come
  CHECK(dcpx::device::is_stale_range(address, kBytes));
  CHECK_EQ(FakeDriver::text(fake_reports), std::string());
  let_end();
}

TEST(a_device_that_was_given_up_serves_again_when_its_copies_have_ended) {
  FakeDriver driver(4);
  fake_set_pace(2);  // late
  {
    HostMemory host(kBytes, true);
    const DeviceMemory memory(0, kBytes);
    CopyStream copies(0, nullptr);
    copies.copy(Direction::kToHost, host.address(), memory.address(), kBytes);
    CHECK_THROWS(copies.finish(kGoOn, "copies that take long", 0), ErrorCode::kStaging);
    while (dcpx::device::Driver::get().has_given_up()) std::this_thread::yield();
  }
  CHECK_EQ(copy_in_all_ways(), std::string());
  driver.check_clean();
}

TEST(a_stop_drops_what_is_collected_and_waits_for_what_is_queued) {
  FakeDriver driver(5);
  HostMemory host(2 * kBytes, true);
  const DeviceMemory memory(0, std::vector<std::byte>(2 * kBytes, std::byte{9}));
  StopFlag stop;
  CopyStream copies(0, nullptr);
  copies.copy(Direction::kToHost, host.address(), memory.address(), kBytes);
  copies.submit();
  copies.copy(Direction::kToHost, host.address() + kBytes, memory.address() + kBytes, kBytes);
  stop.set();
  copies.finish(stop, "copies that are stopped");
  CHECK(host.data()[kBytes - 1] == std::byte{9});
  CHECK(host.data()[kBytes] == std::byte{0});
}

// Submits to pageable memory behind a stream that hangs, on the caller's thread, with `stop`.
template <class Stop>
void copy_behind_a_hanging_stream(const Stop& run) {
  FakeDriver driver(6);
  HostMemory host(4 * kBytes, false);
  const DeviceMemory memory(0, 2 * kBytes);
  {
    const SourceEvents after({{0, hanging_stream(memory)}});
    CopyStreams streams(&after);
    CopyStream& copies = streams.on(0);
    copies.copy(Direction::kToHost, host.address(), memory.address(), kBytes);
    copies.copy_region(Direction::kToHost, {1, {64, 8}, {64, 2}, {64, 3}}, host.address() + kBytes,
                       memory.address() + kBytes);
    run(streams);
  }
  CHECK_EQ(counted(Count::kCopies1d) + counted(Count::kCopies2d), 0U);
  dcpx::device::Driver::get().check_device(0);  // nothing of ours was under way: not given up
  let_end();
  CHECK(host.data()[0] == std::byte{0});
  driver.check_clean();
}

TEST(a_stop_ends_the_wait_for_the_callers_work_before_anything_is_copied) {
  for (const bool is_early : {true, false}) {
    copy_behind_a_hanging_stream([&](CopyStreams& streams) {
      StopFlag stop;
      std::thread stopper;
      if (is_early) {
        stop.set();
      } else {
        stopper = std::thread([&stop] { stop.set(); });
      }
      streams.submit_all(&stop);
      if (stopper.joinable()) stopper.join();
    });
  }
}

TEST(an_interrupt_ends_the_wait_for_the_callers_work_before_anything_is_copied) {
  const dcpx::PollFunction poll = [] { throw std::runtime_error("interrupted"); };
  copy_behind_a_hanging_stream([&](CopyStreams& streams) {
    std::string message;
    try {
      dcpx::run_workers(
          1, [&](unsigned, StopFlag& stop) { streams.finish_all(stop, "copies"); }, poll);
    } catch (const std::runtime_error& error) {
      message = error.what();
    }
    CHECK_EQ(message, std::string("interrupted"));
  });
}

// A copy is under way and more is collected when the kernel's table is full and the job stops.
TEST(a_stop_at_a_full_table_drops_the_rest) {
  FakeDriver driver(7);
  HostMemory host(2 << 20, true);
  const DeviceMemory memory(0, 1 << 20);
  StopFlag stop;
  {
    CopyStream copies(0, nullptr);
    for (std::uint64_t i = 0; i < 20000; ++i)
      copies.copy(Direction::kToHost, host.address() + i * 48, memory.address() + i * 40, 40);
    stop.set();
    copies.submit(&stop);
    copies.finish(stop, "copies that are stopped");
  }
  CHECK_EQ(counted(Count::kKernels), 0U);
  CHECK_EQ(FakeDriver::text(fake_reports), std::string());
}

TEST(pageable_memory_is_copied_in_pieces_between_which_a_job_may_stop) {
  FakeDriver driver(8);
  const dcpx::Slot slot(dcpx::device::kPageableBytes + kBytes);
  const DeviceMemory memory(0, slot.size_bytes());
  CopyStream copies(0, nullptr);
  copies.copy(Direction::kToHost, reinterpret_cast<std::uintptr_t>(slot.data()), memory.address(),
              slot.size_bytes());
  copies.finish(kGoOn, "a large copy");
  CHECK_EQ(counted(Count::kCopies1d), 2U);
}

constexpr std::uint64_t kSlowBytes = 32 << 20;  // takes longer than to throw

// Copies until the poll, which comes ten times a second, throws; then nothing may be under way.
void copy_until_interrupted(StopFlag& stop, HostMemory& host, const DeviceMemory& memory) {
  CopyStream copies(0, nullptr);
  std::byte& last = host.data()[kSlowBytes - 1];
  while (true) {
    last = std::byte{0};
    copies.copy(Direction::kToHost, host.address(), memory.address(), kSlowBytes);
    try {
      copies.finish(stop, "copies that are interrupted");
    } catch (const std::runtime_error&) {
      const std::byte found = last;
      fake_sync_all();
      CHECK(last == found);
      return;
    }
    CHECK(last == std::byte{9});
  }
}

TEST(what_a_poll_throws_is_thrown_when_no_copy_is_under_way) {
  const dcpx::PollFunction poll = [] { throw std::runtime_error("interrupted"); };
  for (std::uint64_t seed = 0; seed < 6; ++seed) {  // each may find it waiting or before it waits
    FakeDriver driver(seed);
    fake_set_pace(2);  // late
    HostMemory host(kSlowBytes, true);
    const DeviceMemory memory(0, std::vector<std::byte>(kSlowBytes, std::byte{9}));
    dcpx::run_workers(
        1, [&](unsigned, StopFlag& stop) { copy_until_interrupted(stop, host, memory); }, poll);
  }
}

}  // namespace
