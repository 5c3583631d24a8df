"""What the limits of frameworks remove: only what a save of ours has made, never the newest."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from support.folders import save_folder

from torch_dcpx import UnsupportedError
from torch_dcpx.integrations._folder_contents import remove_folder
from torch_dcpx.integrations._folder_record import beyond_limit


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    found = [tmp_path / f"checkpoint-{number}" for number in (1, 2, 3)]
    for folder in found:
        save_folder(folder, 1.0)
    return found


@pytest.mark.parametrize(
    ("limit", "kept", "goes"),
    [
        (1, [2], [0, 1]),
        (1, [0], [1, 2]),  # a training that has gone back has published the lowest number
        (2, [0], [1]),
        (1, [0, 2], [1]),
        (3, [2], []),
        (4, [2], []),
        (9, [2], []),
        (2, [], [0]),
    ],
)
def test_what_a_save_has_published_stays(
    folders: list[Path], limit: int, kept: list[int], goes: list[int]
) -> None:
    stays = [folders[at] for at in kept]
    assert beyond_limit(folders, limit, stays) == [folders[at] for at in goes]


USERS: dict[str, Callable[[Path, Path], object]] = {
    "copy": shutil.copytree,
    "of stock": lambda _, new: new.mkdir(),
}


@pytest.mark.parametrize("case", USERS)
def test_what_is_the_users_neither_counts_nor_goes(folders: list[Path], case: str) -> None:
    users = folders[0].with_name("checkpoint-99999")
    USERS[case](folders[0], users)
    assert beyond_limit([*folders, users], 1, [folders[2]]) == folders[:2]
    assert beyond_limit([users, *folders], 3, [folders[2]]) == []


def test_folder_that_was_moved_away_is_not_removed_through_its_link(folders: list[Path]) -> None:
    moved = folders[0].with_name("big") / folders[0].name
    moved.parent.mkdir()
    folders[0].rename(moved)
    folders[0].symlink_to(moved)
    before = sorted(moved.rglob("*"))
    assert beyond_limit(folders, 1, [folders[2]]) == [folders[1]]
    with pytest.raises(UnsupportedError, match="says that it is ours"):
        remove_folder(folders[0])
    assert sorted(moved.rglob("*")) == before
    assert folders[0].is_symlink()


def test_error_of_the_look_for_older_ones_fails_no_save(tmp_path: Path) -> None:
    def condemned() -> list[Path]:
        return [Path(name) for name in os.listdir(tmp_path / "gone")]

    save_folder(tmp_path / "a", 1.0, condemned=condemned)
    assert (tmp_path / "a").is_dir()
