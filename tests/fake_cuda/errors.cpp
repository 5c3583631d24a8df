// Names and descriptions of errors, and what a driver says of itself before it is started.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <unordered_map>

#include "world.h"

namespace fake {
namespace {

struct Text {
  const char* name;
  const char* description;
};

// Any other code has no name, as in CUDA.
const std::unordered_map<Result, Text>& texts() {
  static const std::unordered_map<Result, Text> all = {
      {0, {"CUDA_SUCCESS", "no error"}},
      {1, {"CUDA_ERROR_INVALID_VALUE", "invalid argument"}},
      {2, {"CUDA_ERROR_OUT_OF_MEMORY", "out of memory"}},
      {3, {"CUDA_ERROR_NOT_INITIALIZED", "initialization error"}},
      {4, {"CUDA_ERROR_DEINITIALIZED", "driver shutting down"}},
      {34, {"CUDA_ERROR_STUB_LIBRARY", "CUDA driver is a stub library"}},
      {46, {"CUDA_ERROR_DEVICE_UNAVAILABLE", "device is busy or unavailable"}},
      {100, {"CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"}},
      {101, {"CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"}},
      {200, {"CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"}},
      {201, {"CUDA_ERROR_INVALID_CONTEXT", "invalid device context"}},
      {209, {"CUDA_ERROR_NO_BINARY_FOR_GPU", "no kernel image is available for the device"}},
      {214, {"CUDA_ERROR_ECC_UNCORRECTABLE", "uncorrectable ECC error encountered"}},
      {220, {"CUDA_ERROR_NVLINK_UNCORRECTABLE", "uncorrectable NVLink error detected"}},
      {222, {"CUDA_ERROR_UNSUPPORTED_PTX_VERSION", "PTX of an unsupported toolchain"}},
      {304, {"CUDA_ERROR_OPERATING_SYSTEM", "OS call failed or not supported on this OS"}},
      {400, {"CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"}},
      {500, {"CUDA_ERROR_NOT_FOUND", "named symbol not found"}},
      {600, {"CUDA_ERROR_NOT_READY", "device not ready"}},
      {700, {"CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"}},
      {702, {"CUDA_ERROR_LAUNCH_TIMEOUT", "the launch timed out and was terminated"}},
      {709, {"CUDA_ERROR_CONTEXT_IS_DESTROYED", "context is destroyed"}},
      {712, {"CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", "host memory already registered"}},
      {713, {"CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED", "host memory is not registered"}},
      {719, {"CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"}},
      {800, {"CUDA_ERROR_NOT_PERMITTED", "operation not permitted"}},
      {801, {"CUDA_ERROR_NOT_SUPPORTED", "operation not supported"}},
      {900, {"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "operation not permitted while capturing"}},
      {901, {"CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", "capture failed due to a previous error"}},
      {906, {"CUDA_ERROR_STREAM_CAPTURE_IMPLICIT", "would depend on the capturing stream"}},
      {999, {"CUDA_ERROR_UNKNOWN", "unknown error"}},
  };
  return all;
}

Result tell(const char* entry, Result error, const char** out, const char* Text::* part) {
  const Call call(entry, kBeforeInit);
  *out = nullptr;
  if (call.is_refused()) return call.result();
  const auto found = texts().find(error);
  if (found == texts().end()) return kInvalidValue;
  *out = found->second.*part;
  return kSuccess;
}

}  // namespace
}  // namespace fake

FAKE_EXPORT fake::Result cuGetErrorName(fake::Result error, const char** out) {
  return fake::tell("cuGetErrorName", error, out, &fake::Text::name);
}

FAKE_EXPORT fake::Result cuGetErrorString(fake::Result error, const char** out) {
  return fake::tell("cuGetErrorString", error, out, &fake::Text::description);
}
