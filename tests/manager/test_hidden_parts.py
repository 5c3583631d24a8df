"""A manager removes nothing, and points to nothing older, where a part of the storage is hidden."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from support.fuse_fixture import MountedClient
from trainings import manager_of, save_steps

from torch_dcpx import ReadOptions, StorageError
from torch_dcpx.cli.app import app
from torch_dcpx.manager import removal

Clients = tuple[MountedClient, MountedClient]

LOOKUPS = pytest.mark.parametrize("lookup", [errno.ENOENT, errno.ENOTCONN])
SHORT = ReadOptions(visible_s=0.3)


def save_and_wait(root: Path, *steps: int) -> None:
    """Saves; no thread of the manager looks for removals behind that."""
    with manager_of(root) as manager:
        save_steps(manager, *steps)
        manager.wait()


def hide(client: MountedClient, match: str, lookup: int) -> None:
    client.forget()
    client.take_down(match, lookup=lookup)
    client.forget()


def show(client: MountedClient) -> None:
    client.clear()
    client.forget()


def files_of(path: Path) -> dict[str, bytes]:
    found = [each for each in path.iterdir() if each.name != ".dcpx.lock"]
    return {each.name: each.read_bytes() for each in found}


@LOOKUPS
def test_save_killed_over_a_checkpoint_does_not_remove_its_hidden_one(
    two_clients: Clients, lookup: int
) -> None:
    client, _ = two_clients
    root = client.path / "root"
    save_and_wait(root, 1, 2, 3)
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    note = f"host={os.uname().nodename} pid=1 boot={boot} name=step-2\n"
    (root / "step-2" / ".dcpx.lock").write_text(note)
    before = files_of(root / "step-2")
    hide(client, "*step-2/.metadata", lookup)
    with manager_of(root, keep_last=9) as manager:
        save_steps(manager, 4)
    show(client)
    assert files_of(root / "step-2") == before
    assert manager_of(root).tags() == ["step-1", "step-2", "step-3", "step-4"]


@LOOKUPS
def test_pin_that_is_hidden_keeps_its_checkpoint(two_clients: Clients, lookup: int) -> None:
    client, _ = two_clients
    root = client.path / "root"
    with manager_of(root) as manager:
        save_steps(manager, 1)
        manager.pin(1)
    before = files_of(root / "step-1")
    hide(client, "*step-1/.dcpx.pin", lookup)
    with manager_of(root, keep_last=1) as manager:
        save_steps(manager, 2, 3)
        with pytest.raises(StorageError, match=r"not connected"):
            manager.delete(1)
    show(client)
    assert files_of(root / "step-1") == before
    assert manager_of(root).tags() == ["step-1", "step-3"]


@LOOKUPS
def test_hidden_newest_is_pointed_to_by_a_later_job(two_clients: Clients, lookup: int) -> None:
    client, _ = two_clients
    root = client.path / "root"
    save_and_wait(root, 1, 2, 3)
    hide(client, "*step-3/.metadata", lookup)
    client.fail("rename rename2", errno.EIO, "*step-4/*")
    client.fail("rename rename2", errno.EIO, "*step-4/.metadata")
    with manager_of(root, read_options=SHORT) as manager, pytest.raises(StorageError):
        save_steps(manager, 4)
    show(client)
    assert manager_of(root).resume().tag == "step-3"


@LOOKUPS
@pytest.mark.parametrize("call", ["delete", "latest"])
def test_call_that_goes_by_the_newest_does_not_go_by_an_older_one(
    two_clients: Clients, lookup: int, call: str
) -> None:
    client, _ = two_clients
    root = client.path / "root"
    save_and_wait(root, 1, 2, 3)
    hide(client, "*step-3/.metadata", lookup)
    with manager_of(root, read_options=SHORT) as manager, pytest.raises(StorageError) as info:
        manager.delete(2) if call == "delete" else manager.latest()
    assert "step-3" in str(info.value)
    show(client)
    assert manager_of(root).tags() == ["step-1", "step-2", "step-3"]
    assert manager_of(root).resume().tag == "step-3"


@LOOKUPS
def test_tags_say_what_they_pass_over(
    two_clients: Clients, lookup: int, caplog: pytest.LogCaptureFixture
) -> None:
    client, _ = two_clients
    root = client.path / "root"
    save_and_wait(root, 1, 2, 3)
    hide(client, "*step-2/.metadata", lookup)
    with manager_of(root) as manager:
        assert manager.tags() == ["step-1", "step-3"]
    assert "skipped checkpoint 'step-2'" in caplog.text
    says = "part of the file system" if lookup == errno.ENOENT else os.strerror(lookup)
    assert says in caplog.text
    assert "did not end" not in caplog.text


@LOOKUPS
def test_removal_takes_later_what_was_hidden(two_clients: Clients, lookup: int) -> None:
    client, _ = two_clients
    root = client.path / "root"
    with manager_of(root, keep_last=1) as manager:
        save_steps(manager, 1)
        for place in ("step-1", ".dcpx.trash.*"):
            client.take_down(f"root/{place}/__0_0.distcp", lookup=lookup)
        client.forget()
        save_steps(manager, 2)
        manager.wait()
        show(client)
        save_steps(manager, 3)
    names = {name for name in os.listdir(root) if not name.startswith(".dcpx.root")}
    assert names == {"newest", "step-3"}


def test_removal_that_did_not_see_a_file_takes_it_later(two_clients: Clients) -> None:
    client, _ = two_clients
    root = client.path / "root"
    save_and_wait(root, 1, 2)
    (root / "step-1" / ".metadata").rename(root / "step-1" / ".dcpx.deleted")
    for place in ("step-1", ".dcpx.trash.*"):
        hide(client, f"root/{place}/__0_0.distcp", errno.ENOENT)
    with manager_of(root, keep_last=1) as manager:
        save_steps(manager, 3)
        manager.wait()
        show(client)
        assert any(name.startswith(".dcpx.trash") for name in os.listdir(root))
        save_steps(manager, 4)
    names = {name for name in os.listdir(root) if not name.startswith(".dcpx.root")}
    assert names == {"newest", "step-4"}


@LOOKUPS
def test_checkpoint_that_was_removed_and_saved_anew_is_not_removed_again(
    two_clients: Clients, lookup: int
) -> None:
    client, _ = two_clients
    root = client.path / "root"
    save_and_wait(root, 1, 2)
    note = root / "step-1" / ".dcpx.deleted"
    note.write_bytes((root / "step-1" / ".metadata").read_bytes())
    os.utime(note, (1e9, 1e9))  # of the save before
    before = files_of(root / "step-1")
    hide(client, "*step-1/.metadata", lookup)
    with manager_of(root, keep_last=9) as manager:
        save_steps(manager, 3)
        manager.wait()
    assert CliRunner().invoke(app, ["gc", "--delete", str(root / "step-1")]).exit_code == 2
    show(client)
    assert files_of(root / "step-1") == before


def test_look_for_a_hidden_pin_leaves_none_where_its_own_mark_does_not_go(
    two_clients: Clients,
) -> None:
    root = two_clients[0].path / "root"
    save_and_wait(root, 1, 2)
    two_clients[0].fail("unlink", errno.EIO, "*/.dcpx.pin", times=1)
    with manager_of(root) as manager:
        manager.delete("step-1")
        assert manager.tags() == ["step-2"]
    assert not (root / "step-1").exists()


def test_resume_that_looks_again_says_once_what_it_skips(
    two_clients: Clients, caplog: pytest.LogCaptureFixture
) -> None:
    client, _ = two_clients
    root = client.path / "root"
    save_and_wait(root, 1, 2)
    hide(client, "*step-2/.metadata", errno.ENOENT)
    caplog.clear()
    with manager_of(root, read_options=SHORT) as manager, pytest.raises(StorageError):
        manager.resume(state={})
    told = [text for text in caplog.messages if text.startswith("skipped checkpoint 'step-2'")]
    assert len(told) == 1


@LOOKUPS
def test_resume_that_finds_none_names_the_one_with_the_highest_number(
    two_clients: Clients, lookup: int
) -> None:
    client, _ = two_clients
    root = client.path / "root"
    save_and_wait(root, *range(8, 12))
    (root / "newest").unlink()
    hide(client, "*step-*/.metadata", lookup)
    with (
        manager_of(root, read_options=SHORT) as manager,
        pytest.raises(StorageError, match=r"'step-11' (does not answer|holds files of a commit)"),
    ):
        manager.resume(state={})


@pytest.mark.parametrize("how", ["EIO", "ENOTCONN", "down"])
def test_last_that_answers_is_not_called_the_last_one(two_clients: Clients, how: str) -> None:
    client, _ = two_clients
    root = client.path / "root"
    save_and_wait(root, 1, 2, 3)
    client.forget()
    if how == "down":
        hide(client, "*step-[12]/*", errno.ENOENT)
    else:
        looks = "open read getattr lookup opendir readdir readdirplus"
        client.fail(looks, getattr(errno, how), "root/step-[12]*")
    with (
        manager_of(root, read_options=SHORT) as manager,
        pytest.raises(StorageError, match=r"'step-2' does not answer.*nothing was removed"),
    ):
        manager.delete("step-3")
    show(client)
    with manager_of(root) as manager:
        assert manager.tags() == ["step-1", "step-2", "step-3"]


def test_pin_of_a_checkpoint_that_does_not_answer_says_so(two_clients: Clients) -> None:
    client, _ = two_clients
    root = client.path / "root"
    save_and_wait(root, 1, 2)
    with manager_of(root) as manager:
        name, own = "*step-1/.metadata", manager._root.files
        real = own.identity

        def identity(tag: str) -> object:
            client.forget()
            client.fail("lookup getattr", errno.EIO, name)
            try:
                return real(tag)
            finally:
                show(client)

        own.identity = identity  # type: ignore[method-assign, assignment]
        with pytest.raises(StorageError, match=r"stat '.*step-1/\.metadata': Input/output error"):
            manager.pin("step-1")


def test_removal_goes_on_where_one_read_of_metadata_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_and_wait(tmp_path, 1, 2)
    real, failures = removal.referenced_files, ["step-1"]

    def referenced(directory: Any, name: str) -> Any:
        return None if failures and failures.pop() else real(directory, name)

    monkeypatch.setattr(removal, "referenced_files", referenced)
    with manager_of(tmp_path) as manager:
        manager.delete("step-1")
        assert manager.tags() == ["step-2"]
