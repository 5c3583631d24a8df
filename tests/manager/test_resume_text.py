"""A printed resume says in three lines what was taken, what was not, and what else is there."""

from __future__ import annotations

from pathlib import Path

import torch

import torch_dcpx as dcpx
from torch_dcpx.manager.resume import PassedOver, ResumeInfo


def test_a_resume_prints_in_three_lines_without_names_of_our_own(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with dcpx.CheckpointManager(tmp_path, no_dist=True, async_save=False) as manager:
        manager.save(
            7,
            model=model,
            optimizer=optimizer,
            lr_scheduler=scheduler,
            user_content={"x": "y" * 99},
        )
        whole = manager.resume(model=model, optimizer=optimizer, lr_scheduler=scheduler)
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
