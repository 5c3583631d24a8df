"""Workers of several ranks: each a process of its own, in the environment that torchrun makes."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from support.warm import WarmProcess, warm_parent

WORKER = Path(__file__).with_name("worker.py")
_DEADLINE_S = 900.0


def run_ranks(worker: Path, ranks: int, *args: str) -> None:
    """Runs the worker on `ranks` ranks; fails with their output unless each says that it is done.

    The store is this process's, as it is the launcher's under torchrun, and the first rank that
    fails ends the others. Ranks are forked, not started (tests/support/warm.py).

    Args:
        worker: a script that prints "rank R done" when all of it held.
        ranks: processes on this machine.
        args: its arguments.
    """
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    command = [str(worker), *args]
    with tempfile.TemporaryFile("w+", errors="replace") as out:
        processes = [_started(command, rank, ranks, store.port, out) for rank in range(ranks)]
        try:
            codes = _ends(processes)
        finally:
            for process in processes:
                process.kill()
        out.seek(0)
        said = out.read()
    del store
    _check(command, ranks, codes, said)


def run_cases(worker: Path, ranks: int, name: str, root: Path, *arguments: object) -> None:
    """Runs a worker module's cases of a name (worker.py) on `ranks` ranks, as `run_ranks` does."""
    run_ranks(WORKER, ranks, str(worker), name, str(root), *map(str, arguments))


def run_rank_sets(
    worker: Path, sets: Sequence[tuple[int, Sequence[str]]], at_once: int, deadline_s: float
) -> str:
    """Runs the worker on several sets of ranks, each with a store of its own, some at a time.

    Args:
        worker: as `run_ranks`.
        sets: (ranks, arguments of the worker).
        at_once: sets.
        deadline_s: for all of them.

    Returns:
        What they printed. The first set that fails ends all of them, and fails with its output.
    """
    import torch.distributed as dist

    give_up_at = time.monotonic() + deadline_s
    waiting, running, printed = list(sets), [], ""
    with contextlib.ExitStack() as stack:
        while waiting or running:
            while waiting and len(running) < at_once:
                ranks, args = waiting.pop(0)
                store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
                out = stack.enter_context(tempfile.TemporaryFile("w+", errors="replace"))
                command = [str(worker), *args]
                processes = []
                for rank in range(ranks):
                    processes.append(_started(command, rank, ranks, store.port, out))
                    stack.callback(processes[-1].kill)
                running.append((command, processes, out, store))
            warm_parent().hear(0.1)
            for one in list(running):
                command, processes, out, _ = one
                codes = [process.poll() for process in processes]
                if None in codes and not any(codes) and time.monotonic() < give_up_at:
                    continue
                running.remove(one)
                for process in processes:
                    process.kill()
                out.seek(0)
                said = out.read()
                _check(command, len(processes), codes, said)
                printed += said
    return printed


def run_torchrun(worker: Path, ranks: int, *args: str) -> None:
    """Like `run_ranks`, started as users start it; some seconds more for each."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
        str(ranks), str(worker), *args,
    ]  # fmt: skip
    result = subprocess.run(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_DEADLINE_S,
        check=False,
    )
    _check(command, ranks, [result.returncode], result.stdout)


def _started(command: list[str], rank: int, ranks: int, port: int, out: IO[Any]) -> WarmProcess:
    environment = {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank),
        "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks),
        "TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    return warm_parent().start(command, out, out, env={**os.environ, **environment})


def _ends(processes: list[WarmProcess]) -> list[int | None]:
    """Returns their statuses when all have ended or one has failed; None: it still ran."""
    give_up_at = time.monotonic() + _DEADLINE_S
    while time.monotonic() < give_up_at:
        codes = [process.poll() for process in processes]
        if None not in codes or any(codes):
            return codes
        warm_parent().hear(0.1)
    return [process.poll() for process in processes]


def _check(command: list[str], ranks: int, codes: list[int | None], said: str) -> None:
    missing = [rank for rank in range(ranks) if f"rank {rank} done" not in said]
    assert not any(code != 0 for code in codes) and not missing, f"{command}: {codes}\n{said}"
