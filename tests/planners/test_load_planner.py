"""`DcpxLoadPlanner`: stock's plans and errors, and checkpoints that stock reads past in silence."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from support.machine import points
from support.plan_states import as_rank, mesh_of, mixed_state, part_of
from support.tensor_bits import bits
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.tensor import Replicate, Shard

from torch_dcpx import (
    CorruptionError,
    DcpxLoadPlanner,
    DcpxReader,
    DcpxSavePlanner,
    DcpxWriter,
    PlanError,
)
from torch_dcpx._compat import flatten_before_2_4
from torch_dcpx._hooks import PLAN_HOOKS, TAKING_HOOKS, has_stock_hooks
from torch_dcpx.metadata.file import decode_metadata, encode_metadata


def metadata_of(state: dict[str, Any], *, is_flat: bool = True) -> Metadata:
    planner = DefaultSavePlanner(is_flat, is_flat)
    planner.set_up_planner(copy.copy(state), None, True)
    return planner.create_global_plan([planner.create_local_plan()])[1]


def plan_by(planner: DefaultLoadPlanner, state: dict[str, Any], metadata: Metadata) -> Any:
    """Plans; by our planner also from the columns of a file, to the same end."""
    if isinstance(planner, DcpxLoadPlanner):
        try:
            data = encode_metadata(dataclasses.replace(metadata, storage_data={}), [], "id")
        except PlanError:
            assert not is_encodable(metadata)
        else:
            ends = [
                end_of(copy.copy(planner), state, given)
                for given in (metadata, decode_metadata(data, "ckpt/.metadata").metadata)
            ]
            assert ends[0] == ends[1]
    planner.set_up_planner(copy.copy(state), metadata, True)
    return planner.create_local_plan()


def end_of(planner: DefaultLoadPlanner, state: dict[str, Any], metadata: Metadata) -> Any:
    planner.set_up_planner(copy.copy(state), metadata, True)
    try:
        return items_of(planner.create_local_plan())
    except (CorruptionError, RuntimeError, ValueError) as error:
        return type(error), str(error)


def is_encodable(metadata: Metadata) -> bool:
    """Whether all names are text, and all numbers such as a tensor may have."""
    boxes = [
        (*entry.size, *(place if place is not None else [None]))
        for entry in metadata.state_dict_metadata.values()
        if isinstance(entry, TensorStorageMetadata)
        for chunk in entry.chunks
        for place in (chunk.offsets, chunk.sizes)
    ]
    is_usual = all(isinstance(n, int) and 0 <= n < 1 << 62 for box in boxes for n in box)
    return is_usual and all(isinstance(name, str) for name in metadata.state_dict_metadata)


def items_of(plan: Any) -> list[Any]:
    """All that an item says, hints included, which its own comparison leaves out."""
    return [(item, item.dest_index.index, item.storage_index.index) for item in plan.items]


def assert_same_plan(state: dict[str, Any], metadata: Metadata, **arguments: Any) -> None:
    ours = plan_by(DcpxLoadPlanner(**arguments), state, metadata)
    stock = plan_by(DefaultLoadPlanner(**arguments), state, metadata)
    assert items_of(ours) == items_of(stock)


def test_plan_of_a_mixed_state_is_stocks() -> None:
    assert_same_plan(mixed_state(), metadata_of(mixed_state()))


@pytest.mark.parametrize("is_flat", [True, False])
@pytest.mark.parametrize("is_sharded_flat", [True, False])
def test_plan_without_flattening_is_stocks(is_flat: bool, is_sharded_flat: bool) -> None:
    state = {"a": torch.ones(3), "b": torch.nn.Parameter(torch.zeros(2, 2)), "c": 4}
    arguments = {"flatten_state_dict": is_flat, "flatten_sharded_tensors": is_sharded_flat}
    assert_same_plan(state, metadata_of(state), **arguments)


def test_names_that_a_partial_load_does_not_find_are_passed_over_as_by_stock() -> None:
    state = mixed_state()
    stored = metadata_of(state)
    assert_same_plan({"model": state["model"]}, stored)
    assert_same_plan({**state, "more": torch.ones(2), "other": 3}, stored, allow_partial_load=True)


def test_names_of_torch_before_2_4_are_found() -> None:
    state = {"a": {"b": [1, 2], "c": {"d": 3}}, "t": {"u": torch.ones(2)}}
    old, paths = flatten_before_2_4(state)
    assert "a" in old
    stored = metadata_of(old, is_flat=False)
    stored.planner_data = paths
    assert_same_plan(state, stored)
    planner = DcpxLoadPlanner()
    assert [item.dest_index.fqn for item in plan_by(planner, state, stored).items] == list(old)
    assert planner.mappings == paths


PLACEMENTS = st.sampled_from([Shard(0), Shard(1), Replicate()])


@settings(max_examples=points(40), deadline=None)
@given(
    st.tuples(st.integers(1, 9), st.integers(1, 9)),
    st.sampled_from([(6,), (2, 3)]),
    st.sampled_from([(4,), (2, 2)]),
    st.lists(PLACEMENTS, min_size=4, max_size=4),
)
def test_resharded_plans_are_stocks(
    sizes: tuple[int, int], before: tuple[int, ...], after: tuple[int, ...], placements: list[Any]
) -> None:
    whole = torch.arange(sizes[0] * sizes[1]).reshape(sizes)
    plans = []
    for rank in range(6):
        with as_rank(rank, 6):
            planner = DefaultSavePlanner()
            tensor = part_of(whole, mesh_of(before), placements[: len(before)])
            planner.set_up_planner({"t": tensor, "plain": whole}, None, rank == 0)
            plans.append(planner.create_local_plan())
    _, stored = DefaultSavePlanner(flatten_state_dict=False).create_global_plan(plans)
    for rank in range(4):
        with as_rank(rank, 4):
            tensor = part_of(whole, mesh_of(after), placements[2 : 2 + len(after)])
            assert_same_plan({"t": tensor, "plain": whole}, stored)


def test_what_does_not_fit_has_stocks_error() -> None:
    stored = metadata_of({"a": torch.ones(3, 4)})
    with as_rank(0, 2):
        rows: list[tuple[dict[str, Any], type[Exception]]] = [
            ({"a": torch.ones(3, 4), "more": 1}, RuntimeError),
            ({"a": torch.ones(4, 3)}, ValueError),
            ({"a": part_of(torch.ones(2, 4), mesh_of((2,)), [Shard(0)])}, ValueError),
            ({"a": "text"}, ValueError),
        ]
        for state, error in rows:
            errors = []
            for planner in (DcpxLoadPlanner(), DefaultLoadPlanner()):
                with pytest.raises(error) as caught:
                    plan_by(planner, state, stored)
                errors.append(str(caught.value))
            assert errors[0] == errors[1]


def stored_in(sizes: tuple[int, ...], *boxes: tuple[Any, Any]) -> Metadata:
    chunks = [ChunkStorageMetadata(torch.Size(at), torch.Size(n)) for at, n in boxes]
    entry = TensorStorageMetadata(TensorProperties(), torch.Size(sizes), chunks)
    return Metadata({"layer.weight": entry})


@pytest.mark.parametrize(
    ("boxes", "words"),
    [
        ([((0, 0), (2, 4))], ["element [2, 0]", "[0:4, 0:4]"]),
        ([((0, 0), (2, 4)), ((2, 1), (2, 3))], ["element [2, 0]"]),
        ([], ["element [0, 0]"]),
        ([((0, 0), (3, 4)), ((2, 0), (2, 4))], ["[0:3, 0:4] and [2:4, 0:4]"]),
        ([((0, 0), (4, 4)), ((0, 0), (4, 4))], ["[0:4, 0:4] and [0:4, 0:4]"]),
    ],
)
def test_chunks_that_do_not_fill_what_is_wanted_once_are_refused(
    boxes: list[Any], words: list[str]
) -> None:
    state = {"layer": {"weight": torch.ones(4, 4)}}
    with pytest.raises(CorruptionError) as caught:
        plan_by(DcpxLoadPlanner(), state, stored_in((4, 4), *boxes))
    assert (caught.value.fqn, caught.value.touched) == ("layer.weight", ())
    for word in (*words, "'layer.weight'", "nothing was read"):
        assert word in str(caught.value)


def test_hole_outside_of_what_a_rank_wants_is_none_of_its_concern() -> None:
    stored = stored_in((8, 4), ((0, 0), (4, 4)))
    for rank, is_fine in ((0, True), (1, False)):
        with as_rank(rank, 2):
            state = {"layer": {"weight": part_of(torch.ones(8, 4), mesh_of((2,)), [Shard(0)])}}
            if is_fine:
                assert_same_plan(state, stored)
                continue
            with pytest.raises(CorruptionError, match=r"\[4:8, 0:4\] is wanted"):
                plan_by(DcpxLoadPlanner(), state, stored)


def test_empty_chunks_change_nothing() -> None:
    stored = stored_in((4, 4), ((0, 0), (2, 4)), ((2, 0), (0, 4)), ((2, 0), (2, 4)))
    assert_same_plan({"layer": {"weight": torch.ones(4, 4)}}, stored)


class _Chunked(torch.Tensor):
    """Says in a tuple what it wants, as any sequence may."""

    def __create_chunk_list__(self) -> tuple[ChunkStorageMetadata, ...]:
        half = torch.Size([2, 4])
        return tuple(ChunkStorageMetadata(torch.Size([at, 0]), half) for at in (0, 2))


def test_chunks_wanted_in_a_tuple_are_planned_as_by_stock() -> None:
    state = {"layer.weight": torch.ones(4, 4).as_subclass(_Chunked)}
    stored = stored_in((4, 4), ((0, 0), (3, 4)), ((3, 0), (1, 4)))
    assert_same_plan(state, stored)
    with pytest.raises(CorruptionError, match=r"\[2:4, 0:4\] is wanted"):
        plan_by(DcpxLoadPlanner(), state, stored_in((4, 4), ((0, 0), (3, 4))))


@pytest.mark.parametrize("fqn", [3, (1, 2, 3, 4), ("a",), None])
def test_name_that_is_no_string_is_planned_as_by_stock(fqn: Any) -> None:
    stored = Metadata({fqn: BytesStorageMetadata()})
    assert_same_plan({fqn: 5}, stored, flatten_state_dict=False, flatten_sharded_tensors=False)


@pytest.mark.parametrize(
    ("offsets", "sizes"),
    [
        (torch.Size([2**63 - 1, 0]), torch.Size([4, 4])),
        ((2**70, 0), (4, 4)),
        ((0, 0), (4, 2**64)),
        (("x", 0), (4, 4)),
        (None, None),
    ],
)
def test_chunk_with_numbers_that_no_tensor_has_is_refused(offsets: Any, sizes: Any) -> None:
    stored = stored_in((4, 4), ((0, 0), (4, 4)))
    stored.state_dict_metadata["layer.weight"].chunks.append(ChunkStorageMetadata(offsets, sizes))
    state = {"first": torch.ones(2), "layer": {"weight": torch.ones(4, 4)}}
    stored.state_dict_metadata.update(metadata_of({"first": torch.ones(2)}).state_dict_metadata)
    with pytest.raises(CorruptionError, match="sizes of its chunk 1 are no numbers") as caught:
        plan_by(DcpxLoadPlanner(), state, stored)
    assert (caught.value.fqn, caught.value.touched) == ("layer.weight", ())
    stored.state_dict_metadata["first"] = stored_in((2,)).state_dict_metadata["layer.weight"]
    with pytest.raises(CorruptionError, match="no chunk of the checkpoint") as caught:
        plan_by(DcpxLoadPlanner(), state, stored)
    assert caught.value.fqn == "first"


class _Loud(DefaultLoadPlanner):
    """Overrides the hooks that a subclass of stock's does."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.calls: list[str] = []

    def lookup_tensor(self, index: Any) -> torch.Tensor:
        self.calls.append(f"lookup {index.fqn}")
        return super().lookup_tensor(index)

    def transform_tensor(self, read_item: Any, tensor: torch.Tensor) -> torch.Tensor:
        self.calls.append(f"transform {read_item.dest_index.fqn}")
        return super().transform_tensor(read_item, tensor)

    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        self.calls.append(f"commit {read_item.dest_index.fqn}")


class _LoudOurs(_Loud, DcpxLoadPlanner):
    pass


class _LoudSave(DcpxSavePlanner):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def transform_object(self, write_item: Any, data: Any) -> Any:
        self.seen.append(write_item.index.fqn)
        return super().transform_object(write_item, data)


def zeroed(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return torch.zeros_like(state)
    if isinstance(state, dict):
        return type(state)((key, zeroed(value)) for key, value in state.items())
    if isinstance(state, list):
        return [zeroed(value) for value in state]
    return type(state)() if isinstance(state, (int, float, str)) else state


SIDES = list(
    itertools.product(
        [DcpxWriter, dcp.FileSystemWriter],
        [DcpxReader, dcp.FileSystemReader],
        [(DcpxSavePlanner, DcpxLoadPlanner), (_LoudSave, _LoudOurs)],
    )
)


@pytest.mark.parametrize(("writer", "reader", "planners"), SIDES)
def test_state_comes_back_bit_by_bit(
    writer: Any, reader: Any, planners: Any, tmp_path: Path
) -> None:
    state = mixed_state()
    del state["stream"]
    saved_by, used = (planner() for planner in planners)
    dcp.save(copy.copy(state), storage_writer=writer(tmp_path), planner=saved_by)
    target = zeroed(state)
    dcp.load(target, storage_reader=reader(tmp_path), planner=used)
    assert bits(target) == bits(state)
    if isinstance(saved_by, _LoudSave):
        assert {"model.weight", "step"} <= set(saved_by.seen)
        assert "transform model.weight" in used.calls
        assert "lookup optimizer.state.0.exp_avg" in used.calls


def test_reader_takes_it_for_stocks() -> None:
    every = (*PLAN_HOOKS, *TAKING_HOOKS)
    assert has_stock_hooks(DcpxLoadPlanner(), every)
    assert not has_stock_hooks(_LoudOurs(), ("lookup_tensor",))
    assert has_stock_hooks(_LoudOurs(), ("create_local_plan", "load_bytes"))


def test_global_plan_is_the_local_ones() -> None:
    planner = DcpxLoadPlanner()
    plans = [plan_by(planner, mixed_state(), metadata_of(mixed_state()))] * 2
    assert planner.create_global_plan(plans) is plans
    assert planner.finish_plan(plans[0]) is plans[0]
