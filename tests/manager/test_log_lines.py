"""What a manager logs and prints: a line a save, a line a resume, in the user's words."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from trainings import Log, Patch, manager_of, save_steps, warnings_of

from torch_dcpx import CorruptionError
from torch_dcpx import save as save_alone
from torch_dcpx.manager.resume import PassedOver, ResumeInfo
from torch_dcpx.manager.stored import Record
from torch_dcpx.reports import duration, resumed_line

SAVED_AT = 1_700_000_000.0


def lines_of(caplog: Log, level: int) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno == level]


def test_save_and_resume_are_one_line_each_in_the_users_words(
    tmp_path: Path, monkeypatch: Patch, caplog: Log
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
    inner = [line[:6] for line in lines_of(caplog, logging.DEBUG)]
    assert inner.count("saved ") == 2 and inner.count("loaded") >= 2
    assert warnings_of(caplog) == []


def test_resume_of_what_no_manager_saved_says_what_is_known(tmp_path: Path, caplog: Log) -> None:
    save_alone({"x": torch.ones(3)}, tmp_path / "any", no_dist=True)
    caplog.clear()
    with caplog.at_level(logging.INFO, "torch_dcpx"):
        manager_of(tmp_path).resume(state={})
    assert lines_of(caplog, logging.INFO) == [f"resumed 'any' of '{tmp_path}'; 1 rank now"]


def test_line_of_a_resume_has_its_age_in_the_largest_whole_unit_and_its_ranks() -> None:
    for age_s, ranks, now, rest in (
        (720.0, 2, 4, ", saved 12 min ago by 2 ranks; 4 ranks now"),
        (720.0, 2, 2, ", saved 12 min ago by 2 ranks"),
        (-5.0, 2, 1, ", saved by 2 ranks; 1 rank now"),
        (None, 1, 1, ", saved by 1 rank"),
        (None, None, 3, "; 3 ranks now"),
    ):
        line = resumed_line("step 45", "run/ckpt", age_s, ranks, now)
        assert line == f"resumed step 45 of 'run/ckpt'{rest}"
    for seconds, text in (
        (0.9, "0 s"), (59, "59 s"), (60, "1 min"), (3599, "59 min"), (3600, "1 h"),
        (86399, "23 h"), (86400, "1 day"), (10 * 86400, "10 days"),
    ):  # fmt: skip
        assert duration(seconds) == text


def test_record_keeps_the_time_and_one_without_it_reads(tmp_path: Path) -> None:
    record = Record("step-1", 1, 1, 2, {}, ("state",), (), 1_700_000_000).encoded()
    assert Record.decoded(record, tmp_path).saved_at == 1_700_000_000
    fields: dict[str, Any] = json.loads(record)
    for value in (-1, "1", True, None, 1.5, [1]):
        with pytest.raises(CorruptionError):
            Record.decoded(json.dumps({**fields, "saved_at": value}), tmp_path)
    del fields["saved_at"]
    assert Record.decoded(json.dumps(fields), tmp_path).saved_at == 0


def test_a_resume_prints_in_three_lines_without_names_of_our_own(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    parts = {"model": model, "optimizer": optimizer, "lr_scheduler": scheduler}
    with manager_of(tmp_path) as manager:
        manager.save(7, **parts, user_content={"x": "y" * 99})
        whole = manager.resume(**parts)
        assert whole.report is not None and whole.report.unexpected == ()
        assert str(whole).startswith("resumed 'step-7' (step 7): ") and "\n" not in str(whole)
        info = manager.resume(model=model)
    assert info.report is not None and info.report.phases
    assert "lr_scheduler" in info.report.unexpected
    assert not [name for name in info.report.unexpected if name.startswith("dcpx")]
    first, second = str(info).splitlines()
    assert "user_content" not in first and second.count(",") == 3 and " not taken: " in second


def test_it_names_what_was_passed_over_or_nothing() -> None:
    assert str(ResumeInfo()) == "nothing to resume: a fresh start"
    over = (PassedOver("step-9", "f", "r"),)
    skipped = tuple((f"step-{number}\x1b" + "n" * 200, "why") for number in range(9))
    lines = str(ResumeInfo("step-8", 8, skipped=skipped, passed_over=over)).splitlines()
    assert lines[0] == "resumed 'step-8' (step 8)" and len(lines) == 2
    assert lines[1].startswith("1 passed over as damaged: step-9; 9 skipped: step-0\\x1bn")
    assert len(lines[1]) < 300 and lines[1].endswith(", ...")
