// Compares abi.h with <cuda.h>; empty where no toolkit is installed.
#include "abi.h"

#if __has_include(<cuda.h>)
#include <cuda.h>

namespace fake {
namespace {

#define FAKE_SAME(mine, theirs) static_assert((mine) == (theirs), #theirs)

FAKE_SAME(kInvalidValue, CUDA_ERROR_INVALID_VALUE);
FAKE_SAME(kOutOfMemory, CUDA_ERROR_OUT_OF_MEMORY);
FAKE_SAME(kNotInitialized, CUDA_ERROR_NOT_INITIALIZED);
FAKE_SAME(kDeinitialized, CUDA_ERROR_DEINITIALIZED);
FAKE_SAME(kNoDevice, CUDA_ERROR_NO_DEVICE);
FAKE_SAME(kInvalidDevice, CUDA_ERROR_INVALID_DEVICE);
FAKE_SAME(kInvalidImage, CUDA_ERROR_INVALID_IMAGE);
FAKE_SAME(kInvalidContext, CUDA_ERROR_INVALID_CONTEXT);
FAKE_SAME(kNoBinaryForGpu, CUDA_ERROR_NO_BINARY_FOR_GPU);
FAKE_SAME(kInvalidHandle, CUDA_ERROR_INVALID_HANDLE);
FAKE_SAME(kNotFound, CUDA_ERROR_NOT_FOUND);
FAKE_SAME(kNotReady, CUDA_ERROR_NOT_READY);
FAKE_SAME(kIllegalAddress, CUDA_ERROR_ILLEGAL_ADDRESS);
FAKE_SAME(kLaunchTimeout, CUDA_ERROR_LAUNCH_TIMEOUT);
FAKE_SAME(kAlreadyRegistered, CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
FAKE_SAME(kNotRegistered, CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
FAKE_SAME(kLaunchFailed, CUDA_ERROR_LAUNCH_FAILED);
FAKE_SAME(kNotSupported, CUDA_ERROR_NOT_SUPPORTED);
FAKE_SAME(kCaptureUnsupported, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
FAKE_SAME(kCaptureImplicit, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
FAKE_SAME(kUnknown, CUDA_ERROR_UNKNOWN);
FAKE_SAME(kStreamNonBlocking, unsigned(CU_STREAM_NON_BLOCKING));
FAKE_SAME(kHostRegisterPortable, unsigned(CU_MEMHOSTREGISTER_PORTABLE));
FAKE_SAME(int(kHostMemory), int(CU_MEMORYTYPE_HOST));
FAKE_SAME(int(kDeviceMemory), int(CU_MEMORYTYPE_DEVICE));
FAKE_SAME(int(kUnifiedMemory), int(CU_MEMORYTYPE_UNIFIED));
FAKE_SAME(int(kCaptureRelaxed), int(CU_STREAM_CAPTURE_MODE_RELAXED));
FAKE_SAME(int(kPointerOrdinal), int(CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL));
FAKE_SAME(int(kPointerRangeStart), int(CU_POINTER_ATTRIBUTE_RANGE_START_ADDR));
FAKE_SAME(int(kPointerRangeBytes), int(CU_POINTER_ATTRIBUTE_RANGE_SIZE));
FAKE_SAME(int(kPointerIsMapped), int(CU_POINTER_ATTRIBUTE_MAPPED));
FAKE_SAME(int(kMaxPitch), int(CU_DEVICE_ATTRIBUTE_MAX_PITCH));
FAKE_SAME(int(kPciBusId), int(CU_DEVICE_ATTRIBUTE_PCI_BUS_ID));
FAKE_SAME(int(kComputeCapabilityMajor), int(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR));
FAKE_SAME(int(kHostPointerForRegisteredMem),
          int(CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM));

FAKE_SAME(sizeof(Memcpy2D), sizeof(CUDA_MEMCPY2D));
FAKE_SAME(offsetof(Memcpy2D, src_device), offsetof(CUDA_MEMCPY2D, srcDevice));
FAKE_SAME(offsetof(Memcpy2D, src_pitch), offsetof(CUDA_MEMCPY2D, srcPitch));
FAKE_SAME(offsetof(Memcpy2D, dst_type), offsetof(CUDA_MEMCPY2D, dstMemoryType));
FAKE_SAME(offsetof(Memcpy2D, dst_pitch), offsetof(CUDA_MEMCPY2D, dstPitch));
FAKE_SAME(offsetof(Memcpy2D, height), offsetof(CUDA_MEMCPY2D, Height));

#if CUDA_VERSION >= 12080
FAKE_SAME(int(kOrderStream), int(CU_MEMCPY_SRC_ACCESS_ORDER_STREAM));
FAKE_SAME(int(kOrderAny), int(CU_MEMCPY_SRC_ACCESS_ORDER_ANY));
FAKE_SAME(sizeof(MemcpyAttributes), sizeof(CUmemcpyAttributes));
FAKE_SAME(offsetof(MemcpyAttributes, flags), offsetof(CUmemcpyAttributes, flags));
#endif

}  // namespace
}  // namespace fake
#endif
