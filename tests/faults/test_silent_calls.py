"""Calls on a file system that answers no request: each ends at the option that it was given, or at
the environment's; goes on where an answer comes; or is interrupted.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from forks import run_alone
from support.fuse_fixture import MountedClient
from support.machine import seconds
from torch.distributed.checkpoint.api import CheckpointException

import torch_dcpx as dcpx
from torch_dcpx import (
    CheckpointManager,
    DcpxReader,
    DcpxWriter,
    ReadOptions,
    StorageError,
    WriteOptions,
)
from torch_dcpx._answered_os import path_of
from torch_dcpx.storage.publish import put

READ = ReadOptions(load_timeout_s=1, visible_s=0.1)
WRITE = WriteOptions(save_timeout_s=1, visible_s=0.1)


def state() -> dict[str, Any]:
    return {"w": torch.ones(1 << 12)}


def write_by_dcp(path: Path) -> None:
    dcp.save(state(), storage_writer=DcpxWriter(str(path), options=WRITE), no_dist=True)


def read_by_dcp(path: Path) -> None:
    dcp.load(state(), storage_reader=DcpxReader(str(path), options=READ), no_dist=True)


CALLS: dict[str, Callable[[Path], object]] = {
    "open_checkpoint": lambda path: dcpx.open_checkpoint(path, READ).close(),
    "load_tensors": lambda path: dcpx.load_tensors(path, options=READ),
    "dcp.load": read_by_dcp,
    "dcp.save": write_by_dcp,
    "load": lambda path: dcpx.load(state(), path, options=READ, no_dist=True),
    "save": lambda path: dcpx.save(state(), path, options=WRITE, no_dist=True),
}


def option_of(name: str) -> str:
    return "save_timeout_s" if "save" in name else "load_timeout_s"


@pytest.fixture
def client(
    two_clients: tuple[MountedClient, ...], monkeypatch: pytest.MonkeyPatch
) -> Iterator[MountedClient]:
    for name in ("DCPX_LOAD_TIMEOUT_S", "DCPX_SAVE_TIMEOUT_S"):
        monkeypatch.delenv(name, raising=False)
    yield two_clients[0]
    two_clients[0].clear()


def check_ends(
    client: MountedClient,
    call: Callable[[], object],
    option: str,
    match: str = "*",
    operation: str = "",
    skip: int = 0,
) -> None:
    """Checks that a call raises what a silent file system is, and does not wait for its answers."""
    client.forget()
    client.hold(operation, match, skip=skip)
    late = threading.Timer(seconds(60), client.clear)
    late.start()
    try:
        with pytest.raises((StorageError, CheckpointException)) as caught:
            call()
        assert late.is_alive(), "it ended when the answers came"
    finally:
        late.cancel()
        client.clear()
        client.forget()
    error = caught.value
    if isinstance(error, CheckpointException):  # of dcp.save and dcp.load
        error = error.failures[0][0]
    assert isinstance(error, StorageError), repr(error)
    assert error.errno == errno.ETIMEDOUT, repr(error)
    assert str(client.path) in str(error.path), repr(error)
    assert re.search(f"no answer for.*{option}=1 bounds the wait", str(error)), repr(error)


def test_call_ends_at_the_timeout_of_its_options(client: MountedClient) -> None:
    path = client.path / "ckpt"
    dcpx.save(state(), path, no_dist=True)
    for name, call in CALLS.items():
        check_ends(client, lambda call=call: call(path), option_of(name))
        call(path)
    with dcpx.open_checkpoint(path, READ) as opened:
        check_ends(client, lambda: opened["w"][:3], "load_timeout_s")
        assert opened["w"][:3].tolist() == [1, 1, 1]


def test_call_of_a_manager_ends_at_the_timeout_of_its_options(client: MountedClient) -> None:
    with CheckpointManager(
        client.path / "root", options=WRITE, read_options=READ, async_save=False, no_dist=True
    ) as manager:
        for step in (1, 2):
            manager.save(step, state=state())
        calls: dict[str, Callable[[], object]] = {
            "save": lambda: manager.save(3, state=state()),
            "pin": lambda: manager.pin("step-1"),
            "unpin": lambda: manager.unpin("step-1"),
            "delete": lambda: manager.delete("step-1"),
        }
        for name, call in calls.items():
            if name != "unpin":
                check_ends(client, call, option_of(name), "root/step-*")
            call()


# ---- What the environment bounds, and Ctrl-C ----------------------------------------------------


class Calls:
    """Calls without options of their own; `in_turn` names them."""

    def __init__(self, root: Path) -> None:
        self._root, self._path = root, root / "ckpt"
        self.targets: list[torch.Tensor] = []  # of loads that failed
        (root / "config").mkdir()
        (root / "config" / "config.json").write_text("{}")
        dcpx.save(state(), self._path, no_dist=True)
        self.manager = CheckpointManager(root / "root", no_dist=True, async_save=False)
        self.manager.save(1, state=state())
        self.in_turn: dict[str, Callable[[], object]] = {
            "save": lambda: dcpx.save(state(), self._path, no_dist=True),
            "load": self.load,
            "verify": lambda: dcpx.verify(self._path),
            "ls": lambda: dcpx.ls(root),
            "resume": lambda: self.manager.resume(state=state()),
            "export": lambda: self._export(state(), "exported"),
            "export of what is stored": lambda: self._export(self._path, "stored"),
            "small file": lambda: put(root / "small" / "file", b"small"),
            "adapter's look": lambda: path_of(root / "small").is_dir(),
        }

    def load(self) -> None:
        target = {"w": torch.zeros(1 << 12)}
        try:
            dcpx.load(target, self._path, no_dist=True)
        except BaseException:
            target["w"].fill_(9.0)  # it is the caller's again
            self.targets.append(target["w"])
            raise
        assert target["w"].eq(1).all()

    def _export(self, source: Any, name: str) -> None:
        """Exports beside a config that lies there, too."""
        config = self._root / "config"
        dcpx.export(source, self._root / name, overwrite=True, no_dist=True, config=config)


ANY_OPTION = "(?i:timeout_s)"
# call, request, file: the last such request of the call has no answer
STEPS = [
    ("save", "write", "*.distcp"),
    ("load", "read", "*.distcp"),
    ("verify", "read", "*.distcp"),
    *(
        (f"export{of}", request, f"{folder}/*")
        for of, folder in (("", "exported"), (" of what is stored", "stored"))
        for request in ("write", "fsync")
    ),
]


def requests_before(
    client: MountedClient, call: Callable[[], object], request: str, match: str
) -> int:
    """Returns how many such requests a call makes before its last one."""
    client.forget()
    client.calls()
    call()
    made = [path for name, path in client.calls() if name == request and fnmatch(path, match)]
    assert made, request
    return len(made) - 1


@pytest.mark.slow
def test_call_ends_at_the_timeout_of_the_environment_at_any_of_its_steps(
    client: MountedClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("DCPX_LOAD_TIMEOUT_S", "DCPX_SAVE_TIMEOUT_S"):
        monkeypatch.setenv(name, "1")  # a manager asks when it is made
    calls = Calls(client.path)
    for call in calls.in_turn.values():
        check_ends(client, call, ANY_OPTION)
        call()
    for name, request, match in STEPS:
        call = calls.in_turn[name]
        skip = requests_before(client, call, request, match)
        check_ends(client, call, ANY_OPTION, match, request, skip)
        call()
    assert len(list(client.path.glob("ckpt/*.distcp"))) == 1
    assert not list(client.path.glob("exported/.*"))
    calls.manager.close()
    assert all(target.eq(9.0).all() for target in calls.targets), "what was left behind wrote"


@pytest.mark.slow
def test_call_on_a_silent_file_system_is_interrupted_or_goes_on_with_the_answers(
    client: MountedClient,
) -> None:
    calls = Calls(client.path)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        for name, request, match in (("load", "", "*"), ("export", "", "*"), *STEPS[3:6:2]):
            call, pressed_at = calls.in_turn[name], list[float]()
            skip = requests_before(client, call, request, match) if request else 0

            def press(pressed_at: list[float] = pressed_at) -> None:
                pressed_at.append(time.monotonic())
                os.kill(os.getpid(), signal.SIGINT)

            client.forget()
            client.hold(request, match, skip=skip)
            threading.Timer(1.0, press).start()
            with pytest.raises(KeyboardInterrupt):
                call()
            assert time.monotonic() - pressed_at[0] < seconds(20), name
            client.clear()
            call()
    finally:
        signal.signal(signal.SIGINT, before)
    client.forget()
    client.hold("")
    threading.Timer(1.0, client.clear).start()
    calls.load()
    calls.manager.close()
    assert all(target.eq(9.0).all() for target in calls.targets), "what was left behind wrote"


def last_call_is_given_up(path: Path, daemon: int) -> None:
    dcpx.save(state(), path / "ckpt", no_dist=True)
    MountedClient(path, "", daemon).stop()  # requests that are held take no signal
    for call in (dcpx.save, dcpx.load):
        with pytest.raises(StorageError, match=f"'{path}/ckpt.*no answer for"):
            call(state(), path / "ckpt", no_dist=True)
    raise SystemExit  # a thread is left, which waits


@pytest.mark.slow
def test_process_ends_whose_last_call_has_no_answer(
    client: MountedClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("LOAD", "2"), ("SAVE", "2"), ("EXIT", "5")):
        monkeypatch.setenv(f"DCPX_{name}_TIMEOUT_S", value)
    late = threading.Timer(seconds(120), client.go_on)
    late.start()
    try:
        run_alone(last_call_is_given_up, client.path, client.pid)
        assert late.is_alive(), "it ended when the answers came"
    finally:
        late.cancel()
        client.go_on()
