"""Modules whose `state_dict()` gives copies, in a load and in a manager: `load_state_dict` gets
what was read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.copying import COPYING, assert_holds, cloning, plain
from torch import nn

import torch_dcpx as dcpx


@pytest.mark.parametrize("make", COPYING)
def test_load_hands_copies_to_modules_in_the_state(
    tmp_path: Path, make: Callable[[Any], nn.Module]
) -> None:
    old, new = make(plain(7)), make(plain())
    dcpx.save({"model": old, "step": 3}, tmp_path)
    state: dict[str, Any] = {"model": new, "step": 0}
    dcpx.load(state, tmp_path)
    assert_holds(new, old)
    assert state["step"] == 3 and state["model"] is new


@pytest.mark.parametrize("make", COPYING)
def test_manager_hands_copies_to_the_model(
    tmp_path: Path, make: Callable[[Any], nn.Module]
) -> None:
    old, new = make(plain(7)), make(plain())
    manager = dcpx.CheckpointManager(tmp_path)
    manager.save(1, model=old)
    manager.wait()
    manager.resume(model=new)
    assert_holds(new, old)
    manager.close()


def test_load_into_a_state_dict_fills_it_and_leaves_the_module_to_the_caller(
    tmp_path: Path,
) -> None:
    old, new = plain(7), cloning(plain())
    dcpx.save(dict(old.state_dict()), tmp_path)
    state = dict(new.state_dict())
    dcpx.load(state, tmp_path)
    assert torch.equal(state["0.weight"], old[0].weight)
    new.load_state_dict(state)
    assert_holds(new, old)
