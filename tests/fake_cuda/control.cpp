// The control functions: settings, memory, streams of the test.
#include <cstring>

#include "copies.h"
#include "fake_cuda.h"

using namespace fake;

namespace {

StreamPtr find_stream(int device, std::uint64_t handle) {
  World& w = world();
  if (handle <= kLegacyStream)
    return device >= 0 && device < kMaxDevices ? w.legacy_stream(device) : nullptr;
  if (handle == kPerThreadStream)
    return device >= 0 && device < kMaxDevices ? w.thread_stream(device) : nullptr;
  const auto found = w.streams.find(reinterpret_cast<Handle>(handle));
  return found == w.streams.end() ? nullptr : found->second;
}

// What the CPU would be stopped from: the bytes of a range of one allocation. Null: none.
std::byte* bytes_at(std::uint64_t address, std::uint64_t nbytes) {
  Side side;
  if (resolve("the test", address, nbytes, side) != kSuccess) return nullptr;
  return side.memory;
}

}  // namespace

FAKE_EXPORT void fake_reset(std::uint64_t seed) {
  auto lock = locked();
  World& w = world();
  drain(lock);
  capture_mode() = kCaptureGlobal;  // this thread's, which a failed call may have left relaxed
  w.failures.clear();
  w.calls.clear();
  w.totals.clear();
  w.reports.clear();
  w.notes.clear();
  w.memory.free_all();
  w.memory.device_peak_bytes = w.memory.device_bytes;
  w.memory.pinned_peak_bytes = w.memory.pinned_bytes;
  for (auto it = w.streams.begin(); it != w.streams.end();)
    it = it->second->is_tests ? w.streams.erase(it) : std::next(it);
  w.thread_streams.clear();
  for (DeviceState& device : w.devices) {
    device.lost = kSuccess;
    device.runs_left = 0;
    device.lost_then = kSuccess;
    device.legacy.reset();
  }
  w.settings = w.initial;
  w.settings.seed = seed;
  w.next_ordinal = 1;
}

FAKE_EXPORT void fake_set_driver_version(int version) {
  const auto lock = locked();
  world().settings.version = version;
}

FAKE_EXPORT void fake_set_pace(int pace) {
  const auto lock = locked();
  world().settings.pace = static_cast<Pace>(pace);
}

FAKE_EXPORT void fake_limit_pinned(std::uint64_t nbytes) {
  const auto lock = locked();
  world().settings.pinned_limit_bytes = nbytes;
}

// ---- Memory -------------------------------------------------------------------------------------

FAKE_EXPORT std::uint64_t fake_alloc(int device, std::uint64_t nbytes, int is_adjacent) {
  const auto lock = locked();
  if (device < 0 || device >= kMaxDevices) return 0;
  return world().memory.allocate(device, nbytes, false, is_adjacent != 0);
}

FAKE_EXPORT int fake_free(std::uint64_t address) {
  const auto lock = locked();
  World& w = world();
  const Allocation* found = w.memory.find(address);
  if (found == nullptr || found->address != address) {
    w.report("fake_free: no allocation begins there");
    return kInvalidValue;
  }
  w.memory.free(address);
  return kSuccess;
}

FAKE_EXPORT int fake_device_of(std::uint64_t address) {
  const auto lock = locked();
  return world().memory.device_of(address);
}

FAKE_EXPORT int fake_write(std::uint64_t address, const void* data, std::uint64_t nbytes) {
  auto lock = locked();
  std::byte* bytes = bytes_at(address, nbytes);
  if (bytes == nullptr) return kInvalidValue;
  lock.unlock();
  std::memcpy(bytes, data, nbytes);
  return kSuccess;
}

FAKE_EXPORT int fake_read(std::uint64_t address, void* data, std::uint64_t nbytes) {
  auto lock = locked();
  const std::byte* bytes = bytes_at(address, nbytes);
  if (bytes == nullptr) return kInvalidValue;
  lock.unlock();
  std::memcpy(data, bytes, nbytes);
  return kSuccess;
}

// ---- Streams ------------------------------------------------------------------------------------

FAKE_EXPORT std::uint64_t fake_make_stream(int device, int is_non_blocking) {
  const auto lock = locked();
  World& w = world();
  const StreamPtr stream = w.new_stream(device);
  stream->handle = w.new_handle(13);
  stream->is_blocking = is_non_blocking == 0;
  stream->is_tests = true;
  w.streams[stream->handle] = stream;
  return reinterpret_cast<std::uint64_t>(stream->handle);
}

FAKE_EXPORT int fake_destroy_stream(std::uint64_t handle) {
  const auto lock = locked();
  return world().streams.erase(reinterpret_cast<Handle>(handle)) == 1 ? kSuccess : kInvalidHandle;
}

namespace {

int queue_tests(int device, std::uint64_t handle, const char* what, std::function<void()> run) {
  const StreamPtr stream = find_stream(device, handle);
  if (!stream) return kInvalidHandle;
  if (const Result lost = world().devices[stream->device].lost) return lost;
  auto work = std::make_shared<Work>();
  work->what = what;
  work->is_engines = false;
  work->run = std::move(run);
  enqueue(stream, work);
  return kSuccess;
}

}  // namespace

FAKE_EXPORT int fake_stream_write(int device, std::uint64_t stream, std::uint64_t address,
                                  const void* data, std::uint64_t nbytes) {
  const auto lock = locked();
  std::byte* bytes = bytes_at(address, nbytes);
  if (bytes == nullptr) return kInvalidValue;
  const auto* first = static_cast<const std::byte*>(data);
  std::vector<std::byte> kept(first, first + nbytes);
  return queue_tests(device, stream, "fake_stream_write", [bytes, kept = std::move(kept)] {
    std::memcpy(bytes, kept.data(), kept.size());
  });
}

FAKE_EXPORT int fake_stream_read(int device, std::uint64_t stream, std::uint64_t address,
                                 void* data, std::uint64_t nbytes) {
  const auto lock = locked();
  const std::byte* bytes = bytes_at(address, nbytes);
  if (bytes == nullptr) return kInvalidValue;
  return queue_tests(device, stream, "fake_stream_read",
                     [bytes, data, nbytes] { std::memcpy(data, bytes, nbytes); });
}

FAKE_EXPORT int fake_stream_sync(int device, std::uint64_t handle) {
  auto lock = locked();
  const StreamPtr stream = find_stream(device, handle);
  return stream ? wait_for(lock, stream->last) : kInvalidHandle;
}

FAKE_EXPORT void fake_sync_all() {
  auto lock = locked();
  drain(lock);
}

FAKE_EXPORT void fake_set_stream_pace(int device, std::uint64_t handle, int pace) {
  const auto lock = locked();
  if (const StreamPtr stream = find_stream(device, handle)) {
    stream->pace = static_cast<Pace>(pace);
    stream->has_pace = true;
  }
}

FAKE_EXPORT void fake_release_hung() {
  const auto lock = locked();
  release_hung();
}

FAKE_EXPORT int fake_set_capturing(std::uint64_t handle, int is_capturing) {
  const auto lock = locked();
  const StreamPtr stream = handle <= kLegacyStream ? nullptr : find_stream(-1, handle);
  if (!stream) return kInvalidHandle;
  stream->is_capturing = is_capturing != 0;
  stream->is_capture_broken = false;
  return kSuccess;
}

FAKE_EXPORT int fake_is_capture_broken(std::uint64_t handle) {
  const auto lock = locked();
  const StreamPtr stream = find_stream(-1, handle);
  return stream && stream->is_capture_broken ? 1 : 0;
}
