"""What is in a folder that is saved again or removed: ours goes, the user's stays as it is."""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.folders import RECORD, save_folder, tree, value_in

import torch_dcpx
from torch_dcpx import (
    CheckpointManager,
    StorageError,
    UnsupportedError,
)
from torch_dcpx.integrations._dcp_calls import Part
from torch_dcpx.integrations._folder_contents import check_room, remove_folder
from torch_dcpx.integrations._folder_record import read_record, write_record
from torch_dcpx.integrations._folders import FolderSaves

# ---- What is the user's stays --------------------------------------------------------------------


def checkpoint(path: Path) -> None:
    dcp.save({"w": torch.ones(3)}, checkpoint_id=path, no_dist=True)


def pinned(path: Path) -> None:
    with CheckpointManager(path, no_dist=True) as manager:
        manager.save(1, model=torch.nn.Linear(2, 2))
        manager.wait()
        manager.pin(1)


def filled(path: Path) -> None:
    (path / "empty").mkdir(parents=True)
    (path / "notes").write_text("mine")
    os.utime(path / "notes", ns=(1, 2))
    (path / "notes").chmod(0o440)
    path.chmod(0o710)


def special(path: Path) -> None:
    os.mkfifo(path)


def bound(path: Path) -> None:
    here = Path.cwd()
    try:
        os.chdir(path.parent)  # a socket's path is short
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
    finally:
        os.chdir(here)


USERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "checkpoint of stock": ("step-100", checkpoint),
    "checkpoint of ours": ("ema", lambda path: torch_dcpx.save({"a": torch.ones(3)}, path)),
    "pinned checkpoint of a manager": ("root", pinned),
    "random states": ("random_states_7.pkl", lambda path: path.write_text("mine")),
    "directory": ("mine", filled),
    "link to a file": ("link", lambda path: path.symlink_to("/etc/hostname")),
    "link to a directory": ("link", lambda path: path.symlink_to("/proc")),
    "link to another file system": ("link", lambda path: path.symlink_to("/dev/shm")),
    "link to nothing": ("link", lambda path: path.symlink_to("nothing")),
    "fifo": ("fifo", special),
    "socket": ("socket", bound),
    "hidden file": (".mine", lambda path: path.write_text("mine")),
    "name that is no text": (os.fsdecode(b"\xff"), lambda path: path.write_text("mine")),
    "file in a part": ("model/notes", lambda path: path.write_text("mine")),
    "directory in a part": ("model/mine", filled),
    "file beside files": ("more/mine", lambda path: path.write_text("mine")),
}


@pytest.mark.parametrize("when", ["before any save", "later"])
@pytest.mark.parametrize("case", USERS)
def test_what_is_the_users_stays_as_it_is(tmp_path: Path, case: str, when: str) -> None:
    folder, (name, make) = tmp_path / "a", USERS[case]
    if when == "later":
        save_folder(folder, 1, files=("more/rest",))
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    make(folder / name)
    before = {k: v for k, v in tree(folder).items() if k == name or k.startswith(f"{name}/")}
    assert before
    for value in (2, 3):
        save_folder(folder, value, files=("more/rest",))
        after = tree(folder)
        assert {rel: after.get(rel) for rel in before} == before
        assert value_in(folder / "model") == value
    assert os.listdir(tmp_path) == ["a"]


def test_what_was_saved_and_is_not_saved_again_goes(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    files = ("random_states_0.pkl", "random_states_1.pkl", "deep/one", "deep/two")
    save_folder(folder, 1, parts=("model", "optimizer", "optimizer_1"), files=files)
    (folder / "deep" / "mine").write_text("mine")
    (folder / "optimizer_1" / "mine").write_text("mine")
    save_folder(folder, 2, files=("random_states_0.pkl",))
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert {one for one in found if not one.startswith("model/")} == {
        RECORD, "random_states_0.pkl", "deep/mine", "optimizer_1/mine",
    }  # fmt: skip


@pytest.mark.parametrize("when", ["before", "while it saves"])
@pytest.mark.parametrize("place", ["", "model"])
def test_pinned_folder_or_part_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, when: str
) -> None:
    folder, saves = tmp_path / "a", FolderSaves("save", None)
    pin = folder / place / ".dcpx.pin"

    def save(value: float) -> None:
        target = saves.begin(lambda: folder)
        saves.commit([Part({"model": torch.full((8,), value)}, target / "model")], list)
        saves.wait()

    def write_and_pin(*args: Any, **more: Any) -> None:
        write_record(*args, **more)
        pin.touch()

    save(1)
    with monkeypatch.context() as patch:
        if when == "before":
            pin.touch()
        else:
            patch.setattr("torch_dcpx.integrations._folders.write_record", write_and_pin)
        with pytest.raises(UnsupportedError, match="is pinned"):
            save(2)
    assert value_in(folder / "model") == 1
    pin.unlink()
    save(3)
    assert value_in(folder / "model") == 3
    assert os.listdir(tmp_path) == ["a"]


def replaced_part(folder: Path) -> None:
    shutil.rmtree(folder / "optimizer")
    torch_dcpx.save({"optimizer": torch.ones(3)}, folder / "optimizer", no_dist=True)


def moved_part(folder: Path) -> None:
    (folder / "optimizer").rename(folder / "mine")
    (folder / "optimizer").symlink_to("mine")


FOOLED: dict[str, Callable[[Path], object]] = {
    "part saved by the user": replaced_part,
    "part pinned": lambda folder: (folder / "optimizer" / ".dcpx.pin").touch(),
    "part moved behind a link": moved_part,
    "part renamed": lambda folder: (folder / "optimizer").rename(folder / "optimizer.bak"),
    "file changed": lambda folder: (folder / "rest").write_text("mine"),
    "file renamed": lambda folder: (folder / "rest").rename(folder / "rest.bak"),
    "file moved behind a link": lambda folder: (
        (folder / "rest").rename(folder / "mine"),
        (folder / "rest").symlink_to("mine"),
    ),
    "folder renamed": lambda folder: (folder.rename(f"{folder}x"), Path(f"{folder}x")),
    "folder copied": lambda folder: (shutil.copytree(folder, f"{folder}x"), Path(f"{folder}x")),
    "record of another format": lambda folder: (folder / RECORD).write_text(
        (folder / RECORD).read_text().replace('"format": 1', '"format": 2')
    ),
    "record of an earlier version": lambda folder: (folder / RECORD).unlink(),
    "record that is none": lambda folder: (folder / RECORD).write_bytes(b"\xff[[[["),
    "record that is a link": lambda folder: (
        (folder / RECORD).rename(folder / "record"),
        (folder / RECORD).symlink_to("record"),
    ),
}


@pytest.mark.parametrize("case", FOOLED)
def test_what_is_not_what_the_record_names_is_the_users(tmp_path: Path, case: str) -> None:
    folder = tmp_path / "a"
    save_folder(folder, 1, parts=("model", "optimizer"), files=("rest",))
    made = FOOLED[case](folder)
    if isinstance(made, tuple) and isinstance(made[-1], Path) and made[-1] != folder:
        folder = made[-1] if made[-1].is_dir() else folder
    touched = {"part": ("optimizer", "mine"), "file": ("rest", "mine")}.get(case.split()[0])
    names = touched or ("optimizer", "rest")
    before = {k: v for k, v in tree(folder).items() if k.split("/")[0].startswith(names)}
    assert before
    save_folder(folder, 2)
    after = tree(folder)
    assert {rel: after.get(rel) for rel in before} == before


def test_record_leads_nowhere_outside(tmp_path: Path) -> None:
    folder, outside = tmp_path / "a", tmp_path / "outside"
    save_folder(folder, 1, files=("rest",))
    outside.write_text("rest 1")
    record = json.loads((folder / RECORD).read_text())
    record["files"] = {"../outside": record["files"]["rest"]}
    (folder / RECORD).write_text(json.dumps(record))
    save_folder(folder, 2)
    remove_folder(folder)
    assert outside.exists()


# ---- What needs a name that something else has ---------------------------------------------------


@pytest.mark.parametrize("name", ["model", "rest", "deep"])
@pytest.mark.parametrize("kind", ["link", "other", "fifo"])
def test_name_that_the_user_has_for_something_else_is_refused(
    tmp_path: Path, name: str, kind: str
) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    if kind == "link":
        (tmp_path / "elsewhere").mkdir()
        (folder / name).symlink_to(tmp_path / "elsewhere")
    elif kind == "fifo":
        os.mkfifo(folder / name)
    elif name == "rest":
        (folder / name / "mine").mkdir(parents=True)
    else:
        (folder / name).write_text("mine")
    before = tree(folder)
    with pytest.raises(UnsupportedError, match=f"'{folder}/{name}' is not ours"):
        save_folder(folder, 1, files=("rest", "deep/one"))
    assert tree(folder) == before
    (folder / name).rename(tmp_path / "moved")  # as the error says
    save_folder(folder, 1, files=("rest", "deep/one"))
    assert value_in(folder / "model") == 1


def test_ours_gives_its_name_to_another_kind(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    save_folder(folder, 1, parts=("model", "one"), files=("two",))
    save_folder(folder, 2, parts=("model", "two"), files=("one",))
    assert (folder / "one").read_text() == "one 2"
    assert value_in(folder / "two") == 2


def test_mounted_file_system_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a" / "data").mkdir(parents=True)
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path).name == "data")
    with pytest.raises(UnsupportedError, match="a file system is mounted there"):
        check_room(tmp_path / "a", tmp_path / "b", [])


# ---- The folder itself ---------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [0o700, 0o2775, 0o1777])
def test_folder_and_parts_keep_mode_owner_and_attributes(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "a"
    save_folder(folder, 1)
    for path in (folder, folder / "model"):
        os.setxattr(path, "user.mine", b"yes")
        if os.getuid() == 0:
            os.chown(path, 12, 34)
        path.chmod(mode)
    owner = folder.stat().st_uid, folder.stat().st_gid
    save_folder(folder, 2)
    for path in (folder, folder / "model"):
        assert stat.S_IMODE(path.stat().st_mode) == mode
        assert (path.stat().st_uid, path.stat().st_gid) == owner
        assert os.getxattr(path, "user.mine") == b"yes"


def test_new_folder_is_nobodys_else_until_it_is_there(tmp_path: Path) -> None:
    folder, saves = tmp_path / "a", FolderSaves("save", None)
    folder.mkdir()
    target = saves.begin(lambda: folder)
    assert stat.S_IMODE(target.parent.stat().st_mode) == 0o700
    folder.chmod(0o711)  # meanwhile
    saves.commit([Part({"a": torch.ones(3)}, target / "model")], list).result()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o711


def test_folder_that_may_not_be_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda *_: False)
        with pytest.raises(StorageError, match="may not write") as caught:
            save_folder(tmp_path / "a", 1)
    assert caught.value.errno == errno.EACCES
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("call", ["link", "mkdir"])
def test_what_cannot_be_linked_is_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Some file systems have no links, and files of others may not be linked."""
    folder = tmp_path / "a"
    save_folder(folder, 1)
    filled(folder / "mine")
    (folder / "notes").write_text("mine")
    before = {k: v for k, v in tree(folder).items() if k.startswith(("mine", "notes"))}
    real = getattr(os, call)

    def refuse(path: Any, *args: Any, **more: Any) -> Any:
        if "mine" in str(path) or "notes" in str(path):
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
        return real(path, *args, **more)

    monkeypatch.setattr(os, call, refuse)
    save_folder(folder, 2)
    after = tree(folder)
    assert {rel: after.get(rel) for rel in before} == before
    assert os.listdir(tmp_path) == ["a"]


def test_what_comes_while_folders_change_places_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch_dcpx.integrations import _folder_contents as contents

    folder, real = tmp_path / "a", contents.exchange
    save_folder(folder, 1)
    filled(folder / "mine")

    def exchange(one: Path, other: Path) -> None:
        if other == folder:  # behind the last look
            (folder / "late").write_text("mine")
            (folder / "mine" / "late").write_text("mine")
        real(one, other)

    monkeypatch.setattr(contents, "exchange", exchange)
    save_folder(folder, 2)
    assert (folder / "late").read_text() == (folder / "mine" / "late").read_text() == "mine"
    assert os.listdir(tmp_path) == ["a"]


# ---- Removals ------------------------------------------------------------------------------------


def test_removed_folder_leaves_what_is_the_users(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    save_folder(folder, 1, parts=("model", "optimizer"), files=("rest", "deep/one"))
    checkpoint(folder / "mine")
    (folder / "model" / "notes").write_text("mine")
    before = {k: v for k, v in tree(folder).items() if "mine" in k or "notes" in k}
    remove_folder(folder)
    assert {k: v for k, v in tree(folder).items() if k != "model"} == before
    assert os.listdir(tmp_path) == ["a"]
    with pytest.raises(UnsupportedError, match=r"no .\.dcpx\.folder. says that it is ours"):
        remove_folder(folder)


def test_removal_follows_no_link(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "a", tmp_path / "elsewhere"
    save_folder(folder, 1, files=("deep/er/one",))
    (folder / "deep").rename(elsewhere)
    (folder / "deep").symlink_to(elsewhere)
    remove_folder(folder)
    assert (elsewhere / "er" / "one").exists()
    assert os.listdir(folder) == ["deep"]


@pytest.mark.parametrize("case", ["earlier", "renamed", "copied"])
def test_folder_without_a_record_of_its_name_is_not_removed(tmp_path: Path, case: str) -> None:
    save_folder(tmp_path / "a", 1)
    if case == "earlier":
        (tmp_path / "a" / RECORD).unlink()
    elif case == "renamed":
        (tmp_path / "a").rename(tmp_path / "b")
    else:
        shutil.copytree(tmp_path / "a", tmp_path / "b")
    for folder in tmp_path.iterdir():
        if case == "copied" and folder.name == "a":
            continue
        before = tree(folder)
        with pytest.raises(UnsupportedError, match="remove it yourself"):
            remove_folder(folder)
        assert tree(folder) == before


def test_record_names_what_was_saved(tmp_path: Path) -> None:
    save_folder(tmp_path / "a", 1, parts=("model", "optimizer"), files=("rest", "deep/one"))
    record = read_record(tmp_path / "a")
    assert record is not None
    assert (record.name, set(record.parts), set(record.files)) == (
        "a", {"model", "optimizer"}, {"rest", "deep/one"},
    )  # fmt: skip
