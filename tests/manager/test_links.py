"""Links of the user's in a root: read like checkpoints, and neither changed nor counted."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from trainings import manager_of, on_disk, save_steps

import torch_dcpx as dcpx
from torch_dcpx import CheckpointManager, DcpxError, StorageError, UnsupportedError
from torch_dcpx.cli import ls as cli_list
from torch_dcpx.manager import removal
from torch_dcpx.manager.directory_root import DirectoryRoot
from torch_dcpx.manager.stored import OwnDirectory


def snapshot(*directories: Path) -> dict[str, bytes | str]:
    """Every name beneath some directories, with what it holds or leads to."""
    found: dict[str, bytes | str] = {}
    for directory in directories:
        for parent, names, files in os.walk(directory):
            for name in (*names, *files):
                path = Path(parent, name)
                is_plain = path.is_file() and not path.is_symlink()
                leads_to = str(path.readlink()) if path.is_symlink() else "directory"
                found[str(path)] = path.read_bytes() if is_plain else leads_to
    return found


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, step in (("root", 300), ("elsewhere", 7)):
        with manager_of(tmp_path / name) as manager:
            save_steps(manager, step)
    for name, target in (
        ("latest", "step-300"),
        ("best", "../elsewhere/step-7"),
        ("gone", "step-9"),
        ("loop", "loop"),
    ):
        (tmp_path / "root" / name).symlink_to(target)
    return tmp_path / "root"


CHANGES: dict[str, Callable[[CheckpointManager, str], Any]] = {
    "save": lambda manager, tag: manager.save(tag, state={"x": torch.zeros(3)}),
    "pin": lambda manager, tag: manager.pin(tag),
    "unpin": lambda manager, tag: manager.unpin(tag),
    "delete": lambda manager, tag: manager.delete(tag),
}


@pytest.mark.parametrize("tag", ["latest", "best", "gone", "loop"])
@pytest.mark.parametrize("call", CHANGES)
def test_change_through_a_link_is_refused_and_changes_nothing(
    root: Path, call: str, tag: str
) -> None:
    (root / "step-300" / ".dcpx.pin").write_text("")
    manager = manager_of(root, keep_last=1)
    before = snapshot(root, root.parent / "elsewhere")
    target = str((root / tag).readlink())
    with pytest.raises(UnsupportedError, match="link") as info:
        CHANGES[call](manager, tag)
    assert str(root / tag) in str(info.value) and f"link to '{target}'" in str(info.value)
    assert str(info.value).startswith(call)
    assert snapshot(root, root.parent / "elsewhere") == before
    assert not manager._retention.busy


def test_tag_is_free_again_when_its_link_is_gone(root: Path) -> None:
    manager = manager_of(root, async_save=True)
    with pytest.raises(UnsupportedError, match="link"):
        CHANGES["save"](manager, "latest")
    (root / "latest").unlink()
    CHANGES["save"](manager, "latest")
    manager.wait()
    assert set(manager_of(root).tags()) == {"step-300", "latest"}
    manager.delete("latest")


def test_tag_that_is_a_link_is_read(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manager = manager_of(root)
    for tag, value in (("latest", 300.0), ("best", 7.0)):
        target = {"x": torch.zeros(3)}
        info = manager.resume(state=target, tag=tag)
        assert (info.tag, info.step, target["x"].tolist()) == (tag, value, [value] * 3)
        state = {"state": {"x": torch.zeros(3)}}
        dcpx.load(state, root / tag)
        assert state["state"]["x"].tolist() == [value] * 3
        assert dcpx.verify(root / tag).ok
        manager.export(tag, tmp_path / tag, keys=["state.x"])
        assert list((tmp_path / tag).glob("*.safetensors"))
    cli_list.show(root, with_all=False, as_json=False)
    assert {"latest", "best", "step-300"} <= set(capsys.readouterr().out.split())
    with pytest.raises(DcpxError):
        manager.resume(tag="gone")


def test_link_is_no_second_checkpoint(root: Path) -> None:
    manager = manager_of(root)
    before = snapshot(root)
    with pytest.raises(UnsupportedError, match="the last whole checkpoint"):
        manager.delete(300)
    assert snapshot(root) == before
    assert manager.tags() == ["step-300"]
    assert manager.latest() == "step-300"


def test_retention_neither_counts_nor_follows_nor_removes_links(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    elsewhere = snapshot(root.parent / "elsewhere")
    links = {path.name: path.readlink() for path in root.iterdir() if path.is_symlink()}
    manager = manager_of(root, keep_last=2)
    with caplog.at_level(logging.WARNING, "torch_dcpx"):
        save_steps(manager, 301)
        manager.wait()
        assert manager.tags() == ["step-300", "step-301"]  # though two links are there as well
        save_steps(manager, 302)
        manager.wait()
    assert manager.tags() == ["step-301", "step-302"]
    assert {path.name: path.readlink() for path in root.iterdir() if path.is_symlink()} == links
    assert snapshot(root.parent / "elsewhere") == elsewhere
    assert not caplog.records


def move_away_and_link(directory: Path) -> Path:
    moved = directory.parents[1] / "moved"
    directory.rename(moved)
    directory.symlink_to(moved)
    return moved


def dangle(directory: Path) -> Path:
    moved = directory.parents[1] / "moved"
    directory.rename(moved)
    directory.symlink_to("nowhere")
    return moved


@pytest.mark.parametrize("link", [move_away_and_link, dangle])
def test_link_made_behind_the_check_of_a_save_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, link: Callable[[Path], Path]
) -> None:
    root = tmp_path / "root"
    manager = manager_of(root)
    save_steps(manager, 1, 2)
    reserve = manager._retention.reserve
    moved: list[Path] = []
    before: list[Any] = []

    def raced(tag: str) -> None:
        reserve(tag)
        moved.append(link(root / tag))
        before.append(snapshot(*moved))

    monkeypatch.setattr(manager._retention, "reserve", raced)
    with pytest.raises((UnsupportedError, StorageError), match="step-2"):
        save_steps(manager, 2)
    assert snapshot(*moved) == before[0]
    assert not manager._retention.busy
    assert manager_of(root).tags() == ["step-1"]


@pytest.mark.parametrize("link", [move_away_and_link, dangle])
def test_link_made_while_a_save_writes_is_not_followed(
    tmp_path: Path, link: Callable[[Path], Path]
) -> None:
    root = tmp_path / "root"
    manager = manager_of(root)
    save_steps(manager, 1, 2)
    metadata = (root / "step-2" / ".metadata").read_bytes()

    class Links:
        """Its state is asked for behind the check, before the directory is opened."""

        def state_dict(self) -> dict[str, Any]:
            link(root / "step-2")
            return {"x": torch.zeros(3)}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise NotImplementedError

    with pytest.raises((UnsupportedError, StorageError), match="step-2"):
        manager.save(2, state={"links": Links()})
    assert (tmp_path / "moved" / ".metadata").read_bytes() == metadata
    assert len(list((tmp_path / "moved").glob("*.distcp"))) == 1
    assert dcpx.verify(tmp_path / "moved").ok


@pytest.mark.parametrize("call", ["pin", "delete"])
def test_link_made_behind_the_check_of_a_call_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    root = tmp_path / "root"
    manager = manager_of(root)
    save_steps(manager, 1, 2)
    (root / "step-1" / ".dcpx.readers").unlink()  # else nobody would have to make it
    examined = manager._root.examined
    moved: list[Path] = []

    def raced(tag: str, **how: Any) -> Any:
        found = examined(tag, **how)
        if tag == "step-1" and not moved:
            moved.append(move_away_and_link(root / tag))
        return found

    monkeypatch.setattr(manager._root, "examined", raced)
    with pytest.raises(DcpxError, match="step-1"):
        CHANGES[call](manager, "step-1")
    assert moved and dcpx.verify(moved[0]).ok
    assert {".dcpx.pin", ".dcpx.readers"}.isdisjoint(path.name for path in moved[0].iterdir())
    assert (root / "step-1").is_symlink()
    assert not list(root.glob(".dcpx.trash.*"))


@pytest.mark.parametrize("call", ["pin", "delete"])
def test_link_made_behind_the_opening_changes_nothing_where_it_leads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    root, other = tmp_path / "root", tmp_path / "other"
    manager = manager_of(root)
    save_steps(manager, 1, 2)
    dcpx.save({"x": torch.zeros(2)}, other)
    before = snapshot(other)
    opened = OwnDirectory.__init__

    def raced(self: OwnDirectory, path: Path, doing: str) -> None:
        opened(self, path, doing)
        if path.name == "step-1" and not path.is_symlink():
            move_away_and_link(path)
            path.unlink()
            path.symlink_to(other)

    monkeypatch.setattr(OwnDirectory, "__init__", raced)
    try:
        CHANGES[call](manager, "step-1")
    except DcpxError:
        assert call == "delete"
    assert snapshot(other) == before
    assert (root / "step-1").readlink() == other
    assert not list(root.glob(".dcpx.trash.*"))


def test_link_made_before_retention_opens_what_it_removes_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "root"
    manager = manager_of(root, keep_last=1)
    save_steps(manager, 1)
    remove = DirectoryRoot.remove
    moved: list[Path] = []

    def raced(of: Any, tag: str) -> None:
        moved.append(move_away_and_link(root / tag))
        remove(of, tag)

    monkeypatch.setattr(DirectoryRoot, "remove", raced)
    save_steps(manager, 2)
    manager.wait()
    assert dcpx.verify(moved[0]).ok
    assert (root / "step-1").is_symlink()
    assert manager.tags() == ["step-2"]


def replace(directory: Path) -> Path:
    moved = directory.parents[1] / "moved"
    directory.rename(moved)
    directory.mkdir()
    (directory / "notes.txt").write_text("mine")
    return moved


@pytest.mark.parametrize("put", [move_away_and_link, replace])
def test_what_takes_the_place_of_a_directory_on_its_way_out_gets_its_name_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, put: Callable[[Path], Path]
) -> None:
    root = tmp_path / "root"
    manager = manager_of(root, keep_last=1)
    save_steps(manager, 1)
    empty = removal._empty

    def in_the_middle(of: Any, directory: Any) -> Any:
        put(directory.path)
        return empty(of, directory)

    monkeypatch.setattr(removal, "_empty", in_the_middle)
    save_steps(manager, 2)
    manager.wait()
    assert (root / "step-1").is_symlink() or (root / "step-1" / "notes.txt").exists()
    assert not list(root.glob(".dcpx.trash.*"))
    assert manager.tags() == ["step-2"]


@pytest.mark.parametrize("is_above", [False, True])
def test_root_that_is_a_link_is_like_any_other(tmp_path: Path, is_above: bool) -> None:
    (tmp_path / "real" / "run").mkdir(parents=True)
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "real" if is_above else tmp_path / "real" / "run")
    root = link / "run" if is_above else link
    manager = manager_of(root, keep_last=2)
    save_steps(manager, 1, 2, 2, 3)
    manager.wait()
    assert on_disk(root) == {"step-2", "step-3"} == on_disk(tmp_path / "real" / "run")
    manager.pin(2)
    manager.unpin(2)
    manager.delete(3)
    target = {"x": torch.zeros(3)}
    assert manager_of(root).resume(state=target).tag == "step-2"
    assert target["x"].tolist() == [2.0] * 3


@pytest.mark.multirank
@pytest.mark.parametrize("is_above", [False, True])
def test_root_whose_link_leads_nowhere_is_no_fresh_one(tmp_path: Path, is_above: bool) -> None:
    """As while its disk is not mounted."""
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "disk" / "run")
    with manager_of(link / "root" if is_above else link, no_dist=True) as manager:
        for call in (
            lambda: manager.resume(state={"x": torch.zeros(3)}),
            lambda: manager.save(1, state={"x": torch.ones(3)}),
            manager.tags,
        ):
            with pytest.raises(StorageError, match=r"'.*/link' is a link to '.*/disk/run', where"):
                call()
        assert os.listdir(tmp_path) == ["link"]
        (tmp_path / "disk" / "run").mkdir(parents=True)
        assert manager.resume(state={"x": torch.zeros(3)}).is_fresh
        manager.save(1, state={"x": torch.ones(3)})
        assert manager.tags() == ["step-1"]
