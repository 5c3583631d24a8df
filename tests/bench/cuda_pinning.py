"""The time to have page-locked host memory: registered untouched, faulted first, cuMemHostAlloc."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from cuda_cases import Case, Shape
from cuda_gpu import Gpu, HostBlock
from cuda_rounds import Side
from cuda_sides import until_pinned

import torch_dcpx as dcpx

_THREADS = 8
_HUGE = 2 << 20


def _block(
    gpu: Gpu, nbytes: int, prepare: Callable[[HostBlock], None], *, registers: bool = True
) -> Side:
    def side() -> float:
        block = HostBlock(nbytes)
        try:
            began = time.perf_counter()
            prepare(block)
            if registers:
                block.register(gpu.calls)
            return time.perf_counter() - began
        finally:
            block.close()

    return side


def _touch(block: HostBlock) -> None:
    block.touch()


def _touch_huge(block: HostBlock) -> None:
    block.advise_huge()
    block.touch()


def _touch_by_threads(block: HostBlock) -> None:
    block.advise_huge()
    share = -(-block.nbytes // _THREADS // _HUGE) * _HUGE
    starts = range(0, block.nbytes, share)
    with ThreadPoolExecutor(_THREADS) as pool:
        for _ in pool.map(lambda at: block.touch(at, min(share, block.nbytes - at)), starts):
            pass


def _host_alloc(gpu: Gpu, nbytes: int) -> Side:
    def side() -> float:
        address = ctypes.c_void_p()
        if not hasattr(gpu.calls.fake.library, "cuMemHostAlloc"):
            raise RuntimeError("this driver has no cuMemHostAlloc")
        began = time.perf_counter()
        gpu.calls.call(
            "cuMemHostAlloc", ctypes.byref(address), ctypes.c_size_t(nbytes), ctypes.c_uint(1)
        )
        seconds = time.perf_counter() - began
        gpu.calls.call("cuMemFreeHost", address)
        return seconds

    return side


def _ours(gpu: Gpu, nbytes: int) -> Side:
    """Returns what our pool takes for a state of so many bytes, of which it holds nothing."""
    elements = nbytes // 4
    state = gpu.state(Case("", 0.0, [Shape(1, elements, elements)]))

    def side() -> float:
        dcpx.close()
        began = time.perf_counter()
        dcpx.prewarm(state)
        until_pinned()
        seconds = time.perf_counter() - began
        dcpx.close()
        return seconds

    return side


def sides(gpu: Gpu, nbytes: int) -> dict[str, Side]:
    """Returns the ways to page-lock so many bytes; `faulting alone` registers nothing."""
    return {
        "ours (prewarm)": _ours(gpu, nbytes),
        "registered untouched": _block(gpu, nbytes, lambda _: None),
        "huge pages, untouched": _block(gpu, nbytes, HostBlock.advise_huge),
        "faulted, registered": _block(gpu, nbytes, _touch),
        "huge pages, faulted, registered": _block(gpu, nbytes, _touch_huge),
        f"huge pages, faulted by {_THREADS} threads, registered": _block(
            gpu, nbytes, _touch_by_threads
        ),
        f"faulting alone, by {_THREADS} threads": _block(
            gpu, nbytes, _touch_by_threads, registers=False
        ),
        "cuMemHostAlloc": _host_alloc(gpu, nbytes),
    }
