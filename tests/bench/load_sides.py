"""The sides of load.py: the same state, loaded by each into the same memory."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import load_setup
import torch
import torch.distributed.checkpoint as dcp
from case_states import blank_like, check_same, make_blank
from cases import SHARD_DIMS, Case
from engine_clock import READ_CALLS, engine_calls, seconds_in
from harness import Side
from load_setup import COLD
from raw_limit import best_read_config, build_program, read_raw
from save_sides import safetensors_file, save, save_safetensors
from shards import LOADED_RANKS, ChunkedTensor, blank_shards, chunks_of, saved_shards, shares

import torch_dcpx
from torch_dcpx import DcpxReader, DcpxWriter, ReadOptions, WriteOptions

State = dict[str, Any]

unverified = partial(DcpxReader, options=ReadOptions(verify="none"))
READERS: dict[str, tuple[str, Callable[[Path], Any]]] = {  # side -> whose files, its reader
    "ours": ("ours", DcpxReader),
    "dcpx": ("ours", DcpxReader),  # by torch_dcpx.load, with its planner
    "ours_unverified": ("ours", unverified),
    "stock_files": ("stock", unverified),
    "stock": ("stock", dcp.FileSystemReader),
}


def tensors_of(state: State) -> State:
    return {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}


def files_of(side: str, folder: Path) -> Path:
    """Returns the directory that a side reads. The limit reads our files."""
    return folder / (READERS[side][0] if side in READERS else {"raw": "ours"}.get(side, side))


def write_checkpoints(case: Case, state: State, folder: Path, sides: Sequence[str]) -> None:
    """Saves the state once for each kind of files that the sides read."""
    is_sharded = case.name in SHARD_DIMS
    saved = saved_shards(state, SHARD_DIMS[case.name]) if is_sharded else state
    files = 2 if is_sharded else 1  # as many as ranks that saved
    for path in dict.fromkeys(files_of(side, folder) for side in sides):
        if path.name == "ours":
            save(saved, DcpxWriter(path, options=WriteOptions(files_per_rank=files)))
        elif path.name == "stock":
            save(saved, dcp.FileSystemWriter(path, thread_count=files))
        else:
            save_safetensors(tensors_of(state), path)


def load(name: str, state: State, reader: Any) -> None:
    by = torch_dcpx.load if name == "dcpx" else dcp.load
    by({"model": state}, storage_reader=reader, no_dist=True)


def load_safetensors(state: State, folder: Path) -> None:
    """Loads by safetensors' own function, and copies each tensor to where it is wanted."""
    from safetensors.torch import load_file

    for key, value in load_file(safetensors_file(folder)).items():
        state[key].copy_(value)


class Destination:
    """The memory that every side loads into: one state, or one for each rank that loads."""

    def __init__(self, case: Case, state: State) -> None:
        self._source = state
        self._dim = SHARD_DIMS.get(case.name)
        if self._dim is None:
            self.states = [blank_like(state)]
        else:
            self.states = [blank_shards(state, self._dim, rank) for rank in range(LOADED_RANKS)]

    def make_blank(self) -> None:
        for rank, state in enumerate(self.states):
            make_blank(state if self._dim is None else chunks_of(state, rank))

    def check(self, *, tensors_only: bool = False) -> None:
        """Raises: MismatchError, if a bit is not that of the saved state."""
        for rank, state in enumerate(self.states):
            if self._dim is None:
                source, loaded = self._source, state
                if tensors_only:
                    source, loaded = tensors_of(source), tensors_of(loaded)
                check_same(source, loaded)
                continue
            wanted = {
                key: ChunkedTensor(whole.shape, shares(whole, self._dim, LOADED_RANKS)[rank])
                for key, whole in self._source.items()
            }
            check_same(chunks_of(wanted, rank), chunks_of(state, rank))


def read_to_cache(folder: Path) -> None:
    """Reads every file, so that the page cache holds it."""
    block = memoryview(bytearray(1 << 20))
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while file.readinto(block):
                    pass


def drop_caches() -> None:
    """Empties the page cache of the machine."""
    os.sync()
    load_setup.DROP_CACHES.write_text("3")


def io_counts() -> dict[str, int]:
    """Returns what this process has read: `rchar` by any read, `read_bytes` from the disk."""
    lines = Path("/proc/self/io").read_text().splitlines()
    pairs = (line.split(": ") for line in lines)
    return {name: int(value) for name, value in pairs if name in ("rchar", "read_bytes")}


class RawRead:
    """The limit: the first bytes of our largest file, as many as the tensors have."""

    def __init__(self, folder: Path, nbytes: int, cache: str) -> None:
        self._program = build_program("raw_read")
        self._nbytes = nbytes
        self._path = max(folder.glob("ours/*.distcp"), key=lambda path: path.stat().st_size)
        read_to_cache(self._path.parent)
        is_direct = cache == COLD
        self.config = best_read_config(self._program, self._path, nbytes, is_direct=is_direct)
        self.is_direct = is_direct  # as asked for; then as it was

    def run(self, _: Path) -> Mapping[str, float]:
        seconds, self.is_direct = read_raw(self._program, self._path, self._nbytes, self.config)
        return {"raw": seconds}

    def check(self, _: Path) -> None:
        read_raw(self._program, self._path, self._nbytes, self.config, reference=self._path)


class LoadSides:
    """Makes the sides of one case for one state of the page cache."""

    def __init__(self, destination: Destination, nbytes: int, folder: Path, cache: str) -> None:
        self._destination = destination
        self._nbytes = nbytes
        self._folder = folder
        self._cache = cache
        self.bytes_read: dict[str, dict[str, int]] = {}  # side -> counts of its last run
        self.raw: RawRead | None = None

    def side(self, name: str) -> Side:
        before = partial(self._prepare, name)
        if name == "raw":
            self.raw = RawRead(self._folder, self._nbytes, self._cache)
            return Side(name, self.raw.run, self.raw.check, before=before)
        run = self._run_safetensors if name == "safetensors" else partial(self._run_dcp, name)
        return Side(name, run, lambda _: self._check(name), before=before)

    def _prepare(self, name: str) -> None:
        self._destination.make_blank()
        if self._cache == COLD:
            drop_caches()
        else:
            read_to_cache(files_of(name, self._folder))

    def _run_dcp(self, name: str, _: Path) -> Mapping[str, float]:
        seconds = engine = 0.0
        total: Counter[str] = Counter()
        for state in self._destination.states:
            reader = READERS[name][1](files_of(name, self._folder))
            before = io_counts()
            with engine_calls(of=READ_CALLS) as calls:
                began = time.perf_counter()
                load(name, state, reader)
                seconds += time.perf_counter() - began
            engine += seconds_in(calls)
            total.update({key: value - before[key] for key, value in io_counts().items()})
            report = getattr(reader, "last_report", None)
            if report is not None:
                total.update(engine_read=report.read_bytes, engine_needed=report.needed_bytes)
        self.bytes_read[name] = dict(total)
        return {name: seconds, **({"engine": engine} if name == "ours" else {})}

    def _run_safetensors(self, _: Path) -> Mapping[str, float]:
        (state,) = self._destination.states
        path = files_of("safetensors", self._folder)
        began = time.perf_counter()
        load_safetensors(state, path)
        return {"safetensors": time.perf_counter() - began}

    def _check(self, name: str) -> None:
        self._destination.check(tensors_only=name == "safetensors")
