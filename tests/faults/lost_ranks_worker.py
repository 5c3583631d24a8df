"""Saves of three ranks each, without bytes: one rank of each is killed or stopped in the middle.

Torch is imported once; each save's ranks are forked from here, before they have any thread. Rank 0
hosts the store, as without a launcher. Prints their ends as JSON.

    python lost_ranks_worker.py DIRECTORY VICTIM:PHASE:SIGNAL[:continue] ...
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from torch_dcpx._waiting import Deadline
from torch_dcpx.ranks import store_client
from torch_dcpx.ranks.ballot import Ballot
from torch_dcpx.ranks.members import exchange_for
from torch_dcpx.ranks.store_client import client_of

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from support.machine import seconds

WORLD_SIZE = 3
TIMEOUT_S = seconds(8)
GIVE_UP_S = seconds(60)


def wait_for(is_so: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + GIVE_UP_S
    while not is_so() and time.monotonic() < give_up_at:
        time.sleep(0.02)


def meet(directory: Path, name: str, rank: int) -> None:
    """A barrier without gloo: its threads abort a process that ends after its peers were killed."""
    (directory / f"{rank}.{name}").touch()
    wait_for(lambda: all((directory / f"{r}.{name}").exists() for r in range(WORLD_SIZE)))


def save_as(rank: int, scenario: str, directory: Path) -> Any:
    victim, fatal_phase, kind = scenario.split(":")[:3]

    def reach(phase: str) -> None:
        if rank == int(victim) and phase == fatal_phase:
            os.kill(os.getpid(), getattr(signal, kind))

    def commit(payloads: list[int]) -> list[int]:
        reach("before rename")
        (directory / "committed").write_text(str(payloads))
        reach("after rename")
        return payloads

    def plan() -> int:
        reach("planning")
        return rank

    reach("entry")
    with exchange_for(None, no_dist=False, timeout_s=TIMEOUT_S) as exchange:
        exchange.place = str(directory)
        assert exchange.all_reduce("plan", plan, sum) == 3
        exchange.note_phase("writing")
        client_of(dist.group.WORLD).settle(Deadline(seconds(30)))
        meet(directory, "planned", rank)  # nobody still reads the plan
        reach("writing")
        ballot = Ballot(exchange, exchange.deadline)
        ballot.vote(rank)
        reach("voted")
        return ballot.settle(commit, (directory / "committed").exists)


def run_rank(rank: int, listener: socket.socket, scenario: str, directory: Path) -> NoReturn:
    """In a forked child; never returns."""
    port, fd = listener.getsockname()[1], listener.detach()
    if rank != 0:
        os.close(fd)  # the store is to be gone with rank 0
    store = dist.TCPStore(
        "127.0.0.1", port, is_master=rank == 0, wait_for_workers=False,
        master_listen_fd=fd if rank == 0 else None,
    )  # fmt: skip
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD_SIZE)
    meet(directory, "ready", rank)
    try:
        outcome = ["returned", repr(save_as(rank, scenario, directory))]
    except Exception as error:  # noqa: BLE001 - the test looks at it
        outcome = [type(error).__name__, str(error)]
    (directory / f"{rank}.part").write_text(json.dumps(outcome))
    (directory / f"{rank}.part").rename(directory / f"{rank}.json")
    if scenario.endswith(":continue"):  # the store is to be there when the victim goes on
        wait_for(lambda: all((directory / f"{r}.json").exists() for r in range(WORLD_SIZE)))
    if scenario.startswith("0:writing:"):
        sys.exit(7)  # the interpreter's own way out takes a second, so not everybody goes it
    os._exit(7)


class Save:
    """One save: its ranks, and how they ended."""

    def __init__(self, scenario: str, directory: Path) -> None:
        directory.mkdir()
        self.directory = directory
        self.victim = int(scenario.split(":")[0])
        self.must_end = {0, 1, 2} - {self.victim}
        self.is_continued = not scenario.endswith(":continue")
        self.statuses: dict[int, int] = {}
        self.pids = []
        with socket.create_server(("127.0.0.1", 0)) as listener:  # nobody else gets its port
            for rank in range(WORLD_SIZE):
                pid = os.fork()
                if pid == 0:
                    run_rank(rank, listener, scenario, directory)
                self.pids.append(pid)

    def is_over(self) -> bool:
        for rank, pid in enumerate(self.pids):
            done, status = (0, 0) if rank in self.statuses else os.waitpid(pid, os.WNOHANG)
            if done:
                self.statuses[rank] = os.waitstatus_to_exitcode(status)
        if not self.is_continued and all(self.told(rank) for rank in self.must_end):
            os.kill(self.pids[self.victim], signal.SIGCONT)
            self.must_end |= {self.victim}
            self.is_continued = True
        return self.must_end <= set(self.statuses)

    def told(self, rank: int) -> Any:
        path = self.directory / f"{rank}.json"
        return json.loads(path.read_text()) if path.exists() else None

    def end(self) -> dict[str, Any]:
        for rank, pid in enumerate(self.pids):
            if rank not in self.statuses:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        return {
            "outcomes": [self.told(rank) for rank in range(WORLD_SIZE)],
            "statuses": [self.statuses.get(rank) for rank in range(WORLD_SIZE)],
            "is_committed": (self.directory / "committed").exists(),
        }


if __name__ == "__main__":
    store_client._ANSWER_S = seconds(4)
    saves = {
        name: Save(name, Path(sys.argv[1]) / str(index)) for index, name in enumerate(sys.argv[2:])
    }
    wait_for(lambda: not [save for save in saves.values() if not save.is_over()])
    print(json.dumps({name: save.end() for name, save in saves.items()}))
