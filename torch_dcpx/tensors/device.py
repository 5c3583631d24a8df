"""Hands device memory to C++: as CUDA addresses, with the work that its streams had queued.

No other module asks torch about CUDA. C++ copies by the driver and on streams of its own, so it
must know which tensors lie in memory that the driver serves, and where the caller's streams stand.
Torch copies from all other devices: ROCm, whose tensors have `is_cuda` too, MPS, XPU, CUDA without
a driver library.

Callers ask `is_host` first, which costs a tensor of the host 30 ns. They write
`device_memory.<name>`, so that tests can put a driver without a GPU in its place.
"""

from __future__ import annotations

import functools
import logging
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from torch_dcpx._compat import is_rocm
from torch_dcpx._native import _C

logger = logging.getLogger("torch_dcpx")

_PER_THREAD_STREAM = 2  # CU_STREAM_PER_THREAD: in each thread another one

is_host: Callable[[torch.Tensor], bool] = operator.attrgetter("is_cpu")


@functools.cache
def _is_served() -> bool:
    """Returns whether CUDA tensors of this torch lie in memory of the driver that C++ loads."""
    return not is_rocm() and not _C.device_driver()["failure"]


def ordinal_of(tensor: torch.Tensor) -> int:
    """Returns the CUDA device whose memory holds the tensor; -1 for host memory, and for devices
    from which torch must copy.
    """
    return tensor.get_device() if tensor.is_cuda and _is_served() else -1


def source_events(
    ordinals: Iterable[int], others: Mapping[int, int] | None = None
) -> _C.SourceEvents | None:
    """Returns events that copies from or to these devices wait for: of the work that is queued in
    this thread's current streams, and in `others` by ordinal, as of another thread. Passes over
    the ordinal -1. None without a device.

    Raises:
        StagingError: one of the streams is capturing a graph, or the driver failed.
    """
    devices = {ordinal for ordinal in ordinals if ordinal >= 0}
    streams = {(device, current_stream(device)) for device in devices}
    streams |= {(device, stream) for device, stream in (others or {}).items() if device in devices}
    return _C.SourceEvents(sorted(streams)) if streams else None


def streams_in_use() -> dict[int, int]:
    """Returns the handle of this thread's current stream on each device, for another thread to wait
    for; none before the first use of CUDA. Another thread cannot name the per-thread default
    stream: the host waits for its work.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return {}
    streams = {device: current_stream(device) for device in range(torch.cuda.device_count())}
    for device, stream in streams.items():
        if stream == _PER_THREAD_STREAM:
            torch.cuda.current_stream(device).synchronize()
    return streams


def current_stream(ordinal: int) -> int:
    """Returns the handle of this thread's current stream on a device; 0 is the default stream."""
    return torch.cuda.current_stream(ordinal).cuda_stream


def empty(sizes: Sequence[int], dtype: torch.dtype, like: torch.Tensor) -> torch.Tensor:
    """Returns uninitialised memory on the device of `like`, in C order.

    As all memory of torch's allocator it is ordered after the work that the current stream has
    queued: record an event that is to cover it later.
    """
    return torch.empty(tuple(sizes), dtype=dtype, device=like.device)


def keep_while_copied(owners: object) -> None:
    """Keeps owners of memory as long as late copies of a failed save or load may still use it.
    The next use of devices after the end of those copies lets the owners go.
    """
    _C.keep_while_copied(owners)


def log_warning() -> None:
    """Logs why host memory could not be page-locked for the last copies; once for the process."""
    if warning := _C.take_device_warning():
        logger.warning("%s", warning)
