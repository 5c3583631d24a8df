"""Processes that a launcher has started, and that have no process group."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from torch_dcpx import CheckpointManager, export, load, save
from torch_dcpx.errors import OptionError

CALLS: dict[str, Callable[[Path, bool], object]] = {
    "save": lambda path, alone: save({}, path, no_dist=alone),
    "load": lambda path, alone: load({}, path, no_dist=alone),
    "export": lambda path, alone: export({}, path, no_dist=alone),
    "manager": lambda path, alone: CheckpointManager(path, no_dist=alone).latest(),
}


@pytest.mark.parametrize("name", list(CALLS))
def test_launched_process_without_a_group_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(
        OptionError, match=r"WORLD_SIZE=2 .*init_process_group.*no_dist=True"
    ) as caught:
        CALLS[name](tmp_path / "a", False)
    assert caught.value.option == "process_group"
    assert not list(tmp_path.iterdir())


def test_launched_process_that_is_to_be_alone_saves(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    save({"x": 1}, tmp_path / "a", no_dist=True)
    state = {"x": 0}
    load(state, tmp_path / "a", no_dist=True)
    assert state == {"x": 1}
    for alone in ("1", "", "many"):
        monkeypatch.setenv("WORLD_SIZE", alone)
        load(state, tmp_path / "a")
