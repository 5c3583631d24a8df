"""A state that answers in its own way is asked in stock's way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.saves import WRITERS
from support.states import assert_same
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner


class Doubled(dict[str, Any]):
    """Gives twice what it holds."""

    def __getitem__(self, key: str) -> Any:
        return 2 * super().__getitem__(key)


class DoublingPlanner(DefaultSavePlanner):
    """A planner with stock's hooks over a state of its own."""

    def set_up_planner(
        self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        self.state_dict = Doubled(self.state_dict)


@pytest.mark.parametrize("writer", list(WRITERS))
def test_state_with_its_own_lookup_is_saved_as_it_answers(writer: str, tmp_path: Path) -> None:
    state = {"w": torch.arange(4), "step": 3}
    dcp.save(
        state, storage_writer=WRITERS[writer](tmp_path), planner=DoublingPlanner(), no_dist=True
    )
    loaded = {"w": torch.zeros(4, dtype=torch.int64), "step": 0}
    dcp.load(loaded, storage_reader=dcp.FileSystemReader(tmp_path), no_dist=True)
    assert_same({"w": 2 * torch.arange(4), "step": 6}, loaded)
