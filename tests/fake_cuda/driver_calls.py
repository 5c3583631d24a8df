"""The driver's entry points as Python methods, for tests that speak to the driver themselves."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from fake_cuda.fake import NOT_READY, FakeCuda

if TYPE_CHECKING:
    import torch

_DEVICE_POINTER, _HANDLE, _SIZE = ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t


class CudaError(Exception):
    """A driver call did not return 0. `args`: the CUresult, the entry point."""

    @property
    def code(self) -> int:
        return int(self.args[0])


def error_of(call: Callable[[], object]) -> int:
    """Returns the CUresult that the call raises, 0 for none."""
    try:
        call()
    except CudaError as error:
        return error.code
    return 0


class Memcpy2D(ctypes.Structure):
    """CUDA_MEMCPY2D; x in bytes."""

    _fields_ = (
        ("src_x", _SIZE),
        ("src_y", _SIZE),
        ("src_type", ctypes.c_int),
        ("src_host", _HANDLE),
        ("src_device", _DEVICE_POINTER),
        ("src_array", _HANDLE),
        ("src_pitch", _SIZE),
        ("dst_x", _SIZE),
        ("dst_y", _SIZE),
        ("dst_type", ctypes.c_int),
        ("dst_host", _HANDLE),
        ("dst_device", _DEVICE_POINTER),
        ("dst_array", _HANDLE),
        ("dst_pitch", _SIZE),
        ("width", _SIZE),
        ("height", _SIZE),
    )


class CopyAttributes(ctypes.Structure):
    """CUmemcpyAttributes."""

    _fields_ = (
        ("source_order", ctypes.c_int),
        ("hints", ctypes.c_int * 4),
        ("flags", ctypes.c_uint),
    )


class DriverCalls:
    """Calls on one device, whose primary context is current on the thread while in `with`."""

    def __init__(self, fake: FakeCuda, device: int = 0) -> None:
        self.fake = fake
        self.device = device
        self.context = 0

    def __enter__(self) -> DriverCalls:
        self.call("cuInit", ctypes.c_uint(0))
        context = _HANDLE()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self.device)
        self.context = context.value or 0
        self.call("cuCtxPushCurrent_v2", context)
        return self

    def __exit__(self, *_: object) -> None:
        self.fake.library.cuCtxPopCurrent_v2(None)
        self.fake.library.cuDevicePrimaryCtxRelease_v2(self.device)

    def call(self, symbol: str, *arguments: object) -> None:
        """Calls an exported function; raises CudaError where it does not return 0."""
        result = getattr(self.fake.library, symbol)(*arguments)
        if result != 0:
            raise CudaError(result, symbol)

    def stream(self, is_blocking: bool = False) -> int:
        stream = _HANDLE()
        flags = ctypes.c_uint(0 if is_blocking else 1)
        self.call("cuStreamCreateWithPriority", ctypes.byref(stream), flags, 0)
        return stream.value or 0

    def destroy_stream(self, stream: int) -> None:
        self.call("cuStreamDestroy_v2", _HANDLE(stream))

    def synchronize(self, stream: int) -> None:
        self.call("cuStreamSynchronize", _HANDLE(stream))

    def event(self) -> int:
        event = _HANDLE()
        self.call("cuEventCreate", ctypes.byref(event), ctypes.c_uint(2))
        return event.value or 0

    def destroy_event(self, event: int) -> None:
        self.call("cuEventDestroy_v2", _HANDLE(event))

    def record(self, event: int, stream: int) -> None:
        self.call("cuEventRecord", _HANDLE(event), _HANDLE(stream))

    def stream_wait(self, stream: int, event: int) -> None:
        self.call("cuStreamWaitEvent", _HANDLE(stream), _HANDLE(event), ctypes.c_uint(0))

    def event_wait(self, event: int) -> None:
        self.call("cuEventSynchronize", _HANDLE(event))

    def is_done(self, event: int) -> bool:
        try:
            self.call("cuEventQuery", _HANDLE(event))
        except CudaError as error:
            if error.code != NOT_READY:
                raise
            return False
        return True

    def register(self, memory: torch.Tensor, is_portable: bool = True) -> None:
        nbytes = memory.numel() * memory.element_size()
        self.register_range(memory.data_ptr(), nbytes, is_portable)

    def register_range(self, address: int, nbytes: int, is_portable: bool = True) -> None:
        flags = ctypes.c_uint(is_portable)
        self.call("cuMemHostRegister_v2", _HANDLE(address), _SIZE(nbytes), flags)

    def unregister(self, memory: torch.Tensor) -> None:
        self.call("cuMemHostUnregister", _HANDLE(memory.data_ptr()))

    def to_host(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        arguments = _HANDLE(dst), _DEVICE_POINTER(src), _SIZE(nbytes), _HANDLE(stream)
        self.call("cuMemcpyDtoHAsync_v2", *arguments)

    def to_device(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        arguments = _DEVICE_POINTER(dst), _HANDLE(src), _SIZE(nbytes), _HANDLE(stream)
        self.call("cuMemcpyHtoDAsync_v2", *arguments)

    def copy_2d(self, box: Memcpy2D, stream: int) -> None:
        self.call("cuMemcpy2DAsync_v2", ctypes.byref(box), _HANDLE(stream))

    def kernel(self, name: str, image: bytes = b"// PTX") -> tuple[int, int]:
        """Returns a module and its function."""
        module, function = _HANDLE(), _HANDLE()
        self.call("cuModuleLoadData", ctypes.byref(module), image)
        self.call("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
        return module.value or 0, function.value or 0

    def launch(self, function: int, arguments: Sequence[object], stream: int) -> None:
        pointers = (_HANDLE * len(arguments))(
            *(ctypes.cast(ctypes.byref(a), _HANDLE) for a in arguments)  # type: ignore[arg-type]
        )
        one = ctypes.c_uint(1)
        shape = (one, one, one, ctypes.c_uint(32), one, one, ctypes.c_uint(0))
        self.call("cuLaunchKernel", _HANDLE(function), *shape, _HANDLE(stream), pointers, None)
