"""Loads through a client that sees late what another one has saved."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.fuse_fixture import MountedClient
from support.machine import seconds
from torch.distributed.checkpoint.api import CheckpointException

import torch_dcpx as dcpx
from torch_dcpx import CheckpointManager, DcpxReader, NotCommittedError, ReadOptions, StorageError
from torch_dcpx.manager import directory_root
from torch_dcpx.manager.directory_root import DirectoryRoot
from torch_dcpx.storage.directory import Directory
from torch_dcpx.storage.system_calls import on_stale

Clients = tuple[MountedClient, MountedClient]


def state(value: int) -> dict[str, Any]:
    return {"w": torch.full((1 << 16,), float(value)), "v": value}


def save(value: int, path: Path) -> None:
    dcpx.save(state(value), path, no_dist=True)


def load(path: Path) -> int:
    target = state(-1)
    dcpx.load(target, path, no_dist=True)
    assert target["w"].eq(target["v"]).all()
    return int(target["v"])


def load_by_dcp(path: Path) -> int:
    target = state(-1)
    dcp.load(target, storage_reader=DcpxReader(path), no_dist=True)
    assert target["w"].eq(target["v"]).all()
    return int(target["v"])


def look_at_all(path: Path) -> None:
    for name in os.listdir(path):
        (path / name).stat()


def test_load_after_a_save_that_another_client_made_gives_one_whole_save(
    two_clients: Clients,
) -> None:
    first, second = two_clients
    for value in range(4):
        save(value, first.path / "same")
        assert load(second.path / "same") in (value - 1, value)  # this job knows no save there
        look_at_all(second.path / "same")


def test_load_by_dcp_which_plans_once_gives_one_whole_save_or_says_that_another_came(
    two_clients: Clients,
) -> None:
    first, second = two_clients
    for value in range(4):
        save(value, first.path / "same")
        try:
            found = load_by_dcp(second.path / "same")
        except CheckpointException as error:
            assert "was replaced by save" in str(error)  # noqa: PT017 - or it gives a whole one
        else:
            assert found in (value - 1, value)
        look_at_all(second.path / "same")


@pytest.mark.parametrize(
    ("operation", "match"),
    [("lookup", "same/.metadata"), ("open", "same/.metadata"), ("read", "same/*.distcp")],
)
def test_load_begins_anew_where_a_name_that_is_listed_leads_to_no_file(
    two_clients: Clients, operation: str, match: str
) -> None:
    """As GlusterFS without replicas for a moment after a file was replaced."""
    first, second = two_clients
    save(1, first.path / "same")
    second.fail(operation, errno.ENOENT, match, times=2)
    assert load(second.path / "same") == 1


def test_load_waits_for_the_sizes_that_a_client_saw_while_they_were_written(
    two_clients: Clients,
) -> None:
    first, second = two_clients
    (first.path / "new").mkdir()
    stop = threading.Event()

    def watch() -> None:  # as a listing by `dcpx ls` does
        while not stop.is_set() and ".metadata" not in os.listdir(second.path / "new"):
            pass

    watcher = threading.Thread(target=watch)
    watcher.start()
    save(3, first.path / "new")
    watcher.join(seconds(60))
    stop.set()
    assert load(second.path / "new") == 3


def test_resume_through_another_client_takes_the_newest_and_notes_no_damage(
    two_clients: Clients,
) -> None:
    first, second = two_clients
    with CheckpointManager(first.path / "root", keep_last=2) as manager:
        for value in range(1, 4):
            manager.save(value, state=state(value))
            manager.wait()
            with CheckpointManager(second.path / "root") as other:
                target = state(-1)
                info = other.resume(state=target)
            assert info.passed_over == () and target["v"] == info.step
            assert info.step in (value - 1, value)
            look_at_all(second.path / "root" / f"step-{value}")
    assert "damaged" not in (first.path / "root" / "newest").read_text()


def test_file_that_stays_short_is_named_short_and_no_damage(two_clients: Clients) -> None:
    first, second = two_clients
    save(1, first.path / "cut")
    data = first.path / "cut" / "__0_0.distcp"
    os.truncate(data, 1000)
    options = ReadOptions(visible_s=0.5)
    with pytest.raises(dcpx.ShortReadError, match=r"is shorter .*: 1000 B of \d+ B.*for 1 s"):
        dcpx.load(state(-1), second.path / "cut", options=options, no_dist=True)


def test_data_file_that_is_gone_for_good_is_missing_and_looked_for_once(
    two_clients: Clients,
) -> None:
    first, second = two_clients
    save(1, first.path / "lost")
    (first.path / "lost" / "__0_0.distcp").unlink()
    options = ReadOptions(visible_s=0.5)
    with pytest.raises(StorageError, match=r"No such file.*lists all damage") as caught:
        dcpx.load(state(-1), second.path / "lost", options=options, no_dist=True)
    assert caught.value.errno == errno.ENOENT
    assert "load it again" not in str(caught.value)


def test_stale_directory_takes_a_save_when_it_is_opened_anew(two_clients: Clients) -> None:
    first, _ = two_clients
    for operation in ("create", "mkdir"):
        path = first.path / operation
        if operation == "create":
            path.mkdir()
        first.fail("create", errno.ESTALE, times=2)
        save(5, path)
        first.clear()
        assert load(path) == 5


def test_save_into_a_directory_that_another_client_has_just_made_waits_until_it_sees_it(
    two_clients: Clients,
) -> None:
    first, second = two_clients
    (first.path / "new").mkdir()
    second.fail("lookup", errno.ENOENT, "new", times=9)  # also after its mkdir
    save(1, second.path / "new")
    assert load(second.path / "new") == 1


def test_directory_that_was_replaced_meanwhile_gets_no_file(tmp_path: Path) -> None:
    """A handle that is stale because the directory is another one by now stays an error."""
    (tmp_path / "a").mkdir()
    with Directory(tmp_path / "a") as directory:
        shutil.move(tmp_path / "a", tmp_path / "b")
        (tmp_path / "a").mkdir()
        calls = []

        def call(fd: int) -> None:
            calls.append(fd)
            raise OSError(errno.ESTALE, "stale")

        with pytest.raises(OSError, match="stale"):
            on_stale(directory, call)
        assert calls == [directory.fd]


def test_save_removes_nothing_where_the_metadata_may_be_out_of_sight(two_clients: Clients) -> None:
    client, _ = two_clients
    path = client.path / "same"
    save(1, path)
    client.forget()
    client.take_down("same/.metadata")  # a listing leaves it out, without an error
    options = ReadOptions(visible_s=0.5)
    with pytest.raises(NotCommittedError, match="a part of the file system that does not answer"):
        dcpx.load(state(-1), path, options=options, no_dist=True)
    client.fail("write", errno.ENOSPC, "same/__*")
    with pytest.raises(StorageError, match="No space left"):
        save(2, path)
    client.clear()
    assert load(path) == 1
    save(3, path)
    assert load(path) == 3
    assert len(list(path.glob("__*"))) == 1  # what was left went with the commit


def test_pointer_of_which_a_client_sees_the_size_before_is_read_again(
    two_clients: Clients,
) -> None:
    first, second = two_clients
    with CheckpointManager(first.path / "root") as manager:
        manager.save(1, state=state(1))
    pointer = first.path / "root" / "newest"
    content = pointer.read_bytes()
    pointer.write_bytes(content[:40])  # in its place: for sshfs, a path is a file
    look_at_all(second.path / "root")
    pointer.write_bytes(content)
    assert (second.path / "root" / "newest").stat().st_size == 40
    read = DirectoryRoot(second.path / "root", is_durable=True).read()
    assert read is not None and read.tag == "step-1"


def test_pointer_that_a_client_misses_for_a_moment_is_neither_lost_nor_replaced(
    two_clients: Clients,
) -> None:
    first, second = two_clients
    with CheckpointManager(first.path / "root") as manager:
        manager.save(1, state=state(1))
    content = json.loads((first.path / "root" / "newest").read_text())
    second.forget()
    second.fail("lookup", errno.ENOENT, "root/newest", times=2)
    with CheckpointManager(second.path / "root") as manager:
        assert manager.resume(state=state(-1)).step == 1
        second.fail("lookup", errno.ENOENT, "root/newest", times=2)
        second.forget()
        manager.save(2, state=state(2))
    first.forget()
    found = json.loads((first.path / "root" / "newest").read_text())
    assert (found["tag"], found["run"]) == ("step-2", content["run"])


def test_pointer_that_is_missing_beside_checkpoints_is_none_after_a_while(
    two_clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory_root, "UNKNOWN_S", 0.2)
    first, second = two_clients
    for name in ("root", "other"):
        with CheckpointManager(first.path / name) as manager:
            manager.save(1, state=state(1))
        (first.path / name / "newest").unlink()
    assert DirectoryRoot(second.path / "root", is_durable=True).read() is None
    with CheckpointManager(second.path / "other") as manager:
        assert manager.resume(state=state(-1)).step == 1
        manager.save(2, state=state(2))
    assert (first.path / "other" / "newest").exists()
