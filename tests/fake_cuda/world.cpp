#include "world.h"

#include <pthread.h>
#include <unistd.h>

#include <cstdlib>

namespace fake {

namespace {

std::uintptr_t number(Handle handle) { return reinterpret_cast<std::uintptr_t>(handle); }

constexpr std::uintptr_t kContextBase = 0xC0'0000'0000;

// No text a program produces is so long that it is kept without bound.
void keep(std::vector<std::string>& texts, const std::string& text) {
  constexpr std::size_t kMost = 200;
  if (texts.size() < kMost) texts.push_back(text);
}

std::mutex* the_mutex = nullptr;
int first_pid = 0;

int from_environment(const char* name, int otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr || *text == '\0' ? otherwise
                                          : static_cast<int>(std::strtol(text, nullptr, 10));
}

}  // namespace

// Never destroyed: threads may be in it when the process ends.
World& world() {
  static World& the_world = []() -> World& {
    auto& made = *new World;
    made.settings.seed = static_cast<std::uint64_t>(from_environment("FAKE_CUDA_SEED", 0));
    made.settings.version = from_environment("FAKE_CUDA_VERSION", made.settings.version);
    made.settings.device_count = from_environment("FAKE_CUDA_DEVICES", made.settings.device_count);
    made.initial = made.settings;
    first_pid = ::getpid();
    // A child must not find the mutex held by a thread that it does not have.
    ::pthread_atfork([] { the_mutex->lock(); }, [] { the_mutex->unlock(); },
                     [] { the_mutex->unlock(); });
    the_mutex = &made.mutex;
    return made;
  }();
  return the_world;
}

bool is_forked_child() noexcept { return first_pid != ::getpid(); }

void World::report(const std::string& text) { keep(reports, text); }
void World::note(const std::string& text) { keep(notes, text); }

Handle World::new_handle(int kind) noexcept {
  return reinterpret_cast<Handle>((std::uintptr_t(kind) << 36) + (next_handle++ << 4));
}

StreamPtr World::new_stream(int device) {
  const auto stream = std::make_shared<Stream>();
  stream->device = device;
  stream->ordinal = next_ordinal++;
  all_streams_.push_back(stream);
  return stream;
}

std::vector<StreamPtr> World::living_streams() {
  std::vector<StreamPtr> living;
  for (const std::weak_ptr<Stream>& stream : all_streams_)
    if (StreamPtr alive = stream.lock()) living.push_back(std::move(alive));
  all_streams_.assign(living.begin(), living.end());
  return living;
}

StreamPtr World::legacy_stream(int device) {
  StreamPtr& legacy = devices[device].legacy;
  if (!legacy) {
    legacy = new_stream(device);
    legacy->is_legacy = true;
    legacy->ordinal = 1000000 + static_cast<std::uint64_t>(device);
  }
  return legacy;
}

StreamPtr World::thread_stream(int device) {
  StreamPtr& own = thread_streams[{std::this_thread::get_id(), device}];
  if (!own) own = new_stream(device);
  return own;
}

std::uint64_t drawn(std::uint64_t seed, std::uint64_t a, std::uint64_t b) noexcept {
  std::uint64_t x = seed * 0x9E3779B97F4A7C15 + a * 0xBF58476D1CE4E5B9 + b * 0x94D049BB133111EB;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
  return x ^ (x >> 31);
}

std::vector<int>& context_stack() noexcept {
  thread_local std::vector<int> stack;
  return stack;
}

int current_device() noexcept {
  const std::vector<int>& stack = context_stack();
  return stack.empty() ? -1 : stack.back();
}

Handle context_of(int device) noexcept {
  return reinterpret_cast<Handle>(kContextBase + (std::uintptr_t(device) << 4));
}

int device_of_context(Handle context) noexcept {
  const std::uintptr_t offset = number(context) - kContextBase;
  return offset % 16 == 0 && offset / 16 < kMaxDevices ? static_cast<int>(offset / 16) : -1;
}

int& capture_mode() noexcept {
  thread_local int mode = kCaptureGlobal;
  return mode;
}

Call::Call(const char* entry, unsigned flags) : entry_(entry) {
  World& w = world();
  // A forked child has a mutex that nobody may ever unlock there.
  if (w.owner_pid != 0 && w.owner_pid != ::getpid()) {
    result_ = kNotInitialized;
    is_dead_ = true;
    return;
  }
  lock_ = std::unique_lock(w.mutex);
  ++w.calls[entry];
  if (is_out_of_service(flags)) return;
  for (Failure& failure : w.failures) {
    if (failure.entry != entry || --failure.calls_left != 0) continue;
    result_ = failure.code;
    if (failure.is_sticky)
      for (int device = 0; device < kMaxDevices; ++device)
        if (current_device() < 0 || current_device() == device) lose_device(device, failure.code);
    return;
  }
  if ((flags & kNeedsContext) != 0U) {
    if (current_device() < 0) {
      result_ = wrong(kInvalidContext, "no context is current on this thread");
      return;
    }
    result_ = lost(current_device());
  }
  if ((flags & kUnsafeInCapture) == 0U || result_ != kSuccess) return;
  for (auto& [handle, stream] : w.streams) {
    if (!stream->is_capturing || capture_mode() == kCaptureRelaxed) continue;
    stream->is_capture_broken = true;
    result_ = wrong(kCaptureUnsupported, "breaks a graph capture under way on another stream");
  }
}

bool Call::is_out_of_service(unsigned flags) {
  const World& w = world();
  if (w.is_down) result_ = kDeinitialized;
  if (w.owner_pid == 0 && (flags & kBeforeInit) == 0U) result_ = kNotInitialized;
  is_dead_ = result_ != kSuccess;
  return is_dead_;
}

Result Call::wrong(Result code, const std::string& what) const {
  world().report(std::string(entry_) + ": " + what);
  return code;
}

Result Call::find(Handle handle, StreamPtr& stream) const {
  World& w = world();
  if (number(handle) <= kPerThreadStream) {
    if (current_device() < 0)
      return wrong(kInvalidContext, "a default stream without a current context");
    stream = number(handle) == kPerThreadStream ? w.thread_stream(current_device())
                                                : w.legacy_stream(current_device());
  } else {
    const auto found = w.streams.find(handle);
    if (found == w.streams.end())
      return wrong(kInvalidHandle, "a stream that was destroyed or never made");
    stream = found->second;
  }
  return lost(stream->device);
}

Result Call::find(Handle handle, Event*& event) const {
  World& w = world();
  const auto found = w.events.find(handle);
  if (found == w.events.end())
    return wrong(kInvalidHandle, "an event that was destroyed or never made");
  event = &found->second;
  return lost(event->device);
}

Result Call::lost(int device) const noexcept { return world().devices[device].lost; }

void lose_device(int device, Result code) {
  World& w = world();
  DeviceState& state = w.devices[device];
  if (state.lost != kSuccess) return;
  state.lost = code;
  state.runs_left = 0;
  state.lost_then = kSuccess;
  fail_queued(device, code);
}

}  // namespace fake
