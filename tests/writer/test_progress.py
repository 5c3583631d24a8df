"""`WriteOptions.progress`: what is told, when, to whom; and `progress=True` on a terminal."""

from __future__ import annotations

import dataclasses
import io
import logging
import pickle
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.saves import assert_whole, files_in, raises_one, save
from support.slow_states import SLOW, CopyingPlanner, Seen, gathered_state, windowed_state
from support.states import mixed_state
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from torch_dcpx import DcpxWriter, WriteOptions


def payload_of(state: dict[str, Any]) -> int:
    return sum(value.nbytes for value in state.values() if isinstance(value, torch.Tensor))


def saved_with(
    progress: Any,
    path: Path,
    state: dict[str, Any],
    *,
    options: WriteOptions = WriteOptions(),  # noqa: B008
    planner: Any = None,
    **kwargs: Any,
) -> DcpxWriter:
    options = dataclasses.replace(options, progress=progress)
    writer = DcpxWriter(path, options=options, **kwargs)
    dcp.save(state, storage_writer=writer, planner=planner, no_dist=True)
    return writer


def assert_ascending(calls: list[tuple[int, int]]) -> None:
    """Asserts what every reporter may rely on."""
    assert calls[0][0] == 0
    assert calls[-1][0] == calls[-1][1]
    assert all(before[0] <= after[0] for before, after in pairwise(calls))
    assert all(done < total for done, total in calls[:-1]), "all is said once, in the end"


@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"single_file_per_rank": False},
        {"options": WriteOptions(files_per_rank=3)},
        {"options": WriteOptions(durability="none", direct_io=False)},
    ],
    ids=["one file", "a file each", "several", "buffered"],
)
def test_progress_ascends_from_nothing_to_all(tmp_path: Path, kwargs: dict[str, Any]) -> None:
    seen, state = Seen(), mixed_state()
    writer = saved_with(seen, tmp_path, state, **kwargs)
    assert_ascending(seen.calls)
    assert writer.last_report is not None
    assert seen.calls[-1][1] == writer.last_report.payload_bytes
    assert_whole(state, tmp_path)


@pytest.mark.parametrize("files_per_rank", [1, 2])
def test_each_window_is_told(tmp_path: Path, files_per_rank: int) -> None:
    seen, state, total = Seen(), windowed_state(), payload_of(windowed_state())
    options = dataclasses.replace(SLOW, files_per_rank=files_per_rank)
    saved_with(seen, tmp_path, state, options=options, planner=CopyingPlanner())
    assert_ascending(seen.calls)
    assert {(total * i // 6, total) for i in range(7)} <= set(seen.calls)
    assert_whole(state, tmp_path)


def test_progress_is_told_within_one_call_to_cpp(tmp_path: Path) -> None:
    seen, state = Seen(), gathered_state()
    saved_with(seen, tmp_path, state, options=SLOW)
    assert_ascending(seen.calls)
    total = payload_of(state)
    assert any(0 < done < total for done, _ in seen.calls)
    assert seen.calls[0] == (0, total), "of `step` nobody knows beforehand"
    assert seen.calls[-1][1] > total


def test_total_follows_a_planner_that_changes_what_it_planned(tmp_path: Path) -> None:
    class Halving(DefaultSavePlanner):
        def transform_object(self, write_item: Any, value: Any) -> Any:
            return value.to(torch.uint8) if isinstance(value, torch.Tensor) else value

    seen, state = Seen(), {f"t{i}": torch.ones(1 << 20, dtype=torch.int16) for i in range(3)}
    saved_with(seen, tmp_path, state, options=SLOW, planner=Halving())
    assert_ascending(seen.calls)
    assert seen.calls[0] == (0, 6 << 20)
    assert seen.calls[-1] == (3 << 20, 3 << 20)


def test_save_of_nothing_is_told_to_be_done(tmp_path: Path) -> None:
    seen = Seen()
    saved_with(seen, tmp_path, {})
    assert seen.calls == [(0, 0), (0, 0)]


@pytest.mark.usefixtures("no_leaks")
@pytest.mark.parametrize(
    "at",
    [
        lambda done, _: done == 0,
        lambda done, total: 0 < done < total,
        lambda done, total: done == total,
    ],
    ids=["first", "middle", "last"],
)
@pytest.mark.parametrize("files", [0, 2], ids=["gathered", "windows of several files"])
def test_error_of_the_callable_fails_the_save_and_leaves_nothing(
    tmp_path: Path, files: int, at: Any
) -> None:
    save(mixed_state(), tmp_path)
    before = files_in(tmp_path)
    state, planner = (windowed_state(), CopyingPlanner()) if files else (gathered_state(), None)
    options = dataclasses.replace(SLOW, files_per_rank=max(1, files))

    def fail() -> None:
        raise ValueError("of the user")

    seen = Seen(at, fail)
    with raises_one(ValueError):
        saved_with(seen, tmp_path, state, options=options, planner=planner)
    assert seen.is_done
    assert at(*seen.calls[-1]), "nothing is told after the error"
    assert files_in(tmp_path) == before
    assert_whole(mixed_state(), tmp_path)


def told(done_bytes: int, total_bytes: int) -> None:
    """A function that pickles by its name."""


def test_options_with_a_callable_compare_and_pickle_by_reference(tmp_path: Path) -> None:
    options = WriteOptions(progress=told)
    assert pickle.loads(pickle.dumps(options)) == options
    assert options != WriteOptions()
    writer = pickle.loads(pickle.dumps(DcpxWriter(tmp_path, options=options)))
    assert writer.options.progress is told
    save_through = {"w": torch.arange(10)}
    dcp.save(save_through, storage_writer=writer, no_dist=True)
    assert_whole(save_through, tmp_path)


# ---- progress=True ------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.usefixtures("no_leaks")
def test_true_is_a_bar_on_the_coordinators_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    saved_with(True, tmp_path / "step-7", windowed_state(), options=SLOW, planner=CopyingPlanner())
    shown = terminal.getvalue()
    assert "step-7:   0%" in shown
    assert "step-7:  50%" in shown
    assert "step-7: 100%" in shown
    assert "6.29M/6.29M" in shown


class Replaced:
    """What some logging set-ups put in the place of stderr."""

    def write(self, text: str) -> None:
        raise AssertionError(text)


def test_true_is_silent_where_stderr_is_no_terminal_closed_or_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "torch_dcpx")
    closed, plain = Terminal(), io.StringIO()
    closed.close()
    for number, stderr in enumerate([plain, None, closed, Replaced()]):
        if number < 2:  # nor is it looked for
            monkeypatch.setitem(sys.modules, "tqdm", None)
        monkeypatch.setattr(sys, "stderr", stderr)
        saved_with(True, tmp_path / str(number), {"w": torch.arange(10)})
        monkeypatch.undo()
        assert_whole({"w": torch.arange(10)}, tmp_path / str(number))
    assert plain.getvalue() == ""
    said = [message[:6] for message in caplog.messages if not message.startswith("loaded ")]
    assert said == ["saved "] * 4


@pytest.mark.parametrize("error", [OSError(5, "hung up"), UnicodeError("no such sign")])
@pytest.mark.parametrize("nth", [0, 3])
def test_terminal_that_is_lost_ends_the_bar_and_not_the_save(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    nth: int,
) -> None:
    class Lost(Terminal):
        writes = 0

        def write(self, text: str) -> int:
            self.writes += 1
            if self.writes > nth:
                raise error
            return super().write(text)

    caplog.set_level(logging.WARNING, "torch_dcpx")
    monkeypatch.setattr(sys, "stderr", stderr := Lost())
    saved_with(True, tmp_path, windowed_state(), options=SLOW, planner=CopyingPlanner())
    assert stderr.writes == nth + 1, "nothing is written to what is lost"
    assert [record.message for record in caplog.records] == [f"the progress bar has ended: {error}"]
    assert_whole(windowed_state(), tmp_path)


def test_true_without_tqdm_says_so_once_and_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "torch_dcpx")
    monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    saved_with(True, tmp_path, {"w": torch.arange(10)})
    first, second = [record.message for record in caplog.records]
    assert first == "progress=True shows no bar: tqdm is not installed"
    assert second.startswith("saved ")
    assert terminal.getvalue() == ""
