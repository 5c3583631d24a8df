"""Where a part of the storage is hidden: a manager removes nothing, points to nothing older, and a
resume neither goes back behind a known commit nor begins anew."""

from __future__ import annotations

import errno
import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from support.fuse_fixture import MountedClient, mounted_clients
from trainings import manager_of, on_disk, save_steps

from torch_dcpx import ReadOptions, StorageError
from torch_dcpx.cli.app import app
from torch_dcpx.manager import removal
from torch_dcpx.storage import visibility

LOOKUPS = pytest.mark.parametrize("lookup", [errno.ENOENT, errno.ENOTCONN])
SHORT = ReadOptions(visible_s=0.3)
_numbers = itertools.count()


@pytest.fixture(scope="module")
def two_clients(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[MountedClient, ...]]:
    """One is enough here, for all tests."""
    with mounted_clients(tmp_path_factory.mktemp("clients"), 1) as clients:
        yield clients


@pytest.fixture
def client(
    two_clients: tuple[MountedClient], monkeypatch: pytest.MonkeyPatch
) -> Iterator[MountedClient]:
    monkeypatch.setattr(visibility, "UNKNOWN_S", 0.3)
    yield two_clients[0]
    show(two_clients[0])


@pytest.fixture
def root(client: MountedClient) -> Path:
    return client.path / f"root{next(_numbers)}"


def save_and_wait(root: Path, *steps: int) -> None:
    """Saves; no thread of the manager looks for removals behind that."""
    with manager_of(root) as manager:
        save_steps(manager, *steps)
        manager.wait()


def hide(client: MountedClient, lookup: int, *matches: str) -> None:
    client.forget()
    for match in matches:
        client.take_down(match, lookup=lookup)
    client.forget()


def show(client: MountedClient) -> None:
    client.clear()
    client.forget()


def files_of(path: Path) -> dict[str, bytes]:
    found = [each for each in path.iterdir() if each.name != ".dcpx.lock"]
    return {each.name: each.read_bytes() for each in found}


def resumed(root: Path, **more: Any) -> Any:
    with manager_of(root, read_options=SHORT, **more) as manager:
        return manager.resume(state={"x": torch.zeros(3)})


# ---- Removals ------------------------------------------------------------------------------------


@LOOKUPS
def test_save_killed_over_a_checkpoint_does_not_remove_its_hidden_one(
    client: MountedClient, root: Path, lookup: int
) -> None:
    save_and_wait(root, 1, 2, 3)
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    note = f"host={os.uname().nodename} pid=1 boot={boot} name=step-2\n"
    (root / "step-2" / ".dcpx.lock").write_text(note)
    before = files_of(root / "step-2")
    hide(client, lookup, "*step-2/.metadata")
    with manager_of(root, keep_last=9) as manager:
        save_steps(manager, 4)
    show(client)
    assert files_of(root / "step-2") == before
    assert manager_of(root).tags() == ["step-1", "step-2", "step-3", "step-4"]


@LOOKUPS
def test_pin_that_is_hidden_keeps_its_checkpoint(
    client: MountedClient, root: Path, lookup: int
) -> None:
    with manager_of(root) as manager:
        save_steps(manager, 1)
        manager.pin(1)
    before = files_of(root / "step-1")
    hide(client, lookup, "*step-1/.dcpx.pin")
    with manager_of(root, keep_last=1) as manager:
        save_steps(manager, 2, 3)
        with pytest.raises(StorageError, match=r"not connected"):
            manager.delete(1)
    show(client)
    assert files_of(root / "step-1") == before
    assert manager_of(root).tags() == ["step-1", "step-3"]


@LOOKUPS
@pytest.mark.parametrize("call", ["delete", "latest"])
def test_call_that_goes_by_the_newest_does_not_go_by_an_older_one(
    client: MountedClient, root: Path, lookup: int, call: str
) -> None:
    save_and_wait(root, 1, 2, 3)
    hide(client, lookup, "*step-3/.metadata")
    with manager_of(root, read_options=SHORT) as manager, pytest.raises(StorageError) as info:
        manager.delete(2) if call == "delete" else manager.latest()
    assert "step-3" in str(info.value)
    show(client)
    assert manager_of(root).tags() == ["step-1", "step-2", "step-3"]
    assert manager_of(root).resume().tag == "step-3"


@LOOKUPS
def test_removal_takes_later_what_was_hidden(
    client: MountedClient, root: Path, lookup: int
) -> None:
    hidden = [f"{root.name}/{place}/__0_0.distcp" for place in ("step-1", ".dcpx.trash.*")]
    with manager_of(root, keep_last=1) as manager:
        save_steps(manager, 1)
        hide(client, lookup, *hidden)
        save_steps(manager, 2)
        manager.wait()
        show(client)
        save_steps(manager, 3)
    assert on_disk(root) == {"step-3"}


def test_removal_that_did_not_see_a_file_takes_it_later(client: MountedClient, root: Path) -> None:
    save_and_wait(root, 1, 2)
    (root / "step-1" / ".metadata").rename(root / "step-1" / ".dcpx.deleted")
    hidden = [f"{root.name}/{place}/__0_0.distcp" for place in ("step-1", ".dcpx.trash.*")]
    hide(client, errno.ENOENT, *hidden)
    with manager_of(root, keep_last=1) as manager:
        save_steps(manager, 3)
        manager.wait()
        show(client)
        assert any(name.startswith(".dcpx.trash") for name in os.listdir(root))
        save_steps(manager, 4)
    assert on_disk(root) == {"step-4"}


@LOOKUPS
def test_checkpoint_that_was_removed_and_saved_anew_is_not_removed_again(
    client: MountedClient, root: Path, lookup: int
) -> None:
    save_and_wait(root, 1, 2)
    note = root / "step-1" / ".dcpx.deleted"
    note.write_bytes((root / "step-1" / ".metadata").read_bytes())
    os.utime(note, (1e9, 1e9))  # of the save before
    before = files_of(root / "step-1")
    hide(client, lookup, "*step-1/.metadata")
    with manager_of(root, keep_last=9) as manager:
        save_steps(manager, 3)
        manager.wait()
    assert CliRunner().invoke(app, ["gc", "--delete", str(root / "step-1")]).exit_code == 2
    show(client)
    assert files_of(root / "step-1") == before


def test_look_for_a_hidden_pin_leaves_none_where_its_own_mark_does_not_go(
    client: MountedClient, root: Path
) -> None:
    save_and_wait(root, 1, 2)
    client.fail("unlink", errno.EIO, "*/.dcpx.pin", times=1)
    with manager_of(root) as manager:
        manager.delete("step-1")
        assert manager.tags() == ["step-2"]
    assert not (root / "step-1").exists()


@pytest.mark.parametrize("how", ["EIO", "ENOTCONN", "down"])
def test_last_that_answers_is_not_called_the_last_one(
    client: MountedClient, root: Path, how: str
) -> None:
    save_and_wait(root, 1, 2, 3)
    client.forget()
    if how == "down":
        hide(client, errno.ENOENT, "*step-[12]/*")
    else:
        looks = "open read getattr lookup opendir readdir readdirplus"
        client.fail(looks, getattr(errno, how), f"{root.name}/step-[12]*")
    with (
        manager_of(root, read_options=SHORT) as manager,
        pytest.raises(StorageError, match=r"'step-2' does not answer.*nothing was removed"),
    ):
        manager.delete("step-3")
    show(client)
    assert manager_of(root).tags() == ["step-1", "step-2", "step-3"]


def test_pin_of_a_checkpoint_that_does_not_answer_says_so(
    client: MountedClient, root: Path
) -> None:
    save_and_wait(root, 1, 2)
    with manager_of(root) as manager:
        own = manager._root.files
        real = own.identity

        def identity(tag: str) -> object:
            client.forget()
            client.fail("lookup getattr", errno.EIO, "*step-1/.metadata")
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


# ---- The newest one ------------------------------------------------------------------------------


@LOOKUPS
def test_hidden_newest_is_pointed_to_by_a_later_job(
    client: MountedClient, root: Path, lookup: int
) -> None:
    save_and_wait(root, 1, 2, 3)
    hide(client, lookup, "*step-3/.metadata")
    client.fail("rename rename2", errno.EIO, "*step-4/*")
    client.fail("rename rename2", errno.EIO, "*step-4/.metadata")
    with manager_of(root, read_options=SHORT) as manager, pytest.raises(StorageError):
        save_steps(manager, 4)
    show(client)
    assert manager_of(root).resume().tag == "step-3"


@LOOKUPS
def test_tags_say_what_they_pass_over(
    client: MountedClient, root: Path, lookup: int, caplog: pytest.LogCaptureFixture
) -> None:
    save_and_wait(root, 1, 2, 3)
    hide(client, lookup, "*step-2/.metadata")
    with manager_of(root) as manager:
        assert manager.tags() == ["step-1", "step-3"]
    assert "skipped checkpoint 'step-2'" in caplog.text
    says = "part of the file system" if lookup == errno.ENOENT else os.strerror(lookup)
    assert says in caplog.text
    assert "did not end" not in caplog.text


def test_resume_that_looks_again_says_once_what_it_skips(
    client: MountedClient, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_and_wait(root, 1, 2)
    hide(client, errno.ENOENT, "*step-2/.metadata")
    caplog.clear()
    with pytest.raises(StorageError):
        resumed(root)
    told = [text for text in caplog.messages if text.startswith("skipped checkpoint 'step-2'")]
    assert len(told) == 1


@LOOKUPS
def test_resume_that_finds_none_names_the_one_with_the_highest_number(
    client: MountedClient, root: Path, lookup: int
) -> None:
    save_and_wait(root, *range(8, 12))
    (root / "newest").unlink()
    hide(client, lookup, "*step-*/.metadata")
    with pytest.raises(StorageError, match=r"'step-11' (does not answer|holds files of a commit)"):
        resumed(root)


@LOOKUPS
@pytest.mark.parametrize("down", ["metadata", "data", "pointer", "metadata pointer", "all"])
def test_resume_does_not_go_back_where_a_part_is_down(
    client: MountedClient, root: Path, lookup: int, down: str
) -> None:
    save_and_wait(root, 1, 2)
    files = {"metadata": ["*step-2/.metadata"], "data": ["*step-2/__*"], "pointer": ["*newest"]}
    files["all"] = ["*step-2/*", "*newest"]
    hide(client, lookup, *(match for name in down.split() for match in files[name]))
    if down == "pointer" and lookup == errno.ENOENT:
        assert resumed(root).tag == "step-2"
    else:
        with pytest.raises(StorageError, match=r"allow_older=True|newest'"):
            resumed(root)
    if down != "pointer":
        assert resumed(root, allow_older=True).tag == "step-1"
    client.clear()
    assert resumed(root).tag == "step-2"


@LOOKUPS
@pytest.mark.parametrize("down", ["*.metadata", "*__0*", "*newest *.metadata", "*newest *.m* *.d*"])
def test_training_does_not_begin_anew_where_a_part_is_down(
    client: MountedClient, root: Path, lookup: int, down: str
) -> None:
    save_and_wait(root, 1)
    hide(client, lookup, *down.split())
    with pytest.raises(StorageError):
        resumed(root, allow_fresh=True)
    client.clear()
    assert resumed(root, allow_fresh=True).tag == "step-1"


def test_root_of_a_save_that_was_killed_begins_anew_on_a_shared_file_system(
    client: MountedClient, root: Path
) -> None:
    save_and_wait(root, 1)
    for name in (".metadata", ".dcpx.readers"):
        (root / "step-1" / name).unlink()
    pointer = json.loads((root / "newest").read_text())
    (root / "newest").write_text(json.dumps({**pointer, "tag": None, "save_id": None, "order": 0}))
    client.forget()
    assert resumed(root, allow_fresh=True).is_fresh


@pytest.mark.parametrize("code", [errno.ENOTCONN, errno.EIO, errno.ETIMEDOUT])
def test_pointer_that_does_not_answer_is_not_taken_for_none(
    client: MountedClient, root: Path, code: int
) -> None:
    save_and_wait(root, 1, 2)
    client.forget()
    client.fail("lookup open read", code, "*newest")
    with pytest.raises(StorageError, match="newest") as info:
        resumed(root)
    assert info.value.errno == code
    assert resumed(root, allow_older=True).tag == "step-2"


def test_what_did_not_answer_an_hour_ago_does_not_keep_a_resume_from_what_answers_now(
    client: MountedClient, root: Path
) -> None:
    with manager_of(root) as manager:
        manager.save("best", state={"x": torch.full((3,), 1.0)}, step=1)
        save_steps(manager, 2)
        hide(client, errno.ENOTCONN, "*best/.metadata")
        assert [each.tag for each in manager._root.listed()[0]] == ["step-2"]
        show(client)
        assert manager.resume(state={"x": torch.zeros(3)}).tag == "step-2"


@pytest.mark.parametrize("text", ["", "garbage"])
def test_damaged_pointer_is_replaced_by_the_next_save_on_a_shared_file_system(
    client: MountedClient, root: Path, text: str
) -> None:
    save_and_wait(root, 1)
    (root / "newest").write_text(text)
    client.forget()
    save_and_wait(root, 2)
    assert json.loads((root / "newest").read_text())["tag"] == "step-2"
