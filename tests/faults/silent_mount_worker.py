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
from torch_dcpx._answered_os import path_of
from torch_dcpx.artifacts import files, writing
from torch_dcpx.storage.place import PosixPlace
from torch_dcpx.storage.publish import put

WHERE, DAEMON = Path(sys.argv[1]), int(sys.argv[2])
PATH = WHERE / "ckpt"
BOUND_S = float(os.environ["DCPX_SAVE_TIMEOUT_S"])
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


def export(source: Any, name: str) -> None:
    """Exports beside a config that lies there, too."""
    config = WHERE / "config"
    torch_dcpx.export(source, WHERE / name, overwrite=True, no_dist=True, config=config)


targets: list[torch.Tensor] = []
OPERATIONS: dict[str, Callable[[], object]] = {
    "save": save,
    "load": load,
    "verify": lambda: torch_dcpx.verify(PATH),
    "ls": lambda: torch_dcpx.ls(WHERE),
    "resume": lambda: manager.resume(model=torch.nn.Linear(2, 2)),
    "export": lambda: export({"large": state_of(3)["large"]}, "exported"),
    "export of what is stored": lambda: export(PATH, "stored"),
    "small file": lambda: put(WHERE / "small" / "file", b"small"),
    "adapter's look": lambda: path_of(WHERE / "small").is_dir(),
}


def check_silent(name: str, begin: Callable[[], None] = stop) -> None:
    """Checks that an operation raises when the daemon is stopped, and works afterwards."""
    began = time.monotonic()
    begin()
    try:
        OPERATIONS[name]()
    except StorageError as error:
        assert error.errno == errno.ETIMEDOUT, repr(error)  # noqa: PT017
        assert str(WHERE) in str(error.path), repr(error)  # noqa: PT017
        assert "no answer for" in str(error), repr(error)  # noqa: PT017
    else:
        raise AssertionError(f"{name} got answers")
    assert time.monotonic() - began < BOUND_S + seconds(20)
    go_on()
    while undo:
        undo.pop()()
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


def within_range_job(call: str) -> Callable[[], None]:
    """Lets the daemon stop only where an export begins to write, or to sync."""

    def begin() -> None:
        real = files.open_job

        def made(*args: Any) -> Any:
            found = real(*args)
            vars(found)[call] = stopping(getattr(found, call))
            return found

        for module in (files, writing):
            vars(module)["open_job"] = made
        undo.append(lambda: [vars(module).update(open_job=real) for module in (files, writing)])

    return begin


def stopping(call: Callable[..., Any]) -> Callable[..., Any]:
    def stopped(*args: Any, **kwargs: Any) -> Any:
        stop()
        return call(*args, **kwargs)

    return stopped


def check_interrupted(name: str, begin: Callable[[], None] = stop) -> None:
    """Checks that Ctrl-C ends an operation at once, and the next one works."""
    pressed_at: list[float] = []

    def press() -> None:
        pressed_at.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    os.environ |= {"DCPX_SAVE_TIMEOUT_S": "1000", "DCPX_LOAD_TIMEOUT_S": "1000"}
    begin()
    threading.Timer(1.0, press).start()
    try:
        OPERATIONS[name]()
    except KeyboardInterrupt:
        pass
    else:
        raise AssertionError("it got answers")
    took_s = time.monotonic() - pressed_at[0]
    assert took_s < seconds(20), took_s
    go_on()
    while undo:
        undo.pop()()
    OPERATIONS[name]()
    print(f"interrupted and works: {name} in {took_s:.1f} s", flush=True)


undo: list[Callable[[], object]] = []
(WHERE / "config").mkdir()
(WHERE / "config" / "config.json").write_text("{}")
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
for call in ("write", "finish"):
    for operation in ("export", "export of what is stored"):
        check_silent(operation, within_range_job(call))
left = [name for name in os.listdir(WHERE / "exported") if name.startswith(".")]
assert left == [], left
check_interrupted("load")
check_interrupted("export")
for operation in ("export", "export of what is stored"):
    check_interrupted(operation, within_range_job("write"))
stop()
threading.Timer(1.0, go_on).start()
load()
print("went on", flush=True)
stop()  # and so the process ends
