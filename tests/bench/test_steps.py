"""Every step is met, takes some time, and lies within those that hold it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import load_steps
import pytest
import save_steps


@pytest.mark.parametrize(
    ("table", "item_bytes"), [(save_steps, 64), (load_steps, 64), (load_steps, 0)]
)
def test_every_step_is_met_and_patches_are_undone(
    tmp_path: Path, table: Any, item_bytes: int
) -> None:
    before = [getattr(step.owner, step.name) for step in table.STEPS]
    found = table.measure(50, item_bytes, 1, tmp_path)
    assert list(found) == [step.title for step in table.STEPS]
    assert min(found.values()) > 0
    *_, whole = found
    assert sum(us for title, us in found.items() if title[0] != "-") <= 2 * found[whole]
    assert [getattr(step.owner, step.name) for step in table.STEPS] == before
    assert [path.name for path in tmp_path.iterdir()] == ["save"] * (table is load_steps)
