"""DCP's calls with every argument, through the hook: they work and stock reads the result, or an
UnsupportedError names what cannot be.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.states import assert_same, blank_like, mixed_state
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
)
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import torch_dcpx
from torch_dcpx.hook.classes import OURS

pytestmark = pytest.mark.usefixtures("hook_off")

# What the cases of test_dcp_calls_ranks give; another argument of a newer torch needs another.
SAVE = {"checkpoint_id", "storage_writer", "planner", "process_group", "no_dist", "use_collectives"}
LOAD = {"checkpoint_id", "storage_reader", "planner", "process_group", "no_dist"}
CALLS: list[tuple[Any, set[str]]] = [
    (dcp.save, SAVE),
    (dcp.async_save, SAVE | {"async_checkpointer_type", "async_stager"}),
    (dcp.load, LOAD),
]


# ---- Signatures ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("call", "given"), CALLS, ids=["save", "async_save", "load"])
def test_every_argument_of_dcp_has_a_case(call: Any, given: set[str]) -> None:
    assert set(inspect.signature(call).parameters) == {"state_dict", *given}
    assert {kind.name for kind in AsyncCheckpointerType} == {"THREAD", "PROCESS"}
    assert len(dataclasses.fields(StagingOptions)) == 4


@pytest.mark.parametrize("stock", OURS, ids=lambda cls: cls.__name__)
def test_signatures_are_those_of_stock(stock: type) -> None:
    class Own(stock):  # type: ignore[misc]
        def __init__(self, *, own: int) -> None:
            pass

    init = inspect.signature(stock.__init__)  # type: ignore[misc]
    before = init.replace(parameters=list(init.parameters.values())[1:])
    torch_dcpx.install()
    assert inspect.signature(stock) == before
    assert list(inspect.signature(Own).parameters) == ["own"]
    ours = list(inspect.signature(OURS[stock].__init__).parameters)[1:]
    assert ours[: len(before.parameters)] == list(before.parameters)


# ---- Objects that were made before, or are copied -----------------------------------------------

COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda it: pickle.loads(pickle.dumps(it)),
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("is_on", [True, False], ids=["on", "off"])
def test_copies_of_what_was_replaced_work_with_the_hook_on_and_off(
    copied: Any, is_on: bool, tmp_path: Path
) -> None:
    state, options = mixed_state(), StagingOptions(False, True, False, False)
    torch_dcpx.install()
    parts = (
        FileSystemWriter(tmp_path), DefaultSavePlanner(), FileSystemReader(tmp_path),
        DefaultLoadPlanner(), DefaultStager(options),
    )  # fmt: skip
    if not is_on:
        torch_dcpx.uninstall()
    again: Any = [copied(part) for part in parts]
    assert [type(part) for part in again] == [type(part) for part in parts]
    writer, save_planner, reader, load_planner, stager = again
    dcp.async_save(
        state, storage_writer=writer, planner=save_planner, async_stager=stager, no_dist=True
    ).result()
    stager.close()
    target = blank_like(state)
    dcp.load(target, storage_reader=reader, planner=load_planner, no_dist=True)
    assert_same(state, target)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_copy_of_torchs_own_stager_stages_as_that_does(copied: Any) -> None:
    stager = DefaultStager(StagingOptions(False, False, False, False))
    torch_dcpx.install()
    again = copied(stager)
    assert isinstance(again.stage({"w": torch.ones(3)}), dict)
    assert again.is_shared is False


def test_planner_of_stock_that_kept_plans_writes_what_it_is_given(tmp_path: Path) -> None:
    data = pickle.dumps(DefaultSavePlanner(enable_plan_caching=True))
    torch_dcpx.install()
    planner = pickle.loads(data)
    for dtype in (torch.float32, torch.bfloat16):  # stock's cache takes these states for one
        dcp.save({"w": torch.ones(4, dtype=dtype)}, checkpoint_id=tmp_path, planner=planner)
        assert torch_dcpx.verify(tmp_path).ok


# ---- Without the hook ---------------------------------------------------------------------------


def test_constructors_of_stock_take_their_arguments_after_uninstall(tmp_path: Path) -> None:
    class OwnWriter(FileSystemWriter):
        def __init__(self, path: Path, *, extra: int) -> None:
            super().__init__(path, thread_count=2)
            self.extra = extra

    torch_dcpx.install()
    torch_dcpx.uninstall()
    options = StagingOptions(False, False, False, False)
    made = [
        FileSystemWriter(tmp_path, False, True, 3, 1 << 20, True, True),
        FileSystemWriter(path=tmp_path, thread_count=3, overwrite=False),
        FileSystemReader(tmp_path, None),
        DefaultSavePlanner(False, enable_plan_caching=True),
        DefaultLoadPlanner(allow_partial_load=True),
        DefaultStager(options),
        DefaultStager(config=options),
    ]
    assert {type(it) for it in made} == set(OURS)
    own = OwnWriter(tmp_path, extra=7)
    assert (own.extra, own.thread_count) == (7, 2)
    state = mixed_state()
    dcp.async_save(
        state, storage_writer=own, async_stager=DefaultStager(options), no_dist=True
    ).result()
    target = blank_like(state)
    dcp.load(target, storage_reader=FileSystemReader(tmp_path), no_dist=True)
    assert_same(state, target)
    with pytest.raises(TypeError, match="no_such_argument"):
        DefaultStager(no_such_argument=1)  # type: ignore[call-arg]
