"""A trainer of one rank or two whose process for `dcp.async_save` is killed while it saves: the
worker of test_killed_process.py, behind call_shim.

python killed_process_worker.py LIBRARY DIRECTORY RANK RANKS ENDING...

ENDING is VICTIM:CALL, "1:7": rank 1's process is killed before its 7th call; VICTIM:exit: it calls
`os._exit(3)` while it writes. DCP starts no other process by itself: each case is a new one's.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from call_sweep import of_all, of_rank, state_there
from forks import Table, alone
from support.call_shim import Action, Shim
from support.machine import seconds
from support.saves import assert_whole
from torch.distributed.checkpoint import _async_process_executor as executor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import torch_dcpx
from torch_dcpx import ConcurrentSaveError, DcpxWriter, WriteOptions

GIVE_UP_S = seconds(120)


def leave(_done: int, _total: int) -> None:
    os._exit(3)


class KilledWriter(DcpxWriter):
    """Has its process killed before a call, where that is not the trainer's."""

    def __init__(self, path: Path, library: str, ending: str) -> None:
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
    """Returns what `body` raises, out of what DCP wraps it in."""
    try:
        body()
    except (Exception, CheckpointException) as error:  # noqa: BLE001 - looked at
        if isinstance(error, CheckpointException):
            return next(iter(error.failures.values()))[0]
        return error
    return None


class Trainer:
    """This rank."""

    def __init__(self, library: str, directory: Path, rank: int, ranks: int) -> None:
        self._library, self._path = library, directory / "checkpoint"
        self._rank, self._ranks = rank, ranks
        self._seed = 0

    def case(self, case: str) -> str | None:
        """Saves, has the save killed, and saves again; returns what is bad."""
        victim, ending = int(case.split(":")[0]), case.split(":")[1]
        self._seed += 3
        self._save(self._seed)
        killed = self._killed_save(ending if victim == self._rank else "")
        bad = self._wrong_error(killed, victim, ending)
        dist.barrier()
        if self._rank == 0 and not bad:
            states = {name: of_all(self._seed + at, self._ranks)
                      for at, name in enumerate(("old", "new"))}  # fmt: skip
            there = state_there(self._path, states)
            if there not in states or (ending == "exit" and there != "old"):
                bad = f"{there} is there"
            sys.stderr.write(f"{case}: {there}, {killed!r}\n")
        dist.barrier()
        return bad or self._next(victim)

    def _save(self, seed: int) -> None:
        dcp.save(of_rank(seed, self._rank), storage_writer=DcpxWriter(self._path))

    def _in_process(self, writer: DcpxWriter, seed: int) -> None:
        future: Any = dcp.async_save(
            of_rank(seed, self._rank),
            storage_writer=writer,
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        )
        future.result(GIVE_UP_S)

    def _killed_save(self, ending: str) -> BaseException | None:
        writer = KilledWriter(self._path, self._library, ending)
        return raised_by(lambda: self._in_process(writer, self._seed + 1))

    def _wrong_error(self, error: BaseException | None, victim: int, ending: str) -> str | None:
        if error is None:
            return "the save returned"
        if isinstance(error, TimeoutError):
            return "nobody said that the process is dead"
        is_told = victim != self._rank or "process is dead" in str(error)
        return None if is_told else f"not of a process that is dead: {error!r}"

    def _next(self, victim: int) -> str | None:
        """Returns what is wrong with the saves that follow."""
        again = None
        if victim == self._rank:  # DCP still has the process that is dead
            writer = DcpxWriter(self._path)
            again = raised_by(lambda: self._in_process(writer, self._seed))
            if not isinstance(again, OSError | RuntimeError) or isinstance(again, TimeoutError):
                return f"the next save in process mode: {again!r}"
        dist.barrier()
        bad = self._refused(victim) if victim != 0 else None
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
        return None

    def _refused(self, victim: int) -> str | None:
        """The coordinator's process lives on, holds the lock, and is named."""
        error = raised_by(lambda: self._save(self._seed + 2))
        if not isinstance(error, ConcurrentSaveError):
            return f"the trainer's save while a process holds the lock: {error!r}"
        own = executor._CHECKPOINT_PROCESS
        is_named = own is None or f"pid={own._save_process.pid} " in error.owner
        return None if is_named or self._rank != 0 else f"the owner is {error.owner}"


def main() -> None:
    library, root, rank, ranks, *cases = sys.argv[1:]
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1"}
    directory = Path(root).resolve()
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/store", rank=int(rank), world_size=int(ranks),
        timeout=timedelta(seconds=GIVE_UP_S),
    )  # fmt: skip
    trainer, table = Trainer(library, directory, int(rank), int(ranks)), Table()
    for case in cases:
        try:
            bad = trainer.case(case)
        except AssertionError as error:
            bad = repr(error)
        table.add(f"process of {ranks} ranks", case, bad)
    table.print()
    os._exit(0)  # a thread of gloo may still hold a collective's tensors


if __name__ == "__main__":
    alone()
    main()
