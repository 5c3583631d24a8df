// The CUDA driver of the process: found at run time, so that one binary serves machines with any
// driver since 12.0 and machines without one.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "common/error.h"
#include "common/mutex.h"
#include "device/cuda_abi.h"

namespace dcpx::device {

// Thread-safe. Loaded once and never unloaded: threads may be inside it until the process ends.
class Driver {
 public:
  // The library that DCPX_CUDA_DRIVER names, else libcuda.so.1. Throws Error(kStaging) that says
  // why there is none; the reason is kept and told again. In a forked child of a process that has
  // loaded it: throws, as the driver cannot be used there.
  static Driver& get();

  const Api& api() const noexcept { return api_; }
  int version() const noexcept { return version_; }  // 12040 is 12.4
  int device_count() const noexcept { return device_count_; }
  bool is_of_this_process() const noexcept;  // false in a forked child
  // Attribute of a device, `otherwise` where the driver does not know it.
  int attribute(int device, int attribute, int otherwise) const noexcept;

  // Throws Error(kStaging) unless `result` is kSuccess: "cuEventQuery: CUDA_ERROR_X (700): what it
  // means; copying 8388608 B from device 0". The first error after which a context is lost is
  // kept, and named as the cause by every later error of the device whose context is current.
  void check(Result result, const char* call, const std::string& doing);
  // The text of such an error.
  std::string describe(Result result, const char* call, const std::string& doing) const;

  // Throws Error(kStaging) where `device` is none of the driver's, or is given up.
  void check_device(int device);
  // No more work goes to a device on which copies did not end in time, as they may still write to
  // their memory, until `event` (null: for ever) says that they have ended. `why` is what
  // check_device tells till then. Takes the stream and the event.
  void give_up(int device, const std::string& why, Stream stream, Event event) noexcept;
  // Keeps `memory` as long as copies that were given up, of any device, may still use it; lets it
  // go at once where there are none. It goes on a thread that asks one of these questions.
  void keep_while_used(std::shared_ptr<void> memory) noexcept;
  // Whether copies of a device that is given up may still be under way.
  bool has_given_up() noexcept;

  // The primary context of the device, the one torch works in: retained when first asked for and
  // kept until the process ends. Of a device that is given up, too: what is under way there is to
  // be asked for and taken apart. Throws Error(kStaging).
  Context primary_context(int device);

  std::vector<int> open_devices();  // those whose context was retained

  bool has_batch() const noexcept { return has_batch_.load(std::memory_order_relaxed); }
  void drop_batch() noexcept { has_batch_.store(false, std::memory_order_relaxed); }

  Driver(const Driver&) = delete;

 private:
  friend struct DriverLoader;
  void check_ordinal(int device) const;
  struct GivenUp {
    int device;
    std::string why;
    Stream stream;
    Event event;
  };
  // What was kept and is not used any more: to be let go without the mutex.
  [[nodiscard]] std::vector<std::shared_ptr<void>> forget_ended() DCPX_HOLDS(mutex_);
  Driver() = default;

  Api api_;
  int version_ = 0;
  int device_count_ = 0;
  ::pid_t owner_ = 0;
  std::atomic<bool> has_batch_{false};
  Mutex mutex_;
  std::map<int, Context> contexts_ DCPX_GUARDED_BY(mutex_);
  std::vector<GivenUp> given_up_ DCPX_GUARDED_BY(mutex_);
  std::vector<std::shared_ptr<void>> kept_ DCPX_GUARDED_BY(mutex_);  // by them
  std::map<int, std::string> first_losses_ DCPX_GUARDED_BY(mutex_);  // by device
};

// Whether a context is lost after this error: nothing that was queued in it runs any more.
bool is_lost(Result result) noexcept;

// Driver::keep_while_used; lets `memory` go where there is no driver.
void let_go_when_unused(std::shared_ptr<void> memory) noexcept;

// Why Driver::get() would throw; empty where it would not.
std::string driver_failure();

// For tests: the next use loads the driver anew, so that a fake one may have become another.
// REQUIRES: nothing of csrc/device is alive.
void forget_driver();

// Makes the primary context of a device the calling thread's own while it lives, on any thread,
// and the previous one again afterwards. Meanwhile another thread's graph capture neither fails
// our calls nor is broken by them. Lives on one thread.
class ContextGuard {
 public:
  explicit ContextGuard(int device);  // Throws Error(kStaging).
  ContextGuard(const ContextGuard&) = delete;
  ~ContextGuard();

 private:
  Driver& driver_;
  CaptureMode mode_ = CaptureMode::kRelaxed;  // after construction: what to go back to
  int outer_device_;
};

}  // namespace dcpx::device
