"""Where a part of the storage is hidden: a manager removes nothing, points to nothing older, and a
resume neither goes back behind a known commit nor begins anew."""

from __future__ import annotations

import errno
import itertools
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from support.fuse_fixture import MountedClient, mounted_clients
from support.rows import check_rows
from trainings import Log, Patch, manager_of, on_disk, pointer, save_steps

from torch_dcpx import ReadOptions, StorageError
from torch_dcpx.cli.app import app
from torch_dcpx.manager import removal
from torch_dcpx.storage import visibility

SHORT = ReadOptions(visible_s=0.3)
_numbers = itertools.count()


@pytest.fixture(scope="module")
def two_clients(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[MountedClient, ...]]:
    """One is enough here, for all tests."""
    with mounted_clients(tmp_path_factory.mktemp("clients"), 1) as clients:
        yield clients


class Hide:
    """Hides files of a client's mount by an error of their lookups, and shows them again."""

    def __init__(self, client: MountedClient, lookup: int = errno.ENOENT) -> None:
        self.client, self.lookup = client, lookup

    def __call__(self, *matches: str) -> None:
        self.client.forget()
        for match in matches:
            self.client.take_down(match, lookup=self.lookup)
        self.client.forget()

    def show(self) -> None:
        self.client.clear()
        self.client.forget()


@pytest.fixture
def client(two_clients: tuple[MountedClient], monkeypatch: Patch) -> Iterator[MountedClient]:
    monkeypatch.setattr(visibility, "UNKNOWN_S", 0.3)
    yield two_clients[0]
    Hide(two_clients[0]).show()


@pytest.fixture(params=[errno.ENOENT, errno.ENOTCONN])
def hide(client: MountedClient, request: pytest.FixtureRequest) -> Hide:
    return Hide(client, request.param)


@pytest.fixture
def root(client: MountedClient) -> Path:
    return client.path / f"root{next(_numbers)}"


def save_and_wait(root: Path, *steps: int) -> None:
    """Saves; no thread of the manager looks for removals behind that."""
    with manager_of(root) as manager:
        save_steps(manager, *steps)


def files_of(path: Path) -> dict[str, bytes]:
    found = [each for each in path.iterdir() if each.name != ".dcpx.lock"]
    return {each.name: each.read_bytes() for each in found}


def resumed(root: Path, **more: Any) -> Any:
    with manager_of(root, read_options=SHORT, **more) as manager:
        return manager.resume(state={"x": torch.zeros(3)})


def test_save_killed_over_a_hidden_checkpoint_does_not_remove_it(hide: Hide, root: Path) -> None:
    save_and_wait(root, 1, 2, 3)
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    note = f"host={os.uname().nodename} pid=1 boot={boot} name=step-2\n"
    (root / "step-2" / ".dcpx.lock").write_text(note)
    before = files_of(root / "step-2")
    hide("*step-2/.metadata")
    with manager_of(root, keep_last=9) as manager:
        save_steps(manager, 4)
    hide.show()
    assert files_of(root / "step-2") == before
    assert manager_of(root).tags() == ["step-1", "step-2", "step-3", "step-4"]


def test_pin_that_is_hidden_keeps_its_checkpoint(hide: Hide, root: Path) -> None:
    with manager_of(root) as manager:
        save_steps(manager, 1)
        manager.pin(1)
    before = files_of(root / "step-1")
    hide("*step-1/.dcpx.pin")
    with manager_of(root, keep_last=1) as manager:
        save_steps(manager, 2, 3)
        with pytest.raises(StorageError, match=r"not connected"):
            manager.delete(1)
    hide.show()
    assert files_of(root / "step-1") == before
    assert manager_of(root).tags() == ["step-1", "step-3"]


def test_call_that_goes_by_the_newest_does_not_go_by_an_older_one(hide: Hide, root: Path) -> None:
    save_and_wait(root, 1, 2, 3)
    for call in (lambda manager: manager.delete(2), lambda manager: manager.latest()):
        hide("*step-3/.metadata")
        with (
            manager_of(root, read_options=SHORT) as manager,
            pytest.raises(StorageError, match="step-3"),
        ):
            call(manager)
        hide.show()
        assert manager_of(root).tags() == ["step-1", "step-2", "step-3"]
        assert manager_of(root).resume().tag == "step-3"


def test_removal_takes_later_what_was_hidden(hide: Hide, root: Path) -> None:
    hidden = [f"{root.name}/{place}/__0_0.distcp" for place in ("step-1", ".dcpx.trash.*")]
    with manager_of(root, keep_last=1) as manager:
        save_steps(manager, 1)
        hide(*hidden)
        save_steps(manager, 2)
        hide.show()
        save_steps(manager, 3)
    assert on_disk(root) == {"step-3"}


def test_removal_that_did_not_see_a_file_takes_it_later(client: MountedClient, root: Path) -> None:
    save_and_wait(root, 1, 2)
    (root / "step-1" / ".metadata").rename(root / "step-1" / ".dcpx.deleted")
    hide = Hide(client)
    hide(*(f"{root.name}/{place}/__0_0.distcp" for place in ("step-1", ".dcpx.trash.*")))
    with manager_of(root, keep_last=1) as manager:
        save_steps(manager, 3)
        hide.show()
        assert any(name.startswith(".dcpx.trash") for name in os.listdir(root))
        save_steps(manager, 4)
    assert on_disk(root) == {"step-4"}


def test_what_was_removed_and_saved_anew_is_not_removed_again(hide: Hide, root: Path) -> None:
    save_and_wait(root, 1, 2)
    note = root / "step-1" / ".dcpx.deleted"
    note.write_bytes((root / "step-1" / ".metadata").read_bytes())
    os.utime(note, (1e9, 1e9))  # of the save before
    before = files_of(root / "step-1")
    hide("*step-1/.metadata")
    with manager_of(root, keep_last=9) as manager:
        save_steps(manager, 3)
    assert CliRunner().invoke(app, ["gc", "--delete", str(root / "step-1")]).exit_code == 2
    hide.show()
    assert files_of(root / "step-1") == before


def test_look_for_a_hidden_pin_leaves_no_mark_of_its_own(client: MountedClient, root: Path) -> None:
    save_and_wait(root, 1, 2)
    client.fail("unlink", errno.EIO, "*/.dcpx.pin", times=1)
    with manager_of(root) as manager:
        manager.delete("step-1")
        assert manager.tags() == ["step-2"]
    assert not (root / "step-1").exists()


def test_last_that_answers_is_not_called_the_last_one(client: MountedClient, root: Path) -> None:
    save_and_wait(root, 1, 2, 3)
    hide, looks = Hide(client), "open read getattr lookup opendir readdir readdirplus"

    def check(fails: Callable[[], object]) -> None:
        client.forget()
        fails()
        with (
            manager_of(root, read_options=SHORT) as manager,
            pytest.raises(StorageError, match=r"'step-2' does not answer.*nothing was removed"),
        ):
            manager.delete("step-3")
        hide.show()
        assert manager_of(root).tags() == ["step-1", "step-2", "step-3"]

    rows: dict[str, Callable[[], object]] = {
        "EIO": lambda: client.fail(looks, errno.EIO, f"{root.name}/step-[12]*"),
        "ENOTCONN": lambda: client.fail(looks, errno.ENOTCONN, f"{root.name}/step-[12]*"),
        "down": lambda: hide("*step-[12]/*"),
    }
    check_rows(rows, check)


def test_pin_of_what_does_not_answer_says_so(client: MountedClient, root: Path) -> None:
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
                Hide(client).show()

        own.identity = identity  # type: ignore[method-assign, assignment]
        with pytest.raises(StorageError, match=r"stat '.*step-1/\.metadata': Input/output error"):
            manager.pin("step-1")


def test_removal_goes_on_where_a_read_of_metadata_fails(tmp_path: Path, monkeypatch: Patch) -> None:
    save_and_wait(tmp_path, 1, 2)
    real, failures = removal.referenced_files, ["step-1"]

    def referenced(directory: Any, name: str) -> Any:
        return None if failures and failures.pop() else real(directory, name)

    monkeypatch.setattr(removal, "referenced_files", referenced)
    with manager_of(tmp_path) as manager:
        manager.delete("step-1")
        assert manager.tags() == ["step-2"]


def test_hidden_newest_is_pointed_to_by_a_later_job(hide: Hide, root: Path) -> None:
    save_and_wait(root, 1, 2, 3)
    hide("*step-3/.metadata")
    hide.client.fail("rename rename2", errno.EIO, "*step-4/*")
    hide.client.fail("rename rename2", errno.EIO, "*step-4/.metadata")
    with manager_of(root, read_options=SHORT) as manager, pytest.raises(StorageError):
        save_steps(manager, 4)
    hide.show()
    assert manager_of(root).resume().tag == "step-3"


def test_tags_and_a_resume_say_what_they_pass_over(hide: Hide, root: Path, caplog: Log) -> None:
    save_and_wait(root, 1, 2, 3)
    hide("*step-2/.metadata")
    with manager_of(root) as manager:
        assert manager.tags() == ["step-1", "step-3"]
    says = "part of the file system" if hide.lookup == errno.ENOENT else os.strerror(hide.lookup)
    assert "skipped checkpoint 'step-2'" in caplog.text and says in caplog.text
    assert "did not end" not in caplog.text
    if hide.lookup == errno.ENOENT:
        hide("*step-3/.metadata")
        caplog.clear()
        with pytest.raises(StorageError):
            resumed(root)  # which looks again
        told = [text for text in caplog.messages if text.startswith("skipped checkpoint 'step-3'")]
        assert len(told) == 1


def test_resume_that_finds_none_names_the_highest_number(hide: Hide, root: Path) -> None:
    save_and_wait(root, *range(8, 12))
    (root / "newest").unlink()
    hide("*step-*/.metadata")
    with pytest.raises(StorageError, match=r"'step-11' (does not answer|holds files of a commit)"):
        resumed(root)


def test_resume_does_not_go_back_where_a_part_is_down(hide: Hide, root: Path) -> None:
    save_and_wait(root, 1, 2)

    def check(down: list[str]) -> None:
        hide(*down)
        if down == ["*newest"] and hide.lookup == errno.ENOENT:
            assert resumed(root).tag == "step-2"
        else:
            with pytest.raises(StorageError, match=r"allow_older=True|newest'"):
                resumed(root)
        if down != ["*newest"]:
            assert resumed(root, allow_older=True).tag == "step-1"
        hide.client.clear()
        assert resumed(root).tag == "step-2"

    downs = ("*step-2/.metadata", "*step-2/__*", "*newest", "*step-2/* *newest")
    check_rows({down: down.split() for down in (*downs, "*step-2/.metadata *newest")}, check)


def test_training_does_not_begin_anew_where_a_part_is_down(hide: Hide, root: Path) -> None:
    save_and_wait(root, 1)

    def check(down: list[str]) -> None:
        hide(*down)
        with pytest.raises(StorageError):
            resumed(root, allow_fresh=True)
        hide.client.clear()
        assert resumed(root, allow_fresh=True).tag == "step-1"

    downs = ("*.metadata", "*__0*", "*newest *.metadata", "*newest *.m* *.d*")
    check_rows({down: down.split() for down in downs}, check)


def test_root_of_a_killed_save_begins_anew_when_shared(client: MountedClient, root: Path) -> None:
    save_and_wait(root, 1)
    for name in (".metadata", ".dcpx.readers"):
        (root / "step-1" / name).unlink()
    none = {**pointer(root), "tag": None, "save_id": None, "order": 0}
    (root / "newest").write_text(json.dumps(none))
    client.forget()
    assert resumed(root, allow_fresh=True).is_fresh


def test_pointer_that_does_not_answer_is_not_none(client: MountedClient, root: Path) -> None:
    save_and_wait(root, 1, 2)
    for code in (errno.ENOTCONN, errno.EIO, errno.ETIMEDOUT):
        Hide(client).show()
        client.fail("lookup open read", code, "*newest")
        with pytest.raises(StorageError, match="newest") as info:
            resumed(root)
        assert info.value.errno == code
        assert resumed(root, allow_older=True).tag == "step-2"


def test_what_did_not_answer_before_counts_no_more(client: MountedClient, root: Path) -> None:
    with manager_of(root) as manager:
        manager.save("best", state={"x": torch.full((3,), 1.0)}, step=1)
        save_steps(manager, 2)
        hide = Hide(client, errno.ENOTCONN)
        hide("*best/.metadata")
        assert [each.tag for each in manager._root.listed()[0]] == ["step-2"]
        hide.show()
        assert manager.resume(state={"x": torch.zeros(3)}).tag == "step-2"
