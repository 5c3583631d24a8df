"""`dcpx.load` on two ranks: what fails on one of them is raised on both."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.no_collectives import no_collectives
from support.rank_fixture import StartRanks
from support.saves import change, read_footer
from support.states import assert_same
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import torch_dcpx as dcpx


def errors_of(run: Callable[[], Any]) -> list[Any]:
    """Returns what each rank raised: (class name, text, fields)."""
    try:
        run()
    except (Exception, KeyboardInterrupt) as raised:  # noqa: BLE001 - the caller looks at it
        error: BaseException = raised
    else:
        error = AssertionError("nothing was raised")
    fields = {name: getattr(error, name) for name in getattr(error, "FIELDS", ())}
    gathered: list[Any] = [None, None]
    dist.all_gather_object(gathered, (type(error).__name__, str(error), fields))
    return gathered


def same_on_both(run: Callable[[], Any]) -> Any:
    first, second = errors_of(run)
    assert first == second
    return first


def resharded_state_is_loaded_without_collectives(path: Path, rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    whole = {"w": torch.randn(11, 6, generator=torch.Generator().manual_seed(1)), "step": 7}
    sharded = {"w": distribute_tensor(whole["w"], mesh, [Shard(0)]), "step": 7, "unused": 1}
    dcp.save({**sharded, f"own{rank}": rank}, storage_writer=dcpx.DcpxWriter(path))
    for placement in (Shard(0), Shard(1), Replicate()):
        target = {
            "w": distribute_tensor(torch.zeros(11, 6), mesh, [placement]),
            "step": 0,
            f"own{rank}": -1,
        }
        with no_collectives():
            report = dcpx.load(target, path)
        assert report.unexpected == ("unused",), "what the other rank asks for is expected"
        assert report.is_whole
        assert_same(whole["w"], target["w"].full_tensor())
        assert (target["step"], target[f"own{rank}"]) == (7, rank)


def mismatch_on_one_rank_is_the_same_error_on_both(path: Path, rank: int) -> None:
    target: dict[str, Any] = {"step": 0}
    if rank == 1:
        target |= {"gone": torch.zeros(2), "w": torch.zeros(3, 3)}
    name, text, fields = same_on_both(lambda: dcpx.load(target, path))
    assert name == "MismatchError"
    assert (fields["missing"], fields["ranks"]) == (("gone",), (1,))
    assert fields["shapes"] == (("w", (11, 6), (3, 3)),)
    assert text.startswith("the state does not fit"), "no rank's own name before it"
    assert "rank 1 of 2" in text
    assert target["step"] == 0


class Holder:
    """A Stateful that gives the dict it holds."""

    def __init__(self, state: dict[Any, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[Any, Any]:
        return self.state

    def load_state_dict(self, state: dict[Any, Any]) -> None:
        self.state = state


def parts_grow_by_what_no_rank_asks_for(path: Path, rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    shards = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])
    dcpx.save({"k": Holder({f"own{rank}": {rank: 1}, "all": {7: [{"a": 1}]}})}, path / "a")
    dcpx.save({"k": Holder({"all": {7: 1}, "w": shards})}, path / "b")
    for fresh in ({}, {"all": {}}):
        holder = Holder({f"own{rank}": {rank: 0}, **(fresh if rank else {})})
        with no_collectives():
            dcpx.load({"k": holder}, path / "a")
        wanted = {f"own{rank}": {rank: 1}, "all": {7: [{"a": 1}]}}
        assert holder.state == wanted, "what the other rank asks for is its own"
    held: dict[Any, Any] = {"all": {}}
    name, text, fields = same_on_both(lambda: dcpx.load({"k": Holder(held)}, path / "b"))
    assert (name, fields["fqn"]) == ("MismatchError", "k.w") and "2 pieces" in text
    assert held == {"all": {}}
    state = {**held, **({"w": shards} if rank else {})}
    dcpx.load({"k": Holder(state)}, path / "b")
    assert state["all"] == {7: 1}, "where a rank asks for the shards, no other gets them"


def arguments_that_differ_are_an_error_on_both(path: Path, rank: int) -> None:
    target = {"w": torch.zeros(11, 6, dtype=torch.float64)}
    found = errors_of(lambda: dcpx.load(target, path, cast="error" if rank else "allow"))
    assert [name for name, _, _ in found] == ["PlanError", "PlanError"]
    one = {"storage_reader": dcp.FileSystemReader(path)} if rank else {"checkpoint_id": path}
    found = errors_of(lambda: dcpx.load({"step": 0}, **one))
    assert [name for name, _, _ in found] == ["UnsupportedError", "UnsupportedError"]


class Fails(DefaultLoadPlanner):
    """Does something on rank 1 in one hook."""

    def __init__(self, hook: str, then: Callable[[], Any]) -> None:
        super().__init__()
        self.hook, self.then = hook, then

    def create_local_plan(self) -> Any:
        if dist.get_rank() == 1 and self.hook == "create_local_plan":
            self.then()
        return super().create_local_plan()

    def commit_tensor(self, read_item: Any, tensor: Any) -> None:
        if dist.get_rank() == 1 and self.hook == "commit_tensor":
            self.then()


def failing_rank_fails_the_load_of_both(path: Path, _rank: int) -> None:
    def full() -> None:
        raise dcpx.StorageError("no", errno=28, path="x")

    def other() -> None:
        raise KeyError("mine")

    def interrupt() -> None:
        os.kill(os.getpid(), signal.SIGINT)

    for hook in ("create_local_plan", "commit_tensor"):
        for fail, names in (
            (full, ["StorageError", "StorageError"]),
            (other, ["RankError", "RankError"]),
            (interrupt, ["RankError", "KeyboardInterrupt"]),
        ):
            planner = Fails(hook, fail)
            target = {"w": torch.zeros(11, 6)}
            found = errors_of(lambda t=target, p=planner: dcpx.load(t, path, planner=p))
            assert [name for name, _, _ in found] == names, (hook, fail.__name__, found)
    target = {"w": torch.zeros(11, 6)}
    assert dcpx.load(target, path).is_whole, "the next load works"


def damage_seen_by_one_rank_fails_the_load_of_both(path: Path, rank: int) -> None:
    target = {f"own{rank}": torch.zeros(50_000, dtype=torch.int64)}
    dcp.save({f"own{rank}": torch.arange(50_000)}, storage_writer=dcpx.DcpxWriter(path))
    file = path / "__1_0.distcp"
    if rank == 1:
        change(file, read_footer(file).row("own1").payload_offset + 70_000, b"\xff\xfe")
    dist.barrier()
    for name, _, fields in errors_of(lambda: dcpx.load(target, path)):
        assert name == "CorruptionError"
        assert (fields["fqn"], fields["path"]) == ("own1", str(file))


def refused_state_fails_the_load_of_both(path: Path, rank: int) -> None:
    class Refuses:
        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, _state: dict[str, Any]) -> None:
            raise LookupError("not mine")

    # Only one rank has such an object: both take part in handing it over all the same.
    target: dict[str, Any] = {"step": 0, **({"object": Refuses()} if rank else {})}
    found = errors_of(lambda: dcpx.load(target, path))
    assert [name for name, _, _ in found] == ["RankError", "RankError"]
    assert {fields["original"] for _, _, fields in found} == {"builtins.LookupError"}


def hooks_of_the_coordinator_see_whole_plans(path: Path, rank: int) -> None:
    class Sees(dcpx.DcpxReader):
        seen: Any = None

        def prepare_global_plan(self, plans: Any) -> Any:
            self.seen = [len(plan.items) for plan in plans]
            return super().prepare_global_plan(plans)

    reader = Sees(path)
    target = {"w": torch.zeros(11, 6), "step": 0} if rank else {"step": 0}
    assert dcpx.load(target, storage_reader=reader).items == (3 if rank else 1)
    assert reader.seen == (None if rank else [1, 3])
    assert target["step"] == 7


def groups_and_single_processes_load_by_themselves(path: Path, rank: int) -> None:
    groups = [dist.new_group([r]) for r in range(2)]
    if rank == 1:
        target = {"w": torch.zeros(11, 6)}
        assert dcpx.load(target, path, process_group=groups[1]).is_whole
        with pytest.raises(dcpx.MismatchError) as caught:
            dcpx.load({"gone": 0}, path, no_dist=True)
        assert caught.value.ranks == (0,)
    dist.barrier()


def each_rank_loads_its_own_metadata(path: Path, rank: int) -> None:
    state = {"own": torch.full((5,), rank), f"only{rank}": rank}
    dcp.save(state, storage_writer=dcpx.DcpxWriter(path), use_collectives=False)
    dist.barrier()
    target = {"own": torch.full((5,), -1)}
    report = dcpx.load(target, path)
    assert_same({"own": torch.full((5,), rank)}, target)
    assert report.unexpected == (f"only{rank}",)


def lost_rank_is_named(path: Path, rank: int) -> None:
    """Last: the other rank never begins, so the group's operations are out of step."""
    if rank == 0:
        options = dcpx.ReadOptions(load_timeout_s=0.5)
        with pytest.raises(dcpx.RankLostError) as caught:
            dcpx.load({"step": 0}, path, options=options)
        assert caught.value.ranks == (1,)


def loads_and_failures(root: Path) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    rank = dist.get_rank()
    whole = root / "whole"
    resharded_state_is_loaded_without_collectives(whole, rank)
    mismatch_on_one_rank_is_the_same_error_on_both(whole, rank)
    parts_grow_by_what_no_rank_asks_for(root / "grown", rank)
    arguments_that_differ_are_an_error_on_both(whole, rank)
    failing_rank_fails_the_load_of_both(whole, rank)
    damage_seen_by_one_rank_fails_the_load_of_both(root / "damaged", rank)
    refused_state_fails_the_load_of_both(whole, rank)
    hooks_of_the_coordinator_see_whole_plans(whole, rank)
    groups_and_single_processes_load_by_themselves(whole, rank)
    each_rank_loads_its_own_metadata(root / "local", rank)
    lost_rank_is_named(whole, rank)


def test_two_ranks_load_together_and_fail_together(ranks: StartRanks, tmp_path: Path) -> None:
    ranks(2, anew=True)(loads_and_failures, tmp_path)
