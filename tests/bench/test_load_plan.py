"""The bench of load plans, small: every side plans, and what it prints is a table."""

from __future__ import annotations

from pathlib import Path

import load_plan
import pytest


@pytest.mark.parametrize(("tensors", "chunks"), [(3, 4), (5, 1)])
def test_every_side_finds_every_item(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tensors: int, chunks: int
) -> None:
    where = tmp_path / "checkpoint"
    load_plan.write_metadata(where, tensors, chunks)
    for side in load_plan.SIDES:
        found = load_plan.planned(side, str(where), tensors, chunks)
        assert set(found) == {"read", "plan", "locate", "all", "MiB"}
        assert found["all"] >= found["read"] > 0
    load_plan.print_table("a title", {"torch": [found, found]})
    out = capsys.readouterr().out
    assert "a title" in out
    assert "locate" in out
