"""Calls on a file system that answers no request: each ends at the option that it was given.

The timeouts are options, and none is in the environment: what sets no bound of its own waits on.
"""

from __future__ import annotations

import errno
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
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
    client: MountedClient, call: Callable[[], object], option: str, match: str = "*"
) -> None:
    """Checks that a call raises what a silent file system is, and does not wait for its answers."""
    client.forget()
    client.hold("", match)
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
