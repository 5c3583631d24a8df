// Compares cuda_abi.h with the toolkit's own headers, where the build has a toolkit: setup.py has
// its nvcc compile this file. No code.
#include "device/cuda_abi.h"

#if defined(DCPX_CHECK_ABI) && __has_include(<cuda.h>) && __has_include(<cudaTypedefs.h>)

// Named before <cuda.h> is read, which defines macros of some of these names.
#define DCPX_NAME(name, version, arguments) using Our_##name = decltype(dcpx::device::Api::name);
DCPX_CUDA_ENTRY_POINTS(DCPX_NAME)
#undef DCPX_NAME

#include <cuda.h>
#include <cudaTypedefs.h>

#include <type_traits>

#if CUDA_VERSION >= 12000  // older ones do not know all the entry points

namespace dcpx::device {
namespace {

// Passed alike: both pointers, or both numbers of one size and kind.
template <class Ours, class Theirs>
constexpr bool is_alike =
    sizeof(Ours) == sizeof(Theirs) && std::is_pointer_v<Ours> == std::is_pointer_v<Theirs> &&
    std::is_floating_point_v<Ours> == std::is_floating_point_v<Theirs>;

template <class Ours, class Theirs>
struct Compare : std::false_type {};
template <class R, class... A, class S, class... B>
struct Compare<R (*)(A...), S (*)(B...)> {
  static constexpr bool is_same_count = sizeof...(A) == sizeof...(B);
  static constexpr bool value = [] {
    if constexpr (sizeof...(A) == sizeof...(B)) return is_alike<R, S> && (is_alike<A, B> && ...);
    return false;
  }();
};

#define DCPX_COMPARE(name, version, arguments)                       \
  static_assert(Compare<Our_##name, PFN_##name##_v##version>::value, \
                #name " is declared unlike cudaTypedefs.h of the CUDA toolkit");
DCPX_CUDA_ENTRY_POINTS(DCPX_COMPARE)
#undef DCPX_COMPARE
static_assert(Compare<GetProcAddress12000, PFN_cuGetProcAddress_v12000>::value);

#define DCPX_SAME(ours, theirs) \
  static_assert(static_cast<long long>(ours) == static_cast<long long>(theirs), #theirs)
DCPX_SAME(kSuccess, CUDA_SUCCESS);
DCPX_SAME(kOutOfMemory, CUDA_ERROR_OUT_OF_MEMORY);
DCPX_SAME(kNotInitialized, CUDA_ERROR_NOT_INITIALIZED);
DCPX_SAME(kDeinitialized, CUDA_ERROR_DEINITIALIZED);
DCPX_SAME(kDeviceUnavailable, CUDA_ERROR_DEVICE_UNAVAILABLE);
DCPX_SAME(kNoDevice, CUDA_ERROR_NO_DEVICE);
DCPX_SAME(kEccUncorrectable, CUDA_ERROR_ECC_UNCORRECTABLE);
DCPX_SAME(kNvlinkUncorrectable, CUDA_ERROR_NVLINK_UNCORRECTABLE);
DCPX_SAME(kNotReady, CUDA_ERROR_NOT_READY);
DCPX_SAME(kIllegalAddress, CUDA_ERROR_ILLEGAL_ADDRESS);
DCPX_SAME(kLaunchTimeout, CUDA_ERROR_LAUNCH_TIMEOUT);
DCPX_SAME(kContextIsDestroyed, CUDA_ERROR_CONTEXT_IS_DESTROYED);
DCPX_SAME(kAssert, CUDA_ERROR_ASSERT);
DCPX_SAME(kAlreadyRegistered, CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
DCPX_SAME(kHardwareStackError, CUDA_ERROR_HARDWARE_STACK_ERROR);
DCPX_SAME(kLaunchFailed, CUDA_ERROR_LAUNCH_FAILED);
DCPX_SAME(kNotSupported, CUDA_ERROR_NOT_SUPPORTED);
DCPX_SAME(kExternalDevice, CUDA_ERROR_EXTERNAL_DEVICE);
DCPX_SAME(kCaptureImplicit, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
DCPX_SAME(kUnknown, CUDA_ERROR_UNKNOWN);
DCPX_SAME(kAttributeMaxPitch, CU_DEVICE_ATTRIBUTE_MAX_PITCH);
DCPX_SAME(kAttributeHostPointerForRegisteredMem,
          CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM);
DCPX_SAME(kStreamNonBlocking, CU_STREAM_NON_BLOCKING);
DCPX_SAME(kEventDisableTiming, CU_EVENT_DISABLE_TIMING);
DCPX_SAME(kHostRegisterPortable, CU_MEMHOSTREGISTER_PORTABLE);
DCPX_SAME(kHostRegisterDevicemap, CU_MEMHOSTREGISTER_DEVICEMAP);
DCPX_SAME(kLegacyStreamEntryPoints, CU_GET_PROC_ADDRESS_LEGACY_STREAM);
DCPX_SAME(PointerAttribute::kRangeStart, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR);
DCPX_SAME(PointerAttribute::kRangeSize, CU_POINTER_ATTRIBUTE_RANGE_SIZE);
DCPX_SAME(CaptureStatus::kNone, CU_STREAM_CAPTURE_STATUS_NONE);
DCPX_SAME(CaptureStatus::kActive, CU_STREAM_CAPTURE_STATUS_ACTIVE);
DCPX_SAME(CaptureStatus::kInvalidated, CU_STREAM_CAPTURE_STATUS_INVALIDATED);
DCPX_SAME(CaptureMode::kRelaxed, CU_STREAM_CAPTURE_MODE_RELAXED);
DCPX_SAME(MemoryType::kHost, CU_MEMORYTYPE_HOST);
DCPX_SAME(MemoryType::kDevice, CU_MEMORYTYPE_DEVICE);
DCPX_SAME(ProcAddressStatus::kFound, CU_GET_PROC_ADDRESS_SUCCESS);

#define DCPX_SAME_FIELD(ours, their)                                             \
  static_assert(offsetof(Memcpy2D, ours) == offsetof(CUDA_MEMCPY2D_v2, their) && \
                    sizeof(Memcpy2D::ours) == sizeof(CUDA_MEMCPY2D_v2::their),   \
                #their)
DCPX_SAME_FIELD(src_x_bytes, srcXInBytes);
DCPX_SAME_FIELD(src_y, srcY);
DCPX_SAME_FIELD(src_type, srcMemoryType);
DCPX_SAME_FIELD(src_host, srcHost);
DCPX_SAME_FIELD(src_device, srcDevice);
DCPX_SAME_FIELD(src_array, srcArray);
DCPX_SAME_FIELD(src_pitch, srcPitch);
DCPX_SAME_FIELD(dst_x_bytes, dstXInBytes);
DCPX_SAME_FIELD(dst_y, dstY);
DCPX_SAME_FIELD(dst_type, dstMemoryType);
DCPX_SAME_FIELD(dst_host, dstHost);
DCPX_SAME_FIELD(dst_device, dstDevice);
DCPX_SAME_FIELD(dst_array, dstArray);
DCPX_SAME_FIELD(dst_pitch, dstPitch);
DCPX_SAME_FIELD(width_bytes, WidthInBytes);
DCPX_SAME_FIELD(height, Height);
static_assert(sizeof(Memcpy2D) == sizeof(CUDA_MEMCPY2D_v2));

#if CUDA_VERSION >= 12080
DCPX_SAME(kContained, CUDA_ERROR_CONTAINED);
DCPX_SAME(kTensorMemoryLeak, CUDA_ERROR_TENSOR_MEMORY_LEAK);
DCPX_SAME(SrcAccessOrder::kStream, CU_MEMCPY_SRC_ACCESS_ORDER_STREAM);
DCPX_SAME(kMemcpyPreferOverlapWithCompute, CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE);
static_assert(sizeof(MemcpyAttributes) == sizeof(CUmemcpyAttributes) &&
              offsetof(MemcpyAttributes, src_access_order) ==
                  offsetof(CUmemcpyAttributes, srcAccessOrder) &&
              offsetof(MemcpyAttributes, src_hint) == offsetof(CUmemcpyAttributes, srcLocHint) &&
              offsetof(MemcpyAttributes, dst_hint) == offsetof(CUmemcpyAttributes, dstLocHint) &&
              offsetof(MemcpyAttributes, flags) == offsetof(CUmemcpyAttributes, flags));
static_assert(Compare<MemcpyBatch12080, PFN_cuMemcpyBatchAsync_v12080>::value);
#endif
#if CUDA_VERSION >= 13000
static_assert(Compare<MemcpyBatch13000, PFN_cuMemcpyBatchAsync_v13000>::value);
#endif

}  // namespace
}  // namespace dcpx::device

#endif
#endif
