"""ENOSPC, EDQUOT and EIO of each call: what was there is whole, and the next save works."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.fuse_fixture import MountedClient
from support.machine import seconds

import torch_dcpx as dcpx
from torch_dcpx import CheckpointManager, ReadOptions, StorageError, WriteOptions

Clients = tuple[MountedClient, MountedClient]

OPTIONS = WriteOptions(workers=1, slot_bytes=256 << 10)
CODES = [errno.ENOSPC, errno.EDQUOT, errno.EIO]
CALLS = ["create", "write", "fsync", "flush", "rename rename2", "fsyncdir"]


def state(value: float) -> dict[str, torch.Tensor]:
    return {"x": torch.full((1 << 15,), value)}


def save(path: Path, value: float) -> None:
    dcpx.save(state(value), path, options=OPTIONS, no_dist=True)


def load(path: Path) -> torch.Tensor:
    found = state(-1)
    dcpx.load(found, path, no_dist=True)
    return found["x"]


def save_step(path: Path, value: float) -> None:
    with CheckpointManager(path, options=OPTIONS, async_save=False, no_dist=True) as manager:
        manager.save(int(value), state=state(value))


def resume(path: Path) -> torch.Tensor:
    found = state(-1)
    with CheckpointManager(path, no_dist=True) as manager:
        manager.resume(state=found)
    return found["x"]


def export(path: Path, value: float, options: WriteOptions = OPTIONS) -> None:
    where = path / "model.safetensors"
    dcpx.export(state(value), where, options=options, overwrite=True, no_dist=True)


def exported(path: Path) -> torch.Tensor:
    return load_file(path / "model.safetensors")["x"]


WAYS: dict[str, tuple[Callable[[Path, float], None], Callable[[Path], torch.Tensor]]] = {
    "save": (save, load),
    "manager": (save_step, resume),
    "export": (export, exported),
}


@pytest.mark.parametrize("way", WAYS)
def test_error_that_comes_late_leaves_the_one_before(
    two_clients: Clients, way: str, seed: int, capfd: pytest.CaptureFixture[str]
) -> None:
    client, _ = two_clients
    put, get = WAYS[way]
    for number, call in enumerate(CALLS):
        code = CODES[(seed + number) % len(CODES)]
        path = client.path / f"{number}"
        put(path, 1)
        client.fail(call, code, f"{path.name}*")
        with pytest.raises(StorageError) as caught:
            put(path, 2)
        client.clear()
        client.forget()
        text = str(caught.value)
        assert caught.value.errno == code and os.strerror(code) in text and str(path) in text
        assert "free" not in text or code == errno.ENOSPC, text
        # Behind the rename a sync may fail: then it is there, and a power cut may take it.
        values = {1.0, 2.0} if call == "fsyncdir" else {1.0}
        found = get(path)
        assert found[0].item() in values and bool((found == found[0]).all()), call
        put(path, 3)
        assert bool((get(path) == 3).all()), call
        assert not list(path.rglob("*.tmp")), call
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("name", ["model.safetensors", "model.pt"])
def test_file_that_cannot_be_read_is_no_reason_to_replace_it(
    two_clients: Clients, name: str
) -> None:
    client, _ = two_clients
    path = client.path / name
    dcpx.export(state(1), path, no_dist=True)
    before = path.read_bytes()
    client.forget()
    for call in ("flush", "read", "open"):
        client.fail(call, errno.EIO, name)
        with pytest.raises(StorageError, match=f"read '{path}': Input/output error"):
            dcpx.export(state(2), path, overwrite=True, no_dist=True)
        client.clear()
        client.forget()
    assert path.read_bytes() == before


def test_want_of_room_with_room_left_is_no_want_of_bytes(two_clients: Clients) -> None:
    client, _ = two_clients
    client.fail("rename rename2", errno.ENOSPC, "a/*")
    with pytest.raises(StorageError, match=r"rename '.*free \d+ B, so full is a quota"):
        save(client.path / "a", 1)


@pytest.mark.parametrize("call", ["write", "read"])
def test_error_behind_which_no_file_closes_comes_before_the_deadline(
    two_clients: Clients, call: str
) -> None:
    client, _ = two_clients
    save(client.path / "a", 1)
    client.forget()
    client.fail(call, errno.EIO, "*.distcp")
    client.hold("flush", "*.distcp")

    write = partial(dcpx.save, options=WriteOptions(save_timeout_s=2))
    read = partial(dcpx.load, options=ReadOptions(load_timeout_s=2, visible_s=0.1))
    released = threading.Timer(seconds(15), client.clear)  # what hangs takes no signal
    released.start()
    try:
        with pytest.raises(StorageError, match=os.strerror(errno.EIO)):
            (write if call == "write" else read)(state(2), client.path / "a", no_dist=True)
        assert released.is_alive(), "the call has waited for the server"
    finally:
        released.cancel()
        released.join()


def test_export_whose_files_do_not_close_says_what_was_silent_and_keeps_no_lock(
    two_clients: Clients,
) -> None:
    first, _ = two_clients
    first.hold("flush")
    path = first.path / "exported"
    with pytest.raises(StorageError, match=r"sync '.*': no answer"):
        export(path, 1, WriteOptions(save_timeout_s=1))
    first.clear()
    export(path, 2)
    assert torch.equal(exported(path), state(2)["x"])


def open_files(path: Path) -> list[str]:
    """Returns what is open beneath a mount."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
    return [name for name in found if name.startswith(f"{path}/")]


def test_save_that_was_left_takes_no_file_of_a_later_one_when_it_ends(
    two_clients: Clients,
) -> None:
    first, second = two_clients
    first.hold("write", "*.distcp")
    options = WriteOptions(save_timeout_s=2)
    with pytest.raises(StorageError, match="no answer"):
        dcpx.save(state(1), first.path / "a", options=options, no_dist=True)
    shutil.rmtree(second.path / "a")  # as a job on another node may do, before it begins anew
    save(second.path / "a", 2)
    first.clear()
    give_up_at = time.monotonic() + seconds(60)
    while open_files(first.path) and time.monotonic() < give_up_at:
        time.sleep(0.01)
    time.sleep(0.5)  # the removal comes behind the close
    assert bool((load(second.path / "a") == 2).all())
