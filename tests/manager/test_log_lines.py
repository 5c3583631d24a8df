"""What a manager logs: one INFO line a save, one a resume, in the user's words."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from trainings import manager_of, save_steps

from torch_dcpx import CorruptionError
from torch_dcpx import save as save_alone
from torch_dcpx.manager.stored import Record
from torch_dcpx.reports import duration, resumed_line

SAVED_AT = 1_700_000_000.0


def lines_of(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno == level]


def test_save_and_resume_are_one_line_each_in_the_users_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.DEBUG, "torch_dcpx")
    monkeypatch.setattr(time, "time", lambda: SAVED_AT)
    with manager_of(Path("run/ckpt")) as manager:
        assert manager.resume(state={"x": torch.zeros(3)}).is_fresh
        save_steps(manager, 45)
        manager.save("best", step=44, state={"x": torch.zeros(3)})
        monkeypatch.setattr(time, "time", lambda: SAVED_AT + 12 * 60 + 5)
        manager.resume(state={"x": torch.zeros(3)}, tag=45)
        manager.resume(state={"x": torch.zeros(3)})
        manager.delete(45)
    first, saved, best, resumed, last = lines_of(caplog, logging.INFO)
    assert first == "nothing to resume in 'run/ckpt': a fresh start"
    assert saved.startswith("saved step 45 in 'run/ckpt': 8.19 kB by 1 rank in ")
    assert best.startswith("saved 'best' (step 44) in 'run/ckpt': ")
    assert resumed == "resumed step 45 of 'run/ckpt', saved 12 min ago by 1 rank"
    assert last == "resumed 'best' (step 44) of 'run/ckpt', saved 12 min ago by 1 rank"
    inner = [line for line in lines_of(caplog, logging.DEBUG) if line[:6] in ("saved ", "loaded")]
    assert len([line for line in inner if line[:6] == "saved "]) == 2
    assert len([line for line in inner if line[:6] == "loaded"]) >= 2
    assert lines_of(caplog, logging.WARNING) == []


def test_resume_of_what_no_manager_saved_says_what_is_known(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_alone({"x": torch.ones(3)}, tmp_path / "any", no_dist=True)
    caplog.clear()
    with caplog.at_level(logging.INFO, "torch_dcpx"):
        manager_of(tmp_path).resume(state={})
    assert lines_of(caplog, logging.INFO) == [f"resumed 'any' of '{tmp_path}'; 1 rank now"]


@pytest.mark.parametrize(
    ("age_s", "ranks", "now", "rest"),
    [
        (720.0, 2, 4, ", saved 12 min ago by 2 ranks; 4 ranks now"),
        (720.0, 2, 2, ", saved 12 min ago by 2 ranks"),
        (-5.0, 2, 1, ", saved by 2 ranks; 1 rank now"),
        (None, 1, 1, ", saved by 1 rank"),
        (None, None, 3, "; 3 ranks now"),
    ],
)
def test_line_of_a_resume(age_s: float | None, ranks: int | None, now: int, rest: str) -> None:
    assert resumed_line("step 45", "run/ckpt", age_s, ranks, now) == (
        f"resumed step 45 of 'run/ckpt'{rest}"
    )


def test_duration_is_in_the_largest_whole_unit() -> None:
    for seconds, text in (
        (0.9, "0 s"), (59, "59 s"), (60, "1 min"), (3599, "59 min"), (3600, "1 h"),
        (86399, "23 h"), (86400, "1 day"), (10 * 86400, "10 days"),
    ):  # fmt: skip
        assert duration(seconds) == text


def record_text(**changes: Any) -> str:
    record = Record("step-1", 1, 1, 2, {}, ("state",), (), 1_700_000_000)
    return json.dumps({**json.loads(record.encoded()), **changes})


def test_record_keeps_the_time_and_one_without_it_reads(tmp_path: Path) -> None:
    assert Record.decoded(record_text(), tmp_path).saved_at == 1_700_000_000
    old = json.loads(record_text())
    del old["saved_at"]
    assert Record.decoded(json.dumps(old), tmp_path).saved_at == 0


@pytest.mark.parametrize("value", [-1, "1", True, None, 1.5, [1]], ids=repr)
def test_record_with_a_time_that_is_none_is_damaged(tmp_path: Path, value: Any) -> None:
    with pytest.raises(CorruptionError):
        Record.decoded(record_text(saved_at=value), tmp_path)
