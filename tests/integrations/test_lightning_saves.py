"""Saves and removals of Lightning's strategies, without Lightning: they end in order."""

from __future__ import annotations

import concurrent.futures
import logging
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.machine import seconds

import torch_dcpx
from torch_dcpx import StorageError, UnsupportedError, WriteOptions
from torch_dcpx.integrations._lightning_saves import Saves, raise_first, refuse_link

STATE = {"w": torch.ones(64)}


class Gate:
    """Holds saves that have begun until it is opened, and makes those fail that it is told to."""

    def __init__(self) -> None:
        self.is_open = threading.Event()
        self.begun = 0
        self.failing: set[int] = set()

    def __call__(self, done: int, _all: int) -> None:
        if done:
            return
        self.begun += 1
        number = self.begun
        assert self.is_open.wait(seconds(60))
        if number in self.failing:
            raise OSError(f"save {number} fails")


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.is_open.set()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch_dcpx.checkpoint.pending.raise_uncollected", lambda: None)
        torch_dcpx.wait()


def saves_of(gate: Gate, in_flight: int = 2, **options: Any) -> Saves:
    return Saves(WriteOptions(progress=gate, max_in_flight=in_flight, **options), is_async=True)


def save(saves: Saves, path: Path, value: float = 1) -> None:
    saves.save({"w": torch.full((64,), float(value))}, {"value": value}, str(path))


def remove(saves: Saves, path: Path) -> None:
    saves.remove(path, lambda: shutil.rmtree(path))


def value_in(path: Path) -> float:
    state = {"w": torch.zeros(64)}
    torch_dcpx.load(state, path, no_dist=True)
    assert torch.load(path / "meta.pt") == {"value": state["w"][0].item()}
    return state["w"][0].item()


@pytest.fixture
def old(tmp_path: Path, gate: Gate) -> Path:
    """A checkpoint that was saved before."""
    gate.is_open.set()
    before = saves_of(gate)
    save(before, tmp_path / "A", 0)
    before.wait()
    gate.is_open.clear()
    gate.begun = 0
    return tmp_path / "A"


def aliases(old: Path) -> dict[str, Path]:
    link = old.with_name("link")
    link.symlink_to(old)
    (old.parent / "parent").symlink_to(old.parent)
    return {
        "same": old,
        "dots": old.parent / "x" / ".." / "A",
        "link": link,
        "through a link": old.parent / "parent" / "A",
    }


@pytest.mark.parametrize("name", ["same", "dots", "link", "through a link"])
def test_checkpoint_that_is_saved_again_is_not_removed(gate: Gate, old: Path, name: str) -> None:
    (old.parent / "x").mkdir()
    saves = saves_of(gate)
    save(saves, old.parent / "B")
    remove(saves, old)
    gate.is_open.set()
    save(saves, aliases(old)[name], 2)
    saves.wait()
    torch_dcpx.wait()
    assert value_in(old) == 2


def test_removal_that_runs_ends_before_the_next_save_begins(gate: Gate, old: Path) -> None:
    saves, has_begun, may_end = saves_of(gate), threading.Event(), threading.Event()

    def slow() -> None:
        has_begun.set()
        assert may_end.wait(seconds(60))
        shutil.rmtree(old)

    save(saves, old.parent / "B")
    saves.remove(old, slow)
    gate.is_open.set()
    assert has_begun.wait(seconds(60))
    threading.Timer(0.2, may_end.set).start()
    save(saves, old, 2)
    assert may_end.is_set()
    saves.wait()
    assert value_in(old) == 2


def test_save_beneath_a_directory_waits_for_its_removal(gate: Gate, old: Path) -> None:
    saves = saves_of(gate)
    save(saves, old.parent / "B")
    saves.remove(old, lambda: shutil.rmtree(old))
    gate.is_open.set()
    save(saves, old / "beneath", 2)
    saves.wait()
    assert value_in(old / "beneath") == 2
    assert not (old / ".metadata").exists()


@pytest.mark.parametrize(
    ("calls", "left"),
    [("r", None), ("s", 1), ("sr", None), ("rs", 1), ("srs", 2), ("rsr", None), ("ss", 2),
     ("rr", None), ("srsr", None), ("rsrs", 2), ("sssr", None)],
)  # fmt: skip
def test_saves_and_removals_of_one_path_end_as_they_were_asked_for(
    gate: Gate, old: Path, calls: str, left: float | None
) -> None:
    saves, value = saves_of(gate, in_flight=3), 0
    save(saves, old.parent / "B")
    for at, call in enumerate(calls):
        if call == "s":
            value += 1
            if "s" in calls[:at]:
                gate.is_open.set()  # it waits for the one before
            save(saves, old, value)
        else:
            saves.remove(old, lambda: shutil.rmtree(old, ignore_errors=calls.count("r") > 1))
    gate.is_open.set()
    saves.wait()
    torch_dcpx.wait()
    assert (value_in(old) if old.exists() else None) == left


def test_checkpoint_that_something_else_has_saved_meanwhile_stays(
    gate: Gate, old: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saves = saves_of(gate)
    save(saves, old.parent / "B")
    remove(saves, old)
    dcp.save({"w": torch.full((64,), 5.0)}, checkpoint_id=old, no_dist=True)
    gate.is_open.set()
    with caplog.at_level(logging.WARNING, "torch_dcpx"):
        saves.wait()
    assert "saved again by something else" in caplog.text
    assert (old / ".metadata").exists()


def test_failed_save_calls_a_removal_behind_it_off(gate: Gate, old: Path) -> None:
    gate.failing = {1}
    saves = saves_of(gate)
    save(saves, old.parent / "B")
    remove(saves, old)
    gate.is_open.set()
    with pytest.raises(OSError, match="save 1 fails"):
        saves.wait()
    saves.wait()
    assert value_in(old) == 0


def test_every_error_reaches_the_caller(
    gate: Gate, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gate.failing = {1, 2}
    saves = saves_of(gate)
    save(saves, tmp_path / "A")
    while gate.begun < 1:
        threading.Event().wait(0.01)
    save(saves, tmp_path / "B")
    gate.is_open.set()
    with (
        caplog.at_level(logging.ERROR, "torch_dcpx"),
        pytest.raises(OSError, match="save 1 fails"),
    ):
        saves.wait()
    assert "save 2 fails" in caplog.text
    saves.wait()
    torch_dcpx.wait()


@pytest.mark.parametrize("is_in_flight", [False, True])
@pytest.mark.parametrize("told_by", ["wait", "path_of_all", "path_to_load"])
def test_error_of_a_removal_reaches_the_caller_once(
    gate: Gate, old: Path, is_in_flight: bool, told_by: str
) -> None:
    def fail() -> None:
        raise PermissionError("may not")

    saves = saves_of(gate)
    if is_in_flight:
        save(saves, old.parent / "B")
    saves.remove(old, fail)
    gate.is_open.set()
    if is_in_flight:
        concurrent.futures.wait([saves._removals[0].ended], seconds(60))
    calls: dict[str, Callable[[], object]] = {
        "wait": saves.wait,
        "path_of_all": lambda: saves.path_of_all("C"),
        "path_to_load": lambda: saves.path_to_load("C"),
    }
    with pytest.raises(PermissionError, match="may not"):
        calls[told_by]()
    calls[told_by]()
    saves.wait()


def test_removal_that_does_not_end_has_a_deadline(gate: Gate, old: Path) -> None:
    may_end = threading.Event()
    saves = saves_of(gate, save_timeout_s=1)
    save(saves, old.parent / "B")
    saves.remove(old, lambda: may_end.wait(seconds(60)))
    gate.is_open.set()
    saves._unfinished[0].handle.result()
    concurrent.futures.wait([saves._unfinished[0].ended], seconds(60))
    try:
        with pytest.raises(StorageError, match="a save or a removal of 'a checkpoint'"):
            saves.wait()
    finally:
        may_end.set()
    saves.wait()


def test_first_error_is_raised_and_others_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    raise_first([])
    with caplog.at_level(logging.ERROR, "torch_dcpx"), pytest.raises(ValueError, match="one"):
        raise_first([ValueError("one"), ValueError("two"), ValueError("three")])
    assert "two" in caplog.text and "three" in caplog.text


def test_link_to_what_is_still_saved_is_refused() -> None:
    refuse_link([SimpleNamespace(save_last=value) for value in (None, True, False)])
    with pytest.raises(UnsupportedError, match="save_last='link'"):
        refuse_link([SimpleNamespace(), SimpleNamespace(save_last="link")])
