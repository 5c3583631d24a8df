"""A resume does not go back behind a known commit, nor begin anew, without the user's word."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from support.fuse_fixture import MountedClient
from trainings import manager_of, save_steps

from torch_dcpx import CheckpointManager, ReadOptions, StorageError

Clients = tuple[MountedClient, MountedClient]


@pytest.mark.parametrize("evidence", ["newest", "step-3/.dcpx.readers", "step-3/.metadata"])
def test_training_does_not_begin_anew_where_a_commit_has_left_a_trace(
    tmp_path: Path, evidence: str, caplog: pytest.LogCaptureFixture
) -> None:
    save_steps(manager_of(tmp_path), 3)
    traces = ["newest", "step-3/.dcpx.readers", "step-3/.metadata", "step-3/__0_0.distcp"]
    for trace in traces:
        if trace != evidence:
            (tmp_path / trace).unlink()
    with pytest.raises(StorageError, match=r"'step-3'.*is not found whole.*allow_older"):
        manager_of(tmp_path, allow_fresh=True).resume()
    assert manager_of(tmp_path, allow_fresh=True, allow_older=True).resume().is_fresh
    assert "allow_older=True: a fresh start" in caplog.text


def test_training_does_not_begin_anew_where_a_pointer_cannot_be_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_steps(manager_of(tmp_path), 3)
    shutil.rmtree(tmp_path / "step-3")
    (tmp_path / "newest").write_bytes(b"<html>sign in</html>")
    for more in ({}, {"allow_fresh": True}, {"allow_older": True}):
        with pytest.raises(
            StorageError, match=r"'newest' is there and of no use.*allow_older"
        ) as e:
            manager_of(tmp_path, **more).resume()
        assert e.value.errno == errno.EIO and e.value.path == str(tmp_path / "newest")
    assert manager_of(tmp_path, allow_fresh=True, allow_older=True).resume().is_fresh
    assert "allow_older=True: a fresh start" in caplog.text
    save_steps(manager_of(tmp_path), 4)
    assert manager_of(tmp_path).resume().tag == "step-4"


def test_newest_that_has_only_its_lock_file_left_is_not_passed_over(tmp_path: Path) -> None:
    save_steps(manager_of(tmp_path), 2, 3)
    (tmp_path / "newest").unlink()
    (tmp_path / "step-3" / ".metadata").unlink()
    with pytest.raises(StorageError, match="'step-3' holds files of a commit"):
        manager_of(tmp_path).resume()
    assert manager_of(tmp_path, allow_older=True).resume().tag == "step-2"


def test_what_was_renamed_or_removed_by_a_manager_is_not_missing(tmp_path: Path) -> None:
    manager = manager_of(tmp_path)
    save_steps(manager, 1, 2, 3)
    (tmp_path / "step-3" / "notes.txt").write_text("mine")  # so that the directory stays
    manager.delete(3)
    assert (tmp_path / "step-3").is_dir()
    assert manager_of(tmp_path).resume().tag == "step-2"
    (tmp_path / "step-2").rename(tmp_path / "best")
    assert manager_of(tmp_path).resume().tag == "step-1"


def test_save_to_what_lies_beneath_a_mount_that_is_gone_is_refused(tmp_path: Path) -> None:
    root, theirs, beneath = tmp_path / "root", Path(mkdtemp(dir="/dev/shm")), tmp_path / "beneath"
    beneath.mkdir()
    try:
        root.symlink_to(theirs)
        with manager_of(root) as manager:
            save_steps(manager, 1, 2)
            root.unlink()
            root.symlink_to(beneath)
            for _ in range(2):
                with pytest.raises(
                    StorageError, match=r"on another file system.*mount theirs again"
                ):
                    save_steps(manager, 3)
            assert list(beneath.iterdir()) == []
            root.unlink()
            root.symlink_to(theirs)
            save_steps(manager, 3)
            assert manager.tags() == ["step-1", "step-2", "step-3"]
    finally:
        shutil.rmtree(theirs)


# ---- A part of the file system that does not answer ---------------------------------------------


def resumed(root: Path, **more: Any) -> Any:
    options = ReadOptions(visible_s=0.3)
    with CheckpointManager(root, read_options=options, no_dist=True, **more) as manager:
        return manager.resume(state={"x": torch.zeros(3)})


@pytest.mark.parametrize("lookup", [errno.ENOENT, errno.ENOTCONN])
@pytest.mark.parametrize("down", ["metadata", "data", "pointer", "metadata pointer", "all"])
def test_resume_does_not_go_back_where_a_part_is_down(
    two_clients: Clients, lookup: int, down: str
) -> None:
    client, _ = two_clients
    root = client.path / "root"
    save_steps(manager_of(root), 1, 2)
    files = {"metadata": ["*step-2/.metadata"], "data": ["*step-2/__*"], "pointer": ["*newest"]}
    files["all"] = ["*step-2/*", "*newest"]
    for name in down.split():
        for match in files[name]:
            client.take_down(match, lookup=lookup)
    client.forget()  # behind that: a removal in the background may just have looked
    is_pointer_alone = down == "pointer" and lookup == errno.ENOENT
    if is_pointer_alone:
        assert resumed(root).tag == "step-2"
    else:
        with pytest.raises(StorageError, match=r"allow_older=True|newest'"):
            resumed(root)
    if down != "pointer":
        assert resumed(root, allow_older=True).tag == "step-1"
    client.clear()
    assert resumed(root).tag == "step-2"


@pytest.mark.parametrize("lookup", [errno.ENOENT, errno.ENOTCONN])
@pytest.mark.parametrize("down", ["*.metadata", "*__0*", "*newest *.metadata", "*newest *.m* *.d*"])
def test_training_does_not_begin_anew_where_a_part_is_down(
    two_clients: Clients, lookup: int, down: str
) -> None:
    client, _ = two_clients
    root = client.path / "root"
    save_steps(manager_of(root), 1)
    for match in down.split():
        client.take_down(match, lookup=lookup)
    client.forget()
    with pytest.raises(StorageError):
        resumed(root, allow_fresh=True)
    client.clear()
    assert resumed(root, allow_fresh=True).tag == "step-1"


def test_root_of_a_save_that_was_killed_begins_anew_on_a_shared_file_system(
    two_clients: Clients,
) -> None:
    client, _ = two_clients
    root = client.path / "root"
    save_steps(manager_of(root), 1)
    for name in (".metadata", ".dcpx.readers"):
        (root / "step-1" / name).unlink()
    pointer = json.loads((root / "newest").read_text())
    (root / "newest").write_text(json.dumps({**pointer, "tag": None, "save_id": None, "order": 0}))
    client.forget()
    assert resumed(root, allow_fresh=True).is_fresh


@pytest.mark.parametrize("code", [errno.ENOTCONN, errno.EIO, errno.ETIMEDOUT])
def test_pointer_that_does_not_answer_is_not_taken_for_none(
    two_clients: Clients, code: int
) -> None:
    client, _ = two_clients
    root = client.path / "root"
    save_steps(manager_of(root), 1, 2)
    client.forget()
    client.fail("lookup open read", code, "*newest")
    with pytest.raises(StorageError, match="newest") as info:
        resumed(root)
    assert info.value.errno == code
    assert resumed(root, allow_older=True).tag == "step-2"


def test_what_did_not_answer_an_hour_ago_does_not_keep_a_resume_from_what_answers_now(
    two_clients: Clients,
) -> None:
    client, _ = two_clients
    root = client.path / "root"
    with manager_of(root, no_dist=True) as manager:
        manager.save("best", state={"x": torch.full((3,), 1.0)}, step=1)
        save_steps(manager, 2)
        client.take_down("*best/.metadata", lookup=errno.ENOTCONN)
        client.forget()
        assert [each.tag for each in manager._root.listed()[0]] == ["step-2"]
        client.clear()
        client.forget()
        assert manager.resume(state={"x": torch.zeros(3)}).tag == "step-2"


@pytest.mark.parametrize("text", ["", "garbage"])
def test_damaged_pointer_is_replaced_by_the_next_save_on_a_shared_file_system(
    two_clients: Clients, text: str
) -> None:
    client, _ = two_clients
    root = client.path / "root"
    save_steps(manager_of(root), 1)
    (root / "newest").write_text(text)
    client.forget()
    save_steps(manager_of(root), 2)
    assert json.loads((root / "newest").read_text())["tag"] == "step-2"
