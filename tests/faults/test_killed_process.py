"""The process that `dcp.async_save` saves in is killed: the trainer is told, the old or the new
checkpoint is there, and the next save works and cleans up."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from call_sweep import of_all, of_rank, state_there
from forks import Rows, assert_none_bad, unwrapped
from support.call_shim import Action, Shim, compiled, preloaded
from support.machine import EVERY_POINT, seconds
from support.rank_fixture import StartRanks
from support.saves import assert_whole
from torch.distributed.checkpoint import _async_process_executor as executor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import torch_dcpx
from torch_dcpx import ConcurrentSaveError, DcpxWriter, WriteOptions

GIVE_UP_S = seconds(120)
# Calls of a save of one rank, and of the coordinator and the other of two (test_lost_at_calls.py).
CALLS = {(1, 0): 24, (2, 0): 26, (2, 1): 10}


def leave(_done: int, _total: int) -> None:
    os._exit(3)


class KilledWriter(DcpxWriter):
    """Has its process killed before a call, where that is not the trainer's."""

    def __init__(self, path: Path, library: Path, ending: str) -> None:
        super().__init__(path, options=WriteOptions(progress=leave if ending == "exit" else False))
        self._killed = library, ending, os.getpid()

    def set_up_storage_writer(self, *args: Any, **kwargs: Any) -> None:
        super().set_up_storage_writer(*args, **kwargs)
        library, ending, trainer = self._killed
        if ending.isdigit() and os.getpid() != trainer:
            shim = Shim(library)
            shim.watch(Path(self.path).resolve())
            shim.arm(int(ending), Action.KILL)


def raised_by(body: Callable[[], Any]) -> BaseException | None:
    try:
        body()
    except (Exception, CheckpointException) as error:  # noqa: BLE001 - looked at
        return unwrapped(error)
    return None


class Trainer:
    """This rank."""

    def __init__(self, library: Path, path: Path) -> None:
        self._library, self._path, self._seed = library, path, 0
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()

    def bad(self, victim: int, ending: str) -> str:
        """Saves, has the save killed, and saves again; returns what is bad.

        Args:
            ending: number of the call before which the victim's process is killed; "exit": it
                calls `os._exit(3)` while it writes.
        """
        self._seed += 3
        self._save(self._seed)
        writer = KilledWriter(self._path, self._library, ending if victim == self._rank else "")
        killed = raised_by(lambda: self._in_process(writer, self._seed + 1))
        is_told = victim != self._rank or "process is dead" in str(killed)
        bad = "" if killed and is_told and not isinstance(killed, TimeoutError) else repr(killed)
        dist.barrier()
        if self._rank == 0 and not bad:
            states = {
                n: of_all(self._seed + at, self._ranks) for at, n in enumerate(("old", "new"))
            }
            there = state_there(self._path, states)
            if there not in states or (ending == "exit" and there != "old"):
                bad = f"{there} is there"
        dist.barrier()
        return bad or self._next(victim)

    def _save(self, seed: int) -> None:
        dcp.save(of_rank(seed, self._rank), storage_writer=DcpxWriter(self._path))

    def _in_process(self, writer: DcpxWriter, seed: int) -> None:
        """Saves in DCP's process, which it starts behind the shim."""
        kind = AsyncCheckpointerType.PROCESS
        state = of_rank(seed, self._rank)
        ended: Any = dcp.async_save(state, storage_writer=writer, async_checkpointer_type=kind)
        ended.result(GIVE_UP_S)

    def _next(self, victim: int) -> str:
        """Returns what is wrong with the saves that follow."""
        if victim == self._rank:  # DCP still has the process that is dead
            again = raised_by(lambda: self._in_process(DcpxWriter(self._path), self._seed))
            if not isinstance(again, OSError | RuntimeError) or isinstance(again, TimeoutError):
                return f"the next save in process mode: {again!r}"
        dist.barrier()
        bad = self._wrong_refusal() if victim != 0 else ""
        left = executor._CHECKPOINT_PROCESS
        executor._CHECKPOINT_PROCESS = None  # the next case has a process of its own
        if left is not None:
            left._save_process.kill()
            left._save_process.join(GIVE_UP_S)
        dist.barrier()
        state = of_rank(self._seed + 2, self._rank)
        failed = raised_by(lambda: torch_dcpx.async_save(state, self._path).result(GIVE_UP_S))
        dist.barrier()
        if bad or failed is not None:
            return bad or f"the next save: {failed!r}"
        if self._rank == 0:
            assert_whole(of_all(self._seed + 2, self._ranks), self._path)
        return ""

    def _wrong_refusal(self) -> str:
        """The coordinator's process lives on, holds the lock, and is named."""
        error = raised_by(lambda: self._save(self._seed + 2))
        if not isinstance(error, ConcurrentSaveError):
            return f"the trainer's save while a process holds the lock: {error!r}"
        own = executor._CHECKPOINT_PROCESS
        is_named = own is None or f"pid={own._save_process.pid} " in error.owner
        return "" if is_named or self._rank != 0 else f"the owner is {error.owner}"


def trained(root: Path, library: Path, cases: list[tuple[int, str]]) -> Rows:
    trainer = Trainer(library, root / "checkpoint")
    return [(f"{victim}:{ending}", trainer.bad(victim, ending)) for victim, ending in cases]


@pytest.mark.slow
@pytest.mark.multirank
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("count", [1, 2])
def test_killed_process_of_an_async_save_is_told_and_leaves_old_or_new(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch, ranks: StartRanks, count: int
) -> None:
    library = compiled(tmp_path)
    for name in ("LD_PRELOAD", "PYTHONPATH"):  # of the processes that DCP starts
        monkeypatch.setenv(name, preloaded(library)[name])
    every = [(victim, str(call)) for victim in range(count) for call in range(CALLS[count, victim])]
    cases = [random.Random(seed).choice(every), *([(0, "exit")] if count == 1 else [])]
    if EVERY_POINT:
        cases = [*every, *((victim, "exit") for victim in range(count))]
    call = ranks(count, anew=True).start(trained, tmp_path.resolve(), library, cases)
    for rows in call.wait(seconds(2900 if EVERY_POINT else 1150)):
        assert_none_bad(rows)
