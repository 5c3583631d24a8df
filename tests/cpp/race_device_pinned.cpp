// Host memory that is registered with the driver: in pieces, in the background, or not at all.
#include <sys/wait.h>
#include <unistd.h>

#include <thread>

#include "device/numa.h"
#include "device_samples.h"

namespace {

using dcpx::Slot;
using dcpx::device::is_pinned_range;
using dcpx::device::kPinPieceBytes;
using dcpx::device::pin_run_bytes;
using dcpx::device::Pinned;
using dcpx::device::take_warning;

constexpr std::uint64_t kBytes = 1 << 20;

std::uint64_t address_of(const Slot& slot) { return reinterpret_cast<std::uintptr_t>(slot.data()); }

TEST(memory_is_registered_while_its_pin_lives) {
  FakeDriver driver(1);
  const Slot slot(kBytes);
  {
    Pinned pinned = Pinned::try_pin(slot.data(), kBytes, 1);
    CHECK(pinned.is_pinned());
    CHECK_EQ(driver.more("pinned_bytes"), static_cast<std::int64_t>(kBytes));
    CHECK(is_pinned_range(address_of(slot), kBytes));
    CHECK(!is_pinned_range(address_of(slot), kBytes + 1));
    CHECK(!is_pinned_range(address_of(slot) - 1, 2));
    const Pinned moved = std::move(pinned);
    CHECK(moved.is_pinned());
  }
  CHECK_EQ(driver.more("pinned_bytes"), 0);
  CHECK(!is_pinned_range(address_of(slot), 1));
  CHECK_EQ(take_warning(), std::string());
  driver.check_clean();
}

TEST(large_memory_is_registered_in_pieces_that_copies_do_not_cross) {
  FakeDriver driver(2);
  const Slot slot(2 * kPinPieceBytes + kBytes);  // never touched, so it takes no memory
  {
    const Pinned pinned = Pinned::try_pin(slot.data(), slot.size_bytes(), 0);
    CHECK(pinned.is_pinned());
    CHECK_EQ(driver.more("live_registrations"), 3);
    CHECK(is_pinned_range(address_of(slot), slot.size_bytes()));
    bool is_pinned = false;
    CHECK_EQ(pin_run_bytes(address_of(slot) + kPinPieceBytes - 100, 1000, is_pinned), 100U);
    CHECK(is_pinned);
    const DeviceMemory memory(0, kBytes);
    dcpx::device::CopyStream copies(0, nullptr);
    copies.copy(dcpx::device::Direction::kToHost, address_of(slot) + kPinPieceBytes - kBytes / 2,
                memory.address(), kBytes);
    copies.finish({}, "a copy over a border");
    CHECK_EQ(counted(dcpx::device::Count::kBatchPieces), 2U);
  }
  driver.check_clean();
}

TEST(memory_beside_registered_memory_is_copied_as_pageable) {
  FakeDriver driver(3);
  const Slot slot(4 * kBytes);
  const Pinned middle = Pinned::try_pin(slot.data() + kBytes, kBytes, 0);
  bool is_pinned = true;
  CHECK_EQ(pin_run_bytes(address_of(slot), 4 * kBytes, is_pinned), kBytes);
  CHECK(!is_pinned);
  CHECK_EQ(pin_run_bytes(address_of(slot) + 2 * kBytes, kBytes, is_pinned), kBytes);
  CHECK(!is_pinned);
}

// A copy that named a border's both sides would fail where the driver knows one side at that
// moment.
TEST(memory_that_is_being_registered_is_cut_where_its_pieces_will_be) {
  FakeDriver driver(9);
  fake_limit_pinned(0);  // as if none were registered yet
  const Slot slot(2 * kPinPieceBytes);
  bool is_pinned = true;
  {
    const Pinned pinned = Pinned::start(slot.data(), slot.size_bytes(), 0);
    pinned.wait();
    CHECK_EQ(pin_run_bytes(address_of(slot), slot.size_bytes(), is_pinned), kPinPieceBytes);
    CHECK(!is_pinned);
    CHECK_EQ(pin_run_bytes(address_of(slot) + kPinPieceBytes - 1, 100, is_pinned), 1U);
  }
  CHECK_EQ(pin_run_bytes(address_of(slot), slot.size_bytes(), is_pinned), slot.size_bytes());
}

// Else a write of the parent could go to a copy of the page, and the device read the old one.
TEST(registered_memory_is_not_shared_with_a_forked_child) {
  FakeDriver driver(10);
  const Slot slot(kBytes);
  const auto seen_by_child = [&slot] {
    const ::pid_t child = ::fork();
    if (child == 0) ::_exit(std::to_integer<int>(slot.data()[kBytes - 1]));
    int status = 0;
    CHECK_EQ(::waitpid(child, &status, 0), child);
    CHECK(WIFEXITED(status));
    return WEXITSTATUS(status);
  };
  slot.data()[kBytes - 1] = std::byte{7};
  {
    const Pinned pinned = Pinned::try_pin(slot.data(), kBytes, 0);
    CHECK_EQ(seen_by_child(), 0);
  }
  CHECK_EQ(seen_by_child(), 7);
}

TEST(a_refusal_leaves_memory_pageable_and_warns_once) {
  FakeDriver driver(4);
  fake_limit_pinned(kBytes);
  const Slot slot(4 * kBytes);
  const Pinned first = Pinned::try_pin(slot.data(), 2 * kBytes, 0);
  const Pinned second = Pinned::try_pin(slot.data() + 2 * kBytes, 2 * kBytes, 0);
  CHECK(!first && !second);
  const std::string warning = take_warning();
  CHECK(warning.find("cuMemHostRegister: CUDA_ERROR_OUT_OF_MEMORY (2)") != std::string::npos);
  CHECK(warning.find("pinning 2097152 B") != std::string::npos);
  CHECK_EQ(take_warning(), std::string());
  const DeviceMemory memory(0, std::vector<std::byte>(kBytes, std::byte{5}));
  dcpx::device::CopyStream copies(0, nullptr);
  copies.copy(dcpx::device::Direction::kToHost, address_of(slot), memory.address(), kBytes);
  copies.finish({}, "a copy to pageable memory");
  CHECK(slot.data()[kBytes - 1] == std::byte{5});
}

TEST(memory_that_the_driver_remembers_from_before_is_registered_anew) {
  FakeDriver driver(5);
  const Slot slot(kBytes);
  fake_fail("cuMemHostRegister", 1, dcpx::device::kAlreadyRegistered, 0);
  const Pinned pinned = Pinned::try_pin(slot.data(), kBytes, 0);
  CHECK(pinned.is_pinned());
  CHECK_EQ(fake_count("cuMemHostUnregister"), 1);
}

TEST(a_registration_in_the_background_ends_or_is_stopped) {
  for (std::uint64_t seed = 0; seed < 10; ++seed) {
    FakeDriver driver(seed);
    const Slot slot(6 * kPinPieceBytes);
    {
      const Pinned pinned = Pinned::start(slot.data(), slot.size_bytes(), 0);
      if (seed % 2 == 0) {
        pinned.wait();
        pinned.wait();
        CHECK(pinned.is_pinned());
        CHECK_EQ(driver.more("live_registrations"), 6);
      }
    }
    CHECK_EQ(driver.more("live_registrations"), 0);
    driver.check_clean();
  }
}

TEST(copies_run_beside_a_registration_of_their_memory) {
  for (std::uint64_t seed = 0; seed < 10; ++seed) {
    FakeDriver driver(seed);
    const Slot slot(2 * kPinPieceBytes);
    const DeviceMemory memory(0, std::vector<std::byte>(kBytes, std::byte{3}));
    const Pinned pinned = Pinned::start(slot.data(), slot.size_bytes(), 0);
    dcpx::device::CopyStream copies(0, nullptr);
    for (std::uint64_t i = 0; i < 16; ++i)
      copies.copy(dcpx::device::Direction::kToHost,
                  address_of(slot) + kPinPieceBytes + (2 * i) * (kBytes / 16) - kBytes / 2,
                  memory.address() + i * (kBytes / 16), kBytes / 16);
    copies.finish({}, "copies beside a registration");
    for (std::uint64_t i = 0; i < 16; ++i)
      CHECK(slot.data()[kPinPieceBytes + (2 * i) * (kBytes / 16) - kBytes / 2 + kBytes / 16 - 1] ==
            std::byte{3});
    CHECK_EQ(FakeDriver::text(fake_reports), std::string());
  }
}

TEST(a_node_that_is_not_known_leaves_memory_where_it_lies) {
  FakeDriver driver(7);
  const Slot slot(kBytes);
  CHECK(!dcpx::device::prefer_node(slot.data(), kBytes, -1));
  CHECK(!dcpx::device::prefer_node(slot.data(), kBytes, 1 << 20));
  CHECK(!dcpx::device::prefer_node(slot.data(), 0, 0));
  CHECK(dcpx::device::numa_node_of(0) >= -1);
  CHECK_EQ(dcpx::device::numa_node_of(99), -1);
}

}  // namespace
