"""Every step is met, takes some time, and lies within those that hold it."""

from __future__ import annotations

from pathlib import Path

import load_steps
import pytest
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from torch_dcpx import DcpxReader


@pytest.mark.parametrize("item_bytes", [64, 0], ids=["tensors", "scalars"])
def test_every_step_of_a_load_is_met_and_patches_are_undone(
    tmp_path: Path, item_bytes: int
) -> None:
    before = DcpxReader.read_data, DefaultLoadPlanner.create_local_plan
    found = load_steps.measure(50, item_bytes, 1, tmp_path)
    assert list(found) == [step.title for step in load_steps.STEPS]
    assert min(found.values()) > 0
    whole = found.pop("the whole load")
    assert sum(us for title, us in found.items() if not title.startswith("-")) <= whole
    assert (DcpxReader.read_data, DefaultLoadPlanner.create_local_plan) == before
