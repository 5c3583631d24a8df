// The part of CUDA's driver interface that is used here, in own declarations: no toolkit is needed
// to build. cuda_abi_check.cpp compares them with <cuda.h> where there is one.
#pragma once

#include <cstddef>
#include <cstdint>

namespace dcpx::device {

using Result = int;                       // CUresult
using Device = int;                       // CUdevice
using DevicePtr = unsigned long long;     // CUdeviceptr
using Context = struct OpaqueContext*;    // CUcontext
using Stream = struct OpaqueStream*;      // CUstream
using Event = struct OpaqueEvent*;        // CUevent
using Module = struct OpaqueModule*;      // CUmodule
using Function = struct OpaqueFunction*;  // CUfunction

// CUresult
constexpr Result kSuccess = 0;
constexpr Result kOutOfMemory = 2;
constexpr Result kNotInitialized = 3;
constexpr Result kDeinitialized = 4;
constexpr Result kDeviceUnavailable = 46;
constexpr Result kNoDevice = 100;
constexpr Result kEccUncorrectable = 214;
constexpr Result kNvlinkUncorrectable = 220;
constexpr Result kContained = 226;
constexpr Result kNotReady = 600;
constexpr Result kIllegalAddress = 700;
constexpr Result kLaunchTimeout = 702;
constexpr Result kContextIsDestroyed = 709;
constexpr Result kAssert = 710;
constexpr Result kAlreadyRegistered = 712;
constexpr Result kHardwareStackError = 714;
constexpr Result kLaunchFailed = 719;
constexpr Result kTensorMemoryLeak = 721;
constexpr Result kNotSupported = 801;
constexpr Result kExternalDevice = 911;
constexpr Result kCaptureImplicit = 906;
constexpr Result kUnknown = 999;

// CUdevice_attribute
constexpr int kAttributeMaxPitch = 11;
constexpr int kAttributeHostPointerForRegisteredMem = 91;

// Flags
constexpr unsigned kStreamNonBlocking = 1;
constexpr unsigned kEventDisableTiming = 2;
constexpr unsigned kHostRegisterPortable = 1;
constexpr unsigned kHostRegisterDevicemap = 2;
constexpr std::uint64_t kLegacyStreamEntryPoints = 1;  // CU_GET_PROC_ADDRESS_LEGACY_STREAM

enum class PointerAttribute : int { kRangeStart = 11, kRangeSize = 12 };
enum class CaptureStatus : int { kNone = 0, kActive = 1, kInvalidated = 2 };
enum class CaptureMode : int { kGlobal = 0, kThreadLocal = 1, kRelaxed = 2 };
enum class MemoryType : int { kHost = 1, kDevice = 2 };
enum class SrcAccessOrder : int { kStream = 1 };
enum class ProcAddressStatus : int { kFound = 0, kNotFound = 1, kVersionNotSufficient = 2 };

// CUDA_MEMCPY2D_v2
struct Memcpy2D {
  std::size_t src_x_bytes = 0;
  std::size_t src_y = 0;
  MemoryType src_type = MemoryType::kHost;
  const void* src_host = nullptr;
  DevicePtr src_device = 0;
  void* src_array = nullptr;
  std::size_t src_pitch = 0;
  std::size_t dst_x_bytes = 0;
  std::size_t dst_y = 0;
  MemoryType dst_type = MemoryType::kHost;
  void* dst_host = nullptr;
  DevicePtr dst_device = 0;
  void* dst_array = nullptr;
  std::size_t dst_pitch = 0;
  std::size_t width_bytes = 0;
  std::size_t height = 0;
};

struct MemLocation {  // CUmemLocation
  int type = 0;       // CU_MEM_LOCATION_TYPE_INVALID: no hint
  int id = 0;
};

struct MemcpyAttributes {  // CUmemcpyAttributes
  SrcAccessOrder src_access_order = SrcAccessOrder::kStream;
  MemLocation src_hint;
  MemLocation dst_hint;
  unsigned flags = 0;
};
constexpr unsigned kMemcpyPreferOverlapWithCompute = 1;

// Two forms of cuMemcpyBatchAsync: 13.0 dropped the index of the failed copy.
using MemcpyBatch12080 = Result (*)(DevicePtr* dsts, DevicePtr* srcs, std::size_t* sizes,
                                    std::size_t count, MemcpyAttributes* attributes,
                                    std::size_t* attribute_indexes, std::size_t attribute_count,
                                    std::size_t* fail_index, Stream stream);
using MemcpyBatch13000 = Result (*)(DevicePtr* dsts, DevicePtr* srcs, std::size_t* sizes,
                                    std::size_t count, MemcpyAttributes* attributes,
                                    std::size_t* attribute_indexes, std::size_t attribute_count,
                                    Stream stream);
using GetProcAddress12000 = Result (*)(const char* symbol, void** function, int cuda_version,
                                       std::uint64_t flags, ProcAddressStatus* status);

// The driver's entry points, each by its name without version and the version whose form is
// declared here: DCPX_ENTRY(name, version, arguments).
#define DCPX_CUDA_ENTRY_POINTS(DCPX_ENTRY)                                                    \
  DCPX_ENTRY(cuInit, 2000, (unsigned))                                                        \
  DCPX_ENTRY(cuDriverGetVersion, 2020, (int*))                                                \
  DCPX_ENTRY(cuGetErrorName, 6000, (Result, const char**))                                    \
  DCPX_ENTRY(cuGetErrorString, 6000, (Result, const char**))                                  \
  DCPX_ENTRY(cuDeviceGetCount, 2000, (int*))                                                  \
  DCPX_ENTRY(cuDeviceGet, 2000, (Device*, int))                                               \
  DCPX_ENTRY(cuDeviceGetAttribute, 2000, (int*, int, Device))                                 \
  DCPX_ENTRY(cuDeviceGetPCIBusId, 4010, (char*, int, Device))                                 \
  DCPX_ENTRY(cuDevicePrimaryCtxRetain, 7000, (Context*, Device))                              \
  DCPX_ENTRY(cuCtxPushCurrent, 4000, (Context))                                               \
  DCPX_ENTRY(cuCtxPopCurrent, 4000, (Context*))                                               \
  DCPX_ENTRY(cuCtxGetStreamPriorityRange, 5050, (int*, int*))                                 \
  DCPX_ENTRY(cuStreamCreateWithPriority, 5050, (Stream*, unsigned, int))                      \
  DCPX_ENTRY(cuStreamDestroy, 4000, (Stream))                                                 \
  DCPX_ENTRY(cuStreamWaitEvent, 3020, (Stream, Event, unsigned))                              \
  DCPX_ENTRY(cuStreamIsCapturing, 10000, (Stream, CaptureStatus*))                            \
  DCPX_ENTRY(cuThreadExchangeStreamCaptureMode, 10010, (CaptureMode*))                        \
  DCPX_ENTRY(cuEventCreate, 2000, (Event*, unsigned))                                         \
  DCPX_ENTRY(cuEventDestroy, 4000, (Event))                                                   \
  DCPX_ENTRY(cuEventRecord, 2000, (Event, Stream))                                            \
  DCPX_ENTRY(cuEventQuery, 2000, (Event))                                                     \
  DCPX_ENTRY(cuMemHostRegister, 6050, (void*, std::size_t, unsigned))                         \
  DCPX_ENTRY(cuMemHostUnregister, 4000, (void*))                                              \
  DCPX_ENTRY(cuPointerGetAttributes, 7000, (unsigned, PointerAttribute*, void**, DevicePtr))  \
  DCPX_ENTRY(cuMemcpyDtoHAsync, 3020, (void*, DevicePtr, std::size_t, Stream))                \
  DCPX_ENTRY(cuMemcpyHtoDAsync, 3020, (DevicePtr, const void*, std::size_t, Stream))          \
  DCPX_ENTRY(cuMemcpy2DAsync, 3020, (const Memcpy2D*, Stream))                                \
  DCPX_ENTRY(cuModuleLoadData, 2000, (Module*, const void*))                                  \
  DCPX_ENTRY(cuModuleGetFunction, 2000, (Function*, Module, const char*))                     \
  DCPX_ENTRY(cuLaunchKernel, 4000,                                                            \
             (Function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, \
              Stream, void**, void**))

// Every driver since 12.0 has all but the batch copies, which may be null.
struct Api {
  // NOLINTNEXTLINE(bugprone-macro-parentheses): a declarator and a parameter list
#define DCPX_DECLARE(name, version, arguments) Result(*name) arguments = nullptr;
  DCPX_CUDA_ENTRY_POINTS(DCPX_DECLARE)
#undef DCPX_DECLARE
  MemcpyBatch12080 batch_12080 = nullptr;  // cuMemcpyBatchAsync of a 12.8 or 12.9 driver
  MemcpyBatch13000 batch_13000 = nullptr;  // the same of a driver since 13.0
};

}  // namespace dcpx::device
