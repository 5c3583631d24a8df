"""Every step is met, takes some time, and lies within those that hold it."""

from __future__ import annotations

from pathlib import Path

import save_steps
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from torch_dcpx import DcpxWriter


def test_every_step_of_a_save_is_met_and_patches_are_undone(tmp_path: Path) -> None:
    before = DcpxWriter.write_data, DefaultSavePlanner.create_local_plan
    found = save_steps.measure(50, 64, 1, tmp_path)
    assert list(found) == [step.title for step in save_steps.STEPS]
    assert min(found.values()) > 0
    whole = found.pop("the whole save")
    assert sum(us for title, us in found.items() if not title.startswith("-")) <= whole
    assert (DcpxWriter.write_data, DefaultSavePlanner.create_local_plan) == before
    assert not list(tmp_path.iterdir())
