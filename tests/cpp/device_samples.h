// The fake driver as the C++ tests of csrc/device use it: a new one a test, device memory, pinned
// host memory.
#pragma once

#include <dlfcn.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "common/slot.h"
#include "device/copy_stream.h"
#include "device/counters.h"
#include "device/pack_kernel.h"
#include "device/pinned.h"
#include "fake_cuda.h"

// A fresh fake driver, and nothing of the last test's in csrc/device. REQUIRES: nothing of
// csrc/device is alive.
class FakeDriver {
 public:
  explicit FakeDriver(std::uint64_t seed, int version = 13000) {
    Dl_info place{};
    CHECK(::dladdr(reinterpret_cast<const void*>(&fake_reset), &place) != 0);
    ::setenv("DCPX_CUDA_DRIVER", place.dli_fname, 1);
    fake_reset(seed);
    fake_set_driver_version(version);
    dcpx::device::forget_driver();
    dcpx::device::forget_warnings();
    dcpx::device::Driver::get().primary_context(0);
    dcpx::device::release_stale();
    fake_clear_reports();  // of what an earlier test left with a device that was given up
    set_image();
    dcpx::device::clear_counters();
    fake_clear_counts();
    for (std::size_t i = 0; i < kLive.size(); ++i) before_[i] = fake_count(kLive[i]);
  }

  // The fake runs its own twin of the kernel, whatever PTX it is given.
  static void set_image() {
    constexpr char kPtx[] = "// any PTX";
    std::vector<std::byte> image(sizeof kPtx);
    std::memcpy(image.data(), kPtx, sizeof kPtx);
    dcpx::device::set_pack_image(std::move(image));
  }

  static std::string text(std::size_t (*lines)(char*, std::size_t)) {
    std::string out(lines(nullptr, 0), '\0');
    lines(out.data(), out.size());
    out.resize(out.size() - 1);
    return out;
  }

  // How many of `what` ("live_streams") there are more than when this was made: a test that lost a
  // device leaves what it held there behind.
  std::int64_t more(const std::string& what) const {
    for (std::size_t i = 0; i < kLive.size(); ++i) {
      if (what == kLive[i]) return fake_count(kLive[i]) - before_[i];
    }
    throw std::runtime_error("nothing is known of " + what);
  }

  // Nothing was done that a program must not do, and nothing is left behind. REQUIRES: nothing of
  // csrc/device is alive.
  void check_clean() const {
    fake_sync_all();
    CHECK_EQ(text(fake_reports), std::string());
    for (const char* name : kLive)
      CHECK_EQ(name + std::to_string(more(name)), name + std::string("0"));
    for (const char* name : {"cuMemAlloc", "cuMemFree", "cuCtxSynchronize", "cuStreamSynchronize",
                             "cuEventSynchronize"})
      CHECK_EQ(name + std::to_string(fake_count(name)), name + std::string("0"));
    CHECK_EQ(fake_context_depth(), 0);
    CHECK_EQ(fake_capture_mode(), 0);
  }

 private:
  static constexpr std::array<const char*, 4> kLive = {"live_streams", "live_events",
                                                       "live_registrations", "pinned_bytes"};
  std::array<std::int64_t, 4> before_{};
};

// How many seeds of the fake a test tries: DCPX_FAKE_SEEDS, else `few`.
inline std::uint64_t seed_count(std::uint64_t few) {
  const char* text = std::getenv("DCPX_FAKE_SEEDS");
  return text != nullptr ? std::strtoull(text, nullptr, 10) : few;
}

// Memory of the fake's device, with an address that the CPU cannot touch.
class DeviceMemory {
 public:
  DeviceMemory(int device, std::uint64_t nbytes, bool is_adjacent = false)
      : address_(fake_alloc(device, nbytes, is_adjacent ? 1 : 0)), nbytes_(nbytes) {
    CHECK(address_ != 0);
  }
  DeviceMemory(int device, const std::vector<std::byte>& bytes)
      : DeviceMemory(device, bytes.size()) {
    CHECK_EQ(fake_write(address_, bytes.data(), nbytes_), 0);
  }
  DeviceMemory(const DeviceMemory&) = delete;
  ~DeviceMemory() { fake_free(address_); }

  std::uint64_t address() const { return address_; }
  std::vector<std::byte> read() const {
    std::vector<std::byte> out(nbytes_);
    CHECK_EQ(fake_read(address_, out.data(), nbytes_), 0);
    return out;
  }

 private:
  std::uint64_t address_;
  std::uint64_t nbytes_;
};

// Page-aligned host memory, registered with the driver or not.
class HostMemory {
 public:
  HostMemory(std::uint64_t nbytes, bool is_pinned, int device = 0) : slot_(nbytes) {
    if (is_pinned) pinned_ = dcpx::device::Pinned::try_pin(slot_.data(), nbytes, device);
  }
  std::byte* data() { return slot_.data(); }
  std::uint64_t address() const { return reinterpret_cast<std::uintptr_t>(slot_.data()); }
  bool is_pinned() const { return pinned_.is_pinned(); }
  std::vector<std::byte> read() const { return {slot_.data(), slot_.data() + slot_.size_bytes()}; }

 private:
  dcpx::Slot slot_;
  dcpx::device::Pinned pinned_;
};

inline std::uint64_t counted(dcpx::device::Count count) {
  return dcpx::device::counters()[static_cast<std::size_t>(count)];
}
