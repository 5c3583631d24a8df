// cuGetProcAddress: which form of an entry point a caller of a version gets from this driver.
#include <dlfcn.h>

#include <algorithm>
#include <cstring>

#include "world.h"

namespace fake {
namespace {

struct Entry {
  const char* name;
  int version;  // of CUDA, in which this form came
  const char* symbol;
};

constexpr Entry kEntries[] = {
    {"cuInit", 2000, "cuInit"},
    {"cuDriverGetVersion", 2020, "cuDriverGetVersion"},
    {"cuGetErrorName", 6000, "cuGetErrorName"},
    {"cuGetErrorString", 6000, "cuGetErrorString"},
    {"cuDeviceGetCount", 2000, "cuDeviceGetCount"},
    {"cuDeviceGet", 2000, "cuDeviceGet"},
    {"cuDeviceGetAttribute", 2000, "cuDeviceGetAttribute"},
    {"cuDeviceGetPCIBusId", 4010, "cuDeviceGetPCIBusId"},
    {"cuDevicePrimaryCtxRetain", 7000, "cuDevicePrimaryCtxRetain"},
    {"cuDevicePrimaryCtxRelease", 11000, "cuDevicePrimaryCtxRelease_v2"},
    {"cuCtxPushCurrent", 4000, "cuCtxPushCurrent_v2"},
    {"cuCtxPopCurrent", 4000, "cuCtxPopCurrent_v2"},
    {"cuCtxSetCurrent", 4000, "cuCtxSetCurrent"},
    {"cuCtxGetCurrent", 4000, "cuCtxGetCurrent"},
    {"cuCtxGetDevice", 2000, "cuCtxGetDevice"},
    {"cuCtxGetStreamPriorityRange", 5050, "cuCtxGetStreamPriorityRange"},
    {"cuCtxSynchronize", 2000, "cuCtxSynchronize"},
    {"cuStreamCreateWithPriority", 5050, "cuStreamCreateWithPriority"},
    {"cuStreamDestroy", 4000, "cuStreamDestroy_v2"},
    {"cuStreamWaitEvent", 3020, "cuStreamWaitEvent"},
    {"cuStreamSynchronize", 2000, "cuStreamSynchronize"},
    {"cuStreamQuery", 2000, "cuStreamQuery"},
    {"cuStreamIsCapturing", 10000, "cuStreamIsCapturing"},
    {"cuThreadExchangeStreamCaptureMode", 10010, "cuThreadExchangeStreamCaptureMode"},
    {"cuEventCreate", 2000, "cuEventCreate"},
    {"cuEventDestroy", 4000, "cuEventDestroy_v2"},
    {"cuEventRecord", 2000, "cuEventRecord"},
    {"cuEventQuery", 2000, "cuEventQuery"},
    {"cuEventSynchronize", 2000, "cuEventSynchronize"},
    {"cuMemHostRegister", 6050, "cuMemHostRegister_v2"},
    {"cuMemHostUnregister", 4000, "cuMemHostUnregister"},
    {"cuPointerGetAttribute", 4000, "cuPointerGetAttribute"},
    {"cuPointerGetAttributes", 7000, "cuPointerGetAttributes"},
    {"cuMemcpyDtoHAsync", 3020, "cuMemcpyDtoHAsync_v2"},
    {"cuMemcpyHtoDAsync", 3020, "cuMemcpyHtoDAsync_v2"},
    {"cuMemcpyAsync", 4000, "cuMemcpyAsync"},
    {"cuMemcpy2DAsync", 3020, "cuMemcpy2DAsync_v2"},
    {"cuMemcpyBatchAsync", 12080, "cuMemcpyBatchAsync"},
    {"cuMemcpyBatchAsync", 13000, "cuMemcpyBatchAsync_v2"},
    {"cuModuleLoadData", 2000, "cuModuleLoadData"},
    {"cuModuleUnload", 2000, "cuModuleUnload"},
    {"cuModuleGetFunction", 2000, "cuModuleGetFunction"},
    {"cuLaunchKernel", 4000, "cuLaunchKernel"},
    {"cuMemAlloc", 3020, "cuMemAlloc_v2"},
    {"cuMemFree", 3020, "cuMemFree_v2"},
    {"cuGetProcAddress", 12000, "cuGetProcAddress_v2"},
};

// Entries that counts and failures know by a name of their own.
const char* counted_name(const Entry& entry) {
  return std::strcmp(entry.symbol, "cuMemcpyBatchAsync_v2") == 0 ? entry.symbol : entry.name;
}

void* find_symbol(const char* name) {
  static void* const library = [] {
    Dl_info place{};
    ::dladdr(reinterpret_cast<const void*>(&find_symbol), &place);
    return ::dlopen(place.dli_fname, RTLD_NOW | RTLD_NOLOAD);
  }();
  return library == nullptr ? nullptr : ::dlsym(library, name);
}

// The newest form that is no newer than the caller's version and the driver's; null: none.
const Entry* find_entry(const char* name, int version, bool& is_known) {
  const int driver = world().settings.version;
  const Entry* best = nullptr;
  is_known = false;
  for (const Entry& entry : kEntries) {
    if (std::strcmp(entry.name, name) != 0 || entry.version > driver) continue;
    is_known = true;
    if (entry.version <= version && (best == nullptr || entry.version > best->version))
      best = &entry;
  }
  return best;
}

}  // namespace

const std::vector<std::string>& entry_points() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> all;
    for (const Entry& entry : kEntries) all.emplace_back(counted_name(entry));
    return all;
  }();
  return names;
}

}  // namespace fake

// As documented for 13.0: what is not there is no error but a null pointer and a status.
FAKE_EXPORT fake::Result cuGetProcAddress_v2(const char* symbol, void** function, int version,
                                             std::uint64_t flags, int* status) {
  using namespace fake;
  constexpr int kFound = 0;
  constexpr int kUnknown = 1;
  constexpr int kVersionTooLow = 2;
  Call call("cuGetProcAddress", kBeforeInit);
  *function = nullptr;
  if (call.is_refused()) return call.result();
  if (version > world().settings.version) return kInvalidValue;
  if ((flags & 2U) != 0U) return call.wrong(kNotSupported, "per-thread default streams");
  bool is_known = false;
  const Entry* entry = find_entry(symbol, version, is_known);
  if (status != nullptr) *status = entry ? kFound : is_known ? kVersionTooLow : kUnknown;
  if (entry != nullptr) *function = find_symbol(entry->symbol);
  return kSuccess;
}
