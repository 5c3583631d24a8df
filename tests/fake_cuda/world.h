// All that the fake knows, behind one mutex, and the guard with which every entry point begins.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "address_space.h"
#include "schedule.h"

namespace fake {

struct TwinInfo;

struct DeviceState {
  int retained = 0;  // the primary context
  Result lost = kSuccess;
  StreamPtr legacy;            // made when first used
  std::int64_t runs_left = 0;  // works until it is lost; 0: it is not going to be
  Result lost_then = kSuccess;
};

struct Failure {
  std::string entry;
  std::int64_t calls_left = 0;  // until the call that fails
  Result code = kSuccess;
  bool is_sticky = false;
};

struct Settings {
  std::uint64_t seed = 0;
  int version = 13000;
  int device_count = 2;
  Pace pace = kPaceBySeed;
  bool refuses_fatbin = false;
  std::uint64_t pinned_limit_bytes = ~std::uint64_t{0};
};

struct World {
  std::mutex mutex;
  std::condition_variable host_wake;  // some work is over
  Settings settings, initial;
  Memory memory;
  DeviceState devices[kMaxDevices];
  std::unordered_map<Handle, StreamPtr> streams;
  std::map<std::pair<std::thread::id, int>, StreamPtr> thread_streams;  // per-thread default ones
  std::unordered_map<Handle, Event> events;
  std::unordered_map<Handle, int> modules;  // to their device
  std::unordered_map<Handle, std::pair<int, const TwinInfo*>> functions;
  std::map<std::string, std::int64_t> calls;
  std::map<std::string, std::int64_t> totals;
  std::vector<Failure> failures;
  std::vector<std::string> reports;  // what a program must not do
  std::vector<std::string> notes;    // what it may do, at a cost
  std::uint64_t next_handle = 1;
  std::uint64_t next_ordinal = 1;
  int running = 0;
  int owner_pid = 0;  // 0: cuInit was not called
  bool is_down = false;

  void report(const std::string& text);
  void note(const std::string& text);
  Handle new_handle(int kind) noexcept;
  StreamPtr new_stream(int device);
  StreamPtr legacy_stream(int device);
  StreamPtr thread_stream(int device);      // the calling thread's own default stream
  std::vector<StreamPtr> living_streams();  // destroyed ones too, while they have work

 private:
  std::vector<std::weak_ptr<Stream>> all_streams_;
};

World& world();
inline std::unique_lock<std::mutex> locked() { return std::unique_lock(world().mutex); }
bool is_forked_child() noexcept;  // of the process that first used the fake

// Numbers that depend on the seed, and on what they are for, alone.
std::uint64_t drawn(std::uint64_t seed, std::uint64_t a, std::uint64_t b) noexcept;

// The thread's stack of contexts. A context's handle stands for its device.
std::vector<int>& context_stack() noexcept;
int current_device() noexcept;  // of the context on top; -1: none
Handle context_of(int device) noexcept;
int device_of_context(Handle context) noexcept;  // -1: none such
int& capture_mode() noexcept;                    // the thread's

enum CallFlags : unsigned {
  kNoFlags = 0,
  kNeedsContext = 1,  // a current context
  kUnsafeInCapture = 2,
  kBeforeInit = 4,  // works before cuInit
};

// Counts the call and finds whether it is to fail. Holds the mutex while it lives.
class Call {
 public:
  explicit Call(const char* entry, unsigned flags = kNoFlags);

  const char* entry() const noexcept { return entry_; }
  Result result() const noexcept { return result_; }
  bool is_refused() const noexcept { return result_ != kSuccess; }
  // Whether nothing can be done at all. Calls that give something back do it unless this is so,
  // and then return result(): as in CUDA, their error is often an earlier one's.
  bool is_dead() const noexcept { return is_dead_; }
  std::unique_lock<std::mutex>& lock() noexcept { return lock_; }

  // Reports what the program did wrong and returns `code`.
  Result wrong(Result code, const std::string& what) const;
  // The stream of a handle. kSuccess, or what the call is to return.
  Result find(Handle handle, StreamPtr& stream) const;
  Result find(Handle handle, Event*& event) const;
  // Why the device takes no work: it is lost, or not there.
  Result lost(int device) const noexcept;

 private:
  bool is_out_of_service(unsigned flags);

  const char* entry_;
  Result result_ = kSuccess;
  bool is_dead_ = false;
  std::unique_lock<std::mutex> lock_;
};

void lose_device(int device, Result code);

// The names of all entry points, for tests of all of them.
const std::vector<std::string>& entry_points();

}  // namespace fake
