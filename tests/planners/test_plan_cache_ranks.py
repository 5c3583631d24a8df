"""Three ranks that plan with earlier plans: all of them, or none."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.machine import seconds
from support.rank_fixture import StartRanks
from support.tensor_bits import bits
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import torch_dcpx as dcpx
from torch_dcpx.planners import save_planner
from torch_dcpx.ranks.store_keys import StoreKeys

sent: dict[str, int] = {}  # bytes by key, of the save under way on this rank


class _Counting:
    """Global plans that were made: on the coordinator."""

    def __init__(self, maker: Any) -> None:
        self._maker = maker
        self.made = 0

    def global_plan(self, *arguments: Any) -> Any:
        self.made += 1
        return self._maker.global_plan(*arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._maker, name)


counting = _Counting(save_planner.MAKER)


def note_what_is_planned_and_sent() -> None:
    save_planner.MAKER = counting  # type: ignore[assignment]
    set_one, set_many = StoreKeys.set, StoreKeys.set_all

    def noting_set(self: Any, key: str, value: bytes, deadline: Any) -> None:
        sent[key] = len(value)
        set_one(self, key, value, deadline)

    def noting_all(self: Any, values: Any, deadline: Any) -> None:
        values = list(values)
        sent.update({key: len(value) for key, value in values})
        set_many(self, values, deadline)

    StoreKeys.set, StoreKeys.set_all = noting_set, noting_all  # type: ignore[method-assign]


def state(mesh: Any, fill: float, *, tensors: int = 3, more: Any = ()) -> dict[str, Any]:
    whole = torch.arange(7 * 4, dtype=torch.float32).reshape(7, 4) * fill
    return {
        "model": {
            **{f"layer{n}": torch.full((3,), fill + n) for n in range(tensors)},
            "rows": distribute_tensor(whole, mesh, [Shard(0)]),
            "copied": distribute_tensor(whole + 1, mesh, [Replicate()]),
        },
        "step": int(fill),
        f"of rank {dist.get_rank()}": torch.full((2,), fill),
        **dict(more),
    }


def check(path: Path, wanted: dict[str, Any], group: Any = None) -> None:
    found = copy.deepcopy(wanted)
    for tensor in found["model"].values():
        tensor.zero_()
    found["step"] = -1
    dcp.load(found, storage_reader=dcp.FileSystemReader(path), process_group=group)
    assert bits(found) == bits(wanted)


class Saves:
    """Saves by one planner, and says what the ranks did for it."""

    def __init__(self, root: Path, mesh: Any, planner: Any = None) -> None:
        self.root, self.mesh, self.planner = root, mesh, planner
        self.number = 0

    def save(self, *, group: Any = None, **about: Any) -> tuple[int, int]:
        """Returns (global plans made, rounds) of a save that is then loaded."""
        self.number += 1
        path = self.root / str(self.number)
        wanted = state(self.mesh, float(self.number), **about)
        before = counting.made
        sent.clear()
        if self.number % 2:
            dcpx.save(wanted, path, planner=self.planner, process_group=group)
        else:
            dcpx.async_save(wanted, path, planner=self.planner, process_group=group).result(
                seconds(60)
            )
        check(path, wanted, group)
        rank = dist.get_rank(group)
        return counting.made - before, sum(key == f"{n}/v/{rank}" for n in range(9) for key in sent)


def a_change_on_one_rank_makes_all_plan(saves: Saves, rank: int, group: Any = None) -> None:
    is_first = dist.get_rank(group) == 0
    new, known = (int(is_first), 1), (0, 1)
    both = (int(is_first), 2)  # some know an agreement, others do not
    assert saves.save(group=group) == new
    assert saves.save(group=group) == known
    more = [("extra", torch.ones(2))] if rank == 1 else []
    assert saves.save(group=group, more=more) == both
    assert saves.save(group=group, more=more) == known
    # The others keep one agreement a state: theirs is of the other one now.
    assert saves.save(group=group) == both
    assert saves.save(group=group) == known


def a_rank_that_lost_its_plans_makes_all_plan(saves: Saves, rank: int) -> None:
    saves.save()
    assert saves.save() == (0, 1)
    if rank == 2:
        saves.planner.dcpx_planning.plans._known.clear()
    found = saves.save()
    assert found == (int(rank == 0), 2), (found, sent)
    assert saves.save() == (0, 1)


def values_that_differ_are_found_in_an_unchanged_state(root: Path, mesh: Any, rank: int) -> None:
    saves = Saves(root, mesh, dcpx.DcpxSavePlanner(on_conflict="error"))
    saves.save(more=[("seed", 5)])
    assert saves.save(more=[("seed", 6)]) == (0, 1)
    with pytest.raises(dcpx.PlanError, match="1 Python values differ"):
        saves.save(more=[("seed", rank)])
    assert saves.save(more=[("seed", 7)]) == (int(rank == 0), 1)  # which all have dropped
    assert saves.save(more=[("seed", 8)]) == (0, 1)
    own = [(f"own seed of {rank}", rank)]
    saves.save(more=own)
    assert saves.save(more=own) == (0, 1)  # each of a name of its own
    two = [("of two", rank)] if rank < 2 else []
    with pytest.raises(dcpx.PlanError, match="of two"):
        saves.save(more=two)
    two = [("of two", 3)] if rank < 2 else []
    for _ in range(2):  # no digest is the same on all ranks: planned each time
        assert saves.save(more=two) == (int(rank == 0), 1)


def values_that_differ_are_planned_each_time_and_the_lowest_ranks_are_kept(
    root: Path, mesh: Any, rank: int
) -> None:
    planner = dcpx.DcpxSavePlanner()
    for number in range(3):
        before = counting.made
        dcpx.save({"model": {}, "seed": 10 * number + rank}, root / str(number), planner=planner)
        assert counting.made - before == int(rank == 0)
        found = {"seed": -1}
        dcp.load(found, storage_reader=dcp.FileSystemReader(root / str(number)))
        assert found == {"seed": 10 * number}


class _Failing:
    def state_dict(self) -> Any:
        raise ValueError("no state here")

    def load_state_dict(self, state: Any) -> None: ...


def failures_on_one_rank_leave_all_with_plans_that_are_right(
    root: Path, mesh: Any, rank: int
) -> None:
    saves = Saves(root, mesh, dcpx.DcpxSavePlanner())
    saves.save()
    with pytest.raises(dcpx.RankError, match="no state here"):
        saves.save(more=[("bad", _Failing())] if rank == 1 else [])
    assert saves.save() == (0, 1)
    # A rank that fails to finish a plan has no piece of it; the others may.
    planner = saves.planner
    more = [("new", torch.ones(3))]
    if rank == 2:
        save_planner.with_pieces, before = _refuse, save_planner.with_pieces
        planner.split_replicas = True
    with pytest.raises(dcpx.DcpxError, match="no pieces"):
        saves.save(more=more)
    if rank == 2:
        save_planner.with_pieces = before
        planner.split_replicas = None
    assert saves.save(more=more)[0] == int(rank == 0)
    assert saves.save(more=more) == (0, 1)


def _refuse(*_: Any, **__: Any) -> Any:
    raise dcpx.PlanError("no pieces")


def rows_of_replicas_are_cut_from_the_new_tensors(root: Path, mesh: Any, rank: int) -> None:
    planner = dcpx.DcpxSavePlanner(split_replicas=True)
    for number in range(1, 4):
        large = torch.arange(501 * 256, dtype=torch.float32).reshape(501, 256) * number
        wanted = {"model": {"large": large}, "step": number}
        before = counting.made
        dcpx.save(wanted, root / str(number), planner=planner)
        assert counting.made - before == int(rank == 0 and number == 1)
        sizes = [
            sum(f.stat().st_size for f in (root / str(number)).glob(f"__{r}_*")) for r in range(3)
        ]
        assert max(sizes) * 3 / sum(sizes) <= 1.1, sizes
        check(root / str(number), wanted)


def pair_saves_by_the_planner_of_all(root: Path, planner: Any, group: Any) -> None:
    """Each pair agrees by itself, though rank 0 knows the state from the pair before."""
    before = counting.made
    for number in range(3):
        wanted = {"model": {"w": torch.full((5,), float(number))}, "step": number}
        path = root / str(number)
        dcpx.save(wanted, path, planner=planner, process_group=group)
        check(path, wanted, group)
    assert counting.made - before == int(dist.get_rank() == 0)


def saves_by_earlier_plans(root: Path) -> None:
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (3,))
    note_what_is_planned_and_sent()
    a_change_on_one_rank_makes_all_plan(Saves(root / "default", mesh), rank)
    saves = Saves(root / "own", mesh, dcpx.DcpxSavePlanner())
    a_change_on_one_rank_makes_all_plan(saves, rank)
    a_rank_that_lost_its_plans_makes_all_plan(saves, rank)
    values_that_differ_are_found_in_an_unchanged_state(root / "values", mesh, rank)
    values_that_differ_are_planned_each_time_and_the_lowest_ranks_are_kept(
        root / "lowest", mesh, rank
    )
    failures_on_one_rank_leave_all_with_plans_that_are_right(root / "failed", mesh, rank)
    rows_of_replicas_are_cut_from_the_new_tensors(root / "rows", mesh, rank)
    # The same planner in another group, of other ranks under the numbers of before.
    pairs = [dist.new_group([0, 1]), dist.new_group([0, 2])]
    for pair, ranks in zip(pairs, ((0, 1), (0, 2)), strict=True):
        if rank in ranks:
            pair_saves_by_the_planner_of_all(root / f"pair {ranks}", saves.planner, pair)


@pytest.mark.slow
def test_three_ranks_plan_anew_where_one_has_changed(ranks: StartRanks, tmp_path: Path) -> None:
    ranks(3, anew=True)(saves_by_earlier_plans, tmp_path)
