"""Plans that are used again: only where nothing that decides on them has changed, and rightly."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.async_saves import no_save_is_left
from support.machine import seconds
from support.plan_states import made, set_up
from support.tensor_bits import bits
from torch.distributed.checkpoint.metadata import Metadata

from torch_dcpx import DcpxSavePlanner, DcpxWriter, StorageError, async_save, close, save
from torch_dcpx.checkpoint.save_plan import default_save_planner
from torch_dcpx.planners import cache as plan_cache
from torch_dcpx.planners import save_planner

__all__ = ["made", "no_save_is_left"]
pytestmark = pytest.mark.usefixtures("no_save_is_left")

State = dict[str, Any]


def state_of(fill: float, *, rows: int = 6) -> State:
    return {
        "model": {"weight": torch.full((rows, 4), fill), "bias": torch.full((3,), -fill)},
        "step": int(fill),
    }


def assert_saved(path: Path, wanted: State) -> None:
    """Loads by stock alone."""
    found = copy.deepcopy(wanted)
    for tensor in found["model"].values():
        tensor.zero_()
    found["step"] = -1
    dcp.load(found, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    assert bits(found) == bits(wanted)


@pytest.mark.parametrize("planner", [None, DcpxSavePlanner()])
def test_unchanged_state_is_planned_once_and_saved_as_it_is_now(
    tmp_path: Path, made: list[int], planner: Any
) -> None:
    for number in range(4):
        begin = async_save if number % 2 else save
        done: Any = begin(state_of(number), tmp_path / str(number), planner=planner)
        if begin is async_save:
            done.result(seconds(60))
    assert made == [1, 1]
    for number in range(4):
        assert_saved(tmp_path / str(number), state_of(number))


def test_two_models_that_alternate_through_one_planner_are_planned_once_each(
    tmp_path: Path, made: list[int]
) -> None:
    planner = DcpxSavePlanner()
    for number in range(6):
        state = state_of(number, rows=5 + number % 2)
        save(state, tmp_path / str(number), planner=planner)
        assert_saved(tmp_path / str(number), state)
    assert made == [2, 2]


def test_planners_share_no_plan_but_the_default_ones(tmp_path: Path, made: list[int]) -> None:
    for number in range(2):
        save(state_of(number), tmp_path / str(number), planner=DcpxSavePlanner())
    assert made == [2, 2]
    for number in range(2, 4):
        save(state_of(number), tmp_path / str(number))
    assert made == [3, 3]


def test_planner_that_is_told_not_to_keeps_no_plan(tmp_path: Path, made: list[int]) -> None:
    planner = DcpxSavePlanner(enable_plan_caching=False)
    for number in range(2):
        save(state_of(number), tmp_path / str(number), planner=planner)
    assert made == [2, 2]
    assert len(planner.dcpx_planning.plans) == 0


@pytest.mark.parametrize(
    "hook",
    [
        "create_local_plan",
        "create_global_plan",
        "_create_global_plan",
        "_dedup_save_plans",
        "finish_plan",
    ],
)
def test_planner_with_planning_of_its_own_is_asked_each_time(
    hook: str, tmp_path: Path, made: list[int]
) -> None:
    asked = []

    def overriding(self: Any, *arguments: Any) -> Any:
        asked.append(hook)
        return getattr(DcpxSavePlanner, hook)(self, *arguments)

    planner = type("Own", (DcpxSavePlanner,), {hook: overriding})()
    on_instance = DcpxSavePlanner()
    setattr(on_instance, hook, lambda *arguments: overriding(on_instance, *arguments))
    for number, one in enumerate((planner, planner, on_instance, on_instance)):
        save(state_of(number), tmp_path / str(number), planner=one)
        assert_saved(tmp_path / str(number), state_of(number))
    assert len(asked) == 4
    assert made == [4, 4]


@pytest.mark.parametrize("hook", ["prepare_local_plan", "prepare_global_plan"])
def test_writer_that_sees_plans_sees_whole_ones_each_time(
    hook: str, tmp_path: Path, made: list[int]
) -> None:
    seen = []

    def overriding(self: Any, plans: Any) -> Any:
        one = plans[0] if isinstance(plans, list) else plans
        seen.append(len(one.items))
        return getattr(DcpxWriter, hook)(self, plans)

    kind = type("Own", (DcpxWriter,), {hook: overriding})
    for number in range(3):
        save(state_of(number), storage_writer=kind(tmp_path / str(number)))
    assert seen == [3, 3, 3]
    assert made[1] == 3


# ---- Failures, and what others do to what they get -----------------------------------------------


class _Failing:
    def state_dict(self) -> Any:
        raise ValueError("no state")

    def load_state_dict(self, state: Any) -> None: ...


def test_failed_saves_leave_plans_that_are_right(tmp_path: Path, made: list[int]) -> None:
    planner = DcpxSavePlanner()

    class FailsToWrite(DcpxWriter):
        def write_data(self, plan: Any, planner: Any) -> Any:
            raise StorageError("no room", errno=28, path="here")

    class FailsToCommit(DcpxWriter):
        def finish(self, metadata: Metadata, results: Any) -> None:
            metadata.state_dict_metadata.clear()
            raise StorageError("no room", errno=28, path="here")

    for kind in (FailsToWrite, FailsToCommit, FailsToWrite):
        with pytest.raises(StorageError, match="no room"):
            save(state_of(1), storage_writer=kind(tmp_path / "no"), planner=planner)
    with pytest.raises(ValueError, match="no state"):
        save({**state_of(1), "bad": _Failing()}, tmp_path / "no", planner=planner)
    assert made == [1, 1]  # a plan is right whatever becomes of the save
    save(state_of(2), tmp_path / "yes", planner=planner)
    assert_saved(tmp_path / "yes", state_of(2))
    assert made == [1, 1]


def test_global_plan_that_was_refused_is_not_kept(
    tmp_path: Path, made: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    planner = DcpxSavePlanner()
    with monkeypatch.context() as patch:
        patch.setattr(save_planner.MAKER, "global_plan", _refusing, raising=False)
        with pytest.raises(ValueError, match="refused"):
            save(state_of(1), tmp_path / "no", planner=planner)
    save(state_of(2), tmp_path / "yes", planner=planner)
    assert_saved(tmp_path / "yes", state_of(2))
    assert made == [1, 1]


def _refusing(*_: Any) -> Any:
    raise ValueError("refused")


def spoil(metadata: Metadata) -> None:
    for entry in metadata.state_dict_metadata.values():
        if hasattr(entry, "chunks"):
            for chunk in entry.chunks:
                chunk.sizes = torch.Size([1])
            entry.chunks.append(entry.chunks[0])
            entry.properties.dtype = torch.bool
            entry.size = torch.Size([99])
    metadata.state_dict_metadata.clear()
    metadata.planner_data.clear()


class _SpoilingWriter(DcpxWriter):
    def finish(self, metadata: Metadata, results: Any) -> None:
        super().finish(metadata, results)
        spoil(metadata)


def test_items_that_a_writer_spoils_spoil_no_later_save(tmp_path: Path, made: list[int]) -> None:
    class SpoilsItems(DcpxWriter):
        def write_data(self, plan: Any, planner: Any) -> Any:
            written = super().write_data(plan, planner)
            for item in plan.items:
                if item.tensor_data is not None:
                    item.tensor_data.chunk.sizes = torch.Size([1])
                    item.tensor_data.properties.dtype = torch.bool
            return written

    for number in range(3):
        save(state_of(number), storage_writer=SpoilsItems(tmp_path / str(number)))
        assert_saved(tmp_path / str(number), state_of(number))
    assert made == [1, 1]
    save(state_of(1, rows=9), storage_writer=DcpxWriter(tmp_path / "new"))
    save(state_of(2), storage_writer=DcpxWriter(tmp_path / "plain"))
    assert_saved(tmp_path / "plain", state_of(2))
    assert made == [2, 2]


@pytest.mark.parametrize("has_own_planner", [False, True])
def test_metadata_that_a_writer_spoils_spoils_no_later_save(
    tmp_path: Path, made: list[int], has_own_planner: bool
) -> None:
    planner = DcpxSavePlanner() if has_own_planner else None
    for number in range(4):
        kind = _SpoilingWriter if number < 3 else DcpxWriter
        save(state_of(number), storage_writer=kind(tmp_path / str(number)), planner=planner)
        if planner is not None and "metadata" in vars(planner):
            spoil(planner.metadata)
    assert made == [1, 1]
    for number in range(4):
        assert_saved(tmp_path / str(number), state_of(number))


def test_metadata_of_dcp_save_that_is_spoilt_spoils_no_later_save(
    tmp_path: Path, made: list[int]
) -> None:
    planner = DcpxSavePlanner()
    for number in range(3):
        writer = DcpxWriter(tmp_path / str(number))
        spoil(dcp.save(state_of(number), storage_writer=writer, planner=planner, no_dist=True))
        assert_saved(tmp_path / str(number), state_of(number))
    assert made == [1, 3]  # who agrees is torch's: the global plan is made each time
    save(state_of(7), tmp_path / "own", planner=planner)
    assert_saved(tmp_path / "own", state_of(7))


def test_few_plans_are_kept_and_the_last_ones(tmp_path: Path, made: list[int]) -> None:
    planner = DcpxSavePlanner()
    for rows in range(1, 8):
        set_up(planner, state_of(1, rows=rows))
    assert len(planner.dcpx_planning.plans) == plan_cache.MAX_PLANS
    assert made[0] == 7
    for rows in range(7, 3, -1):
        set_up(planner, state_of(1, rows=rows))
    assert made[0] == 7
    set_up(planner, state_of(1, rows=3))
    assert made[0] == 8


def test_plans_that_are_large_together_are_dropped_but_the_last(
    monkeypatch: pytest.MonkeyPatch, made: list[int], tmp_path: Path
) -> None:
    monkeypatch.setattr(plan_cache, "MAX_ITEMS", 10)
    planner = DcpxSavePlanner()
    for rows in (1, 2, 1, 2):  # 3 items and 3 entries each
        save(state_of(1, rows=rows), tmp_path / str(rows), planner=planner)
    assert len(planner.dcpx_planning.plans) == 1
    assert made == [4, 4]


def test_kept_plan_weighs_its_items_and_its_agreements_items_and_chunks(tmp_path: Path) -> None:
    planner = DcpxSavePlanner()
    save(state_of(1), tmp_path, planner=planner)
    (known,) = planner.dcpx_planning.plans._known.values()
    assert known.weight == 3 + 3 + (2 + 1)  # local; piece; chunks, and the number
    assert known.agreement is not None
    metadata = known.agreement.metadata
    assert metadata is not None
    weight: Any = metadata.state_dict_metadata["model.weight"]
    many = dataclasses.replace(weight, chunks=weight.chunks * 100)
    entries = {**metadata.state_dict_metadata, "model.weight": many}
    heavy = dataclasses.replace(metadata, state_dict_metadata=entries)
    assert dataclasses.replace(known.agreement, metadata=heavy).weight == 3 + (101 + 1)


def test_agreement_that_is_too_large_by_itself_is_not_kept(
    monkeypatch: pytest.MonkeyPatch, made: list[int], tmp_path: Path
) -> None:
    for most, plans in ((9, [1, 1]), (8, [2, 3])):  # it weighs 9
        monkeypatch.setattr(plan_cache, "MAX_ITEMS", most)
        planner = DcpxSavePlanner()
        for number in range(2):
            save(state_of(1), tmp_path / f"{most} {number}", planner=planner)
        assert made == plans
        (known,) = planner.dcpx_planning.plans._known.values()
        assert (known.agreement is None) == (most == 8)


def test_close_drops_the_plans_of_saves_without_a_planner(tmp_path: Path) -> None:
    save(state_of(1), tmp_path)
    plans = default_save_planner().dcpx_planning.plans
    assert len(plans) > 0
    close()
    assert len(plans) == 0


def test_kept_plans_hold_no_tensor(tmp_path: Path) -> None:
    planner = DcpxSavePlanner()
    save(state_of(1), tmp_path, planner=planner)
    kept = pickle.dumps(list(planner.dcpx_planning.plans._known.values()))
    assert b"_rebuild_tensor" not in kept


def test_copied_and_pickled_planners_have_no_plans_and_work(tmp_path: Path) -> None:
    planner = DcpxSavePlanner(on_conflict="error")
    save(state_of(1), tmp_path / "0", planner=planner)
    del planner.state_dict
    copies = copy.copy(planner), copy.deepcopy(planner), pickle.loads(pickle.dumps(planner))
    for number, other in enumerate(copies):
        assert other.dcpx_planning is not planner.dcpx_planning
        assert len(other.dcpx_planning.plans) == 0
        assert other.on_conflict == "error"
        save(state_of(number), tmp_path / f"other{number}", planner=other)
        assert_saved(tmp_path / f"other{number}", state_of(number))


def test_values_that_a_subclass_transforms_are_those_of_this_save(
    tmp_path: Path, made: list[int]
) -> None:
    class Doubling(DcpxSavePlanner):
        def lookup_object(self, index: Any) -> Any:
            found = super().lookup_object(index)
            return found * 2 if isinstance(found, torch.Tensor) else found

    planner = Doubling()
    for number in range(3):
        save(state_of(number), tmp_path / str(number), planner=planner)
        found = state_of(0)
        dcp.load(found, checkpoint_id=tmp_path / str(number), no_dist=True)
        assert bits(found["model"]) == bits(state_of(2 * number)["model"])
    assert made == [1, 1]
