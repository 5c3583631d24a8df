"""The GPU that tests/bench/cuda.py times, or in a rehearsal the fake driver in its place.

A rehearsal (ON_GPU_REHEARSAL=1, with DCPX_CUDA_DRIVER) runs the same code from start to end: our
side's tensors lie in the fake's device memory, torch's own sides get tensors of the host. Its
figures say nothing about a GPU, and whoever prints them says so.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cuda_cases import Case
from fake_cuda.driver_calls import DriverCalls

State = dict[str, torch.Tensor]


def is_rehearsal() -> bool:
    return os.environ.get("ON_GPU_REHEARSAL") == "1"


def why_not() -> str:
    """Returns why nothing can be timed here; empty where it can."""
    if is_rehearsal():
        return "" if os.environ.get("DCPX_CUDA_DRIVER") else "a rehearsal needs DCPX_CUDA_DRIVER"
    if torch.version.cuda is None:
        return "this torch is built without CUDA"
    return "" if torch.cuda.is_available() else "torch finds no CUDA device"


class Gpu:
    """Device 0 of the real driver. `calls` speaks to the driver in torch's own context."""

    is_rehearsal = False

    def __init__(self) -> None:
        torch.cuda.set_device(0)
        torch.cuda.init()
        torch.cuda.synchronize()
        self.name = torch.cuda.get_device_name()
        self.calls = _calls_of(ctypes.CDLL("libcuda.so.1"))

    def tensors(self, hosts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns copies on the device, made by copies alone."""
        return [host.to("cuda") for host in hosts]

    def state(self, case: Case) -> State:
        """Returns tensors of the case's shapes whose values differ."""
        wholes = [torch.empty(s.rows * s.stride, device="cuda") for s in case.shapes]
        torch._foreach_zero_(wholes)
        torch._foreach_add_(wholes, [float(i % 8191) for i in range(len(wholes))])
        for whole in wholes[:64]:
            whole.uniform_()
        return _viewed(case, wholes)

    def on_host(self, state: Mapping[str, torch.Tensor]) -> State:
        return {name: tensor.cpu() for name, tensor in state.items()}

    def for_torch(self, state: State) -> State:
        """Returns what torch's own sides work on."""
        return state

    def zero(self, state: State) -> None:
        """Zeroes all that lies under the tensors, without a kernel of torch's."""
        for tensor in state.values():
            under = tensor.untyped_storage()
            address, nbytes = ctypes.c_uint64(under.data_ptr()), ctypes.c_size_t(under.nbytes())
            self.calls.call("cuMemsetD8_v2", address, ctypes.c_ubyte(0), nbytes)
        self.synchronize()

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def free_bytes(self) -> int:
        return torch.cuda.mem_get_info(0)[0]

    def alloc(self, nbytes: int) -> int:
        """Returns device memory of the driver's; `free` gives it back."""
        address = ctypes.c_uint64()
        self.calls.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(nbytes))
        return address.value

    def free(self, address: int) -> None:
        self.calls.call("cuMemFree_v2", ctypes.c_uint64(address))

    def copy_block(self, host: HostBlock, device: int, stream: int, *, to_host: bool) -> None:
        """Copies a page-locked block, piece by piece as it is registered: some drivers refuse one
        copy over both sides of a border.
        """
        for begin, nbytes in host.pieces():
            if to_host:
                self.calls.to_host(host.address + begin, device + begin, nbytes, stream)
            else:
                self.calls.to_device(device + begin, host.address + begin, nbytes, stream)
        self.calls.synchronize(stream)

    def stager_options(self) -> dict[str, bool]:
        """Returns options of torch's stagers other than the defaults."""
        return {}

    def check(self) -> None:
        """Raises where the driver complains of what was done; a real one has its own ways."""


class RehearsedGpu(Gpu):
    """The fake driver. Torch sees no device."""

    is_rehearsal = True

    def __init__(self) -> None:
        from fake_cuda import fake, seam

        self.fake = seam.install()
        self.fake.library.fake_set_pace(fake.EAGER)
        self.name = "the fake driver"
        self.calls = _calls_of(self.fake.library)

    def tensors(self, hosts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return self.fake.segment(hosts)

    def state(self, case: Case) -> State:
        wholes = [torch.rand(s.rows * s.stride) + i for i, s in enumerate(case.shapes)]
        return _viewed(case, self.fake.segment(wholes))

    def on_host(self, state: Mapping[str, torch.Tensor]) -> State:
        self.fake.sync()
        return {name: self.fake.read_back(tensor).contiguous() for name, tensor in state.items()}

    def for_torch(self, state: State) -> State:
        return self.on_host(state)

    def zero(self, state: State) -> None:
        for tensor in state.values():
            blank = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype).zero_()
            self.fake.stream_write(tensor, blank)
        self.fake.sync()

    def synchronize(self) -> None:
        self.fake.sync()

    def free_bytes(self) -> int:
        return (1 << 40) - self.fake.live()["driver_allocations"]

    def stager_options(self) -> dict[str, bool]:
        names = ("use_pinned_memory", "use_shared_memory", "use_async_staging")
        return dict.fromkeys([*names, "use_non_blocking_copy"], False)

    def check(self) -> None:
        self.fake.sync()
        if reports := self.fake.reports():
            raise AssertionError(f"the fake driver reports {reports}")


def the_gpu() -> Gpu:
    """Returns the GPU, or in a rehearsal the fake one. One a process."""
    if reason := why_not():
        raise SystemExit(f"tests/bench/cuda.py needs a GPU: {reason}")
    return RehearsedGpu() if is_rehearsal() else Gpu()


def _calls_of(library: ctypes.CDLL) -> DriverCalls:
    calls = DriverCalls(cast(Any, SimpleNamespace(library=library)))
    calls.__enter__()  # for the rest of the process
    return calls


def _viewed(case: Case, wholes: Sequence[torch.Tensor]) -> State:
    state = {}
    for number, (shape, whole) in enumerate(zip(case.shapes, wholes, strict=True)):
        size, stride = (shape.rows, shape.columns), (shape.stride, 1)
        state[f"t{number}"] = whole.as_strided(size, stride, whole.storage_offset())
    return state


class HostBlock:
    """Anonymous memory of the host: `register` page-locks it, `close` gives it back."""

    piece_bytes = 1 << 30  # some kernels refuse to lock more at once

    def __init__(self, nbytes: int) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [
            *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int),
            ctypes.c_long,
        ]
        libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        private_anonymous, read_write = 0x22, 3
        address = libc.mmap(None, nbytes, read_write, private_anonymous, -1, 0)
        if address in (None, ctypes.c_void_p(-1).value):
            raise MemoryError(f"mmap of {nbytes} B: errno {ctypes.get_errno()}")
        self.address: int = address
        self.nbytes = nbytes
        self._libc = libc
        self._owner: DriverCalls | None = None

    def touch(self, begin: int = 0, nbytes: int | None = None) -> None:
        """Faults pages in, in one call without the GIL (MADV_POPULATE_WRITE, else by memset)."""
        populate_write = 23
        size = self.nbytes if nbytes is None else nbytes
        if self._libc.madvise(self.address + begin, size, populate_write) != 0:
            ctypes.memset(self.address + begin, 0, size)

    def advise_huge(self) -> None:
        madv_hugepage = 14
        self._libc.madvise(self.address, self.nbytes, madv_hugepage)

    def register(self, calls: DriverCalls) -> None:
        """Page-locks it all, once."""
        if self._owner is None:
            for begin, nbytes in self.pieces():
                calls.register_range(self.address + begin, nbytes, 3)
            self._owner = calls

    def pieces(self) -> list[tuple[int, int]]:
        """Returns where each piece that is registered by itself begins, and its bytes."""
        step, end = self.piece_bytes, self.nbytes
        return [(begin, min(step, end - begin)) for begin in range(0, end, step)]

    def close(self) -> None:
        if self._owner is not None:
            for begin, _ in self.pieces():
                self._owner.call("cuMemHostUnregister", ctypes.c_void_p(self.address + begin))
            self._owner = None
        self._libc.munmap(self.address, self.nbytes)
