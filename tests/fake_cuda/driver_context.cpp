// Start-up, devices, primary contexts and the thread's stack of contexts.
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>

#include "world.h"

using namespace fake;

namespace {

// What CUDA does when the process ends: what is queued never runs, and later calls fail.
void shut_down() {
  World& w = world();
  if (w.owner_pid != ::getpid()) return;
  std::unique_lock lock(w.mutex);
  w.is_down = true;
  for (int device = 0; device < kMaxDevices; ++device) fail_queued(device, kDeinitialized);
  w.host_wake.wait_for(lock, std::chrono::seconds(5), [&] { return w.running == 0; });
}

bool is_device(int device) { return device >= 0 && device < world().settings.device_count; }

int attribute_of(int attribute, int device) {
  switch (attribute) {
    case kMaxThreadsPerBlock:
      return 1024;
    case kWarpSize:
      return 32;
    case kMaxPitch:
      return 0x7FFFFFFF;
    case kMultiprocessorCount:
      return 4;
    case kPciBusId:
      return device + 1;
    case kAsyncEngineCount:
      return 2;
    case kComputeCapabilityMajor:
      return 9;
    case kCanMapHostMemory:
    case kConcurrentKernels:
    case kUnifiedAddressing:
    case kHostPointerForRegisteredMem:
    case kHostRegisterSupported:
      return 1;
    default:
      return 0;
  }
}

}  // namespace

FAKE_EXPORT Result cuInit(unsigned flags) {
  Call call("cuInit", kBeforeInit);
  if (call.is_refused()) return call.result();
  if (flags != 0) return call.wrong(kInvalidValue, "flags must be 0");
  World& w = world();
  if (w.settings.device_count == 0) return kNoDevice;
  if (w.owner_pid == 0) {
    std::atexit(shut_down);
    w.owner_pid = ::getpid();
  }
  return kSuccess;
}

FAKE_EXPORT Result cuDriverGetVersion(int* version) {
  Call call("cuDriverGetVersion", kBeforeInit);
  if (call.is_refused()) return call.result();
  *version = world().settings.version;
  return kSuccess;
}

FAKE_EXPORT Result cuDeviceGetCount(int* count) {
  Call call("cuDeviceGetCount");
  if (call.is_refused()) return call.result();
  *count = world().settings.device_count;
  return kSuccess;
}

FAKE_EXPORT Result cuDeviceGet(Device* device, int ordinal) {
  Call call("cuDeviceGet");
  if (call.is_refused()) return call.result();
  if (!is_device(ordinal)) return kInvalidDevice;
  *device = ordinal;
  return kSuccess;
}

FAKE_EXPORT Result cuDeviceGetAttribute(int* value, int attribute, Device device) {
  Call call("cuDeviceGetAttribute");
  if (call.is_refused()) return call.result();
  if (!is_device(device)) return kInvalidDevice;
  if (attribute <= 0) return kInvalidValue;
  *value = attribute_of(attribute, device);
  return kSuccess;
}

FAKE_EXPORT Result cuDeviceGetPCIBusId(char* text, int nbytes, Device device) {
  Call call("cuDeviceGetPCIBusId");
  if (call.is_refused()) return call.result();
  if (!is_device(device)) return kInvalidDevice;
  char id[16];
  std::snprintf(id, sizeof id, "0000:%02X:00.0", unsigned(device) + 1);
  if (text == nullptr || nbytes < 13) return kInvalidValue;
  std::snprintf(text, std::size_t(nbytes), "%s", id);
  return kSuccess;
}

FAKE_EXPORT Result cuDevicePrimaryCtxRetain(Handle* context, Device device) {
  Call call("cuDevicePrimaryCtxRetain");
  if (call.is_refused()) return call.result();
  if (!is_device(device)) return kInvalidDevice;
  if (const Result lost = call.lost(device)) return lost;
  ++world().devices[device].retained;
  *context = context_of(device);
  return kSuccess;
}

FAKE_EXPORT Result cuDevicePrimaryCtxRelease_v2(Device device) {
  Call call("cuDevicePrimaryCtxRelease");
  if (call.is_dead()) return call.result();
  if (!is_device(device)) return kInvalidDevice;
  int& retained = world().devices[device].retained;
  if (retained == 0) return call.wrong(kInvalidContext, "released more often than retained");
  --retained;
  return call.result();
}

namespace {

Result check_context(const Call& call, Handle context, int& device) {
  device = device_of_context(context);
  if (device < 0 || world().devices[device].retained == 0)
    return call.wrong(kInvalidContext, "a context that nobody retains");
  return kSuccess;
}

}  // namespace

FAKE_EXPORT Result cuCtxPushCurrent_v2(Handle context) {
  Call call("cuCtxPushCurrent");
  if (call.is_refused()) return call.result();
  int device = -1;
  if (const Result bad = check_context(call, context, device)) return bad;
  context_stack().push_back(device);
  return kSuccess;
}

FAKE_EXPORT Result cuCtxPopCurrent_v2(Handle* context) {
  Call call("cuCtxPopCurrent");
  if (call.is_dead()) return call.result();
  if (context_stack().empty()) return call.wrong(kInvalidContext, "no context was pushed");
  if (context != nullptr) *context = context_of(context_stack().back());
  context_stack().pop_back();
  return call.result();
}

FAKE_EXPORT Result cuCtxSetCurrent(Handle context) {
  Call call("cuCtxSetCurrent");
  if (call.is_refused()) return call.result();
  int device = -1;
  if (context != nullptr)
    if (const Result bad = check_context(call, context, device)) return bad;
  std::vector<int>& stack = context_stack();
  if (!stack.empty()) stack.pop_back();
  if (device >= 0) stack.push_back(device);
  return kSuccess;
}

FAKE_EXPORT Result cuCtxGetCurrent(Handle* context) {
  Call call("cuCtxGetCurrent");
  if (call.is_refused()) return call.result();
  *context = current_device() < 0 ? nullptr : context_of(current_device());
  return kSuccess;
}

FAKE_EXPORT Result cuCtxGetDevice(Device* device) {
  Call call("cuCtxGetDevice", kNeedsContext);
  if (call.is_refused()) return call.result();
  *device = current_device();
  return kSuccess;
}

FAKE_EXPORT Result cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  Call call("cuCtxGetStreamPriorityRange", kNeedsContext);
  if (call.is_refused()) return call.result();
  if (least != nullptr) *least = 0;
  if (greatest != nullptr) *greatest = -5;
  return kSuccess;
}

FAKE_EXPORT Result cuCtxSynchronize() {
  Call call("cuCtxSynchronize", kNeedsContext | kUnsafeInCapture);
  if (call.is_refused()) return call.result();
  const int device = current_device();
  for (const StreamPtr& stream : world().living_streams())
    if (stream->device == device) wait_for(call.lock(), stream->last);
  return call.lost(device);
}

FAKE_EXPORT Result cuThreadExchangeStreamCaptureMode(int* mode) {
  Call call("cuThreadExchangeStreamCaptureMode");
  if (call.is_refused()) return call.result();
  if (mode == nullptr || *mode < kCaptureGlobal || *mode > kCaptureRelaxed) return kInvalidValue;
  std::swap(*mode, capture_mode());
  return kSuccess;
}
