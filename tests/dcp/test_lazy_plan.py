"""Loads from metadata that is filled on demand: what they make of it, and what they notice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from plan_states import as_rank, mesh_of, part_of
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
)
from torch.distributed.tensor import Shard

import torch_dcpx as dcpx
from torch_dcpx import DcpxLoadPlanner, DcpxReader, DcpxWriter, read_coverage
from torch_dcpx.lazy_metadata import StoredEntries, StoredPlaces
from torch_dcpx.load_checks import LoadRules, compare
from torch_dcpx.locate import _places
from torch_dcpx.metadata import decode_metadata, encode_metadata

RANKS = 16
NAMES = [f"layer{number}" for number in range(5)]


def sharded() -> Metadata:
    """Metadata, as a file hands it out, of tensors [32, 4] in a chunk a rank."""
    whole = torch.zeros(32, 4)
    plans = []
    for rank in range(RANKS):
        with as_rank(rank, RANKS):
            planner = DefaultSavePlanner()
            state = {name: part_of(whole, mesh_of((RANKS,)), [Shard(0)]) for name in NAMES}
            planner.set_up_planner({**state, "step": 3}, None, rank == 0)
            plans.append(planner.create_local_plan())
    _, metadata = planner.create_global_plan(plans)
    metadata.storage_data = {
        item.index: _StorageInfo(f"__{rank}_0.distcp", number, 1)
        for rank, plan in enumerate(plans)
        for number, item in enumerate(plan.items)
    }
    return decode_metadata(encode_metadata(metadata, [], "id"), "ckpt/.metadata").metadata


def test_a_rank_makes_the_places_of_its_own_items_and_no_chunk() -> None:
    metadata = sharded()
    entries, places = metadata.state_dict_metadata, metadata.storage_data
    assert isinstance(entries, StoredEntries)
    assert isinstance(places, StoredPlaces)
    assert len(places) == RANKS * len(NAMES) + 1
    with as_rank(3, RANKS):
        whole = torch.zeros(32, 4)
        state = {name: part_of(whole, mesh_of((RANKS,)), [Shard(0)]) for name in NAMES}
        planner = DcpxLoadPlanner()
        planner.set_up_planner({**state, "step": 3}, metadata, True)
        assert compare(planner.state_dict, entries, LoadRules.of(True, (), "error")) == (
            (),
        ) * 5 + ({}, 0)
        plan = planner.create_local_plan()
        assert read_coverage.check_coverage(plan.items, planner, "ckpt/.metadata")
    assert entries.columns.made_count == 0
    assert [place.relative_path for place in _places(plan.items, places)] == (
        ["__3_0.distcp"] * len(NAMES) + ["__15_0.distcp"]
    )
    assert entries.columns.made_count == len(plan.items) == len(NAMES) + 1
    assert entries.columns is places.columns is not None


def renamed(entries: dict[str, Any]) -> None:
    entries["layer0"], entries["old"] = entries.pop("layer1"), entries.pop("layer0")


def removed(entries: dict[str, Any]) -> None:
    del entries["layer0"]


def added(entries: dict[str, Any]) -> None:
    entries["new"] = BytesStorageMetadata()


def replaced(entries: dict[str, Any]) -> None:
    entries["layer0"] = entries["layer3"]


def cut(entries: dict[str, Any]) -> None:
    entries["layer0"].chunks.pop()


def moved(entries: dict[str, Any]) -> None:
    for chunk in entries["layer0"].chunks:
        chunk.offsets = torch.Size([30 - chunk.offsets[0], 0])


def resized(entries: dict[str, Any]) -> None:
    entries["layer0"].size = torch.Size([33, 4])


def retyped(entries: dict[str, Any]) -> None:
    entries["layer0"].properties.dtype = torch.float64


@pytest.mark.parametrize(
    "change", [renamed, removed, added, replaced, cut, moved, resized, retyped]
)
def test_what_was_changed_in_the_metadata_is_what_is_planned(
    change: Callable[[dict[str, Any]], None],
) -> None:
    ends = []
    for is_plain in (False, True):
        metadata = sharded()
        if is_plain:
            metadata.state_dict_metadata = dict(metadata.state_dict_metadata)
        change(metadata.state_dict_metadata)
        planner = DcpxLoadPlanner()
        state = {name: torch.zeros(32, 4) for name in NAMES}
        planner.set_up_planner(state, metadata, True)
        found = compare(state, metadata.state_dict_metadata, LoadRules.of(True, (), "error"))
        try:
            plan = planner.create_local_plan()
            ends.append((found, [(one, one.storage_index.index) for one in plan.items]))
        except (RuntimeError, ValueError, dcpx.CorruptionError) as error:
            ends.append((found, [type(error), str(error)]))
    assert ends[0] == ends[1]


def test_entry_that_a_planner_swaps_is_what_is_loaded(tmp_path: Path) -> None:
    dcp.save({"a": torch.ones(4), "b": torch.full((4,), 2.0)}, storage_writer=DcpxWriter(tmp_path))

    class Swaps(DcpxLoadPlanner):
        def set_up_planner(
            self, state: Any, metadata: Any = None, is_coordinator: Any = False
        ) -> None:
            places = metadata.storage_data
            a, b = (MetadataIndex(name, [0]) for name in "ab")
            places[a], places[b] = places[b], places[a]
            super().set_up_planner(state, metadata, is_coordinator)

    state = {"a": torch.zeros(4), "b": torch.zeros(4)}
    dcp.load(state, storage_reader=DcpxReader(tmp_path), planner=Swaps())
    assert (state["a"].tolist(), state["b"].tolist()) == ([2.0] * 4, [1.0] * 4)


@pytest.mark.parametrize("planner", [DefaultLoadPlanner, DcpxLoadPlanner])
def test_place_that_was_changed_in_its_object_is_where_is_read(
    tmp_path: Path, planner: Any
) -> None:
    dcp.save({"a": torch.ones(4), "b": torch.full((4,), 2.0)}, storage_writer=DcpxWriter(tmp_path))

    class Points(planner):  # type: ignore[misc]
        def set_up_planner(
            self, state: Any, metadata: Any = None, is_coordinator: Any = False
        ) -> None:
            places = metadata.storage_data
            places[MetadataIndex("a", [0])].offset = places[MetadataIndex("b", [0])].offset
            super().set_up_planner(state, metadata, is_coordinator)

    state = {"a": torch.zeros(4)}
    dcp.load(state, storage_reader=DcpxReader(tmp_path), planner=Points())
    assert state["a"].tolist() == [2.0] * 4


def test_wanted_chunk_of_another_number_of_dimensions_is_planned_as_from_plain_dicts() -> None:
    class Flat(torch.Tensor):
        def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
            return [ChunkStorageMetadata(torch.Size([0]), torch.Size([32]))]

    ends = []
    for is_plain in (False, True):
        metadata = sharded()
        if is_plain:
            metadata.state_dict_metadata = dict(metadata.state_dict_metadata)
        planner = DcpxLoadPlanner()
        planner.set_up_planner({"layer0": torch.zeros(32, 4).as_subclass(Flat)}, metadata, True)
        try:
            ends.append(planner.create_local_plan())
        except (AssertionError, IndexError, ValueError, RuntimeError) as error:
            ends.append((type(error), str(error)))
    assert ends[0] == ends[1]
