// The driver interface as the fake exports it, in own declarations; abi_check.cpp compares them
// with <cuda.h> where a toolkit is installed.
#pragma once

#include <cstddef>
#include <cstdint>

#define FAKE_EXPORT extern "C" __attribute__((visibility("default")))

namespace fake {

using Result = int;  // CUresult
using Device = int;
using Address = unsigned long long;  // CUdeviceptr: one address space for host and devices
using Handle = void*;                // CUcontext, CUstream, CUevent, CUmodule, CUfunction

constexpr Result kSuccess = 0;
constexpr Result kInvalidValue = 1;
constexpr Result kOutOfMemory = 2;
constexpr Result kNotInitialized = 3;
constexpr Result kDeinitialized = 4;
constexpr Result kNoDevice = 100;
constexpr Result kInvalidDevice = 101;
constexpr Result kInvalidImage = 200;
constexpr Result kInvalidContext = 201;
constexpr Result kNoBinaryForGpu = 209;
constexpr Result kInvalidHandle = 400;
constexpr Result kNotFound = 500;
constexpr Result kNotReady = 600;
constexpr Result kIllegalAddress = 700;
constexpr Result kLaunchTimeout = 702;
constexpr Result kAlreadyRegistered = 712;
constexpr Result kNotRegistered = 713;
constexpr Result kLaunchFailed = 719;
constexpr Result kNotSupported = 801;
constexpr Result kCaptureUnsupported = 900;
constexpr Result kCaptureImplicit = 906;
constexpr Result kUnknown = 999;

constexpr unsigned kStreamNonBlocking = 1;
constexpr unsigned kHostRegisterPortable = 1;

// What is no handle of a stream that was made: CU_STREAM_LEGACY and CU_STREAM_PER_THREAD.
constexpr std::uintptr_t kLegacyStream = 1;
constexpr std::uintptr_t kPerThreadStream = 2;

enum MemoryType : int { kHostMemory = 1, kDeviceMemory = 2, kUnifiedMemory = 4 };
enum CaptureMode : int { kCaptureGlobal = 0, kCaptureThreadLocal = 1, kCaptureRelaxed = 2 };
enum SourceOrder : int { kOrderStream = 1, kOrderDuringCall = 2, kOrderAny = 3 };

enum PointerAttribute : int {
  kPointerContext = 1,
  kPointerMemoryType = 2,
  kPointerDeviceAddress = 3,
  kPointerHostAddress = 4,
  kPointerIsManaged = 8,
  kPointerOrdinal = 9,
  kPointerRangeStart = 11,
  kPointerRangeBytes = 12,
  kPointerIsMapped = 13,
};

enum DeviceAttribute : int {
  kMaxThreadsPerBlock = 1,
  kWarpSize = 10,
  kMaxPitch = 11,
  kMultiprocessorCount = 16,
  kCanMapHostMemory = 19,
  kConcurrentKernels = 31,
  kPciBusId = 33,
  kPciDeviceId = 34,
  kAsyncEngineCount = 40,
  kUnifiedAddressing = 41,
  kPciDomainId = 50,
  kComputeCapabilityMajor = 75,
  kComputeCapabilityMinor = 76,
  kPageableMemoryAccess = 88,
  kHostPointerForRegisteredMem = 91,
  kHostRegisterSupported = 99,
  kHostNumaId = 134,
};

struct Memcpy2D {  // CUDA_MEMCPY2D_v2
  std::size_t src_x_bytes;
  std::size_t src_y;
  int src_type;
  const void* src_host;
  Address src_device;
  Handle src_array;
  std::size_t src_pitch;
  std::size_t dst_x_bytes;
  std::size_t dst_y;
  int dst_type;
  void* dst_host;
  Address dst_device;
  Handle dst_array;
  std::size_t dst_pitch;
  std::size_t width_bytes;
  std::size_t height;
};

struct MemcpyAttributes {  // CUmemcpyAttributes
  int source_order;
  int src_hint[2];
  int dst_hint[2];
  unsigned flags;
};

}  // namespace fake
