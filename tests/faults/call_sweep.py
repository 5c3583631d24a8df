"""Saves that are cut, killed or failed at one of their calls: their states, the kinds of them, and
what must hold afterwards."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from support.saves import READERS, assert_whole, load, save, save_rank_local
from support.slow_states import CopyingPlanner
from support.states import assert_same
from torch.distributed.checkpoint.planner import SavePlan

import torch_dcpx
from torch_dcpx import DcpxWriter, WriteOptions
from torch_dcpx.staging import arena

MOST_CALLS = 1000
OPTIONS = WriteOptions(workers=2, slot_bytes=256 << 10)

State = dict[str, Any]
Save = Callable[[State, Path], Any]


class BadPointError(AssertionError):
    """Something that must not be, after one call has failed."""


def state_of(seed: int) -> State:
    """Returns a state that takes each way through the engine: packed, gathered, in place, bytes."""
    g = torch.Generator().manual_seed(seed)
    return {
        "small": torch.randn(100, generator=g),
        "strided": torch.randn(60, 50, generator=g).t(),
        "large": torch.randn(150_000, generator=g),
        "step": seed,
    }


def of_rank(seed: int, rank: int) -> State:
    """Returns what a rank of several holds: tensors of its own, and a number that all have."""
    own = state_of(2 * seed + rank)
    return {**{f"{name}.{rank}": value for name, value in own.items()}, "step": seed}


def of_all(seed: int, ranks: int = 2) -> State:
    """Returns what all ranks hold together."""
    return {name: v for rank in range(ranks) for name, v in of_rank(seed, rank).items()}


# ---- Kinds of saves -----------------------------------------------------------------------------


def a_file_each(state: State, directory: Path) -> None:
    save(state, directory, single_file_per_rank=False, options=OPTIONS)


def buffered(state: State, directory: Path) -> None:
    save(state, directory, options=WriteOptions(workers=2, slot_bytes=256 << 10, direct_io=False))


def three_files(state: State, directory: Path) -> None:
    options = dataclasses.replace(OPTIONS, files_per_rank=3, in_place="always")
    save(state, directory, options=options)


def in_windows(state: State, directory: Path) -> None:
    options = dataclasses.replace(OPTIONS, host_memory_bytes=512 << 10)
    writer = DcpxWriter(directory, options=options)
    dcp.save(state, storage_writer=writer, planner=CopyingPlanner(), no_dist=True)


def background(state: State, directory: Path) -> None:
    torch_dcpx.async_save(state, directory, no_dist=True).result()


def stocks_background(state: State, directory: Path) -> None:
    ended: Any = dcp.async_save(state, storage_writer=DcpxWriter(directory), no_dist=True)
    ended.result()


def own_save(state: State, directory: Path) -> None:
    torch_dcpx.save(state, directory, no_dist=True)


def rank_local(state: State, directory: Path) -> None:
    save_rank_local(state, directory, 0)


def of_stock(state: State, directory: Path) -> None:
    save(state, directory, "stock")


def both_rank_local(state: State, directory: Path) -> None:
    save_rank_local(state, directory, 1)
    save_rank_local(state, directory, 0)


class Kind(NamedTuple):
    """A save, and the one before it."""

    before: Save | None
    save: Save
    is_wrapped: bool = True  # by DCP, what it raises

    @property
    def is_local(self) -> bool:
        return self.save is rank_local


KINDS = {
    "first save": Kind(None, save),
    "save over ours": Kind(save, save),
    "save over stock's": Kind(of_stock, save),
    "a file each": Kind(a_file_each, a_file_each),
    "buffered": Kind(save, buffered),
    "three files": Kind(three_files, three_files),
    "windows": Kind(save, in_windows),
    "save over rank-local": Kind(both_rank_local, save),
    "torch_dcpx.save": Kind(save, own_save, False),
    "first torch_dcpx.save": Kind(None, own_save, False),
    "dcp.async_save": Kind(save, stocks_background),
    "torch_dcpx.async_save": Kind(save, background, False),
    "rank-local save": Kind(both_rank_local, rank_local, False),
    "first rank-local save": Kind(None, rank_local, False),
}


def new_arena() -> None:
    """For a forked child: the parent's is refused, and has staged nothing."""
    arena._pool = arena.ArenaPool()


# ---- What is there ------------------------------------------------------------------------------


def state_there(directory: Path, states: dict[str, State], *, is_local: bool = False) -> str:
    """Returns which of the states is there, bit for bit, or "none".

    Args:
        is_local: a checkpoint of rank 0 alone, which our reader finds; else both readers.
    """
    if not (directory / ("__0.metadata" if is_local else ".metadata")).exists():
        return "none"
    found = []
    for reader in ["ours"] if is_local else READERS:
        loaded = load(next(iter(states.values())), directory, reader)
        found += [name for name, state in states.items() if state["step"] == loaded["step"]]
        assert_same(states[found[-1]], loaded)
    if len(set(found)) != 1:
        raise BadPointError(f"the readers disagree: {found}")
    return found[0]


def assert_next_save_works(state: State, directory: Path, *, is_local: bool) -> None:
    """Asserts that a save succeeds now, and leaves its own files alone."""
    if not is_local:
        save(state, directory)
        for lock in directory.glob(".dcpx.?.lock"):  # of rank-local saves: they stay
            lock.unlink()
        assert_whole(state, directory)
        return
    rank_local(state, directory)
    assert_same(state, load(state, directory))
    names = {path.name for path in directory.iterdir()}
    assert len([name for name in names if name.startswith("__0_")]) == 1, names
    metadata = {name for name in names if name.endswith(".metadata")}
    assert metadata <= {"__0.metadata", "__1.metadata"}, names


# ---- Saves that stop in a phase -----------------------------------------------------------------


class PhasedPlanner(dcp.DefaultSavePlanner):
    """Calls `at("planning")` once it is asked for a plan, on each rank."""

    def __init__(self, at: Callable[[str], object]) -> None:
        super().__init__()
        self._at = at

    def create_local_plan(self) -> SavePlan:
        self._at("planning")
        return super().create_local_plan()


class PhasedWriter(DcpxWriter):
    """Calls `at` with "writing", "failing", and on the coordinator around the commit."""

    def __init__(self, path: Path, at: Callable[[str], object], **options: Any) -> None:
        def progress(_done: int, _total: int) -> None:
            at("writing")
            at("failing")

        super().__init__(path, options=WriteOptions(progress=progress, **options))
        self._at = at

    def finish(self, *args: Any, **kwargs: Any) -> None:
        self._at("committing")
        super().finish(*args, **kwargs)
        self._at("after the commit")
