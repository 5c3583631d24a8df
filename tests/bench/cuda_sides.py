"""The ways to move a case's state between device and host."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from cuda_cases import GIB, Case
from cuda_gpu import Gpu, HostBlock
from cuda_rounds import LeftOutError, Side, timed
from support.staged import stage_tensors
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

import torch_dcpx as dcpx
from torch_dcpx import ReadOptions
from torch_dcpx.staging.arena import process_pool

#: Seconds a tensor that these take, roughly, where there are many: of what cannot be interrupted.
_STOCK_STAGER_S = 60e-6
_STOCK_LOAD_S = 300e-6
#: Tensors at most of a state that these stage: each is a mapping, of which a process has 65,530.
_STAGER_TENSORS = 30_000
_SAVE_AND_LOAD_S = 80e-6
_SAVE_AND_LOAD_GIB_S = 1.5  # besides, a GiB


class OnDevice:
    """A case's state on the device, and one page-locked block of its bytes to compare with."""

    def __init__(self, gpu: Gpu, case: Case, path: Path) -> None:
        self._gpu, self._case, self._path = gpu, case, path
        self._state = gpu.state(case)
        self._twin = gpu.for_torch(self._state)
        self._stagers: list[Any] = []
        self._stream = gpu.calls.stream()
        self._block = gpu.alloc(case.nbytes)
        self._host = HostBlock(case.nbytes)
        self._host.advise_huge()
        self._host.touch()

    def close(self) -> None:
        for stager in self._stagers:
            stager.close()
        self._gpu.calls.destroy_stream(self._stream)
        self._gpu.free(self._block)
        self._host.close()
        shutil.rmtree(self._path, ignore_errors=True)
        self._state = self._twin = {}

    def _block_copy(self, to_host: bool) -> Side:
        """Returns the side of one page-locked block, whose registering is not timed."""

        def side() -> float:
            self._host.register(self._gpu.calls)
            ends = self._host, self._block, self._stream
            return timed(
                lambda: self._gpu.copy_block(*ends, to_host=to_host), self._gpu.synchronize
            )

        return side


class Moves(OnDevice):
    """The sides of one case. The checkpoint that is loaded lies in `folder`, in memory (tmpfs)."""

    def __init__(self, gpu: Gpu, case: Case, folder: Path) -> None:
        super().__init__(gpu, case, folder / "loaded")

    def check(self) -> None:
        """Raises unless what is staged is the state, bit for bit."""
        wanted = self._gpu.on_host(self._state)
        staged = stage_tensors(list(self._state.values()))
        for (name, tensor), found in zip(wanted.items(), staged, strict=True):
            _assert_same(name, found, tensor)

    def save(self) -> None:
        """Saves the state to load, and raises unless a load gives it, bit for bit."""
        dcpx.save(self._state, self._path, no_dist=True)
        wanted = self._gpu.on_host(self._state)
        self._gpu.zero(self._state)
        dcpx.load(self._state, self._path, no_dist=True)
        for name, tensor in self._gpu.on_host(self._state).items():
            _assert_same(name, tensor, wanted[name])

    def save_s(self) -> float:
        """Returns about how many seconds `save` and one load take."""
        gib = self._case.nbytes / GIB
        return _SAVE_AND_LOAD_S * len(self._case.shapes) + _SAVE_AND_LOAD_GIB_S * gib

    def _timed(self, run: Callable[[], object]) -> Side:
        return lambda: timed(run, self._gpu.synchronize)

    def _in_time(
        self, each_s: float, left_s: float, run: Callable[[], object], most: int | None = None
    ) -> Side:
        """Returns the side, which refuses where so many tensors take too long, or are too many."""

        def side() -> float:
            tensors = len(self._case.shapes)
            if each_s * tensors > left_s / 3:
                raise LeftOutError(f"some {each_s * tensors:.0f} s for so many tensors")
            if most is not None and tensors > most:
                raise LeftOutError(f"a mapping for each of {tensors} tensors")
            return timed(run, self._gpu.synchronize)

        return side

    def to_host(self, left_s: float) -> dict[str, Side]:
        """Returns the sides of the way to the host; `block` is one copy of the same bytes."""
        tensors, twins = list(self._state.values()), list(self._twin.values())
        return {
            "block": self._block_copy(to_host=True),
            "ours": self._timed(lambda: stage_tensors(tensors)),
            "per_tensor": self._timed(lambda: [t.to("cpu", copy=True) for t in twins]),
            "stock_stager": self._stager_side(left_s, self._stock),
            "torch_checkpointing": self._stager_side(left_s, self._torch_checkpointing),
        }

    def to_device(self, left_s: float) -> dict[str, Side]:
        """Returns the sides of the way to the device. Loads read files that lie in memory."""
        twins = list(self._twin.values())
        hosts = [tensor.to("cpu", copy=True) for tensor in twins]

        def per_tensor() -> None:
            for tensor, host in zip(twins, hosts, strict=True):
                tensor.copy_(host)

        unverified = ReadOptions(verify="none")
        return {
            "block": self._block_copy(to_host=False),
            "ours": self._timed(lambda: dcpx.load(self._state, self._path, no_dist=True)),
            "ours_unverified": self._timed(
                lambda: dcpx.load(self._state, self._path, no_dist=True, options=unverified)
            ),
            "per_tensor": self._timed(per_tensor),
            "stock_load": self._in_time(_STOCK_LOAD_S, left_s, self._stock_load),
        }

    def _stock_load(self) -> None:
        reader = dcp.FileSystemReader(self._path)
        dcp.load(self._twin, storage_reader=reader, no_dist=True)

    def _stock(self) -> Any:
        options = self._gpu.stager_options()
        return DefaultStager(StagingOptions(**options))

    def _torch_checkpointing(self) -> Any:
        from torch_checkpointing.staging import CheckpointStagerConfig
        from torch_checkpointing.staging import DefaultStager as Stager

        return Stager(CheckpointStagerConfig(**self._gpu.stager_options()))

    def _stager_side(self, left_s: float, make: Callable[[], Any]) -> Side:
        """Returns the side of one stager, made anew where it serves but once."""
        made: list[Any] = []

        def stage() -> object:
            if not made or not serves_again(made[-1]):
                made.append(make())
                self._stagers.append(made[-1])
            try:
                staged = made[-1].stage(self._twin)
                staged = staged.result() if hasattr(staged, "result") else staged
            except BaseException:  # what it holds of the state is to be given back at once
                self._stagers.remove(made[-1])
                made.pop().close()
                raise
            if hasattr(made[-1], "_staging_future"):
                made[-1]._staging_future = None  # which keeps all that is staged, after close() too
            return staged

        return self._in_time(_STOCK_STAGER_S, left_s, stage, _STAGER_TENSORS)


def serves_again(stager: Any) -> bool:
    """Returns whether a stager can stage once more: torch 2.11's gives its memory back each time,
    and then fails.
    """
    return bool(stager._state_dict_stager._deepcopy_dispatch)


def until_pinned() -> None:
    """Waits until the driver has registered the process's arenas, which goes on in the background.

    Raises:
        LeftOutError: it has not within 8 s; the driver may refuse to, which is slower and as right.
    """
    give_up_at = time.monotonic() + 8
    while any(arena.pinned_bytes < arena.nbytes for arena in process_pool()._arenas):
        if time.monotonic() > give_up_at:
            raise LeftOutError("memory for snapshots is not page-locked after 8 s")
        time.sleep(0.0002)


def device_bytes(gpu: Gpu, state: dict[str, torch.Tensor], folder: Path) -> tuple[int, int]:
    """Returns the device memory that a save takes besides the state: meanwhile, and after."""
    gpu.synchronize()
    free = least = gpu.free_bytes()
    path = folder / "beside"
    handle = dcpx.async_save(state, path, no_dist=True, options=dcpx.WriteOptions(overlap=True))
    while not handle.done():
        least = min(least, gpu.free_bytes())
        time.sleep(0.0005)
    handle.result()
    shutil.rmtree(path)
    return free - least, free - gpu.free_bytes()


def _assert_same(name: str, found: torch.Tensor, wanted: torch.Tensor) -> None:
    if not torch.equal(found.view(torch.int32), wanted.view(torch.int32)):
        raise AssertionError(f"{name} is not what it was")
