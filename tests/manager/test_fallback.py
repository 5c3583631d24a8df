"""A newest checkpoint that is damaged: `resume` takes the one before it, whole, or says why not."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from support.states import assert_same
from trainings import (
    Called,
    Held,
    Log,
    Patch,
    Training,
    damage,
    large,
    manager_of,
    pointer,
    save_steps,
    warnings_of,
)

import torch_dcpx as dcpx
from torch_dcpx.checkpoint.load import LoadRun
from torch_dcpx.manager import root as manager_root
from torch_dcpx.manager.catalog import CheckpointCatalog


def save_large(manager: dcpx.CheckpointManager, *steps: int) -> None:
    for step in steps:
        manager.save(step, state={"x": large(step)})
    manager.wait()


def resume(manager: dcpx.CheckpointManager | Path, **how: Any) -> tuple[Any, float]:
    """Resumes what `save_large` has saved; returns what the manager says of it, and the value."""
    target = {"x": large(0)}
    manager = manager_of(manager) if isinstance(manager, Path) else manager
    info = manager.resume(state=target, **how)
    (value,) = set(target["x"].tolist())
    return info, value


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Holds step-100, 150 and 160; a step-300 was committed before these."""
    save_large(manager_of(tmp_path), 300, 100, 150, 160)
    return tmp_path


def test_damaged_newest_gives_way_to_the_commit_before_it(root: Path, caplog: Log) -> None:
    assert manager_of(root).resume().tag == "step-160"
    file = damage(root / "step-160")
    info = manager_of(root).resume()  # what is not asked for may be damaged
    assert (info.tag, info.passed_over) == ("step-160", ())
    info, value = resume(root)
    assert (info.tag, info.step, value) == ("step-150", 150, 150)
    ((tag, damaged, reason),) = info.passed_over
    assert (tag, damaged) == ("step-160", str(file))
    assert info.skipped == ()
    (text,) = warnings_of(caplog)
    assert all(part in text for part in ("step-160", str(file), reason))
    manager = manager_of(root)
    resume(manager)
    save_large(manager, 155)
    info, value = resume(root)
    assert (info.tag, info.passed_over, value) == ("step-155", (), 155)
    assert manager.tags()[-2:] == ["step-160", "step-155"]


def test_fallback_goes_on_until_one_is_good(root: Path, caplog: Log) -> None:
    for step in (160, 150):
        damage(root / f"step-{step}")
    (root / "step-100" / ".metadata").unlink()
    (root / "newest").unlink()  # so that the first look lists, as the others do
    info, value = resume(root)
    assert (info.tag, value) == ("step-300", 300)
    assert [over.tag for over in info.passed_over] == ["step-160", "step-150"]
    assert [tag for tag, _ in info.skipped] == ["step-100"]
    warned = [text.split("'")[1] for text in warnings_of(caplog)]
    assert warned == ["step-100", "step-160", "step-150"]


@pytest.mark.parametrize("allow_fresh", [False, True])
def test_nothing_but_damage_is_an_error_that_names_each(root: Path, allow_fresh: bool) -> None:
    steps = (100, 150, 160, 300)
    files = [str(damage(root / f"step-{step}")) for step in steps]
    (root / "step-7").mkdir()
    with pytest.raises(dcpx.CorruptionError) as info:
        resume(manager_of(root, allow_fresh=allow_fresh))
    text = str(info.value)
    assert all(f"'step-{step}'" in text for step in (*steps, 7))
    assert all(file in text for file in files)
    assert info.value.path == files[2]  # of the newest


def test_without_fallback_or_with_a_tag_damage_is_the_error(root: Path) -> None:
    file = damage(root / "step-160")
    for arguments in ({"fallback": False}, {"tag": 160}, {"tag": 160, "fallback": True}):
        with pytest.raises(dcpx.CorruptionError) as info:
            resume(root, **arguments)
        assert info.value.path == str(file)
        assert "step-150" not in str(info.value)


def data_file(path: Path) -> Path:
    return next(path.glob("__0_*.distcp"))


def spoil_record(path: Path) -> None:
    data = data_file(path).read_bytes()
    assert b'"parts"' in data
    data_file(path).write_bytes(data.replace(b'"parts"', b'"p\0rts"'))


SPOIL: list[tuple[Callable[[Path], Any], type[dcpx.DcpxError]]] = [
    (spoil_record, dcpx.CorruptionError),
    (lambda path: (path / ".metadata").write_bytes(b"cut"), dcpx.CorruptionError),
    (
        lambda path: data_file(path).write_bytes(data_file(path).read_bytes()[:-1]),
        dcpx.ShortReadError,
    ),
    (lambda path: data_file(path).unlink(), dcpx.StorageError),
]


def test_newest_that_is_not_whole_is_an_error_without_fallback(tmp_path: Path) -> None:
    save_steps(tmp_path, 150, 160)
    for step, (spoil, error) in enumerate(SPOIL, 200):
        save_steps(tmp_path, step)
        spoil(tmp_path / f"step-{step}")
        for allow_fresh in (False, True):
            with pytest.raises(error, match=f"step-{step}"):
                manager_of(tmp_path, allow_fresh=allow_fresh).resume(fallback=False)
        assert manager_of(tmp_path).resume().tag == "step-160"
        shutil.rmtree(tmp_path / f"step-{step}")
    save_steps(tmp_path / "other", 150, 160)
    (tmp_path / "other" / "step-150" / ".metadata").write_bytes(b"cut")  # an older one may be
    assert manager_of(tmp_path / "other").resume(fallback=False).tag == "step-160"


def test_save_that_did_not_end_is_no_error_without_fallback(tmp_path: Path) -> None:
    save_steps(tmp_path, 150, 160)
    (tmp_path / "step-200").mkdir()
    (tmp_path / "step-160" / ".metadata").unlink()
    manager = manager_of(tmp_path, allow_older=True)  # the pointer names step-160
    info = manager.resume(fallback=False)
    skipped = [tag for tag, _ in info.skipped]
    assert (info.tag, skipped) == ("step-150", ["step-160", "step-200"])


@pytest.mark.parametrize("merge", [False, True])
def test_training_goes_on_as_if_the_damaged_were_not_there(tmp_path: Path, merge: bool) -> None:
    """Parts that the damaged read has filled, and those handed over, are the good one's."""
    first, loader, live = Training(0), Held(position=0), Held(x=large(0), name="live")
    manager = manager_of(tmp_path)
    for step in (1, 2, 3):
        expected = first.train(step)
        loader.values["position"] = step
        live.values["x"].fill_(step)
        state = {"live": live, "nested": {"lr": step, "x": torch.full((2,), step)}}
        content = {"step": step, "rng": dcpx.PerRank(step)}
        manager.save(step, **first.parts, dataloader=loader, state=state, user_content=content)
    damage(tmp_path / "step-3")
    tensor = large(0)
    again, loader, live = Training(1), Held(position=0), Held(x=tensor, name="live")
    again.train(9)  # its optimizer has a state of its own
    state = {"live": live, "nested": {"lr": 0, "x": torch.zeros(2, dtype=torch.int64)}}
    merges = {"merge": lambda values, *_: values[0]} if merge else {}
    info = manager_of(tmp_path).resume(**again.parts, dataloader=loader, state=state, **merges)
    assert (info.tag, info.step) == ("step-2", 2)
    assert info.user_content == {"step": 2, "rng": 2}
    assert loader.taken == [{"position": 2}]
    assert (len(live.taken), set(tensor.tolist())) == (1, {2.0})
    assert_same(state["nested"], {"lr": 2, "x": torch.full((2,), 2)})
    assert again.train(3) == expected
    assert_same(again.model.state_dict(), first.model.state_dict())


class Other:
    """On no allow-list."""


def test_only_damage_of_the_checkpoint_falls_back(root: Path, monkeypatch: Patch) -> None:
    manager = manager_of(root)
    with pytest.raises(dcpx.MismatchError, match="step-160"):
        manager.resume(state={"x": large(0), "y": torch.zeros(1)})
    with pytest.raises(dcpx.OptionError):
        manager.resume(dataloader=1)
    manager.save(170, state={"x": Other()})
    with pytest.raises(dcpx.UnsafePickleError, match="Other"):
        manager.resume(state={"x": 1})
    manager.save(175, state={"x": numpy.array([1, "a"], dtype=object)})
    with pytest.raises(dcpx.UnsafePickleError, match=r"'state\.x'.*a NumPy array of objects: save"):
        manager.resume(state={"x": 0})
    for path in ("/elsewhere/another", None):

        def reads_another(_: Any, path: str | None = path) -> None:
            raise dcpx.CorruptionError("another file is damaged", path=path)

        manager.save(180, state={"x": Held(x=torch.zeros(3))})
        with pytest.raises(dcpx.CorruptionError, match=r"^another file is damaged$"):
            manager.resume(state={"x": Called(lambda: {"x": torch.zeros(3)}, reads_another)})

    def fails(self: LoadRun) -> None:
        raise dcpx.StorageError("pread: Input/output error", errno=5)

    monkeypatch.setattr(LoadRun, "read", fails)
    with pytest.raises(dcpx.StorageError, match="Input/output"):
        manager.resume(state={"x": large(0)}, tag=None)


def test_name_that_only_the_damaged_one_holds_leaves_the_damage_as_the_error(root: Path) -> None:
    """Whoever takes a MismatchError for "nothing was changed" would train on damaged bytes, and
    `strict=False` leaves what was not saved as it was: which it is not any more."""
    manager_of(root).save(170, state={"x": large(170), "y": large(170)})
    file = damage(root / "step-170")
    asked = {"x": large(0), "y": large(0)}
    with pytest.raises(dcpx.CorruptionError, match=r"step-170.*\n?.*state\.y") as info:
        manager_of(root).resume(state=asked)
    assert info.value.path == str(file)
    assert isinstance(info.value.__cause__, dcpx.MismatchError)
    with pytest.raises(dcpx.CorruptionError, match=r"step-170.*does not hold state\.y\."):
        manager_of(root).resume(state={**asked, "z": torch.zeros(2)}, strict=False)
    asked = {"x": large(0), "z": torch.zeros(2)}  # which neither of them holds
    info = manager_of(root).resume(state=asked, strict=False)
    assert (info.tag, asked["x"][0], asked["z"].tolist()) == ("step-160", 160, [0, 0])


def test_good_resume_costs_what_one_without_fallback_does(root: Path, monkeypatch: Patch) -> None:
    calls: list[str] = []

    def watch(owner: Any, name: str, told: Callable[..., str]) -> None:
        real = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a: calls.append(told(*a)) or real(*a))  # type: ignore[func-returns-value]

    for name in ("listed", "newest", "newest_but"):
        watch(manager_root.ManagerRoot, name, lambda *_, name=name: name)
    watch(CheckpointCatalog, "exchange", lambda _, what, *__: what)
    manager_of(root).resume(state={"x": large(0)}, strict=False)
    assert calls == ["resume", "newest"]


@pytest.mark.parametrize("found_by", [{}, {"fallback": False}, {"tag": 3}])
def test_damaged_one_takes_no_good_ones_place(tmp_path: Path, found_by: dict[str, Any]) -> None:
    save_large(manager_of(tmp_path), 1, 2, 3)
    damage(tmp_path / "step-3")
    manager = manager_of(tmp_path, keep_last=2)
    if found_by:
        with pytest.raises(dcpx.CorruptionError):
            resume(manager, **found_by)
    else:
        resume(manager)
    manager._retention.run()  # as the first commit does before anything else
    assert manager.tags() == ["step-1", "step-2", "step-3"]
    save_large(manager, 4)
    assert manager.tags() == ["step-2", "step-3", "step-4"]
    later = manager_of(tmp_path, keep_last=2)  # a job that has not read the damaged one
    assert resume(later)[0].tag == "step-4"
    later._retention.run()
    assert later.tags() == ["step-2", "step-3", "step-4"]
    save_large(later, 5)
    assert later.tags() == ["step-4", "step-5"]  # it goes when it would have gone anyway
    assert "damaged" in pointer(tmp_path)
    save_large(later, 6)
    assert "damaged" not in pointer(tmp_path)


def test_nothing_is_removed_while_all_are_damaged(tmp_path: Path) -> None:
    save_large(manager_of(tmp_path), 1, 2)
    for step in (1, 2):
        damage(tmp_path / f"step-{step}")
    manager = manager_of(tmp_path, keep_last=1)
    with pytest.raises(dcpx.CorruptionError):
        resume(manager)
    manager._retention.run()
    assert manager.tags() == ["step-1", "step-2"]


def test_last_good_one_is_not_deleted_also_by_the_next_process(tmp_path: Path) -> None:
    save_large(manager_of(tmp_path), 1, 2, 3)
    for step in (2, 3):
        damage(tmp_path / f"step-{step}")
    before = pointer(tmp_path)
    manager = manager_of(tmp_path)
    assert resume(manager)[0].tag == "step-1"
    noted = pointer(tmp_path)
    assert noted.pop("damaged") and noted == before
    for one in (manager, manager_of(tmp_path)):
        with pytest.raises(
            dcpx.UnsupportedError, match=r"the last whole checkpoint .* not damaged"
        ):
            one.delete(1)
    manager.delete(3)
    assert manager_of(tmp_path).latest() == "step-1"  # and not step-2
    manager.delete(2)
    assert manager.tags() == ["step-1"]


def test_damage_is_written_down_once_and_with_no_pointer_by_itself(
    tmp_path: Path, monkeypatch: Patch, caplog: Log
) -> None:
    save_large(manager_of(tmp_path), 1, 2)
    damage(tmp_path / "step-2")
    (tmp_path / "newest").unlink()
    written: list[Any] = []
    real = manager_root.DirectoryRoot.write

    def write(*args: Any, **kwargs: Any) -> Any:
        written.append(args)
        if len(written) == 1:
            raise dcpx.StorageError("write the pointer", errno=30, path=str(tmp_path))
        return real(*args, **kwargs)

    monkeypatch.setattr(manager_root.DirectoryRoot, "write", write)
    for count in (1, 2, 2):
        assert resume(tmp_path)[0].tag == "step-1"
        assert len(written) == count
        assert any("not told what is damaged" in text for text in caplog.messages)
    assert pointer(tmp_path)["tag"] is None  # it is looked for
    assert manager_of(tmp_path).latest() == "step-2"


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
    found = pointer(tmp_path)
    assert (found["tag"], len(found["damaged"])) == ("step-3", 1)
