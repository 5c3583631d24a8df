"""What this process holds: files, threads, tensors and memory, before and after failed calls."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import os
import re
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from support.machine import seconds

# Caches of torch and half empty arenas of Python grow by 2 MB in a sweep, at times by 5 MB. Each
# failed call that kept a slot would keep 2 MiB.
_NOISE_BYTES = 12 << 20
_ENDING_S = seconds(20)  # of a thread
_libc = ctypes.CDLL(None)


class _Mallinfo(ctypes.Structure):
    _fields_ = [(f"field{number}", ctypes.c_size_t) for number in range(8)] + [
        ("fordblks", ctypes.c_size_t),  # bytes of free chunks, in all arenas
        ("keepcost", ctypes.c_size_t),
    ]


_libc.mallinfo2.restype = _Mallinfo
_libc.open_memstream.restype = ctypes.c_void_p


def _used_bytes() -> int:
    """Returns the writable memory of this process without stacks and what malloc holds unused.

    Resident memory says nothing: how many free pages malloc keeps depends on what other tests have
    left between them, and the kernel takes pages of files and gives them back.
    """
    status = Path("/proc/self/status").read_text().splitlines()
    writable = next(int(line.split()[1]) for line in status if line.startswith("VmData:"))
    stacks = stack_bytes(Path("/proc/self/maps").read_text())
    return (writable << 10) - stacks - int(_libc.mallinfo2().fordblks) - _cut_bytes()


def _cut_bytes() -> int:
    """Returns what malloc has cut off the ends of its arenas and left writable.

    In a thread's arena that is all that was ever in use at a time and is free now; no other count
    of malloc has it.
    """
    text, nbytes = ctypes.c_void_p(), ctypes.c_size_t()
    stream = ctypes.c_void_p(_libc.open_memstream(ctypes.byref(text), ctypes.byref(nbytes)))
    assert stream, "open_memstream"
    assert _libc.malloc_info(0, stream) == 0
    _libc.fclose(stream)
    found = ctypes.string_at(text, nbytes.value).decode()
    _libc.free(text)
    total, writable = (
        int(re.findall(rf'<aspace type="{kind}" size="(\d+)"/>', found)[-1])  # of all arenas
        for kind in ("total", "mprotect")
    )
    return writable - total


def stack_bytes(maps: str) -> int:
    """Returns the sizes of threads' stacks, of which glibc keeps 40 MiB and more for new threads.

    Each has a page before it that nobody may touch. What the kernel has mapped right behind one,
    with the same rights, it may show as one mapping with it.

    Args:
        maps: the text of /proc/self/maps.
    """
    usual, found, guard_end = resource.getrlimit(resource.RLIMIT_STACK)[0], 0, 0
    for line in maps.splitlines():
        span, rights, *_ = line.split()
        begin, end = (int(one, 16) for one in span.split("-"))
        found += usual if begin == guard_end and end - begin >= usual else 0
        guard_end = end if rights == "---p" and end - begin == resource.getpagesize() else 0
    return found


def _files() -> list[str]:
    """Returns the open files but sockets: those of a store's client close when they are idle."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # of the listing itself
            target = os.readlink(f"/proc/self/fd/{name}")
            found.extend([] if target.startswith("socket:") else [target])
    return sorted(found)


def _tensors() -> int:
    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


class MemoryGrownError(AssertionError):
    """More memory is in use than `Held` has found."""


def grown_each_time(test: Callable[..., None]) -> Callable[..., None]:
    """Runs a test again, twice at most, where memory has grown: a leak grows each time.

    In a process that has run others' tests a cache may fill now; one that is full stays so.
    """

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        for _ in range(2):
            try:
                return test(*args, **kwargs)
            except MemoryGrownError:
                gc.collect()
        return test(*args, **kwargs)

    return run


class Held:
    """What the process holds now. Make it after a first failed call, which fills every cache."""

    def __init__(self) -> None:
        self._tensors = _tensors()
        self._files = _files()
        self._threads = set(os.listdir("/proc/self/task"))
        self._used_bytes = _used_bytes()

    def assert_no_file_or_thread_more(self) -> None:
        """Cheap enough for after each call. A thread that is just ending gets time.

        What a failed call's traceback holds goes here: where it waits for the collector's own time,
        the memory of some twenty of them lies scattered, and their pages are not given back.
        """
        gc.collect()
        assert len(files := _files()) == len(self._files), (files, self._files)
        deadline = time.monotonic() + _ENDING_S
        while not set(os.listdir("/proc/self/task")) <= self._threads:
            assert time.monotonic() < deadline, "a thread is left running"

    def assert_no_memory_more(self, collectives: int = 0) -> None:
        """Asserts that no call since has kept a tensor, and not each of them a worker's slots.

        Args:
            collectives: of objects, that were run since. Gloo keeps about 1 KiB of each.

        Gloo's threads let go of a collective's tensors only after it has returned, now and then: a
        tensor gets time.
        """
        deadline = time.monotonic() + _ENDING_S
        while (tensors := _tensors()) > self._tensors:
            assert time.monotonic() < deadline, f"{tensors - self._tensors} tensors more"
            time.sleep(0.01)
        grown = _used_bytes() - self._used_bytes
        if grown >= _NOISE_BYTES + (collectives << 10):
            raise MemoryGrownError(f"{grown} B more")
