"""Loads from metadata that is filled on demand: what they make of it, and what they notice."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.plan_states import as_rank, mesh_of, part_of
from support.saves import save
from support.states import assert_same, blank_like, mixed_state
from torch.distributed.checkpoint import format_utils
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
)
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
from torch.distributed.tensor import Shard

import torch_dcpx as dcpx
from torch_dcpx import DcpxLoadPlanner, DcpxReader, DcpxSavePlanner, DcpxWriter
from torch_dcpx.checkpoint.load_checks import Differences, LoadRules, compare
from torch_dcpx.metadata.file import decode_metadata, encode_metadata
from torch_dcpx.metadata.lazy import StoredEntries, StoredPlaces
from torch_dcpx.reader import coverage as read_coverage
from torch_dcpx.reader.locate import _places

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
        assert compare(planner.state_dict, entries, LoadRules.of(True, (), "error")) == Differences(
            found=len(planner.state_dict)
        )
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


@pytest.mark.parametrize("planner", [None, DcpxSavePlanner])
def test_dicts_of_metadata_in_a_state_are_saved_as_plain_ones(tmp_path: Path, planner: Any) -> None:
    dcp.save({"a": torch.ones(4), "b": [1]}, storage_writer=DcpxWriter(tmp_path / "first"))
    metadata = DcpxReader(tmp_path / "first").read_metadata()
    paths = {"a": ("a",), "b": ("b",)}
    state = {"paths": (metadata.planner_data, 1), "names": metadata.planner_data}
    dcp.save(state, storage_writer=DcpxWriter(tmp_path / "second"), planner=planner and planner())
    for reader in (DcpxReader, dcp.FileSystemReader):
        found: dict[str, Any] = {"paths": None, "names": dict.fromkeys(paths)}
        dcp.load(found, storage_reader=reader(tmp_path / "second"))
        assert found == {"paths": (paths, 1), "names": paths}
        assert type(found["paths"][0]) is dict


def test_pickle_of_metadata_that_was_read_serves_as_the_checkpoints_own(tmp_path: Path) -> None:
    save(mixed_state(3), tmp_path)
    metadata = DcpxReader(tmp_path).read_metadata()
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    for reader in (DcpxReader, dcp.FileSystemReader):
        found = blank_like(mixed_state(3))
        dcp.load(found, storage_reader=reader(tmp_path))
        assert_same(mixed_state(3), found)


def test_stocks_converter_rebuilds_a_state_from_metadata_of_our_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(mixed_state(3), tmp_path / "ours")
    monkeypatch.setattr(format_utils, "FileSystemReader", DcpxReader)
    format_utils.dcp_to_torch_save(tmp_path / "ours", tmp_path / "whole.pt")
    assert_same(mixed_state(3), torch.load(tmp_path / "whole.pt", weights_only=True))


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_stocks_loader_of_sharded_optimizers_reads_metadata_of_our_reader(tmp_path: Path) -> None:
    moments = {"average": torch.randn(6, 4), "step": torch.tensor(3.0)}
    optimizer = {"state": {"w": moments}, "param_groups": [{"lr": 0.1, "params": ["w"]}]}
    model = {"w": torch.randn(6, 4)}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        save({"model": model, "optimizer": optimizer}, tmp_path)
        found = load_sharded_optimizer_state_dict(model, "optimizer", DcpxReader(tmp_path))
    finally:
        dist.destroy_process_group()
    part = found["optimizer"]["state"]["w"]  # type: ignore[index]
    part["average"] = part["average"].local_shards()[0].tensor
    assert_same(optimizer, found["optimizer"])
