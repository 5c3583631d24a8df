"""Folders of several checkpoints as one commit, without a framework."""

from __future__ import annotations

import concurrent.futures
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.folders import save_folder, value_in

import torch_dcpx
from torch_dcpx import (
    ConcurrentSaveError,
    OptionError,
    StorageError,
    UnsupportedError,
    WriteOptions,
)
from torch_dcpx.integrations._dcp_calls import Part, loads_by_us, noted, parts_of
from torch_dcpx.integrations._folders import FolderSaves, remove_folder
from torch_dcpx.storage.reader_lock import being_read

PARTS = ("model", "optimizer")


def save(
    saves: FolderSaves, folder: Path, value: float, condemned: Sequence[Path] = (), **options: Any
) -> None:
    """Saves two parts and a file beside them, as a framework does."""
    save_folder(
        folder, value, parts=PARTS, files=("rest",), condemned=lambda: list(condemned), by=saves,
        **options,
    )  # fmt: skip


def values_in(folder: Path) -> list[float]:
    """Returns the value of each part, read by stock, and that of the file."""
    found = [value_in(folder / part) for part in PARTS]
    return [*found, float((folder / "rest").read_text().split()[1])]


@pytest.fixture
def saves() -> FolderSaves:
    return FolderSaves("save", None)


def test_folder_is_there_as_a_whole_behind_wait(saves: FolderSaves, tmp_path: Path) -> None:
    save(saves, tmp_path / "a", 1)
    saves.wait()
    assert values_in(tmp_path / "a") == [1, 1, 1]
    assert os.listdir(tmp_path) == ["a"]
    assert saves.take_figures()["save_bytes"] > 0
    assert saves.take_figures() == {}


def test_failed_rename_leaves_the_folder_before(
    saves: FolderSaves, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(saves, tmp_path / "a", 1)
    saves.wait()

    def fail(*_: object) -> None:
        raise OSError(22, "no exchange")

    with monkeypatch.context() as patch:
        patch.setattr("torch_dcpx.integrations._folder_contents.exchange", fail)
        save(saves, tmp_path / "a", 2)
        with pytest.raises(StorageError, match="rename"):
            saves.wait()
    saves.wait()  # once
    assert values_in(tmp_path / "a") == [1, 1, 1]
    save(saves, tmp_path / "a", 3)
    saves.wait()
    assert values_in(tmp_path / "a") == [3, 3, 3]
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("failing", PARTS)
def test_failed_part_publishes_nothing_and_is_raised_by_the_next_save(
    saves: FolderSaves, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    stock = torch_dcpx.DcpxWriter.write_data

    def write_data(self: Any, *args: Any) -> Any:
        if Path(self.path).name == failing:
            raise OSError(28, "no room")
        return stock(self, *args)

    def save_two() -> None:
        for name in "ab":  # the second part of the first may know it already
            save(saves, tmp_path / name, 1)

    with monkeypatch.context() as patch:
        patch.setattr(torch_dcpx.DcpxWriter, "write_data", write_data)
        with pytest.raises(OSError, match="no room"):
            save_two()
    assert not (tmp_path / "a").exists()
    assert not (tmp_path / "b").exists()
    save(saves, tmp_path / "a", 3)
    saves.wait()
    assert values_in(tmp_path / "a") == [3, 3, 3]


def test_error_that_was_read_is_not_raised_again(
    saves: FolderSaves, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = torch_dcpx.DcpxWriter.write_data

    def write_data(self: Any, *args: Any) -> Any:
        if Path(self.path).name == PARTS[0]:
            raise OSError(28, "no room")
        return stock(self, *args)

    target = saves.begin(lambda: tmp_path / "a")
    parts = [Part({part: torch.ones(8)}, target / part) for part in PARTS]
    with monkeypatch.context() as patch:
        patch.setattr(torch_dcpx.DcpxWriter, "write_data", write_data)
        patch.setattr("torch_dcpx.checkpoint.pending.raise_uncollected", lambda: None)
        handle = saves.commit(parts, list)
        assert handle.exception() is not None
    vars(saves._handles[0].durable)["is_collected"] = False  # as on ranks that do not commit
    save(saves, tmp_path / "a", 3)
    saves.wait()
    assert values_in(tmp_path / "a") == [3, 3, 3]


def test_what_a_killed_save_has_left_goes(saves: FolderSaves, tmp_path: Path) -> None:
    left = tmp_path / ".dcpx.saving.a" / "a" / "model"
    left.mkdir(parents=True)
    (left / "junk").touch()
    (tmp_path / ".dcpx.saving.a" / ".dcpx.lock").touch()  # as earlier versions have it
    save(saves, tmp_path / "a", 1)
    saves.wait()
    assert os.listdir(tmp_path) == ["a"]
    assert not (tmp_path / "a" / "model" / "junk").exists()


def test_condemned_folders_go_behind_the_commit_but_those_that_are_read_or_pinned(
    saves: FolderSaves, tmp_path: Path
) -> None:
    for name in "abcd":
        save(saves, tmp_path / name, 1)
    saves.wait()
    (tmp_path / "c" / "optimizer" / ".dcpx.pin").touch()
    with being_read(tmp_path / "b" / "optimizer"):
        save(saves, tmp_path / "e", 2, [tmp_path / name for name in "abc"])
        saves.wait()
    assert sorted(os.listdir(tmp_path)) == ["b", "c", "d", "e"]
    with loads_by_us(tmp_path / "d"), pytest.raises(ConcurrentSaveError):
        remove_folder(tmp_path / "d")
    assert parts_of(tmp_path / "d") == [tmp_path / "d" / part for part in PARTS]


def test_loads_are_ours_within_the_block(saves: FolderSaves, tmp_path: Path) -> None:
    save(saves, tmp_path / "a", 1)
    saves.wait()
    stock = dcp.load
    state = {"model": torch.zeros(8, dtype=torch.float64)}
    with loads_by_us(tmp_path / "a"):
        dcp.load(state, storage_reader=dcp.FileSystemReader(tmp_path / "a" / "model"))
    assert state["model"][0] == 1
    assert dcp.load is stock


def test_calls_that_ask_for_more_are_stocks(tmp_path: Path) -> None:
    state = {"a": torch.ones(3)}
    calls: dict[str, dict[str, Any]] = {
        "alone": {"no_dist": True},
        "planner": {"planner": _Planner()},
    }
    with noted(tmp_path / "inside") as parts:
        for name, more in calls.items():
            dcp.save(state, checkpoint_id=tmp_path / "inside" / name, **more)
        dcp.save(state, checkpoint_id=tmp_path / "outside")
        with concurrent.futures.ThreadPoolExecutor() as other:  # what it saves is its own
            other.submit(dcp.save, state, checkpoint_id=tmp_path / "inside" / "thread").result()
        dcp.save(state, storage_writer=_Writer(tmp_path / "inside" / "writer"))
        dcp.save(state, checkpoint_id=tmp_path / "inside" / "plain")
        dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "inside" / "stock"))
    assert parts == [(state, tmp_path / "inside" / name) for name in ("plain", "stock")]
    saved = {path.parent.name for path in tmp_path.rglob(".metadata")}
    assert saved == {*calls, "outside", "thread", "writer"}
    more_names = {"a": torch.zeros(3), "b": torch.full((3,), 5.0)}
    with loads_by_us(tmp_path / "inside"):  # ours would refuse a name that is not there
        partial = dcp.DefaultLoadPlanner(allow_partial_load=True)
        dcp.load(more_names, checkpoint_id=tmp_path / "inside" / "alone", planner=partial)
    assert [value[0].item() for value in more_names.values()] == [1.0, 5.0]


class _Planner(dcp.DefaultSavePlanner):
    """A user's."""


class _Writer(dcp.FileSystemWriter):
    """A user's."""


def test_link_file_and_taken_name_are_refused(saves: FolderSaves, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "file").touch()
    for name in ("link", "file"):
        with pytest.raises(UnsupportedError, match="a link or a file"):
            save(saves, tmp_path / name, 1)
    with pytest.raises(OptionError, match="there already"):
        save(saves, tmp_path, 1, may_replace=False)


def test_nothing_to_save_is_refused(saves: FolderSaves, tmp_path: Path) -> None:
    saves.begin(lambda: tmp_path / "a")
    with pytest.raises(UnsupportedError, match="SHARDED_STATE_DICT"):
        saves.commit([], list)
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("option", ["overlap", "node_local"])
def test_options_that_cannot_hold_are_refused(option: str) -> None:
    with pytest.raises(UnsupportedError, match=f"{option}=True"):
        FolderSaves("save", WriteOptions(**{option: True}))
