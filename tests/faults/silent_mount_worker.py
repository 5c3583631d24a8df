"""Saves, loads and looks on a FUSE mount whose daemon is stopped (root).

    silent_mount_worker.py DIRECTORY PID    (PID: of the daemon)

Each raises with the path within its bound, and works once the daemon goes on. The last one leaves
a thread behind: the process ends all the same.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from support.machine import seconds

import torch_dcpx
from torch_dcpx import CheckpointManager, StorageError
from torch_dcpx._answers import StorageTimeout, wait_at_most
from torch_dcpx.storage.place import PosixPlace

WHERE, DAEMON = Path(sys.argv[1]), int(sys.argv[2])
PATH = WHERE / "ckpt"
BOUND_S = 3.0
JOBS = ("write_job", "read_job", "verify_job")


def state_of(seed: int) -> dict[str, Any]:
    return {"large": torch.full((4 << 20,), float(seed)), "step": seed}


def stop() -> None:
    os.kill(DAEMON, signal.SIGSTOP)


def go_on() -> None:
    os.kill(DAEMON, signal.SIGCONT)


def save() -> None:
    torch_dcpx.save(state_of(2), PATH, no_dist=True)


def load() -> None:
    target = state_of(0)
    try:
        torch_dcpx.load(target, PATH, no_dist=True)
    except BaseException:
        target["large"].fill_(9.0)  # it is the caller's again
        targets.append(target["large"])
        raise
    assert target["large"].eq(target["step"]).all()


targets: list[torch.Tensor] = []
OPERATIONS: dict[str, Callable[[], object]] = {
    "save": save,
    "load": load,
    "verify": lambda: torch_dcpx.verify(PATH),
    "ls": lambda: torch_dcpx.ls(WHERE),
    "resume": lambda: manager.resume(model=torch.nn.Linear(2, 2)),
}


def check_silent(name: str, begin: Callable[[], None] = stop) -> None:
    """Checks that an operation raises when the daemon is stopped, and works afterwards."""
    began = time.monotonic()
    begin()
    try:
        with wait_at_most(StorageTimeout(BOUND_S, "save_timeout_s")):
            OPERATIONS[name]()
    except StorageError as error:
        assert error.errno == errno.ETIMEDOUT, repr(error)  # noqa: PT017
        assert str(WHERE) in str(error.path), repr(error)  # noqa: PT017
        assert "no answer for" in str(error), repr(error)  # noqa: PT017
    else:
        raise AssertionError(f"{name} got answers")
    assert time.monotonic() - began < BOUND_S + seconds(20)
    go_on()
    OPERATIONS[name]()
    print("raised and works:", name, flush=True)


def within(job: str) -> Callable[[], None]:
    """Lets the daemon stop only where C++ begins to read or write."""

    def begin() -> None:
        real = getattr(PosixPlace, job)

        def made(place: Any, options: Any) -> Any:
            setattr(PosixPlace, job, real)
            found = real(place, options)
            for name in ("write", "read", "sum"):
                if hasattr(found, name):
                    vars(found)[name] = stopping(getattr(found, name))
            return found

        setattr(PosixPlace, job, made)

    return begin


def stopping(call: Callable[..., Any]) -> Callable[..., Any]:
    def stopped(*args: Any, **kwargs: Any) -> Any:
        stop()
        return call(*args, **kwargs)

    return stopped


def check_interrupted() -> None:
    """Checks that Ctrl-C ends an operation at once, and the next one works."""
    stop()
    threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    began = time.monotonic()
    try:
        load()
    except KeyboardInterrupt:
        pass
    else:
        raise AssertionError("it got answers")
    assert time.monotonic() - began < seconds(30)
    go_on()
    load()
    print("interrupted and works", flush=True)


torch_dcpx.save(state_of(1), PATH, no_dist=True)
manager = CheckpointManager(WHERE / "root", no_dist=True)
manager.save(1, model=torch.nn.Linear(2, 2))
manager.wait()
for operation in OPERATIONS:
    check_silent(operation)
for operation, kind in zip(("save", "load", "verify"), JOBS, strict=True):
    check_silent(operation, within(kind))
names = {name for name in os.listdir(PATH) if name.endswith(".distcp")}
assert len(names) == 1, names  # the files of what was left behind are gone
assert all(target.eq(9.0).all() for target in targets), "what was left behind wrote to a target"
check_interrupted()
stop()
threading.Timer(1.0, go_on).start()
load()
print("went on", flush=True)
stop()  # and so the process ends
