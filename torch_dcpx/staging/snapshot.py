"""The bytes of many tensors at one moment: copied into an arena, and tensors over the copies.

A state may have 100,000 tensors, so each costs two calls: one makes a DLPack capsule of it, one
makes a tensor of a capsule; everything between is C++. Memory of CUDA devices goes the same way, by
copies that C++ queues there; the arena is then registered with the driver.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from torch_dcpx._compat import dlpack_dtypes, from_dlpack, to_dlpack
from torch_dcpx._environment import threads_of_rank
from torch_dcpx._gc import bounded_pause
from torch_dcpx._native import _C
from torch_dcpx.errors import UnsupportedError
from torch_dcpx.staging.arena import (
    ArenaPool,
    make_ready,
    no_memory_is_staging_error,
    process_pool,
)
from torch_dcpx.tensors import device as device_memory
from torch_dcpx.tensors.copy_guard import CopyGuard
from torch_dcpx.tensors.memory import PLAIN_CLASSES, check_storage, has_strides


def staging_workers() -> int:
    """Returns the threads of a snapshot: this rank's share of the usable cores, 2 to 8.

    More do not copy faster: they wait for memory.
    """
    return min(threads_of_rank(1), 8)


class StagePlan:
    """A snapshot of some tensors, laid out and not yet copied. Holds them until it is dropped.

    Args:
        tensors: of any device, dtype, layout and class, without DTensors and ShardedTensors.
        name_of: gives the name of a tensor by its number, for errors; None: the number.

    Attributes:
        nbytes: the snapshot's bytes in an arena. Tensors that no address and strides describe
            (sparse, quantized, of other classes) are cloned outside of it.
        devices: ordinals of the CUDA devices that C++ copies from.

    Raises:
        UnsupportedError: a tensor has no memory, or it was freed or resized under it.
    """

    def __init__(
        self, tensors: Sequence[torch.Tensor], name_of: Callable[[int], str] | None = None
    ) -> None:
        self._name_of = name_of or "tensor {}".format
        self._raw: list[tuple[int, torch.dtype]] = []  # come back as bytes
        self._elsewhere: list[tuple[int, torch.Tensor]] = []  # to be copied by torch into its place
        self._cloned: dict[int, torch.Tensor] = {}
        entries: list[Any] = []
        has_conj, is_host = dlpack_dtypes().get, device_memory.is_host
        ordinal_of = device_memory.ordinal_of
        with bounded_pause(len(tensors)):
            for tensor in tensors:
                # Nearly all are like this: each question is asked once.
                on_host = is_host(tensor)
                device = -1 if on_host else ordinal_of(tensor)
                if (
                    type(tensor) in PLAIN_CLASSES
                    and (on_host or device >= 0)
                    and has_conj(tensor.dtype) is False
                    and not tensor.is_neg()
                    and tensor.layout == torch.strided
                    and not tensor.is_nested
                    and tensor.nbytes == tensor.untyped_storage().nbytes()
                    and not tensor.storage_offset()
                    and tensor.is_contiguous()
                ):
                    capsule = to_dlpack(tensor)
                    entries.append(capsule if on_host else (capsule, device))
                else:
                    entries.append(self._entry(len(entries), tensor))
            self._table = _C.StageTable(entries)
        if self._table.nowhere >= 0:
            raise UnsupportedError(
                f"'{self._name_of(self._table.nowhere)}' lies nowhere: torch has no memory for a "
                "tensor that torch.func tracks or that is known to be zero; save `tensor.clone()`"
            )
        self.nbytes = self._table.nbytes
        self.devices = self._table.devices

    def copy_to(
        self,
        arena: _C.Arena,
        workers: int,
        *,
        overlap: bool = False,
        streams: Mapping[int, int] | None = None,
    ) -> tuple[list[torch.Tensor], CopyGuard]:
        """Returns the tensors over `arena`, with the bytes they have now; blocks until these are
        copied. Each has a storage of its own, of exactly its size, and requires no gradient.

        Args:
            arena: of `nbytes` at least, which nobody else fills; lent until the tensors are gone.
            workers: threads that copy.
            overlap: copies from devices are queued and go on; the guard knows how far they are, and
                keeps the memory that they read. Default False: the guard is done.
            streams: by ordinal, to wait for besides this thread's current ones. Default None.

        Raises:
            StagingError: the driver failed, a current stream is capturing a graph, or the system
                has less memory than it said.
        """
        table = self._table
        with bounded_pause(len(self)):
            staged = list(map(from_dlpack, table.capsules(arena)))
        for index, dtype in self._raw:
            sizes, strides = table.form(index)
            staged[index] = staged[index].view(dtype).as_strided(sizes, strides)
        for index, tensor in self._elsewhere:
            staged[index].copy_(tensor)
        for index, tensor in self._cloned.items():
            staged[index] = self._clone(index, tensor)
        if not self.devices:
            with no_memory_is_staging_error(arena):
                _C.snapshot(arena, table, workers)
            return staged, CopyGuard()
        make_ready(arena, self.devices[0], workers)
        # Behind all that the caller and this plan have queued so far.
        after = device_memory.source_events(self.devices, streams)
        copies = _C.snapshot(arena, table, workers, after, overlap)
        device_memory.log_warning()
        return staged, CopyGuard(copies, self.devices)

    def _clone(self, index: int, tensor: torch.Tensor) -> torch.Tensor:
        try:
            return tensor.clone() if tensor.is_cpu or tensor.is_meta else tensor.cpu()
        except RuntimeError:  # some quantized ones have no clone
            try:
                return copy.deepcopy(tensor)
            except RuntimeError as error:
                raise UnsupportedError(
                    f"'{self._name_of(index)}' cannot be copied for a snapshot: {error}"
                ) from error

    def __len__(self) -> int:
        return len(self._table)

    def _entry(self, index: int, tensor: torch.Tensor) -> Any:
        """Returns the table's entry of a rarer tensor, and notes what else that needs."""
        if isinstance(tensor, AsyncCollectiveTensor):
            tensor = tensor.trigger_wait()  # type: ignore[no-untyped-call]
        tensor = tensor.detach()
        if type(tensor) in PLAIN_CLASSES and (tensor.is_conj() or tensor.is_neg()):
            tensor = tensor.resolve_conj().resolve_neg()
        if not has_strides(tensor) or tensor.is_meta:
            self._cloned[index] = tensor
            return (0, 1, (0,), (1,), -1, None)
        is_host = device_memory.is_host(tensor)
        device = -1 if is_host else device_memory.ordinal_of(tensor)
        is_copied_here = is_host or device >= 0
        if (is_copied_here or tensor.is_cuda) and tensor.numel():
            check_storage(tensor, self._name_of(index))
        if is_copied_here and tensor.dtype in dlpack_dtypes():
            return to_dlpack(tensor) if is_host else (to_dlpack(tensor), device)
        self._raw.append((index, tensor.dtype))
        if not is_copied_here:
            self._elsewhere.append((index, tensor))
        address = tensor.data_ptr() if is_copied_here and tensor.numel() else 0
        sizes, strides = tuple(tensor.shape), tensor.stride()
        # The tensor keeps the memory of the address.
        return address, tensor.element_size(), sizes, strides, device, tensor


def stage_guarded(
    tensors: Sequence[torch.Tensor],
    *,
    names: Sequence[str] | None = None,
    pool: ArenaPool | None = None,
    is_shared: bool = False,
    budget_bytes: int | None = None,
    timeout_s: float = 1800.0,
    overlap: bool = True,
    streams: Mapping[int, int] | None = None,
) -> tuple[list[torch.Tensor], CopyGuard]:
    """Returns host tensors that get the bytes of `tensors` at this moment, and their guard.

    Each has a storage of its own, of exactly its size, over an arena that is free for the next
    snapshot when the last of them is gone. Dense tensors keep their strides, others become
    contiguous. None requires a gradient.

    Args:
        tensors: as of `StagePlan`.
        names: of the tensors, for errors; None: their numbers.
        pool: of the arenas; None: the process's.
        is_shared, budget_bytes, timeout_s: as of `ArenaPool.lease`.
        overlap, streams: as of `StagePlan.copy_to`.

    Raises:
        StagingError: as `ArenaPool.lease` and `StagePlan.copy_to`.
        UnsupportedError: as `StagePlan`.
    """
    plan = StagePlan(tensors, names.__getitem__ if names else None)
    with (pool or process_pool()).lease(
        plan.nbytes, is_shared=is_shared, budget_bytes=budget_bytes, timeout_s=timeout_s
    ) as arena:
        return plan.copy_to(arena, staging_workers(), overlap=overlap, streams=streams)
