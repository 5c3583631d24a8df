"""What a rank writes has the shape that its plan says, or nothing is written."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support import rank_hooks
from support.async_saves import no_save_is_left
from support.hook_planners import Halves
from support.machine import seconds
from support.odd_tensors import Folded
from support.plan_states import as_rank, mesh_of
from support.rank_hooks import states_of
from support.saves import data_files
from support.states import blank_like
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.tensor import DTensor, Shard

import torch_dcpx as dcpx
from torch_dcpx import _C, DcpxSavePlanner, DcpxWriter, PlanError, WriteOptions
from torch_dcpx.checkpoint.save_plan import PlanRound

__all__ = ["no_save_is_left"]
pytestmark = pytest.mark.usefixtures("no_save_is_left")

WHOLE = torch.arange(11 * 3, dtype=torch.float32).reshape(11, 3)
GOOD = {"w": torch.ones(11, 3), "step": 1}


def odd(rank: int, ranks: int = 2) -> DTensor:
    """Returns 11 rows as 5 and 6, where torch cuts them into 6 and 5; on one rank as 10."""
    local = WHOLE[:10] if ranks == 1 else (WHOLE[:5], WHOLE[5:])[rank]
    return DTensor.from_local(
        local, mesh_of((ranks,)), [Shard(0)], run_check=False, shape=(11, 3), stride=(3, 1)
    )


def reshaping(change: Callable[[torch.Tensor], torch.Tensor]) -> DefaultSavePlanner:
    """Returns a planner that gives another tensor than planned for "w", once it is asked for it."""

    class Reshapes(DefaultSavePlanner):
        def transform_object(self, write_item: WriteItem, value: Any) -> Any:
            if write_item.index.fqn == "w":
                return change(value)
            return super().transform_object(write_item, value)

    return Reshapes()


WAVES = WriteOptions(host_memory_bytes=1 << 19, workers=1, slot_bytes=1 << 18)
# Before the last tensor of the state is asked for these fit into a wave, and would be written.
LARGE = {"large": torch.ones(1 << 17), "more": torch.ones(1 << 17)}
Way = Callable[[dict[str, Any], Path, Any], Any]
WAYS: dict[str, Way] = {
    "save": lambda state, path, planner: dcpx.save(state, path, planner=planner, no_dist=True),
    "async_save": lambda state, path, planner: dcpx.async_save(
        state, path, planner=planner, no_dist=True
    ).result(seconds(60)),
    "waves": lambda state, path, planner: dcpx.async_save(
        {**LARGE, **state}, path, planner=planner, no_dist=True, options=WAVES
    ).result(seconds(60)),
    "dcp.save": lambda state, path, planner: dcp.save(
        state, storage_writer=DcpxWriter(path), planner=planner, no_dist=True
    ),
}


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> Way:
    return WAYS[request.param]


def assert_refused(save: Callable[[], object], path: Path, text: str) -> None:
    """Asserts that a save is a PlanError, and that what is in `path` is the last good one."""
    dcp.save(GOOD, storage_writer=DcpxWriter(path), no_dist=True)
    before = data_files(path)
    with pytest.raises((PlanError, CheckpointException)) as caught:
        save()
    error = caught.value
    if isinstance(error, CheckpointException):
        ((error, _),) = error.failures.values()
    assert isinstance(error, PlanError) and text in str(error) and error.fqn == "w"
    assert data_files(path) == before
    assert dcpx.verify(path).ok


@pytest.fixture
def files_made(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What the engine was given to write, whether or not it went away again."""
    made: list[object] = []

    class Watched:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._job = _C.WriteJob(*args, **kwargs)

        def write(self, rows: Any, *args: Any, **kwargs: Any) -> Any:
            made.append(rows)
            return self._job.write(rows, *args, **kwargs)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._job, name)

    class Door:
        WriteJob = Watched

        def __getattr__(self, name: str) -> Any:
            return getattr(_C, name)

    monkeypatch.setattr("torch_dcpx.writer.files._C", Door())
    return made


@pytest.mark.parametrize("planner", [DcpxSavePlanner, DefaultSavePlanner])
def test_dtensor_with_other_rows_than_planned_is_refused_before_a_file_is_made(
    way: Way, planner: Callable[[], Any], tmp_path: Path, files_made: list[object]
) -> None:
    def save() -> None:
        files_made.clear()
        with as_rank(0, 1):
            way({"w": odd(0, 1)}, tmp_path, planner())

    assert_refused(save, tmp_path, "[11, 3] at offsets [0, 0], but")
    assert not files_made


def unsqueezed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.unsqueeze(-1)


def test_tensor_that_a_planner_reshapes_is_refused(way: Way, tmp_path: Path) -> None:
    with as_rank(0, 1):
        cases: list[tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]] = [
            (WHOLE, lambda tensor: tensor[:-1]),
            (WHOLE, lambda tensor: tensor.repeat_interleave(2, 0)),
            (WHOLE, lambda tensor: tensor.flatten()),
            (WHOLE, lambda tensor: tensor.t()),
            (WHOLE, unsqueezed),
            (torch.tensor(1.0), unsqueezed),
            (DTensor.from_local(WHOLE, mesh_of((1,)), [Shard(0)], run_check=False), unsqueezed),
        ]
        for number, (value, change) in enumerate(cases):
            path, planner = tmp_path / str(number), reshaping(change)
            path.mkdir()
            assert_refused(partial(way, {"w": value}, path, planner), path, "hooks must")


@pytest.mark.parametrize("planner", ["ours", "stock"])
def test_shards_cut_unlike_torch_are_refused_on_two_ranks(planner: str, tmp_path: Path) -> None:
    states = states_of(2, lambda rank: {"w": odd(rank)})
    assert_refused(lambda: rank_hooks.save(states, tmp_path, planner), tmp_path, "[6, 3]")


@pytest.mark.parametrize("is_kept", [False, True])
def test_piece_of_a_kept_plan_that_the_tensor_has_outgrown_is_refused(
    is_kept: bool, tmp_path: Path
) -> None:
    planner = DcpxSavePlanner(enable_plan_caching=is_kept)
    with as_rank(0, 1):
        even = DTensor.from_local(WHOLE, mesh_of((1,)), [Shard(0)], run_check=False)
        WAYS["save"]({"w": even}, tmp_path, planner)
        assert_refused(
            lambda: WAYS["save"]({"w": odd(0, 1)}, tmp_path, planner), tmp_path, "[10, 3]"
        )


def test_tensor_resized_after_it_was_planned_is_refused_before_a_file_is_made(
    way: Way, tmp_path: Path, files_made: list[object]
) -> None:
    class Late(DcpxSavePlanner):
        def finish_plan(self, new_plan: Any) -> Any:
            self.state_dict["w"] = WHOLE[:4]
            return super().finish_plan(new_plan)

    def save() -> None:
        files_made.clear()
        way({"w": WHOLE}, tmp_path, Late())

    assert_refused(save, tmp_path, "[4, 3]")
    assert not files_made


def test_tensor_that_a_planner_casts_is_stored_and_loads_as_from_stock(
    way: Way, tmp_path: Path
) -> None:
    state = {"w": WHOLE / 3, "step": 3}
    way(state, tmp_path / "ours", Halves())
    dcp.save(state, checkpoint_id=tmp_path / "stock", planner=Halves(), no_dist=True)
    assert dcpx.verify(tmp_path / "ours").ok
    found = {}
    for name in ("ours", "stock"):
        target = blank_like(state)
        dcp.load(target, checkpoint_id=tmp_path / name, no_dist=True)
        found[name] = target
    target = blank_like(state)
    dcpx.load(target, tmp_path / "ours", no_dist=True)
    expected = (WHOLE / 3).bfloat16().float()
    assert all(torch.equal(each["w"], expected) for each in (*found.values(), target))


def test_planner_that_makes_the_planned_shape_of_an_odd_shard_is_taken(tmp_path: Path) -> None:
    class Pads(DcpxSavePlanner):
        def transform_object(self, write_item: WriteItem, value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return torch.cat([value, torch.zeros(1, 3)])
            return super().transform_object(write_item, value)

    with as_rank(0, 1):
        WAYS["save"]({"w": odd(0, 1)}, tmp_path, Pads())
    found = {"w": torch.ones(11, 3)}
    dcpx.load(found, tmp_path, no_dist=True)
    assert torch.equal(found["w"], torch.cat([WHOLE[:10], torch.zeros(1, 3)]))


def test_matrix_that_calls_itself_a_vector_is_saved(way: Way, tmp_path: Path) -> None:
    state = {"w": torch.arange(48.0).reshape(6, 8).as_subclass(Folded)}
    way(state, tmp_path, DefaultSavePlanner())
    found = {"w": torch.zeros(6, 8).as_subclass(Folded)}
    dcp.load(found, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(found["w"].as_subclass(torch.Tensor), state["w"].as_subclass(torch.Tensor))


@pytest.mark.parametrize("planner", [DcpxSavePlanner, DefaultSavePlanner])
def test_odd_shard_is_refused_while_the_ranks_agree_on_a_plan(
    planner: Callable[[], Any], tmp_path: Path
) -> None:
    with as_rank(1, 2):
        state = {"w": odd(1)}
        own = planner()
        own.set_up_planner(state, None, False)
        writer = DcpxWriter(tmp_path)
        writer.set_up_storage_writer(False)
        with pytest.raises(PlanError, match=r"\[5, 3\] at offsets \[6, 0\], .* shape \[6, 3\]"):
            PlanRound(own, writer, 1, 2).offer()
