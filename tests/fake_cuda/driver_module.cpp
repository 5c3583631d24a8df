// Modules, and kernels by their host twins.
#include <cstring>

#include "twins.h"

using namespace fake;

namespace {

// A fatbin, as nvcc writes it or as it is embedded; a cubin; PTX.
bool is_image(const void* image) {
  unsigned magic = 0;
  std::memcpy(&magic, image, sizeof magic);
  const bool is_ptx = std::strncmp(static_cast<const char*>(image), "//", 2) == 0 ||
                      std::strncmp(static_cast<const char*>(image), ".ver", 4) == 0;
  return magic == 0xBA55ED50 || magic == 0x466243B1 || magic == 0x464C457F || is_ptx;
}

}  // namespace

FAKE_EXPORT Result cuModuleLoadData(Handle* out, const void* image) {
  Call call("cuModuleLoadData", kNeedsContext | kUnsafeInCapture);
  if (call.is_refused()) return call.result();
  World& w = world();
  if (w.settings.refuses_fatbin) return kNoBinaryForGpu;
  if (!is_image(image)) return kInvalidImage;
  *out = w.new_handle(9);
  w.modules[*out] = current_device();
  return kSuccess;
}

FAKE_EXPORT Result cuModuleUnload(Handle module) {
  Call call("cuModuleUnload", kNeedsContext);
  if (call.is_dead()) return call.result();
  if (world().modules.erase(module) == 0) return call.wrong(kInvalidHandle, "no such module");
  return call.result();
}

FAKE_EXPORT Result cuModuleGetFunction(Handle* out, Handle module, const char* name) {
  Call call("cuModuleGetFunction");
  if (call.is_refused()) return call.result();
  World& w = world();
  const auto found = w.modules.find(module);
  if (found == w.modules.end()) return call.wrong(kInvalidHandle, "no such module");
  const TwinInfo* twin = find_twin(name);
  if (twin == nullptr) return kNotFound;
  *out = w.new_handle(11);
  w.functions[*out] = {found->second, twin};
  return kSuccess;
}

FAKE_EXPORT Result cuLaunchKernel(Handle function, unsigned grid_x, unsigned grid_y,
                                  unsigned grid_z, unsigned block_x, unsigned block_y,
                                  unsigned block_z, unsigned shared_bytes, Handle stream_handle,
                                  void** arguments, void** extra) {
  Call call("cuLaunchKernel", kNeedsContext);
  if (call.is_refused()) return call.result();
  World& w = world();
  StreamPtr stream;
  if (const Result bad = call.find(stream_handle, stream)) return bad;
  const auto found = w.functions.find(function);
  if (found == w.functions.end()) return call.wrong(kInvalidHandle, "no such function");
  const int device = found->second.first;
  if (device != stream->device || device != current_device())
    return call.wrong(kInvalidHandle, "function, stream and context of different devices");
  if (stream->is_capturing) {
    stream->is_capture_broken = true;
    return call.wrong(kCaptureUnsupported, "a stream that is capturing a graph");
  }
  const std::uint64_t threads = std::uint64_t{block_x} * block_y * block_z;
  const std::uint64_t blocks = std::uint64_t{grid_x} * grid_y * grid_z;
  if (threads == 0 || threads > 1024 || blocks == 0 || shared_bytes > (48U << 10) ||
      extra != nullptr || arguments == nullptr)
    return call.wrong(kInvalidValue, "a launch that no device takes");
  const TwinInfo* twin = found->second.second;
  Launch launch;
  launch.blocks = static_cast<unsigned>(blocks);
  launch.threads = static_cast<unsigned>(threads);
  launch.seed = drawn(w.settings.seed, stream->ordinal, stream->queued) >> 16;
  for (std::size_t i = 0; i < twin->argument_bytes.size(); ++i) {
    const auto* first = static_cast<const std::byte*>(arguments[i]);
    launch.arguments.emplace_back(first, first + twin->argument_bytes[i]);
  }
  auto work = std::make_shared<Work>();
  work->what = std::string("kernel ") + twin->name;
  work->run = [twin, launch, device] {
    try {
      twin->run(launch, KernelMemory(device));
    } catch (const IllegalAddress&) {
      const std::lock_guard lock(world().mutex);
      lose_device(device, kIllegalAddress);
    }
  };
  enqueue(stream, work);
  return kSuccess;
}
