"""One round through the driver that calls every entry point once, right arguments given."""

from __future__ import annotations

import ctypes

from fake_cuda.driver_calls import CopyAttributes, DriverCalls, Memcpy2D
from fake_cuda.fake import NOT_READY

_N = 256  # bytes
_MAKERS = {
    "cuCtxPushCurrent",
    "cuDevicePrimaryCtxRetain",
    "cuEventCreate",
    "cuMemAlloc",
    "cuMemHostRegister",
    "cuModuleGetFunction",
    "cuModuleLoadData",
    "cuStreamCreateWithPriority",
}


def call_everything(driver: DriverCalls) -> dict[str, int]:
    """Returns the result of each entry point, by the name that counts and failures have for it.

    What makes something is called once more where it fails, so that all later calls are right.
    """
    library = driver.fake.library
    results: dict[str, int] = {}

    def call(symbol: str, *arguments: object, name: str = "") -> None:
        name = name or symbol.removesuffix("_v2")
        assert name not in results
        result = getattr(library, symbol)(*arguments)
        results[name] = 0 if result == NOT_READY else result
        if result != 0 and name in _MAKERS:
            getattr(library, symbol)(*arguments)

    out = [ctypes.c_void_p() for _ in range(8)]
    context, stream, event, module, function, memory, ignored, text = out
    to = ctypes.byref
    number, size = ctypes.c_int(0), ctypes.c_size_t(_N)
    host = ctypes.create_string_buffer(_N)
    host_at = ctypes.c_void_p(ctypes.addressof(host))

    call("cuGetProcAddress_v2", b"cuInit", to(ignored), 12000, ctypes.c_uint64(1), None)
    call("cuInit", 0)
    call("cuDriverGetVersion", to(number))
    call("cuGetErrorName", 1, to(text))
    call("cuGetErrorString", 1, to(text))
    call("cuDeviceGetCount", to(number))
    call("cuDeviceGet", to(number), 0)
    call("cuDeviceGetAttribute", to(number), 75, 0)
    call("cuDeviceGetPCIBusId", ctypes.create_string_buffer(64), 64, 0)

    call("cuDevicePrimaryCtxRetain", to(context), 0)
    call("cuCtxPushCurrent_v2", context)
    call("cuCtxSetCurrent", context)
    call("cuCtxGetCurrent", to(ignored))
    call("cuCtxGetDevice", to(number))
    call("cuCtxGetStreamPriorityRange", to(number), None)
    number.value = library.fake_capture_mode()
    call("cuThreadExchangeStreamCaptureMode", to(number))

    call("cuStreamCreateWithPriority", to(stream), 1, 0)
    call("cuStreamIsCapturing", stream, to(number))
    call("cuEventCreate", to(event), 2)
    call("cuMemHostRegister_v2", host_at, size, 1)
    call("cuMemAlloc_v2", to(memory), size)
    call("cuPointerGetAttribute", to(ignored), 2, memory)
    call("cuPointerGetAttributes", 0, None, None, memory)

    box = Memcpy2D(src_type=2, src_device=memory.value or 0, src_pitch=16, dst_type=1)
    box.dst_host, box.dst_pitch, box.width, box.height = host_at.value or 0, 16, 8, 4
    batch = (to(host_at), to(memory), to(size), ctypes.c_size_t(1))
    attributes = (to(CopyAttributes(source_order=1)), to(ctypes.c_size_t(0)), ctypes.c_size_t(1))
    call("cuMemcpyDtoHAsync_v2", host_at, memory, size, stream)
    call("cuMemcpyHtoDAsync_v2", memory, host_at, size, stream)
    call("cuMemcpyAsync", memory, host_at, size, stream)
    call("cuMemcpy2DAsync_v2", to(box), stream)
    call("cuMemcpyBatchAsync", *batch, *attributes, None, stream)
    name = "cuMemcpyBatchAsync_v2"
    call(name, *batch, *attributes, stream, name=name)

    call("cuModuleLoadData", to(module), b"// PTX")
    call("cuModuleGetFunction", to(function), module, b"fake_fill_kernel")
    values = (memory, size, ctypes.c_uint8(7))
    pointers = (ctypes.c_void_p * 3)(*(ctypes.addressof(value) for value in values))
    call("cuLaunchKernel", function, 1, 1, 1, 32, 1, 1, 0, stream, pointers, None)
    call("cuEventRecord", event, stream)
    call("cuStreamWaitEvent", stream, event, 0)
    call("cuEventQuery", event)
    call("cuStreamQuery", stream)
    call("cuEventSynchronize", event)
    call("cuStreamSynchronize", stream)
    call("cuCtxSynchronize")

    call("cuModuleUnload", module)
    call("cuMemFree_v2", memory)
    call("cuMemHostUnregister", host_at)
    call("cuEventDestroy_v2", event)
    call("cuStreamDestroy_v2", stream)
    call("cuCtxPopCurrent_v2", None)
    call("cuDevicePrimaryCtxRelease_v2", 0)
    return results
