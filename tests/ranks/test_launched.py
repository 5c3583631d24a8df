"""Processes that a launcher has started, and that have no process group."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from torch_dcpx import CheckpointManager, export, load, save
from torch_dcpx.errors import OptionError

CALLS: list[Callable[[Path], object]] = [
    lambda path: save({}, path),
    lambda path: load({}, path),
    lambda path: export({}, path),
    lambda path: CheckpointManager(path).latest(),
]


def test_launched_process_without_a_group_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for call in CALLS:
        with pytest.raises(OptionError, match=r"WORLD_SIZE=2 .*no_dist=True") as caught:
            call(tmp_path / "a")
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
