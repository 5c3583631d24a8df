"""Many pieces of one size between device and host: the pack kernel beside the driver's own copies.

Pieces lie apart on the device and side by side on the host, as small tensors in a file's slot do.
`one copy` is what they take where they touch on both sides and become one.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence
from typing import Any

from cuda_cases import KIB, MIB
from cuda_gpu import Gpu, HostBlock
from cuda_rounds import Side, timed
from fake_cuda.driver_calls import CopyAttributes, Memcpy2D

SIZES = {
    "full": [256, KIB, 4 * KIB, 16 * KIB, 32 * KIB, 64 * KIB, 256 * KIB, MIB],
    "quick": [KIB, 8 * KIB, 32 * KIB, 128 * KIB],
    "smoke": [KIB, 20 * KIB],
}
_MOST_PIECES = {"full": 16384, "quick": 8192, "smoke": 20}
_MOST_BYTES = 256 * MIB
_TASK_BYTES = 8 << 10  # kPackTaskBytes
_BATCH = 4096  # kMaxBatchPieces
_WARPS, _LANES = 8, 32
_NO_SHAPE = 0xFFFFFFFF
_MAGIC = 0xBA55ED50.to_bytes(4, "little")


def kernel_image(gpu: Gpu) -> bytes:
    """Returns the fatbin of the installed extension, b"" where it was built without."""
    if gpu.is_rehearsal:
        from fake_cuda.fake import IMAGE

        return IMAGE
    from torch_dcpx import _C

    with open(_C.__file__, "rb") as file:
        data = file.read()
    at = data.find(_MAGIC)
    while at >= 0:
        version, header = (int.from_bytes(data[at + i : at + i + 2], "little") for i in (4, 6))
        if (version, header) == (1, 16):
            return data[at : at + header + int.from_bytes(data[at + 8 : at + 16], "little")]
        at = data.find(_MAGIC, at + 1)
    return b""


def _index() -> Any:
    return ctypes.byref(ctypes.c_size_t(0))


def _batch(pairs: Sequence[tuple[int, int, int]]) -> list[Any]:
    """Returns cuMemcpyBatchAsync's arguments for (dst, src, nbytes) each."""
    kinds = ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t
    columns = zip(kinds, zip(*pairs, strict=True), strict=True)
    arrays = [(kind * len(pairs))(*column) for kind, column in columns]
    attributes = ctypes.byref(CopyAttributes(source_order=1))
    return [*arrays, ctypes.c_size_t(len(pairs)), attributes, _index(), ctypes.c_size_t(1)]


class Pieces:
    """`count` pieces of `nbytes` each, on the device and on the host."""

    def __init__(self, gpu: Gpu, nbytes: int, size: str) -> None:
        self.gpu, self.nbytes = gpu, nbytes
        self.count = min(_MOST_PIECES[size], _MOST_BYTES // nbytes)
        self.pitch = -(-(nbytes + 1) // 512) * 512
        self._device = gpu.alloc(self.pitch * self.count)
        self._host = HostBlock(nbytes * self.count)
        self._host.touch()
        self._host.register(gpu.calls)
        self._stream = gpu.calls.stream()
        self._wanted = bytes(i * 7 % 251 for i in range(nbytes))
        self._tasks: HostBlock | None = None
        self._task_count = self._filled = 0
        self._module = ctypes.c_void_p()
        self._function = ctypes.c_void_p()
        self._image = kernel_image(gpu)

    @property
    def total(self) -> int:
        return self.nbytes * self.count

    def close(self) -> None:
        self.gpu.calls.synchronize(self._stream)
        self.gpu.calls.destroy_stream(self._stream)
        if self._module:
            self.gpu.calls.call("cuModuleUnload", self._module)
        for block in (self._tasks, self._host):
            if block is not None:
                block.close()
        self.gpu.free(self._device)

    def _pairs(self, to_host: bool) -> list[tuple[int, int, int]]:
        """Returns (dst, src, nbytes) of each piece."""
        device = range(self._device, self._device + self.pitch * self.count, self.pitch)
        host = range(self._host.address, self._host.address + self.total, self.nbytes)
        dsts, srcs = (host, device) if to_host else (device, host)
        return [(dst, src, self.nbytes) for dst, src in zip(dsts, srcs, strict=True)]

    def sides(self, to_host: bool) -> dict[str, Side]:
        """Returns the ways to copy all pieces; each is tried once, and what it copied compared."""
        calls, pairs = self.gpu.calls, self._pairs(to_host)
        single = calls.to_host if to_host else calls.to_device

        def one_copy() -> None:
            ends = (self._host.address, self._device)
            dst, src = ends if to_host else ends[::-1]
            single(dst, src, self.total, self._stream)

        def each() -> None:
            for dst, src, nbytes in pairs:
                single(dst, src, nbytes, self._stream)

        ways: dict[str, Callable[[], None]] = {
            "one copy": one_copy,
            "a copy each, from Python": each,
            "one 2-D copy": self._rows(to_host),
            "cuMemcpyBatchAsync": self._batched(pairs),
            "the pack kernel, 64 blocks": self._kernel(pairs, 64),
            "the pack kernel, 512 blocks": self._kernel(pairs, 512),
        }

        def side(name: str) -> Side:
            checked: list[str] = [] if name != "one copy" else [name]

            def run() -> float:
                if not checked:
                    self._check(to_host, ways[name])
                    checked.append(name)
                return timed(ways[name], lambda: calls.synchronize(self._stream))

            return run

        return {name: side(name) for name in ways}

    def _check(self, to_host: bool, way: Callable[[], None]) -> None:
        """Raises unless the way copies the first, a middle and the last piece right."""
        calls = self.gpu.calls
        blank = bytes(self.nbytes)
        for number in {0, self.count // 2, self.count - 1}:
            host = self._host.address + number * self.nbytes
            device = self._device + number * self.pitch
            ctypes.memmove(host, self._wanted if to_host else blank, self.nbytes)
            calls.to_device(device, host, self.nbytes, self._stream)
            calls.synchronize(self._stream)
            ctypes.memmove(host, blank if to_host else self._wanted, self.nbytes)
            way()
            calls.synchronize(self._stream)
            if not to_host:
                ctypes.memmove(host, blank, self.nbytes)
                calls.to_host(host, device, self.nbytes, self._stream)
                calls.synchronize(self._stream)
            if ctypes.string_at(host, self.nbytes) != self._wanted:
                raise AssertionError(f"piece {number} of {self.nbytes} B is not what it was")

    def _rows(self, to_host: bool) -> Callable[[], None]:
        box = Memcpy2D(
            src_type=2 if to_host else 1,
            dst_type=1 if to_host else 2,
            width=self.nbytes,
            height=self.count,
        )
        host, device = ctypes.c_void_p(self._host.address), self._device
        if to_host:
            box.src_device, box.src_pitch = device, self.pitch
            box.dst_host, box.dst_pitch = host, self.nbytes
        else:
            box.dst_device, box.dst_pitch = device, self.pitch
            box.src_host, box.src_pitch = host, self.nbytes
        return lambda: self.gpu.calls.copy_2d(box, self._stream)

    def _batched(self, pairs: Sequence[tuple[int, int, int]]) -> Callable[[], None]:
        calls = self.gpu.calls
        version = ctypes.c_int()
        calls.call("cuDriverGetVersion", ctypes.byref(version))
        if version.value >= 13000:
            entry, end = "cuMemcpyBatchAsync_v2", [ctypes.c_void_p(self._stream)]
        else:
            entry, end = "cuMemcpyBatchAsync", [_index(), ctypes.c_void_p(self._stream)]
        # Made once, as the kernel's table is: only what the driver takes is timed.
        batches = [[*_batch(pairs[i : i + _BATCH]), *end] for i in range(0, len(pairs), _BATCH)]

        def run() -> None:
            if version.value < 12080:
                raise RuntimeError(f"driver {version.value} has no cuMemcpyBatchAsync")
            for batch in batches:
                calls.call(entry, *batch)

        return run

    def _kernel(self, pairs: Sequence[tuple[int, int, int]], blocks: int) -> Callable[[], None]:
        def run() -> None:
            if not self._image:
                raise RuntimeError("this build has no pack kernel")
            if not self._function:
                self._load()
            self._fill(pairs)
            assert self._tasks is not None
            arguments = [
                ctypes.c_uint64(self._tasks.address),
                ctypes.c_uint64(self._tasks.address),
                ctypes.c_uint64(self._task_count),
            ]
            pointers = (ctypes.c_void_p * 3)(*(ctypes.addressof(one) for one in arguments))
            grid = min(blocks, -(-self._task_count // _WARPS))
            sizes = (ctypes.c_uint(n) for n in (grid, 1, 1, _WARPS * _LANES, 1, 1, 0))
            stream = ctypes.c_void_p(self._stream)
            self.gpu.calls.call("cuLaunchKernel", self._function, *sizes, stream, pointers, None)

        return run

    def _load(self) -> None:
        calls = self.gpu.calls
        image = ctypes.create_string_buffer(self._image, len(self._image) + 16)
        calls.call("cuModuleLoadData", ctypes.byref(self._module), image)
        name = ctypes.c_char_p(b"dcpx_pack")
        calls.call("cuModuleGetFunction", ctypes.byref(self._function), self._module, name)

    def _fill(self, pairs: Sequence[tuple[int, int, int]]) -> None:
        """Makes the kernel's table once a direction: PackTask of csrc/device/pack_index.h."""
        key = pairs[0][0]
        if self._tasks is not None and self._filled == key:
            return
        words = array("Q")
        for dst, src, nbytes in pairs:
            for begin in range(0, nbytes, _TASK_BYTES):
                end = min(nbytes, begin + _TASK_BYTES)
                words.extend((dst, src, begin, end, _NO_SHAPE))
        if self._tasks is None:
            self._tasks = HostBlock(-(-len(words) * 8 // 4096) * 4096)
            self._tasks.touch()
            self._tasks.register(self.gpu.calls)
        ctypes.memmove(self._tasks.address, words.buffer_info()[0], len(words) * 8)
        self._task_count = len(words) // 5
        self._filled = key
