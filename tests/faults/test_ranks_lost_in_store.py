"""Ranks that are killed or stopped in a save without bytes: the others end, agree, and say who is
missing. Rank 0 hosts the store, as without a launcher."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from support.machine import seconds
from support.rank_fixture import Handle, StartRanks

from torch_dcpx._waiting import Deadline
from torch_dcpx.ranks import store_client
from torch_dcpx.ranks.ballot import Ballot
from torch_dcpx.ranks.members import exchange_for
from torch_dcpx.ranks.store_client import client_of

pytestmark = [pytest.mark.slow, pytest.mark.multirank]

RANKS = range(3)
TIMEOUT_S = seconds(8)

# victim:phase:signal. Those of test_lost_ranks.py are not here again.
RANK_LOST = ["1:entry:SIGKILL", "1:planning:SIGKILL", "1:writing:SIGSTOP:continue"]
STORE_LOST = ["0:planning:SIGKILL", "0:planning:SIGSTOP"]
COORDINATOR_LOST = [
    f"0:{phase}:{kind}"
    for phase in ("writing", "before rename", "after rename")
    for kind in ("SIGKILL", "SIGSTOP")
]


def wait_for(is_so: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + seconds(60)
    while not is_so() and time.monotonic() < give_up_at:
        time.sleep(0.02)


def meet(directory: Path, name: str) -> None:
    """A barrier without gloo: its threads abort a process that ends after its peers were killed."""
    (directory / f"{dist.get_rank()}.{name}").touch()
    wait_for(lambda: all((directory / f"{rank}.{name}").exists() for rank in RANKS))


def host_the_store() -> None:
    """Makes the group anew, with a store that ends with rank 0."""
    rank, is_host = dist.get_rank(), dist.get_rank() == 0
    store: Any = None
    if is_host:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = [store.port if is_host else 0]
    dist.broadcast_object_list(port)
    store = store or dist.TCPStore("127.0.0.1", port[0], timeout=timedelta(seconds=seconds(60)))
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=len(RANKS))


def save_as(scenario: str, directory: Path) -> Any:
    victim, fatal_phase, kind = scenario.split(":")[:3]
    rank = dist.get_rank()

    def reach(phase: str) -> None:
        if rank == int(victim) and phase == fatal_phase:
            (directory / "lost").touch()
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
        meet(directory, "planned")  # nobody still reads the plan
        reach("writing")
        ballot = Ballot(exchange, exchange.deadline)
        ballot.vote(rank)
        reach("voted")
        return ballot.settle(commit, (directory / "committed").exists)


def one_is_lost(directory: Path, scenario: str) -> tuple[str, str]:
    store_client._ANSWER_S = seconds(4)
    host_the_store()
    meet(directory, "ready")
    try:
        outcome = "returned", repr(save_as(scenario, directory))
    except Exception as error:  # noqa: BLE001 - the test looks at it
        outcome = type(error).__name__, str(error)
    (directory / f"{dist.get_rank()}.ended").write_text("\n".join(outcome))
    if scenario.endswith(":continue"):  # the store is to be there when the victim goes on
        meet(directory, "told")
        return outcome
    if scenario.startswith("0:writing:"):
        sys.exit(7)  # the interpreter's own way out: no abort
    return outcome


def started(root: Path, ranks: StartRanks, scenarios: list[str]) -> dict[str, tuple[Path, Handle]]:
    found = {}
    for number, scenario in enumerate(scenarios):
        directory = root / str(number)
        directory.mkdir()
        call = ranks(len(RANKS), anew=True).start(one_is_lost, directory, scenario)
        found[scenario] = directory, call
    return found


def survivors(scenario: str, directory: Path, call: Handle) -> list[list[str]]:
    """Returns (type, text) of the ranks that were left; they ended, and were not aborted."""
    victim = int(scenario[0])
    left = [rank for rank in RANKS if rank != victim]
    if scenario.endswith(":continue"):
        files = [directory / f"{rank}.ended" for rank in left]
        wait_for(lambda: all(file.exists() for file in files))
        call.processes[victim].send_signal(signal.SIGCONT)
        left = list(RANKS)
    ended = dict.fromkeys(left, 7) if scenario.startswith("0:writing:") else {}
    call.wait(seconds(100), ended=ended, but=set(RANKS) - set(left))
    return [(directory / f"{rank}.ended").read_text().split("\n", 1) for rank in left]


@pytest.mark.parametrize("scenario", RANK_LOST)
def test_lost_rank_is_named_on_all_others_and_nothing_is_committed(
    tmp_path: Path, ranks: StartRanks, scenario: str
) -> None:
    phase = scenario.split(":")[1]
    ((directory, call),) = started(tmp_path, ranks, [scenario]).values()
    for kind, text in survivors(scenario, directory, call):
        assert kind == "RankLostError", text
        seen = "rank 1, not even begun" if phase == "entry" else "rank 1 ("
        assert text.startswith(seen)
        assert phase == "entry" or f"), {phase}: no sign within" in text
        assert re.search(r" of the save at '[^']+': killed", text), text
    assert not (directory / "committed").exists()


def test_store_lost_with_its_host_is_an_error_on_all_or_looked_up_in_the_storage(
    tmp_path: Path, ranks: StartRanks
) -> None:
    """While planning nothing can be committed; later the coordinator may have committed."""
    for scenario, (directory, call) in started(
        tmp_path, ranks, [*STORE_LOST, *COORDINATOR_LOST]
    ).items():
        is_committed = "after rename" in scenario
        wanted = "StoreLostError" if scenario in STORE_LOST else "OutcomeUnknownError"
        for kind, text in survivors(scenario, directory, call):
            assert kind == ("returned" if is_committed else wanted), (scenario, text)
            assert scenario not in STORE_LOST or "the process group's store" in text, scenario
        assert (directory / "committed").exists() is is_committed, scenario
