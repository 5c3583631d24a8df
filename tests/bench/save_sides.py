"""The sides of save.py: one state, written durably to a fresh directory by each."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from case_states import blank_like, check_same, payload_bytes
from engine_clock import engine_calls, seconds_in
from harness import Side
from plan_only import PlanOnlyWriter
from raw_limit import WriteConfig, best_write_config, build_program, check_raw, write_raw

import torch_dcpx
from torch_dcpx import DcpxReader, DcpxWriter, WriteOptions

State = dict[str, Any]

WRITERS: dict[str, Callable[[Path], Any]] = {
    "ours": DcpxWriter,
    "stock": partial(dcp.FileSystemWriter, thread_count=1),
    "stock2": partial(dcp.FileSystemWriter, thread_count=2),
    "dcp_alone": PlanOnlyWriter,
    # What durability costs: the same without any fsync.
    "ours_nosync": partial(DcpxWriter, options=WriteOptions(durability="none")),
    "stock_nosync": partial(dcp.FileSystemWriter, thread_count=1, sync_files=False),
}


def is_alone() -> bool:
    return not dist.is_initialized()


def save(state: State, writer: Any) -> None:
    # Under one key, as jobs do: DCP logs every top-level key, at 22 us each.
    dcp.save({"model": state}, storage_writer=writer, no_dist=is_alone())


def save_clocked(state: State, writer: Any) -> dict[str, float]:
    """Saves with our writer; returns the seconds of its C++ call as `engine`."""
    with engine_calls() as calls:
        save(state, writer)
    return {"engine": seconds_in(calls)}


def check_dcp(name: str, state: State, path: Path) -> None:
    """Loads ours with stock's reader, and stock's with ours (much faster), and compares.

    Raises:
        MismatchError: the bits differ.
    """
    if name == "dcp_alone":  # wrote nothing
        return
    reader = DcpxReader(path) if name.startswith("stock") else dcp.FileSystemReader(path)
    target = blank_like(state)
    dcp.load({"model": target}, storage_reader=reader, no_dist=is_alone())
    check_same(state, target)


def dcp_side(name: str, state: State) -> Side:
    def run(path: Path) -> Mapping[str, float]:
        writer = WRITERS[name](path)
        if name == "ours":
            return save_clocked(state, writer)
        save(state, writer)
        return {}

    return Side(name, run, partial(check_dcp, name, state))


def dcpx_side(state: State) -> Side:
    """Our own entry point, with its planner: the plan is kept from the second round on."""

    def run(path: Path) -> Mapping[str, float]:
        torch_dcpx.save({"model": state}, path, no_dist=is_alone())
        return {}

    return Side("dcpx", run, partial(check_dcp, "dcpx", state))


def safetensors_file(path: Path) -> Path:
    rank = 0 if is_alone() else dist.get_rank()
    return path / f"rank{rank}.safetensors"


def save_safetensors(state: State, path: Path) -> None:
    """Writes this rank's tensors to a file of its own, and fsyncs it and the directory."""
    from safetensors.torch import save_file

    path.mkdir(exist_ok=True)
    save_file(state, safetensors_file(path))
    for name in (safetensors_file(path), path):
        fd = os.open(name, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def safetensors_side(state: State) -> Side:
    tensors = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}

    def run(path: Path) -> Mapping[str, float]:
        save_safetensors(tensors, path)
        return {}

    def check(path: Path) -> None:
        from safetensors.torch import load_file

        check_same(tensors, load_file(safetensors_file(path)))

    return Side("safetensors", run, check)


class RawSide:
    """All ranks' bytes from one process; with several ranks the first one runs it."""

    def __init__(self, state: State, folder: Path) -> None:
        self._nbytes = payload_bytes(state)
        self._is_first = is_alone() or dist.get_rank() == 0
        self.config: WriteConfig | None = None
        self.is_direct = False
        if not is_alone():
            total = torch.tensor(self._nbytes)
            dist.all_reduce(total)
            self._nbytes = int(total)
        if self._is_first:
            self._program = build_program("raw_write")
            self.config = best_write_config(self._program, folder, self._nbytes)

    def side(self) -> Side:
        return Side("raw", self.run, self.check)

    def run(self, path: Path) -> Mapping[str, float]:
        if not self._is_first:
            return {}
        assert self.config is not None
        path.mkdir()
        seconds, self.is_direct = write_raw(self._program, path / "raw", self._nbytes, self.config)
        return {"raw": seconds}

    def check(self, path: Path) -> None:
        if self._is_first:
            check_raw(self._program, path / "raw", self._nbytes)
