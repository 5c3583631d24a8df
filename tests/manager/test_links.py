"""Links of the user's in a root: read like checkpoints, and neither changed nor counted."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from trainings import Called, Log, Patch, manager_of, on_disk, resumed, save_steps, warnings_of

import torch_dcpx as dcpx
from torch_dcpx import CheckpointManager, DcpxError, StorageError, UnsupportedError
from torch_dcpx.cli import ls as cli_list
from torch_dcpx.manager import removal
from torch_dcpx.manager.directory_root import DirectoryRoot
from torch_dcpx.manager.stored import OwnDirectory

REFUSED = (UnsupportedError, StorageError)


def snapshot(*directories: Path) -> dict[str, bytes | str]:
    """Every name beneath some directories, with what it holds or leads to."""
    found: dict[str, bytes | str] = {}
    for directory in directories:
        for parent, names, files in os.walk(directory):
            for path in (Path(parent, name) for name in (*names, *files)):
                is_plain = path.is_file() and not path.is_symlink()
                leads_to = str(path.readlink()) if path.is_symlink() else "directory"
                found[str(path)] = path.read_bytes() if is_plain else leads_to
    return found


def links_of(root: Path) -> dict[str, Path]:
    return {path.name: path.readlink() for path in root.iterdir() if path.is_symlink()}


LINKS = {"latest": "step-300", "best": "../elsewhere/step-7", "gone": "step-9", "loop": "loop"}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    save_steps(tmp_path / "root", 300)
    save_steps(tmp_path / "elsewhere", 7)
    for name, target in LINKS.items():
        (tmp_path / "root" / name).symlink_to(target)
    return tmp_path / "root"


CHANGES: dict[str, Callable[[CheckpointManager, str], Any]] = {
    "save": lambda manager, tag: manager.save(tag, state={"x": torch.zeros(3)}),
    "pin": lambda manager, tag: manager.pin(tag),
    "unpin": lambda manager, tag: manager.unpin(tag),
    "delete": lambda manager, tag: manager.delete(tag),
}


@pytest.mark.parametrize("call", CHANGES)
def test_change_through_a_link_is_refused_and_changes_nothing(root: Path, call: str) -> None:
    (root / "step-300" / ".dcpx.pin").write_text("")
    before = snapshot(root, root.parent / "elsewhere")
    for tag, target in LINKS.items():
        manager = manager_of(root, keep_last=1)
        with pytest.raises(UnsupportedError, match=f"^{call}") as info:
            CHANGES[call](manager, tag)
        assert str(root / tag) in str(info.value) and f"link to '{target}'" in str(info.value)
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


def test_tag_that_is_a_link_is_read(root: Path, tmp_path: Path, capsys: Any) -> None:
    manager = manager_of(root)
    for tag, wanted in (("latest", 300), ("best", 7)):
        info, value = resumed(manager, tag=tag)
        assert (info.tag, info.step, value) == (tag, wanted, wanted)
        state = {"state": {"x": torch.zeros(3)}}
        dcpx.load(state, root / tag)
        assert state["state"]["x"].tolist() == [wanted] * 3
        assert dcpx.verify(root / tag).ok
        manager.export(tag, tmp_path / tag, keys=["state.x"])
        assert list((tmp_path / tag).glob("*.safetensors"))
    cli_list.show(root, with_all=False, as_json=False)
    assert {"latest", "best", "step-300"} <= set(capsys.readouterr().out.split())
    with pytest.raises(DcpxError):
        manager.resume(tag="gone")


def test_link_is_no_second_checkpoint(root: Path) -> None:
    manager = manager_of(root)
    (root / "step-400").symlink_to("../elsewhere/step-7")
    before = snapshot(root)
    with pytest.raises(UnsupportedError, match="the last whole checkpoint"):
        manager.delete(300)
    assert snapshot(root) == before
    assert (manager.tags(), manager.latest()) == (["step-300"], "step-300")


def test_retention_neither_counts_nor_follows_nor_removes_links(root: Path, caplog: Log) -> None:
    elsewhere, links = snapshot(root.parent / "elsewhere"), links_of(root)
    manager = manager_of(root, keep_last=2)
    save_steps(manager, 301)
    assert manager.tags() == ["step-300", "step-301"]  # though two links are there as well
    save_steps(manager, 302)
    assert manager.tags() == ["step-301", "step-302"]
    assert links_of(root) == links
    assert snapshot(root.parent / "elsewhere") == elsewhere
    assert warnings_of(caplog) == []


class Race:
    """A manager with two checkpoints, amid whose calls a test does something."""

    def __init__(self, tmp_path: Path, monkeypatch: Patch) -> None:
        self.root, self.moved, self._patch = tmp_path / "root", tmp_path / "moved", monkeypatch
        self.manager = manager_of(self.root)
        save_steps(self.manager, 1, 2)

    def before(self, owner: Any, name: str, do: Callable[..., Any]) -> None:
        real = getattr(owner, name)
        self._patch.setattr(owner, name, lambda *args: (do(*args), real(*args))[1])

    def behind(self, owner: Any, name: str, do: Callable[..., Any]) -> None:
        real = getattr(owner, name)
        self._patch.setattr(owner, name, lambda *args, **how: (real(*args, **how), do(*args))[0])


@pytest.fixture
def race(tmp_path: Path, monkeypatch: Patch) -> Race:
    return Race(tmp_path, monkeypatch)


def move_away_and_link(directory: Path, target: str | Path | None = None) -> Path:
    moved = directory.parents[1] / "moved"
    directory.rename(moved)
    directory.symlink_to(target or moved)
    return moved


def dangle(directory: Path) -> Path:
    return move_away_and_link(directory, "nowhere")


@pytest.mark.parametrize("link", [move_away_and_link, dangle])
def test_link_made_behind_the_check_of_a_save_is_not_followed(race: Race, link: Any) -> None:
    kept, before = race.manager._retention, list[Any]()
    race.behind(kept, "reserve", lambda tag: before.append(snapshot(link(race.root / tag))))
    with pytest.raises(REFUSED, match="step-2"):
        save_steps(race.manager, 2)
    assert [snapshot(race.moved)] == before
    assert not kept.busy
    assert manager_of(race.root).tags() == ["step-1"]


@pytest.mark.parametrize("link", [move_away_and_link, dangle])
def test_link_made_while_a_save_writes_is_not_followed(race: Race, link: Any) -> None:
    metadata = (race.root / "step-2" / ".metadata").read_bytes()

    def links() -> dict[str, Any]:  # behind the check, before the directory is opened
        link(race.root / "step-2")
        return {"x": torch.zeros(3)}

    with pytest.raises(REFUSED, match="step-2"):
        race.manager.save(2, state={"links": Called(links)})
    assert (race.moved / ".metadata").read_bytes() == metadata
    assert len(list(race.moved.glob("*.distcp"))) == 1
    assert dcpx.verify(race.moved).ok


@pytest.mark.parametrize("call", ["pin", "delete"])
def test_link_made_behind_the_check_of_a_call_is_not_followed(race: Race, call: str) -> None:
    root, moved = race.root, race.moved
    (root / "step-1" / ".dcpx.readers").unlink()  # else nobody would have to make it

    def link(tag: str) -> None:
        if tag == "step-1" and not moved.exists():
            move_away_and_link(root / tag)

    race.behind(race.manager._root, "examined", link)
    with pytest.raises(DcpxError, match="step-1"):
        CHANGES[call](race.manager, "step-1")
    assert dcpx.verify(moved).ok
    assert {".dcpx.pin", ".dcpx.readers"}.isdisjoint(path.name for path in moved.iterdir())
    assert (root / "step-1").is_symlink()
    assert not list(root.glob(".dcpx.trash.*"))


@pytest.mark.parametrize("call", ["pin", "delete"])
def test_link_made_behind_the_opening_changes_nothing_where_it_leads(race: Race, call: str) -> None:
    other = race.moved.with_name("other")
    dcpx.save({"x": torch.zeros(2)}, other)
    before = snapshot(other)

    def link(_: OwnDirectory, path: Path, doing: str) -> None:
        if path.name == "step-1" and not path.is_symlink():
            move_away_and_link(path, other)

    race.behind(OwnDirectory, "__init__", link)
    try:
        CHANGES[call](race.manager, "step-1")
    except DcpxError:
        assert call == "delete"
    assert snapshot(other) == before
    assert (race.root / "step-1").readlink() == other
    assert not list(race.root.glob(".dcpx.trash.*"))


def test_link_made_before_retention_opens_is_not_followed(race: Race) -> None:
    race.manager.delete(2)
    race.before(DirectoryRoot, "remove", lambda _, tag: move_away_and_link(race.root / tag))
    with manager_of(race.root, keep_last=1) as manager:
        save_steps(manager, 3)
    assert dcpx.verify(race.moved).ok
    assert (race.root / "step-1").is_symlink()
    assert manager_of(race.root).tags() == ["step-3"]


def replace(directory: Path) -> None:
    directory.rename(directory.parents[1] / "moved")
    directory.mkdir()
    (directory / "notes.txt").write_text("mine")


@pytest.mark.parametrize("put", [move_away_and_link, replace])
def test_what_takes_the_place_of_what_goes_gets_its_name_back(race: Race, put: Any) -> None:
    race.manager.delete(2)
    race.before(removal, "_empty", lambda _, directory: put(directory.path))
    with manager_of(race.root, keep_last=1) as manager:
        save_steps(manager, 3)
    assert (race.root / "step-1").is_symlink() or (race.root / "step-1" / "notes.txt").exists()
    assert not list(race.root.glob(".dcpx.trash.*"))
    assert manager_of(race.root).tags() == ["step-3"]


@pytest.mark.parametrize("is_above", [False, True])
def test_root_that_is_a_link_is_a_root_once_it_leads_somewhere(
    tmp_path: Path, is_above: bool
) -> None:
    link, real = tmp_path / "link", tmp_path / "disk" / "run"
    link.symlink_to(real)
    root = link / "root" if is_above else link
    manager = manager_of(root, no_dist=True, keep_last=2)
    for call in (lambda: resumed(manager), lambda: save_steps(manager, 1), manager.tags):
        with pytest.raises(StorageError, match=r"'.*/link' is a link to '.*/disk/run', where"):
            call()  # as while its disk is not mounted
    assert os.listdir(tmp_path) == ["link"]
    real.mkdir(parents=True)
    assert manager.resume(state={"x": torch.zeros(3)}).is_fresh
    save_steps(manager, 1, 2, 2, 3)
    assert on_disk(root) == {"step-2", "step-3"} == on_disk(real / "root" if is_above else real)
    manager.pin(2)
    manager.unpin(2)
    manager.delete(3)
    info, value = resumed(root)
    assert (info.tag, value) == ("step-2", 2.0)
