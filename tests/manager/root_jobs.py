"""Other jobs at a manager's root, as processes and as records, for tests."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from support.machine import seconds

import torch_dcpx as dcpx
from torch_dcpx import CheckpointManager
from torch_dcpx.storage.holder import Holder
from torch_dcpx.storage.names import root_lock_name, root_lock_number
from torch_dcpx.storage.root_record import identity_of

WORKER = Path(__file__).with_name("root_holder_worker.py")
NEVER = 1e6
# Only what is proved counts: nobody is gone for his silence, and nobody is waited for.
PROOFS = {"_GONE_S": NEVER, "_ENDING_S": 0.0}


class Job:
    """Another process with a manager, which does what it is told."""

    def __init__(self, root: Path, *flags: str, **values: float) -> None:
        paths = [Path(dcpx.__file__).parents[1], *map(Path, sys.path)]
        self.process = subprocess.Popen(
            [sys.executable, str(WORKER), str(root), json.dumps({**PROOFS, **values}), *flags],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))},
        )
        assert self._line() == "ready\n"

    def _line(self) -> str:
        assert self.process.stdout is not None
        late = threading.Timer(seconds(120), self.process.kill)
        late.start()
        try:
            return self.process.stdout.readline()
        finally:
            late.cancel()

    def tell(self, what: str) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{what}\n")
        self.process.stdin.flush()
        return json.loads(self._line())

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def alarm() -> Iterator[None]:
    """Raises in the block, whatever it waits for, when it takes too long."""

    def ring(*_: object) -> None:
        raise AssertionError("it hangs")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds(60))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def manager_of(root: Path, **more: Any) -> CheckpointManager:
    return CheckpointManager(root, no_dist=True, **{"async_save": False, **more})


def save(manager: CheckpointManager, step: int) -> None:
    manager.save(step, state={"x": torch.ones(8)})


def snapshot(root: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file() and not path.name.startswith(".dcpx.root.")
    }


def locks(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if root_lock_number(path.name))


def elsewhere(**more: Any) -> Holder:
    """Returns the record of a job on another machine."""
    own = Holder.own("")._replace(host="node7", pid=4711, boot="another", space="pid:[1]")
    return own._replace(token="other", has_flock=True, **more)


def put(root: Path, holder: Holder, number: int = 1) -> None:
    """Writes a record of a root, unless its holder names another one."""
    beside = root.with_name(f"{root.name}.record")
    beside.write_bytes(holder._replace(root=holder.root or identity_of(root)).encoded())
    beside.rename(root / root_lock_name(number))  # nobody finds a half
