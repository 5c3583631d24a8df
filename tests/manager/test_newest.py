"""Which checkpoint `resume` takes: the newest that is whole, whatever the pointer says."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.saves import save
from trainings import Log, Patch, manager_of, pointer, resumed, save_steps, warnings_of

import torch_dcpx as dcpx
from torch_dcpx.manager import root as manager_root


def pointing(root: Path, **fields: Any) -> None:
    (root / "newest").write_text(json.dumps({**pointer(root), **fields}))


def lose(root: Path) -> None:
    (root / "newest").unlink()


BREAK: dict[str, Callable[[Path], Any]] = {
    "lose": lose,
    "tear": lambda root: (root / "newest").write_bytes((root / "newest").read_bytes()[:20]),
    "point nowhere": lambda root: pointing(root, tag="step-99"),
    "empty": lambda root: (root / "newest").write_bytes(b""),
    "lie": lambda root: pointing(root, tag="../elsewhere"),
}


@pytest.mark.parametrize("how", BREAK)
def test_broken_pointer_costs_one_listing(tmp_path: Path, how: str, monkeypatch: Patch) -> None:
    save_steps(tmp_path, 2, 10, 9)
    assert manager_of(tmp_path).latest() == "step-9"  # the last commit
    BREAK[how](tmp_path)
    listings: list[Path] = []
    listed = manager_root.ManagerRoot.listed

    def counted(self: manager_root.ManagerRoot) -> object:
        listings.append(self.path)
        return listed(self)

    monkeypatch.setattr(manager_root.ManagerRoot, "listed", counted)
    info, value = resumed(tmp_path)
    assert (info.tag, value) == ("step-9", 9.0)  # though 10 is higher
    assert len(listings) == 1
    save_steps(tmp_path, 11)  # and it is written anew
    assert manager_of(tmp_path).latest() == "step-11"
    assert len(listings) == 2


def cut(path: Path, count: int) -> None:
    os.truncate(path, path.stat().st_size - count)


def data_file(path: Path) -> Path:
    return next(path.glob("__*.distcp"))


SPOIL: dict[str, Callable[[Path], Any]] = {
    "metadata is cut": lambda path: cut(path / ".metadata", 70),
    "a data file is gone": lambda path: data_file(path).unlink(),
    "a data file is cut": lambda path: cut(data_file(path), 1),
    "metadata are lost": lambda path: (path / ".metadata").unlink(),
    "all is lost": shutil.rmtree,
}


@pytest.mark.parametrize("what", SPOIL)
def test_broken_newest_is_skipped_with_the_reason(tmp_path: Path, what: str, caplog: Log) -> None:
    save_steps(tmp_path, 1, 2, 3)
    SPOIL[what](tmp_path / "step-3")
    is_lost = "lost" in what
    if is_lost:
        with pytest.raises(
            dcpx.StorageError, match=r"'step-3' .*is known to be committed.*allow_o"
        ):
            manager_of(tmp_path).resume()
    info = manager_of(tmp_path, allow_older=is_lost).resume()
    assert info.tag == "step-2"
    assert ("allow_older=True: 'step-2' is taken" in caplog.text) == is_lost
    if what != "all is lost":
        ((tag, reason),) = info.skipped
        assert tag == "step-3"
        assert "step-3" in reason and reason in caplog.text
    with pytest.raises(dcpx.DcpxError):
        manager_of(tmp_path).resume(tag=3)
    assert manager_of(tmp_path).tags() == ["step-1", "step-2"]


def test_tag_that_is_asked_for_is_taken(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    manager = manager_of(tmp_path)
    info, value = resumed(manager, tag=1)
    assert (info.step, value) == (1, 1.0)
    asked: list[Callable[[], Any]] = [
        lambda: manager.resume(tag=7),
        lambda: manager.export(7, tmp_path / "out"),
        lambda: manager.dry_run(dcpx.KeyMap(), 7),
        lambda: manager.pin(7),
    ]
    for ask in asked:
        with pytest.raises(dcpx.NotCommittedError, match="step-7"):
            ask()


@pytest.mark.parametrize("lose_it", ["delete", "remove", "remove with the pointer"])
def test_commit_before_the_lost_one_is_newest_behind_a_return(tmp_path: Path, lose_it: str) -> None:
    save_steps(tmp_path, 100, 200, 300)
    manager = manager_of(tmp_path)
    manager.resume(tag=100)
    save_steps(manager, 150, 160)
    assert manager_of(tmp_path).resume().step == 160
    if lose_it == "delete":
        manager.delete(160)
    else:
        shutil.rmtree(tmp_path / "step-160")
    if "pointer" in lose_it:
        lose(tmp_path)
    again = manager_of(tmp_path, allow_older=lose_it == "remove")
    assert again.latest() == "step-150"
    assert again.tags() == ["step-100", "step-200", "step-300", "step-150"]
    assert resumed(again)[1] == 150.0
    save_steps(again, 160)
    assert manager_of(tmp_path).latest() == "step-160"


def test_steps_decide_only_among_checkpoints_without_a_record(tmp_path: Path) -> None:
    for step in (9, 400, 30):
        save({"state": {"x": torch.full((3,), float(step))}}, tmp_path / f"step-{step}", "stock")
    save({"state": {"x": torch.zeros(3)}}, tmp_path / "other", "stock")
    tags = ["other", "step-9", "step-30", "step-400"]
    assert manager_of(tmp_path).tags() == tags
    save_steps(tmp_path, 31, 20)
    lose(tmp_path)
    assert manager_of(tmp_path).tags() == [*tags, "step-31", "step-20"]
    assert manager_of(tmp_path).resume().tag == "step-20"


def test_save_over_the_newest_is_the_newest(tmp_path: Path) -> None:
    manager = manager_of(tmp_path)
    manager.save("last", step=1, user_content="old")
    manager.save("last", step=2, user_content="new")
    info = manager_of(tmp_path).resume()
    assert (info.tag, info.step, info.user_content) == ("last", 2, "new")


def test_missing_or_empty_root_starts_fresh(tmp_path: Path) -> None:
    info = manager_of(tmp_path / "none").resume()
    assert info.is_fresh and (info.tag, info.step, info.report) == (None, None, None)
    assert not (tmp_path / "none").exists()
    assert manager_of(tmp_path).resume().is_fresh
    assert manager_of(tmp_path).latest() is None
    assert manager_of(tmp_path).tags() == []


def test_root_with_nothing_whole_raises_and_names_what_lies_there(tmp_path: Path) -> None:
    save_steps(tmp_path, 4)
    (tmp_path / "notes.txt").write_text("mine")
    lose(tmp_path)
    for name in (".metadata", ".dcpx.readers"):
        (tmp_path / "step-4" / name).unlink()
    with pytest.raises(dcpx.NotCommittedError, match="step-4") as info:
        manager_of(tmp_path).resume()
    assert "allow_fresh=True" in str(info.value) and "notes.txt" not in str(info.value)
    fresh = manager_of(tmp_path, allow_fresh=True).resume()
    assert fresh.is_fresh and fresh.skipped[0][0] == "step-4"


def test_checkpoint_of_stock_is_found_by_its_name(tmp_path: Path) -> None:
    for step in (9, 10):
        save({"model": {"w": torch.full((2,), float(step))}}, tmp_path / f"step-{step}", "stock")
    model = torch.nn.Module()
    model.w = torch.nn.Parameter(torch.zeros(2))
    info = manager_of(tmp_path).resume(model=model)
    assert (info.tag, info.step, info.user_content) == ("step-10", 10, None)
    assert model.w.tolist() == [10.0, 10.0]
    os.truncate(data_file(tmp_path / "step-10"), 100)
    assert manager_of(tmp_path).latest() == "step-9"


@pytest.mark.parametrize("loss", ["gone", "cut", "directory"])
def test_checkpoint_that_loses_its_data_is_no_tag_to_its_manager(tmp_path: Path, loss: str) -> None:
    manager = manager_of(tmp_path)
    save_steps(manager, 1, 2, 3)
    assert manager.tags() == ["step-1", "step-2", "step-3"]
    name = data_file(tmp_path / "step-2")
    if loss == "cut":
        os.truncate(name, 100)
    else:
        name.rename(tmp_path / "away")
        if loss == "directory":
            name.mkdir()
    assert manager.tags() == ["step-1", "step-3"] == manager_of(tmp_path).tags()
    with pytest.raises(dcpx.StorageError, match=r"step-2/__0_0"):
        manager.pin(2)
    if loss == "gone":
        (tmp_path / "away").rename(name)
        assert manager.tags() == ["step-1", "step-2", "step-3"]


def test_root_that_is_a_file_raises(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for ask in ("resume", "latest", "tags"):
        with pytest.raises(dcpx.DcpxError):
            getattr(manager_of(tmp_path / "file"), ask)()


@pytest.mark.parametrize("kind", ["symbolic link", "directory"])
def test_pointer_of_the_users_own_fails_no_resume_but_a_save(tmp_path: Path, kind: str) -> None:
    save_steps(tmp_path, 1, 2)
    pointer = tmp_path / "newest"
    pointer.unlink()
    pointer.mkdir() if kind == "directory" else pointer.symlink_to("/etc/passwd")
    before = sorted(tmp_path.rglob("*"))
    manager = manager_of(tmp_path)
    assert resumed(manager)[0].tag == "step-2"
    with pytest.raises(dcpx.UnsupportedError, match=rf"newest' is a {kind}.*move it"):
        save_steps(manager, 3)
    assert sorted(tmp_path.rglob("*")) == before
    manager.delete(2)  # which would point away from it
    assert pointer.is_dir() or pointer.readlink() == Path("/etc/passwd")
    pointer.rename(tmp_path / "mine")
    save_steps(manager, 3)
    assert manager_of(tmp_path).tags() == ["step-1", "step-3"]


def test_pieces_of_the_pointer_go(tmp_path: Path) -> None:
    (tmp_path / "newest.0123456789ab.tmp").write_text("torn")
    save_steps(tmp_path, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".dcpx.root.1", "newest", "step-1"]


def test_same_call_is_compared() -> None:
    from torch_dcpx.checkpoint.same_call import Call, check_same_call

    same = Call("save", {"tag": "a", "model": "one"})
    assert check_same_call([same, Call("save", dict(same.arguments))]) is same
    with pytest.raises(
        dcpx.PlanError, match=r"rank 1: tag='b' where rank 0 has 'a'; optimizer='one' "
    ):
        check_same_call([same, Call("save", {"tag": "b", "model": "one", "optimizer": "one"})])
    with pytest.raises(dcpx.PlanError, match="rank 2 called resume, rank 0 save"):
        check_same_call([same, same, Call("resume", {})])


def put_back(root: Path, earlier: bytes, *steps: int) -> None:
    """Saves more, and puts an earlier pointer back, as a backup does; dates are in order."""
    with manager_of(root) as manager:
        manager.resume()
        save_steps(manager, *steps)
    (root / "newest").write_bytes(earlier)
    for second, step in enumerate(steps, 1):
        os.utime(root / f"step-{step}" / ".metadata", (2e9 + second, 2e9 + second))


@pytest.mark.parametrize("steps", [(7, 8), (8, 7), (3, 4)], ids=["on", "down", "back"])
def test_later_commit_counts_where_an_earlier_pointer_was_put_back(
    tmp_path: Path, steps: tuple[int, ...], caplog: Log
) -> None:
    save_steps(tmp_path, 5, 6)
    put_back(tmp_path, (tmp_path / "newest").read_bytes(), *steps)
    with manager_of(tmp_path) as manager:
        info, value = resumed(manager)
        assert (info.step, info.skipped, value) == (steps[-1], (), steps[-1])
        assert f"names 'step-6', but 'step-{steps[-1]}' is a later commit" in caplog.text
        save_steps(manager, 9)
    assert manager_of(tmp_path).tags()[-2:] == [f"step-{steps[-1]}", "step-9"]


def test_later_commit_counts_behind_many_higher_steps_of_before(tmp_path: Path) -> None:
    save_steps(tmp_path, *range(10, 40))
    with manager_of(tmp_path) as manager:
        manager.resume(tag=10)
        save_steps(manager, 11)
    put_back(tmp_path, (tmp_path / "newest").read_bytes(), 12)
    assert manager_of(tmp_path).resume().step == 12


def test_going_back_is_no_pointer_that_was_put_back(tmp_path: Path, caplog: Log) -> None:
    save_steps(tmp_path, 100, 200, 300)
    with manager_of(tmp_path) as manager:
        manager.resume(tag=100)
        save_steps(manager, 110, 120)
        manager.delete(120)  # the pointer names an older commit than the last
    info = manager_of(tmp_path).resume()
    assert (info.step, info.skipped, warnings_of(caplog)) == (110, (), [])


def test_later_commit_in_a_copied_root_is_said(tmp_path: Path) -> None:
    """Copied while a job saved: it may also have come from there afterwards."""
    root, other = tmp_path / "root", tmp_path / "other"
    save_steps(root, 1)
    shutil.copytree(root, other)
    save_steps(root, 2)
    shutil.copytree(root / "step-2", other / "step-2")
    info = manager_of(other).resume()
    ((tag, reason),) = info.skipped
    assert (info.step, tag) == (1, "step-2") and "later commit than the pointer knows" in reason
