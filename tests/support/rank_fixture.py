"""Functions that run on several ranks, each a process of its own, in the environment of torchrun.

    def every_rank_saves(root: Path, rows: int) -> None: ...  # at the top of the test's own module

    def test_it(ranks, tmp_path):
        ranks(2)(every_rank_saves, tmp_path, rows=3)

On each rank `torch.distributed` is initialised with gloo, and the environment and the directory are
the test's; arguments are pickled. The call fails with what each rank raised and printed if one
raises, ends or does not return in time. The ranks of a module stay for its next call, as long as
each returns; `ranks(2, anew=True)` starts others, which end after the call: for functions that end
ranks, or leave something behind (hooks, patches, groups).

    lost = ranks(3, anew=True).start(one_rank_is_killed, tmp_path)   # a handle, for such tests
    lost.processes[1].kill()
    lost.wait(ended={1: -signal.SIGKILL})                            # the others return

A function that raises SystemExit ends its rank as Python does.

`ranks(2, library=shim)` starts fresh processes that are behind the shim (call_shim).
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Container, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import pytest
from support.call_shim import preloaded
from support.machine import seconds
from support.rank_process import OWN
from support.warm import WarmProcess, warm_parent

_DEADLINE_S = 900.0
_PROCESS = Path(__file__).with_name("rank_process.py")


class Handle:
    """A call that runs.

    Attributes:
        processes: one for each rank.
    """

    def __init__(self, ranks: Ranks, number: int, name: str) -> None:
        self._ranks, self._number, self._name = ranks, number, name
        self.processes = ranks.processes

    def wait(
        self,
        deadline_s: float | None = None,
        ended: Mapping[int, int] | None = None,
        but: Container[int] = (),
    ) -> list[Any]:
        """Returns what the function returned on each rank, None for one that ended.

        Args:
            deadline_s: seconds that all ranks have; None: 900, a slow machine's more.
            ended: ranks that end, with their exit status.
            but: ranks that are not waited for: None is returned.
        """
        give_up_at = time.monotonic() + (deadline_s or seconds(_DEADLINE_S))
        wanted, wrong = dict(ended or {}), list[str]()
        found: dict[int, Any] = {r: None for r in range(len(self.processes)) if r in but}
        while len(found) < len(self.processes) and time.monotonic() < give_up_at:
            warm_parent().hear(0.002 if time.monotonic() < self._ranks.asked_at + 1 else 0.05)
            before = len(wrong)
            for rank, process in enumerate(self.processes):
                if rank in found:
                    continue
                code, said = process.poll(), self._ranks.answer(self._number, rank)
                if said is not None and rank not in wanted:
                    has_returned, found[rank] = pickle.loads(said)
                    wrong += [] if has_returned else [f"rank {rank} raised\n{found[rank]}"]
                elif code is not None:
                    found[rank] = None
                    wrong += [] if code == wanted.get(rank) else [f"rank {rank} ended with {code}"]
            if wrong and not before:  # the others may say why
                give_up_at = min(give_up_at, time.monotonic() + 1)
        left = sorted(set(range(len(self.processes))) - set(found))
        wrong += [f"ranks {left} did not return"] if left else []
        if wrong:
            printed = self._ranks.printed()
            self._ranks.close()
            pytest.fail("\n".join([f"{self._name}:", *wrong, printed]), pytrace=False)
        return [found[rank] for rank in range(len(self.processes))]


class Ranks:
    """Processes of one group, which wait for functions to call."""

    def __init__(self, count: int, library: Path | None = None) -> None:
        import torch.distributed as dist

        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._printed = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self.calls, self.asked_at, self.is_open = 0, 0.0, True
        self.processes: list[WarmProcess | subprocess.Popen[str]] = []
        for rank in range(count):
            environment = {
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.store.port),
                "RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(count), "TORCHELASTIC_USE_AGENT_STORE": "True",
                "OMP_NUM_THREADS": "1",
            }  # fmt: skip
            assert environment.keys() == OWN
            out, command = self._printed, [str(_PROCESS)]
            if library is not None:
                given = {**preloaded(library), **environment}
                fresh = subprocess.Popen(
                    [sys.executable, *command], stdout=out, stderr=out, env=given, text=True
                )
                self.processes.append(fresh)
                continue
            given = {**os.environ, **environment}
            self.processes.append(warm_parent().start(command, out, out, env=given))

    def start(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Handle:
        """Calls a function of a module on each rank; returns at once."""
        file = sys.modules[function.__module__].__file__
        environment = {name: os.environ[name] for name in os.environ if name not in OWN}
        arguments = pickle.dumps((args, kwargs))
        call = (file, function.__qualname__, environment, os.getcwd(), arguments)
        self.calls += 1
        self.asked_at = time.monotonic()
        self._printed.seek(0, os.SEEK_END)
        self.store.set(f"call/{self.calls}", pickle.dumps(call))
        return Handle(self, self.calls, function.__qualname__)

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Calls it, and returns what it returned on each rank (`Handle.wait`)."""
        return self.start(function, *args, **kwargs).wait()

    def answer(self, number: int, rank: int) -> bytes | None:
        key = f"answer/{number}/{rank}"
        return bytes(self.store.get(key)) if self.store.check([key]) else None

    def printed(self) -> str:
        """Returns what the ranks have printed since they started."""
        self._printed.seek(0)
        return self._printed.read()

    def close(self) -> None:
        """Ends the processes."""
        if self.is_open:
            self.is_open = False
            for process in self.processes:
                process.kill()
            for process in self.processes:
                process.wait(seconds(60))
            self._printed.close()
            del self.store


class StartRanks(Protocol):
    def __call__(self, count: int, *, anew: bool = False, library: Path | None = None) -> Ranks: ...


@pytest.fixture(scope="module")
def _kept_ranks() -> Iterator[dict[int, Ranks]]:
    kept: dict[int, Ranks] = {}
    yield kept
    for each in kept.values():
        each.close()


@pytest.fixture
def ranks(_kept_ranks: dict[int, Ranks]) -> Iterator[StartRanks]:
    """Starts ranks, or takes the module's; this module's docstring has the rules."""
    own: list[Ranks] = []

    def of(count: int, *, anew: bool = False, library: Path | None = None) -> Ranks:
        if anew or library is not None:
            own.append(Ranks(count, library))
            return own[-1]
        if count not in _kept_ranks or not _kept_ranks[count].is_open:
            _kept_ranks[count] = Ranks(count)
        return _kept_ranks[count]

    yield of
    for each in own:
        each.close()
