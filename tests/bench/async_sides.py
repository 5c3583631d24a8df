"""The sides of async_save.py: each saves in the background, and says how long it blocked."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from harness import Side
from save_sides import check_dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from torch_dcpx import DcpxStager, DcpxWriter, WriteOptions, async_save, save

State = dict[str, Any]
Begin = Callable[[State, Path], Callable[[], Any]]  # saves; returns what waits for the end
PIECE_BYTES = 4 << 20


def _ours(state: State, path: Path) -> Callable[[], Any]:
    return async_save({"model": state}, path).result


def _one_worker(state: State, path: Path) -> Callable[[], Any]:
    return async_save({"model": state}, path, options=WriteOptions(workers=1)).result


def _none(_state: State, path: Path) -> Callable[[], Any]:
    path.mkdir()
    return dict  # what the states alone cost


def _ours_sync(state: State, path: Path) -> Callable[[], Any]:
    save({"model": state}, path)
    return dict  # nothing to wait for


def _through_dcp(writer: Callable[[Path], Any], stager: Any, kind: AsyncCheckpointerType) -> Begin:
    def begin(state: State, path: Path) -> Callable[[], Any]:
        found: Any = dcp.async_save(
            {"model": state},
            storage_writer=writer(path),
            async_stager=stager,
            async_checkpointer_type=kind,
        )
        future: Future[Any] = getattr(found, "upload_completion", found)
        if hasattr(found, "staging_completion"):
            found.staging_completion.result()  # the state may not change before
        return future.result

    return begin


THREAD, PROCESS = AsyncCheckpointerType.THREAD, AsyncCheckpointerType.PROCESS


def sides_by_name() -> dict[str, Begin]:
    """Returns what begins a save, by side; stagers live as long as the process."""
    stock_stager = DefaultStager(
        StagingOptions(
            use_pinned_memory=False, use_shared_memory=True, use_async_staging=False,
            use_non_blocking_copy=False,
        )
    )  # fmt: skip
    return {
        "ours": _ours,
        "ours_one_worker": _one_worker,
        "ours_sync": _ours_sync,
        "none": _none,
        "stager": _through_dcp(DcpxWriter, DcpxStager(), THREAD),
        "stage": _through_dcp(DcpxWriter, None, THREAD),
        "stager_process": _through_dcp(DcpxWriter, DcpxStager(), PROCESS),
        "stock_thread": _through_dcp(dcp.FileSystemWriter, None, THREAD),
        "stock_process": _through_dcp(dcp.FileSystemWriter, None, PROCESS),
        "stock_stager": _through_dcp(dcp.FileSystemWriter, stock_stager, THREAD),
    }


NEEDS_RANKS = ("stager", "stage", "stager_process", "stock_thread", "stock_process", "stock_stager")


def side(name: str, state: State, begin: Begin) -> Side:
    """Returns a side whose time is that until the checkpoint is durable, and its stall a part."""

    def run(path: Path) -> Mapping[str, float]:
        began = time.perf_counter()
        wait = begin(state, path)
        stall = time.perf_counter() - began
        wait()
        return {} if name == "ours_sync" else {f"{name} stall": stall}

    return Side(name, run, lambda path: check_dcp(name, state, path))


class Memcpy:
    """The limit of a stall: two threads copy the same bytes into memory that is warm."""

    def __init__(self, state: State) -> None:
        self._pieces: list[tuple[int, int, int]] = []
        tensors = [value for value in state.values() if isinstance(value, torch.Tensor)]
        self._warm = torch.ones(sum(t.nbytes for t in tensors), dtype=torch.uint8)
        self._tensors = tensors
        to = self._warm.data_ptr()
        for tensor in tensors:
            for at in range(0, tensor.nbytes, PIECE_BYTES):
                count = min(PIECE_BYTES, tensor.nbytes - at)
                self._pieces.append((to, tensor.data_ptr() + at, count))
                to += count

    def side(self) -> Side:
        return Side("memcpy", self._run, lambda _path: None)

    def _run(self, path: Path) -> Mapping[str, float]:
        path.mkdir()
        threads = [threading.Thread(target=self._copy, args=(half,)) for half in (0, 1)]
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return {"memcpy stall": time.perf_counter() - began}

    def _copy(self, half: int) -> None:
        pieces = self._pieces[half::2]
        for to, source, count in pieces:
            ctypes.memmove(to, source, count)  # without the GIL
