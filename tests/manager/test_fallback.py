"""A newest checkpoint that is damaged: `resume` takes the one before it, whole, or says why not."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from support.states import assert_same
from trainings import Training, damage, large, manager_of

from torch_dcpx import (
    CheckpointManager,
    CorruptionError,
    MismatchError,
    OptionError,
    PerRank,
    StorageError,
    UnsafePickleError,
    UnsupportedError,
)
from torch_dcpx.checkpoint.load import LoadRun
from torch_dcpx.manager import root as manager_root
from torch_dcpx.manager.catalog import CheckpointCatalog


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Holds step-100, 150 and 160; a step-300 was committed before these."""
    save_large(manager_of(tmp_path), 300, 100, 150, 160)
    return tmp_path


def filled(target: dict[str, Any]) -> set[float]:
    return set(target["x"].tolist())


def test_damaged_newest_gives_way_to_the_commit_before_it(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = damage(root / "step-160")
    target = {"x": large(0)}
    with caplog.at_level(logging.WARNING, "torch_dcpx"):
        info = manager_of(root).resume(state=target)
    assert (info.tag, info.step, filled(target)) == ("step-150", 150, {150})
    ((tag, damaged, reason),) = info.passed_over
    assert (tag, damaged) == ("step-160", str(file))
    assert info.skipped == ()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert all(text in record.getMessage() for text in ("step-160", str(file), reason))


def test_fallback_goes_on_until_one_is_good(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    for step in (160, 150):
        damage(root / f"step-{step}")
    (root / "step-100" / ".metadata").unlink()
    (root / "newest").unlink()  # so that the first look lists, as the others do
    target = {"x": large(0)}
    with caplog.at_level(logging.WARNING, "torch_dcpx"):
        info = manager_of(root).resume(state=target)
    assert (info.tag, filled(target)) == ("step-300", {300})
    assert [over.tag for over in info.passed_over] == ["step-160", "step-150"]
    assert [tag for tag, _ in info.skipped] == ["step-100"]
    warned = [record.getMessage().split("'")[1] for record in caplog.records]
    assert warned == ["step-100", "step-160", "step-150"]


@pytest.mark.parametrize("allow_fresh", [False, True])
def test_nothing_but_damage_is_an_error_that_names_each(root: Path, allow_fresh: bool) -> None:
    steps = (100, 150, 160, 300)
    files = [str(damage(root / f"step-{step}")) for step in steps]
    (root / "step-7").mkdir()
    with pytest.raises(CorruptionError) as info:
        manager_of(root, allow_fresh=allow_fresh).resume(state={"x": large(0)})
    text = str(info.value)
    assert all(f"'step-{step}'" in text for step in steps)
    assert all(file in text for file in files)
    assert "'step-7'" in text
    assert info.value.path == files[2]  # of the newest


def test_without_fallback_or_with_a_tag_damage_is_the_error(root: Path) -> None:
    file = damage(root / "step-160")
    for arguments in ({"fallback": False}, {"tag": 160}, {"tag": 160, "fallback": True}):
        with pytest.raises(CorruptionError) as info:
            manager_of(root).resume(state={"x": large(0)}, **arguments)
        assert info.value.path == str(file)
        assert "step-150" not in str(info.value)


def test_what_is_not_asked_for_may_be_damaged(root: Path) -> None:
    damage(root / "step-160")
    info = manager_of(root).resume()
    assert (info.tag, info.passed_over) == ("step-160", ())


@pytest.mark.parametrize("merge", [False, True])
def test_training_goes_on_from_the_good_one_as_if_the_damaged_were_not_there(
    tmp_path: Path, merge: bool
) -> None:
    """Parts that the damaged read has filled, and those handed over, are the good one's."""

    class Loader:
        position = 0
        given: list[int]

        def __init__(self) -> None:
            self.given = []

        def state_dict(self) -> dict[str, Any]:
            return {"position": self.position}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.given.append(state["position"])

    class Live:
        """Gives its tensor itself: a load fills it in place."""

        def __init__(self) -> None:
            self.x = large(0)
            self.given = 0

        def state_dict(self) -> dict[str, Any]:
            return {"x": self.x, "name": "live"}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.given += 1

    first, loader, live = Training(0), Loader(), Live()
    manager = manager_of(tmp_path)
    expected: list[float] = []
    for step in (1, 2, 3):
        loss = first.train(step)
        expected += [loss] if step == 3 else []
        loader.position = step
        live.x.fill_(step)
        state = {"live": live, "nested": {"lr": step, "x": torch.full((2,), step)}}
        content = {"step": step, "rng": PerRank(step)}
        manager.save(step, **first.parts, dataloader=loader, state=state, user_content=content)
    damage(tmp_path / "step-3")
    again, loader, live = Training(1), Loader(), Live()
    again.train(9)  # its optimizer has a state of its own
    state = {"live": live, "nested": {"lr": 0, "x": torch.zeros(2, dtype=torch.int64)}}
    merges = {"merge": lambda values, *_: values[0]} if merge else {}
    info = manager_of(tmp_path).resume(**again.parts, dataloader=loader, state=state, **merges)
    assert (info.tag, info.step) == ("step-2", 2)
    assert info.user_content == {"step": 2, "rng": 2}
    assert loader.given == [2]
    assert (live.given, set(live.x.tolist())) == (1, {2.0})
    assert_same(state["nested"], {"lr": 2, "x": torch.full((2,), 2)})
    assert again.train(3) == expected[0]
    assert_same(again.model.state_dict(), first.model.state_dict())


def test_save_behind_a_fallback_is_the_newest(root: Path) -> None:
    damage(root / "step-160")
    manager = manager_of(root)
    manager.resume(state={"x": large(0)})
    manager.save(155, state={"x": large(155)})
    target = {"x": large(0)}
    info = manager_of(root).resume(state=target)
    assert (info.tag, info.passed_over, filled(target)) == ("step-155", (), {155})
    assert manager.tags()[-2:] == ["step-160", "step-155"]


class Other:
    """On no allow-list."""


class Elsewhere:
    """Reads a file of its own when it is given its state."""

    def __init__(self, path: str | None) -> None:
        self.path = path

    def state_dict(self) -> dict[str, Any]:
        return {"x": torch.zeros(3)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise CorruptionError("another file is damaged", path=self.path)


def test_only_damage_of_the_checkpoint_falls_back(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = manager_of(root)
    with pytest.raises(MismatchError, match="step-160"):
        manager.resume(state={"x": large(0), "y": torch.zeros(1)})
    with pytest.raises(OptionError):
        manager.resume(dataloader=1)
    manager.save(170, state={"x": Other()})
    with pytest.raises(UnsafePickleError, match="Other"):
        manager.resume(state={"x": 1})
    for path in ("/elsewhere/another", None):
        manager.save(180, state={"x": Elsewhere(path)})
        with pytest.raises(CorruptionError, match=r"^another file is damaged$"):
            manager.resume(state={"x": Elsewhere(path)})

    def fails(self: LoadRun) -> None:
        raise StorageError("pread: Input/output error", errno=5)

    monkeypatch.setattr(LoadRun, "read", fails)
    with pytest.raises(StorageError, match="Input/output"):
        manager.resume(state={"x": large(0)}, tag=None)


def test_commit_before_that_does_not_fit_leaves_the_damage_as_the_error(root: Path) -> None:
    """Whoever takes a MismatchError for "nothing was changed" would train on damaged bytes."""
    manager = manager_of(root)
    state = {"x": large(170), "y": large(170)}
    manager.save(170, state=state)
    file = damage(root / "step-170")
    asked = {"x": large(0), "y": large(0)}
    with pytest.raises(CorruptionError, match=r"step-170.*\n?.*state\.y") as info:
        manager_of(root).resume(state=asked)
    assert info.value.path == str(file)
    assert isinstance(info.value.__cause__, MismatchError)


def test_name_that_only_the_damaged_one_holds_is_not_forgiven(root: Path) -> None:
    """`strict=False` leaves what was not saved as it was: which it is not any more."""
    manager = manager_of(root)
    state = {"x": large(170), "y": large(170)}
    manager.save(170, state=state)
    damage(root / "step-170")
    asked = {"x": large(0), "y": large(0), "z": torch.zeros(2)}
    with pytest.raises(CorruptionError, match=r"step-170.*does not hold state\.y\."):
        manager_of(root).resume(state=asked, strict=False)
    asked = {"x": large(0), "z": torch.zeros(2)}  # which neither of them holds
    info = manager_of(root).resume(state=asked, strict=False)
    assert (info.tag, filled(asked), asked["z"].tolist()) == ("step-160", {160}, [0, 0])


def test_good_resume_has_no_more_rounds_and_looks_than_without_fallback(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    for name in ("listed", "newest", "newest_but"):
        real = getattr(manager_root.ManagerRoot, name)
        monkeypatch.setattr(
            manager_root.ManagerRoot,
            name,
            lambda self, *args, _real=real, _name=name: calls.append(_name) or _real(self, *args),
        )
    rounds = CheckpointCatalog.exchange
    monkeypatch.setattr(
        CheckpointCatalog,
        "exchange",
        lambda self, what, *more: calls.append(what) or rounds(self, what, *more),
    )
    manager_of(root).resume(state={"x": large(0)}, strict=False)
    assert calls == ["resume", "newest"]


def save_large(manager: CheckpointManager, *steps: int) -> None:
    for step in steps:
        manager.save(step, state={"x": large(step)})
    manager.wait()


@pytest.mark.parametrize("found_by", [{}, {"fallback": False}, {"tag": 3}])
def test_damaged_one_takes_no_good_ones_place(tmp_path: Path, found_by: dict[str, Any]) -> None:
    save_large(manager_of(tmp_path), 1, 2, 3)
    damage(tmp_path / "step-3")
    manager = manager_of(tmp_path, keep_last=2)
    if found_by:
        with pytest.raises(CorruptionError):
            manager.resume(state={"x": large(0)}, **found_by)
    else:
        manager.resume(state={"x": large(0)})
    manager._retention.run()  # as the first commit does before anything else
    assert manager.tags() == ["step-1", "step-2", "step-3"]
    save_large(manager, 4)
    assert manager.tags() == ["step-2", "step-3", "step-4"]
    later = manager_of(tmp_path, keep_last=2)  # a job that has not read the damaged one
    assert later.resume(state={"x": large(0)}).tag == "step-4"
    later._retention.run()
    assert later.tags() == ["step-2", "step-3", "step-4"]
    save_large(later, 5)
    assert later.tags() == ["step-4", "step-5"]  # it goes when it would have gone anyway
    assert "damaged" in json.loads((tmp_path / "newest").read_bytes())
    save_large(later, 6)
    assert "damaged" not in json.loads((tmp_path / "newest").read_bytes())


def test_nothing_is_removed_while_all_are_damaged(tmp_path: Path) -> None:
    save_large(manager_of(tmp_path), 1, 2)
    for step in (1, 2):
        damage(tmp_path / f"step-{step}")
    manager = manager_of(tmp_path, keep_last=1)
    with pytest.raises(CorruptionError):
        manager.resume(state={"x": large(0)})
    manager._retention.run()
    assert manager.tags() == ["step-1", "step-2"]


def test_last_good_one_is_not_deleted_for_a_damaged_one(tmp_path: Path) -> None:
    save_large(manager_of(tmp_path), 1, 2, 3)
    for step in (2, 3):
        damage(tmp_path / f"step-{step}")
    manager = manager_of(tmp_path)
    assert manager.resume(state={"x": large(0)}).tag == "step-1"
    with pytest.raises(UnsupportedError, match=r"the last whole checkpoint .* not damaged"):
        manager.delete(1)
    manager.delete(3)
    assert manager_of(tmp_path).latest() == "step-1"  # and not step-2
    manager.delete(2)
    assert manager.tags() == ["step-1"]


def test_damage_that_a_resume_has_passed_over_is_known_to_the_next_process(tmp_path: Path) -> None:
    save_large(manager_of(tmp_path), 1, 2)
    damage(tmp_path / "step-2")
    before = json.loads((tmp_path / "newest").read_bytes())
    with manager_of(tmp_path) as manager:
        assert manager.resume(state={"x": large(0)}).tag == "step-1"
    noted = json.loads((tmp_path / "newest").read_bytes())
    assert noted.pop("damaged") and noted == before
    with pytest.raises(UnsupportedError, match=r"the last whole checkpoint .* not damaged"):
        manager_of(tmp_path).delete(1)


def test_damage_is_written_down_once_and_with_no_pointer_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_large(manager_of(tmp_path), 1, 2)
    damage(tmp_path / "step-2")
    (tmp_path / "newest").unlink()
    written: list[Any] = []
    real = manager_root.DirectoryRoot.write
    monkeypatch.setattr(
        manager_root.DirectoryRoot,
        "write",
        lambda *args, **kwargs: written.append(args) or real(*args, **kwargs),
    )
    for _ in range(2):
        assert manager_of(tmp_path).resume(state={"x": large(0)}).tag == "step-1"
    assert len(written) == 1
    assert json.loads((tmp_path / "newest").read_bytes())["tag"] is None  # it is looked for
    assert manager_of(tmp_path).latest() == "step-2"


def test_damage_that_cannot_be_written_down_is_logged(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    damage(root / "step-160")

    def fails(*args: Any, **kwargs: Any) -> None:
        raise StorageError("write the pointer", errno=30, path=str(root))

    monkeypatch.setattr(manager_root.DirectoryRoot, "write", fails)
    with caplog.at_level(logging.WARNING, "torch_dcpx"):
        assert manager_of(root).resume(state={"x": large(0)}).tag == "step-150"
    assert any("not told what is damaged" in message for message in caplog.messages)


def test_note_of_damage_takes_nothing_of_who_commits_meanwhile(tmp_path: Path) -> None:
    """A job that only reads may fall back while the training saves."""
    training = manager_of(tmp_path)
    save_large(training, 1, 2)
    damage(tmp_path / "step-2")
    reader = manager_of(tmp_path)
    assert reader.latest() == "step-2"
    save_large(training, 3)
    temporary = tmp_path / f"newest.{'0' * 12}.tmp"
    temporary.write_bytes(b"")  # that the training is about to rename
    reader._root.note_damaged("step-2")
    reader._root.tell_damaged()
    assert temporary.exists()
    found = json.loads((tmp_path / "newest").read_bytes())
    assert (found["tag"], len(found["damaged"])) == ("step-3", 1)


def test_array_of_objects_is_no_damage(tmp_path: Path) -> None:
    with manager_of(tmp_path) as manager:
        manager.save(1, state={"x": 1})
        manager.save(2, state={"x": numpy.array([1, "a"], dtype=object)})
        with pytest.raises(UnsafePickleError, match=r"'state\.x'.*a NumPy array of objects: save"):
            manager.resume(state={"x": 0})
