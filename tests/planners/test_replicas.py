"""Tensors whose placement says that ranks hold copies are shared by rows, all others are whole."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.hook_planners import ForeignSave
from support.plan_states import as_rank, mesh_of, part_of
from support.rank_hooks import LOAD_PLANNERS, READERS, load, save, sent, states_of
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.utils import find_state_dict_object
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from torch_dcpx import DcpxSavePlanner, DcpxWriter, PlanError
from torch_dcpx.planners import save_planner
from torch_dcpx.ranks.plan_wire import RankPlan, offered

State = dict[str, Any]

LARGE = torch.arange(800 * 64, dtype=torch.float32).reshape(800, 64)  # 200 KiB
COPIED = [Replicate(), Replicate()]


def hsdp(rank: int) -> State:
    """Returns what a rank of four has: replicas by placement of several kinds, and plain ones."""
    mesh = mesh_of((2, 2))
    return {
        "rows": part_of(LARGE, mesh, [Replicate(), Shard(0)]),
        "columns": part_of(LARGE + 1, mesh, [Shard(1), Replicate()]),
        "copied": part_of(LARGE + 2, mesh, COPIED),
        "strided": part_of(LARGE + 3, mesh, [_StridedShard(0, split_factor=2), Shard(0)]),
        "small": part_of(LARGE[:50] + 4, mesh, COPIED),
        "plain": LARGE + 5,
        f"own.{rank}": LARGE + rank,
        "step": 7,
    }


def chunks_of(metadata: Metadata) -> dict[str, int]:
    entries = metadata.state_dict_metadata.items()
    return {fqn: len(entry.chunks) for fqn, entry in entries if hasattr(entry, "chunks")}


def as_whole(metadata: Metadata) -> dict[str, int]:
    """Returns the chunks that there are where no tensor is cut."""
    kinds = {"rows": 2, "columns": 2, "strided": 4}
    return {fqn: kinds.get(fqn, 1) for fqn in chunks_of(metadata)}


def tensors_of(state: State) -> State:
    return {fqn: value for fqn, value in state.items() if isinstance(value, torch.Tensor)}


def local(value: Any) -> torch.Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def assert_equal(found: State, wanted: State) -> None:
    assert found.keys() == wanted.keys()
    for fqn, value in wanted.items():
        assert torch.equal(local(found[fqn]), local(value)), fqn


def resharded(_: int) -> State:
    """Returns what a rank of three wants of it."""
    mesh = mesh_of((3,))
    return {
        "rows": part_of(LARGE, mesh, [Shard(1)]),
        "columns": part_of(LARGE + 1, mesh, [Shard(0)]),
        "copied": part_of(LARGE + 2, mesh, [Shard(0)]),
        "strided": part_of(LARGE + 3, mesh, [Replicate()]),
        "plain": part_of(LARGE + 5, mesh, [Shard(0)]),
    }


def test_replicas_by_placement_are_cut_and_every_reader_finds_every_bit(tmp_path: Path) -> None:
    states = states_of(4, hsdp)
    chunks = chunks_of(save(states, tmp_path))
    assert chunks["copied"] > 1
    assert {fqn: chunks[fqn] for fqn in ("strided", "small", "plain")} == {
        "strided": 4, "small": 1, "plain": 1,
    }  # fmt: skip
    assert all(chunks[f"own.{rank}"] == 1 for rank in range(4))
    for planner in LOAD_PLANNERS:
        for reader in READERS:
            for ranks, make in ((4, hsdp), (3, resharded)):
                wanted, found = (
                    [tensors_of(state) for state in states_of(ranks, make)] for _ in range(2)
                )
                for state in found:
                    for value in state.values():
                        local(value).zero_()
                assert not any(load(found, tmp_path, planner, reader))
                for mine, its in zip(found, wanted, strict=True):
                    assert_equal(mine, its)


@pytest.mark.parametrize("number", [0, 1])
def test_rows_of_a_shard_are_cut_within_its_replicas(number: int, tmp_path: Path) -> None:
    """One large shard a rank: each of its two holders writes half of it."""
    placements: Any = ([Replicate(), Shard(0)], [Shard(1), Replicate()])[number]

    def make(_: int) -> State:
        return {"w": part_of(LARGE, mesh_of((2, 2)), placements)}

    metadata = save(states_of(4, make), tmp_path)
    bytes_each = [chunk.sizes.numel() * 4 for chunk in metadata.state_dict_metadata["w"].chunks]  # type: ignore[union-attr]
    assert len(bytes_each) == 4
    assert max(bytes_each) * 4 <= 1.05 * sum(bytes_each)


def test_stocks_writer_is_given_whole_tensors(tmp_path: Path) -> None:
    metadata = save(states_of(4, hsdp), tmp_path, writer="stock")
    assert chunks_of(metadata) == as_whole(metadata)


class _Looking(DcpxSavePlanner):
    def transform_object(self, write_item: WriteItem, data: Any) -> Any:
        return super().transform_object(write_item, data)


class _Finishing(DcpxSavePlanner):
    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return super().finish_plan(new_plan)


class Around(ForeignSave):
    """Hands everything to a planner of ours."""

    def __init__(self) -> None:
        self.inner: Any = DcpxSavePlanner(flatten_state_dict=False)


class LooksUpItself(Around):
    """Gives the data by itself, and knows of no rows."""

    def resolve_data(self, write_item: WriteItem) -> Any:
        return local(find_state_dict_object(self.state, write_item.index)).detach()

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:  # fmt: skip  # noqa: E501
        self.state = state_dict
        super().set_up_planner(state_dict, storage_meta, is_coordinator)


def copied_pair(_: int) -> State:
    return {"w": part_of(LARGE, mesh_of((2,)), [Replicate()])}


def test_planner_around_ours_that_gives_other_rows_than_planned_is_refused(tmp_path: Path) -> None:
    states = states_of(2, copied_pair)
    metadata = save(states, tmp_path / "a", planners=[Around() for _ in states])
    assert chunks_of(metadata) == {"w": 2}
    with pytest.raises(PlanError, match=r"LooksUpItself gave \[800, 64\] for rows of") as caught:
        save(states, tmp_path / "b", planners=[LooksUpItself() for _ in states])
    assert caught.value.fqn == "w"
    assert not list((tmp_path / "b").glob("*.distcp"))


WHOLE: dict[str, Callable[[], Any]] = {
    "asked": lambda: DcpxSavePlanner(split_replicas=False),
    "sees the data": _Looking,
    "finishes": _Finishing,
    "stock": DefaultSavePlanner,
}


@pytest.mark.parametrize("kind", WHOLE)
def test_tensor_is_whole_where_one_of_its_ranks_takes_no_rows(kind: str, tmp_path: Path) -> None:
    planners = [DcpxSavePlanner() for _ in range(4)]
    planners[3] = WHOLE[kind]()

    def make(rank: int) -> State:
        mesh = mesh_of((2, 2))
        return {
            "all": part_of(LARGE, mesh, COPIED),
            "shard": part_of(LARGE, mesh, [Replicate(), Shard(0)]),
        }

    metadata = save(states_of(4, make), tmp_path, planners=planners)
    assert chunks_of(metadata)["all"] == 1
    # Ranks 0 and 2 share the first of its shards; 1 and 3 cannot share the second.
    boxes = [tuple(chunk.offsets) for chunk in metadata.state_dict_metadata["shard"].chunks]  # type: ignore[union-attr]
    assert [at for at, _ in boxes if at >= 400] == [400]
    assert len(boxes) == 3


def test_rank_that_vouches_for_all_shares_rows_with_those_that_ask_placements(
    tmp_path: Path,
) -> None:
    planners = [DcpxSavePlanner(split_replicas=True), DcpxSavePlanner()]

    def make(_: int) -> State:
        twice = torch.cat((LARGE, LARGE))
        return {"w": part_of(twice, mesh_of((2,)), [Replicate()]), "plain": LARGE}

    chunks = chunks_of(save(states_of(2, make), tmp_path, planners=planners))
    assert chunks == {"w": 2, "plain": 1}


def test_lowest_rank_writes_whole_tensors_where_asked(tmp_path: Path) -> None:
    planners = [DcpxSavePlanner(dedup_save_to_lowest_rank=True) for _ in range(4)]
    metadata = save(states_of(4, hsdp), tmp_path, planners=planners)
    assert chunks_of(metadata) == as_whole(metadata)
    files = [info.relative_path for index, info in metadata.storage_data.items()
             if index.fqn == "copied"]  # fmt: skip
    assert [name.startswith("__0_") for name in files] == [True]


def two_meshes(rank: int) -> State:
    """Returns what a rank of four has where two stages of two ranks tie one tensor, and differ."""
    stage = rank // 2
    mesh = DeviceMesh("cpu", torch.tensor([[0, 1], [2, 3]][stage]))
    return {
        "tied": part_of(LARGE + stage, mesh, [Replicate()]),
        f"stage.{stage}": part_of(LARGE + 2 + stage, mesh, [Replicate()]),
    }


def test_rows_of_ranks_of_two_meshes_are_never_mixed(tmp_path: Path) -> None:
    chunks = chunks_of(save(states_of(4, two_meshes), tmp_path))
    assert chunks["tied"] == 1
    assert chunks["stage.0"] == chunks["stage.1"] == 2
    found = {"tied": torch.zeros_like(LARGE)}
    dcp.load(found, storage_reader=dcp.FileSystemReader(tmp_path), no_dist=True)
    assert any(torch.equal(found["tied"], LARGE + stage) for stage in range(2))


def by_other_placements(rank: int) -> State:
    """Returns parts of which ranks 0 and 1 have the same rows, each by a placement of its own."""
    own: Any = [[Replicate(), Shard(0)], [Shard(0), Replicate()]][rank % 2]
    return {"w": part_of(LARGE, mesh_of((2, 2)), own)}


def test_ranks_of_the_same_names_share_no_rows_unless_one_placement_says_so(tmp_path: Path) -> None:
    assert chunks_of(save(states_of(4, by_other_placements), tmp_path)) == {"w": 2}


OTHERS: dict[str, Callable[[DeviceMesh], Any]] = {
    "plain": lambda _: LARGE + 1,
    "another mesh": lambda _: part_of(LARGE + 1, DeviceMesh("cpu", torch.tensor([2])), [Shard(0)]),
    "a mesh of other ranks": lambda _: part_of(
        LARGE + 1, DeviceMesh("cpu", torch.tensor([[2, 1, 0]])), COPIED
    ),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_tensor_is_whole_where_one_rank_has_it_otherwise(kind: str, tmp_path: Path) -> None:
    def make(rank: int) -> State:
        mesh = mesh_of((3,))
        tensor = OTHERS[kind](mesh) if rank == 2 else part_of(LARGE, mesh, [Replicate()])
        return {"w": tensor, "v": part_of(LARGE + 2, mesh, [Replicate()])}

    chunks = chunks_of(save(states_of(3, make), tmp_path))
    assert chunks["w"] == 1
    found = {"w": torch.zeros_like(LARGE)}
    dcp.load(found, storage_reader=dcp.FileSystemReader(tmp_path), no_dist=True)
    assert any(torch.equal(found["w"], LARGE + number) for number in range(2))


def test_terms_of_a_sum_are_no_replicas() -> None:
    with as_rank(0, 4):
        mesh = mesh_of((2, 2))
        summed = DTensor.from_local(LARGE, mesh, [Replicate(), Partial()], run_check=False)
        planner = DcpxSavePlanner()
        planner.set_up_planner({"sum": summed, "copied": part_of(LARGE, mesh, COPIED)})
        try:
            plan = planner.create_local_plan()
        except ValueError:  # newer torch does not plan them at all
            assert not hasattr(planner, "plan")
        else:
            assert isinstance(plan, RankPlan) and plan.replicas and plan.whole_names == {"sum"}


def test_order_of_names_on_a_rank_does_not_matter(tmp_path: Path) -> None:
    def make(rank: int) -> State:
        mesh = mesh_of((2,))
        names = ["a", "b", "c"][:: 1 - 2 * rank]
        return {name: part_of(LARGE + ord(name), mesh, [Replicate()]) for name in names}

    states = states_of(2, make)
    assert max(chunks_of(save(states, tmp_path)).values()) == 2


def test_state_that_is_sharded_next_time_is_planned_anew(tmp_path: Path) -> None:
    planners = [DcpxSavePlanner() for _ in range(2)]
    chunks = []
    for number, placement in enumerate((Shard(0), Replicate(), Replicate(), Shard(0))):

        def make(_: int, placement: Any = placement, number: int = number) -> State:
            return {"w": part_of(LARGE + number, mesh_of((2,)), [placement])}

        states = states_of(2, make)
        path = tmp_path / str(number)
        metadata = save(states, path, planners=planners)
        chunks.append([tuple(c.sizes) for c in metadata.state_dict_metadata["w"].chunks])  # type: ignore[union-attr]
        found = {"w": torch.zeros_like(LARGE)}
        dcp.load(found, storage_reader=dcp.FileSystemReader(path), no_dist=True)
        assert torch.equal(found["w"], LARGE + number)
    assert chunks == [[(400, 64)] * 2, chunks[1], chunks[1], [(400, 64)] * 2]
    assert len(chunks[1]) == 2


def test_plan_that_is_used_again_knows_the_same_copies_for_each_writer(tmp_path: Path) -> None:
    planners = [DcpxSavePlanner() for _ in range(4)]
    states = states_of(4, hsdp)
    found = []
    for number, writer in enumerate(("ours", "stock", "ours")):
        metadata = save(states, tmp_path / str(number), writer=writer, planners=planners)
        found.append(chunks_of(metadata))
    assert planners[0].dcpx_planning.known is not None
    assert found[0] == found[2] != found[1]
    with as_rank(3, 4):
        fresh = DcpxSavePlanner()
        fresh.set_up_planner(dict(states[3]))
        plan = fresh.create_local_plan()
        again = planners[3].create_local_plan()
    assert isinstance(plan, RankPlan) and isinstance(again, RankPlan)
    assert (plan.replicas, plan.whole_names) == (again.replicas, again.whole_names)
    assert plan.whole_names == {"plain", "own.3"}


def test_rows_are_looked_for_only_where_some_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[Any] = []
    monkeypatch.setattr(save_planner, "with_pieces", lambda *args, **_: looked.append(args))
    with as_rank(0, 4):
        planner = DcpxSavePlanner()
        planner.set_up_planner(hsdp(0))
        plan = planner.create_local_plan()
        planner.finish_plan(plan)
        assert not looked
        planner.finish_plan(offered(plan))
        assert looked


def test_rank_by_itself_writes_whole_tensors(tmp_path: Path) -> None:
    with as_rank(0, 4):
        writer, planner = DcpxWriter(tmp_path), DcpxSavePlanner()
        planner.set_up_planner(hsdp(0), writer.storage_meta(), True)
        writer.set_up_storage_writer(True, rank=0, use_collectives=False)
        plan = writer.prepare_local_plan(planner.create_local_plan())
        assert isinstance(plan, RankPlan) and not plan.can_split
        (plan,), metadata = planner.create_global_plan([plan])
        (plan,) = writer.prepare_global_plan([plan])
        plan = planner.finish_plan(plan)
        writer.finish(metadata, [writer.write_data(plan, planner).wait()])
    chunks = chunks_of(metadata)
    assert set(chunks.values()) == {1} and len(chunks) == 7


def test_what_ranks_say_of_copies_is_a_few_bytes() -> None:
    """Whatever the number of tensors, and nothing where no tensor has copies."""

    def told(count: int, sizes: tuple[int, ...], *own: Any) -> int:
        with as_rank(1, 2):
            mesh = mesh_of(sizes)
            state = {f"layers.{n}": part_of(LARGE, mesh, own) for n in range(count)}
            lengths = []
            for is_split in (None, False):
                planner = DcpxSavePlanner(flatten_state_dict=False, split_replicas=is_split)
                planner.set_up_planner(dict(state))
                lengths.append(len(_pickled(offered(planner.create_local_plan()))))
            return lengths[0] - lengths[1]

    few, many = (told(count, (2,), Replicate()) for count in (10, 300))
    assert 16 < few < 64 and 16 < many < 64
    assert told(10, (2,), Shard(0)) == told(10, (1, 2), Replicate(), Shard(0)) == 0


def _pickled(plan: SavePlan) -> bytes:
    assert sent(plan) == plan
    return pickle.dumps(plan)


def test_answer_says_nothing_of_copies() -> None:
    plan = RankPlan([], can_split=True, replicas=b"k" * 16)
    assert sent(plan).replicas == plan.replicas
    assert plan.planned([]).replicas == b""
