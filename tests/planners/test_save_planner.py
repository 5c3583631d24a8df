"""`DcpxSavePlanner`: stock's plans where nothing is shared, and balanced ones where ranks share."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from support.machine import points
from support.plan_states import (
    MakeState,
    as_rank,
    mesh_of,
    mixed_state,
    part_of,
    plan_all,
    said,
    set_up,
)
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.tensor import Replicate, Shard

from torch_dcpx import DcpxSavePlanner, PlanError
from torch_dcpx._compat import HAS_STRIDES
from torch_dcpx.tensors.offences import check_plan
from torch_dcpx.writer.table import gives_state_as_it_is


def assert_same_plans(make_state: MakeState, ranks: int, **arguments: Any) -> None:
    ours, our_metadata, our_local = plan_all(
        [DcpxSavePlanner(**arguments) for _ in range(ranks)], make_state
    )
    stock, metadata, local = plan_all(
        [DefaultSavePlanner(**arguments) for _ in range(ranks)], make_state
    )
    assert list(map(said, our_local)) == list(map(said, local))
    assert list(map(said, ours)) == list(map(said, stock))
    assert our_metadata == metadata
    assert list(our_metadata.state_dict_metadata) == list(metadata.state_dict_metadata)
    assert list(our_metadata.planner_data or ()) == list(metadata.planner_data or ())


@pytest.mark.parametrize("is_flat", [True, False])
def test_plan_of_one_rank_is_stocks(is_flat: bool) -> None:
    arguments = {"flatten_state_dict": is_flat, "flatten_sharded_tensors": is_flat}
    assert_same_plans(lambda _: mixed_state(), 1, **arguments)


def test_items_have_all_attributes_of_stocks() -> None:
    ours, stock = (set_up(kind(), mixed_state()) for kind in (DcpxSavePlanner, DefaultSavePlanner))
    for one, other in zip(ours.items, stock.items, strict=True):
        assert vars(one).keys() == vars(other).keys()
        assert vars(one.index) == vars(other.index)
        if one.tensor_data is not None and other.tensor_data is not None:
            assert vars(one.tensor_data.properties) == vars(other.tensor_data.properties)
            for chunk in (one.tensor_data.chunk, other.tensor_data.chunk):
                assert type(chunk.offsets) is type(chunk.sizes) is torch.Size


PLACEMENTS = st.sampled_from([Shard(0), Shard(1), Replicate()])


@settings(max_examples=points(30), deadline=None)
@given(
    st.tuples(st.integers(1, 9), st.integers(1, 9)),
    st.sampled_from([(6,), (2, 3)]),
    st.lists(PLACEMENTS, min_size=2, max_size=2),
    st.booleans(),
)
def test_local_plans_of_shards_are_stocks(
    sizes: tuple[int, int], mesh: tuple[int, ...], placements: list[Any], needs_grad: bool
) -> None:
    whole = torch.ones(sizes)
    for rank in range(6):
        with as_rank(rank, 6):
            tensor = part_of(whole, mesh_of(mesh), placements[: len(mesh)])
            state = {"t": tensor.requires_grad_(needs_grad), "plain": whole}
            for context in (torch.enable_grad(), torch.no_grad()):
                with context:
                    ours = set_up(DcpxSavePlanner(), state)
                    assert said(ours) == said(set_up(DefaultSavePlanner(), state))


def sharded_state(rank: int) -> dict[str, Any]:
    whole = torch.arange(7 * 12.0).reshape(7, 12)
    return {
        "rows": part_of(whole, mesh_of((4,)), [Shard(0)]),
        "columns": part_of(whole, mesh_of((4,)), [Shard(1)]),
        "square": part_of(whole, mesh_of((2, 2)), [Shard(0), Shard(1)]),
        f"own.{rank}": torch.full((3,), float(rank)),
        f"value.{rank}": rank,
    }


def test_plans_of_ranks_that_share_nothing_are_stocks() -> None:
    assert_same_plans(sharded_state, 4)


def shared_state(rank: int) -> dict[str, Any]:
    state = {f"layer.{i}": torch.arange(i * 1000.0) for i in range(12)}
    large = torch.arange(1200 * 301, dtype=torch.int64).reshape(1200, 301)
    mesh = mesh_of((2, 2))
    return {
        **state,
        "large": torch.nn.Parameter(large.double()),
        "copied": part_of(large, mesh, [Replicate(), Replicate()]),
        "halves": part_of(large[::2], mesh, [Replicate(), Shard(0)]),
        "flat": torch.arange(300_000.0)[None, None],
        "step": 7,
        f"own.{rank}": torch.ones(rank * 20_000),
    }


def written_bytes(plan: SavePlan) -> int:
    return sum(
        item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize
        for item in plan.items
        if item.tensor_data is not None
    )


def wholes(planners: list[Any], plans: list[SavePlan], metadata: Any) -> dict[str, torch.Tensor]:
    """Returns each tensor put together from what all ranks write, every element once."""
    found: dict[str, torch.Tensor] = {}
    times: dict[str, torch.Tensor] = {}
    for planner, plan in zip(planners, plans, strict=True):
        for item in plan.items:
            if item.tensor_data is None:
                continue
            data, chunk = planner.resolve_data(item), item.tensor_data.chunk
            assert data.shape == chunk.sizes
            fqn = item.index.fqn
            size = metadata.state_dict_metadata[fqn].size
            whole = found.setdefault(fqn, torch.zeros(size, dtype=data.dtype))
            where = tuple(slice(a, a + n) for a, n in zip(chunk.offsets, chunk.sizes, strict=True))
            whole[where] = data.detach()
            times.setdefault(fqn, torch.zeros(size, dtype=torch.int))[where] += 1
    assert all(bool((count == 1).all()) for count in times.values())
    return found


def test_what_ranks_share_is_balanced_and_written_once() -> None:
    planners = [DcpxSavePlanner(split_replicas=True) for _ in range(4)]
    plans, metadata, _ = plan_all(planners, shared_state)
    loads = list(map(written_bytes, plans))
    assert max(loads) * 4 / sum(loads) <= 1.05, loads
    written = wholes(planners, plans, metadata)
    with as_rank(0, 4):
        state = shared_state(0)
    large = torch.arange(1200 * 301, dtype=torch.int64).reshape(1200, 301)
    assert torch.equal(written["large"], large.double())
    assert torch.equal(written["copied"], large)
    assert torch.equal(written["halves"], large[::2])
    assert torch.equal(written["flat"], state["flat"])
    for fqn in (f"layer.{i}" for i in range(12)):
        assert torch.equal(written[fqn], state[fqn])
    assert len(metadata.state_dict_metadata["large"].chunks) > 1
    for item in (item for plan in plans for item in plan.items if item.tensor_data is not None):
        chunks = metadata.state_dict_metadata[item.index.fqn].chunks
        assert item.index.index is not None
        assert chunks[item.index.index] == item.tensor_data.chunk  # hints number the chunks
    again, _, _ = plan_all([DcpxSavePlanner(split_replicas=True) for _ in range(4)], shared_state)
    assert list(map(said, again)) == list(map(said, plans))


def test_lowest_rank_writes_all_that_several_have_where_asked() -> None:
    assert_same_plans(shared_state, 4, dedup_save_to_lowest_rank=True)


class _Looking(DcpxSavePlanner):
    """Sees the data of each item."""

    def transform_object(self, write_item: WriteItem, data: Any) -> Any:
        return super().transform_object(write_item, data)


def _replaced(**arguments: Any) -> DcpxSavePlanner:
    """Returns a planner whose instance replaces a hook."""
    planner = DcpxSavePlanner(**arguments)
    planner.lookup_object = planner.lookup_object  # type: ignore[method-assign]
    return planner


class _LoudFinish(DcpxSavePlanner):
    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan


@pytest.mark.parametrize("kind", [_Looking, _LoudFinish, _replaced, DefaultSavePlanner])
@pytest.mark.parametrize("rank", range(3))
def test_rank_that_may_not_find_rows_is_given_whole_tensors(kind: Any, rank: int) -> None:
    if rank == 0 and kind is DefaultSavePlanner:
        kind = _Looking
    planners: list[Any] = [DcpxSavePlanner(split_replicas=True) for _ in range(3)]
    planners[rank] = kind() if kind is DefaultSavePlanner else kind(split_replicas=True)
    large = torch.arange(600_000.0).reshape(600, 1000)
    plans, metadata, _ = plan_all(planners, lambda _: {"large": large, "x": torch.ones(5)})
    assert len(metadata.state_dict_metadata["large"].chunks) == 1
    assert torch.equal(wholes(planners, plans, metadata)["large"], large)


def test_tensor_that_gives_its_own_chunks_is_never_cut() -> None:
    class Own(torch.Tensor):
        def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
            plan = set_up(DefaultSavePlanner(), {fqn: self.as_subclass(torch.Tensor)})
            return plan.items

    def state(_: int) -> dict[str, Any]:
        return {"large": torch.ones(600, 1000).as_subclass(Own)}

    _, metadata, _ = plan_all([DcpxSavePlanner(split_replicas=True) for _ in range(3)], state)
    assert len(metadata.state_dict_metadata["large"].chunks) == 1


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support", "ignore:.*quantize")
def test_tensors_of_which_there_are_no_rows_are_never_cut() -> None:
    dense = torch.arange(600_000.0).reshape(600, 1000)
    scales, zeros = torch.ones(600).double(), torch.zeros(600).long()
    state = {
        "quantized": torch.quantize_per_channel(dense, scales, zeros, 0, torch.qint32),
        "dense": torch.cat((dense, dense)),
    }
    if not HAS_STRIDES:  # a torch whose planner takes it
        state["csr"] = dense.to_sparse_csr()
    planners = [DcpxSavePlanner(split_replicas=True) for _ in range(3)]
    plans, metadata, _ = plan_all(planners, lambda _: state)
    chunks = {fqn: len(entry.chunks) for fqn, entry in metadata.state_dict_metadata.items()}
    assert chunks.pop("dense") > 1
    assert set(chunks.values()) == {1}
    for planner, plan in zip(planners, plans, strict=True):
        for item in plan.items:
            assert planner.resolve_data(item).layout == state[item.index.fqn].layout


def test_rows_lie_in_the_tensor_and_hooks_stay_stocks() -> None:
    planners = [DcpxSavePlanner(split_replicas=True) for _ in range(2)]
    large = torch.arange(600_000.0).reshape(600, 1000)
    plans, _, _ = plan_all(planners, lambda _: {"large": large})
    (item,) = plans[1].items
    assert item.tensor_data is not None
    rows = planners[1].resolve_data(item)
    first = int(item.tensor_data.chunk.offsets[0])
    assert first > 0
    assert rows.data_ptr() == large[first:].data_ptr()
    assert type(rows) is torch.Tensor
    assert gives_state_as_it_is(planners[1])


def test_piece_that_no_rank_has_is_refused() -> None:
    planner = DcpxSavePlanner(split_replicas=True)
    plan = set_up(planner, {"t": torch.ones(4, 4)})
    data = plan.items[0].tensor_data
    assert data is not None
    data = type(data)(
        ChunkStorageMetadata(torch.Size([2, 0]), torch.Size([3, 4])), data.properties, data.size
    )
    bad = WriteItem(MetadataIndex("t", [2, 0]), WriteItemType.SHARD, tensor_data=data)
    with pytest.raises(PlanError) as caught:
        planner.finish_plan(SavePlan([bad]))
    assert caught.value.fqn == "t"


def boxes_plan(size: tuple[int, ...], *boxes: tuple[Any, Any]) -> SavePlan:
    plan = set_up(DefaultSavePlanner(), {"layer.weight": torch.ones(size)})
    data = plan.items[0].tensor_data
    assert data is not None
    items = [
        WriteItem(
            MetadataIndex("layer.weight", at),
            WriteItemType.SHARD,
            tensor_data=type(data)(
                ChunkStorageMetadata(torch.Size(at), torch.Size(n)), data.properties, data.size
            ),
        )
        for at, n in boxes
    ]
    return SavePlan(items, planner_data={"layer.weight": ("layer.weight",)})


@pytest.mark.parametrize(
    ("boxes", "words"),
    [
        ([((0, 0), (5, 4))], "out of bounds chunk"),
        ([((0, 0), (3, 4)), ((2, 0), (2, 4))], "overlapping chunks"),
        ([((0, 0), (2, 4)), ((2, 0), (2, 3))], "invalid fill tensor-volume"),
    ],
)
def test_chunks_that_do_not_tile_their_tensor_are_refused(boxes: list[Any], words: str) -> None:
    plans = [boxes_plan((4, 4), box) for box in boxes] + [SavePlan([], planner_data={})] * 2
    with pytest.raises(
        PlanError, match=f"^Failed to validate global plan: key:layer.weight.*{words}"
    ):
        DcpxSavePlanner().create_global_plan(plans)
    with pytest.raises(ValueError, match="Failed to validate global plan"):
        DefaultSavePlanner().create_global_plan(plans)


def test_rank_that_saves_alone_may_save_a_part() -> None:
    plan = boxes_plan((4, 4), ((0, 0), (2, 4)))
    for kind in (DcpxSavePlanner, DefaultSavePlanner):
        _, metadata = kind().create_global_plan([plan])
        assert len(metadata.state_dict_metadata["layer.weight"].chunks) == 1


def test_whole_tensor_under_the_name_of_shards_has_stocks_error() -> None:
    whole = set_up(DefaultSavePlanner(), {"layer.weight": torch.ones(4, 4)})
    plans = [boxes_plan((4, 4), ((2, 0), (2, 4))), whole]
    for kind in (DcpxSavePlanner, DefaultSavePlanner):
        with pytest.raises(AssertionError):
            kind().create_global_plan(plans)


def test_plan_that_writes_a_chunk_twice_is_refused() -> None:
    items = set_up(DcpxSavePlanner(), {"w": torch.ones(3), "x": torch.ones(3), "n": 1}).items
    check_plan(items)
    for item in items:
        with pytest.raises(PlanError, match=f"the plan writes '{item.index.fqn}' .* twice"):
            check_plan([*items, item])
