"""Metadata whose chunks do not hold every wanted element once: refused before a tensor changes.

Stock loads all of these: a hole keeps what the tensor held before, of an overlap one chunk stays.
"""

from __future__ import annotations

import dataclasses
import itertools
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.chunked import Box, chunked, grid
from support.saves import READERS, WRITERS, raises_one
from support.states import assert_same
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem

from torch_dcpx import CorruptionError, DcpxReader, ShortReadError
from torch_dcpx.metadata.file import decode_metadata, encode_metadata

SIZES = (12, 5)
WHOLE = torch.arange(60.0).reshape(SIZES)
ROWS = grid(SIZES, (3, 1))
OTHER = torch.arange(1000)


@pytest.fixture(params=["ours", "stock"])
def ckpt(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    state = {
        "a": OTHER,
        "w": chunked(ROWS, [WHOLE[box.slices] for box in ROWS], SIZES),
    }
    dcp.save(state, storage_writer=WRITERS[request.param](tmp_path / "ckpt"), no_dist=True)
    return tmp_path / "ckpt"


def edit(directory: Path, change: Callable[[Metadata], None]) -> None:
    """Changes the metadata, of either format, under right checksums."""
    path = directory / ".metadata"
    data = path.read_bytes()
    found = decode_metadata(data, str(path))
    metadata = found.metadata if found.files is not None else pickle.loads(data)
    change(metadata)
    if found.files is None:
        path.write_bytes(pickle.dumps(metadata))
    else:
        path.write_bytes(encode_metadata(metadata, list(found.files.values()), found.save_id))


def w_of(metadata: Metadata) -> TensorStorageMetadata:
    entry = metadata.state_dict_metadata["w"]
    assert isinstance(entry, TensorStorageMetadata)
    return entry


def resize(number: int, rows: int) -> Callable[[Metadata], None]:
    def change(metadata: Metadata) -> None:
        chunk = w_of(metadata).chunks[number]
        w_of(metadata).chunks[number] = ChunkStorageMetadata(chunk.offsets, torch.Size((rows, 5)))

    return change


def move(metadata: Metadata) -> None:
    begin, end = torch.Size((4, 0)), torch.Size((5, 0))
    w_of(metadata).chunks[1] = ChunkStorageMetadata(end, torch.Size((4, 5)))
    place = metadata.storage_data.pop(MetadataIndex("w", begin))
    metadata.storage_data[MetadataIndex("w", end)] = place


# name -> (change, a word of the message)
DAMAGES: dict[str, tuple[Callable[[Metadata], None], str]] = {
    "chunk left out": (lambda m: w_of(m).chunks.__delitem__(1), "element [4, 0]"),
    "last chunk left out": (lambda m: w_of(m).chunks.__delitem__(2), "element [8, 0]"),
    "no chunk at all": (lambda m: w_of(m).chunks.clear(), "element [0, 0]"),
    "shorter chunk": (resize(1, 3), "element [7, 0]"),
    "chunk without elements": (resize(0, 0), "element [0, 0]"),
    "longer chunk": (resize(0, 5), "twice"),
    "chunk listed twice": (lambda m: w_of(m).chunks.append(w_of(m).chunks[0]), "twice"),
    "moved chunk": (move, "twice"),
}


def canaries(sizes: tuple[int, ...] = SIZES) -> torch.Tensor:
    return torch.full(sizes, -7.0)


@pytest.mark.usefixtures("no_leaks")
@pytest.mark.parametrize("damage", DAMAGES)
def test_wanted_elements_that_are_not_stored_once_are_refused_and_the_others_load(
    ckpt: Path, damage: str
) -> None:
    change, word = DAMAGES[damage]
    edit(ckpt, change)
    target = {"a": torch.zeros_like(OTHER), "w": canaries()}
    with raises_one(CorruptionError) as raised:
        dcp.load(target, storage_reader=DcpxReader(ckpt), no_dist=True)
    error = raised.error
    assert (error.fqn, error.path, error.touched) == ("w", str(ckpt / ".metadata"), ())
    assert word in str(error)
    assert_same({"a": torch.zeros_like(OTHER), "w": canaries()}, target)
    # A chunk of the state beside the damage.
    box = Box((1, 1), (2, 3)) if "last" in damage else Box((10, 1), (2, 3))
    if damage == "no chunk at all":
        box = Box((12, 0), (0, 5))
    part = canaries(box.sizes)
    beside = {"a": torch.zeros_like(OTHER), "w": chunked([box], [part], SIZES)}
    dcp.load(beside, storage_reader=DcpxReader(ckpt), no_dist=True)
    assert_same(WHOLE[box.slices], part)
    assert_same(OTHER, beside["a"])


def test_one_bad_chunk_of_the_state_among_good_ones_is_found(ckpt: Path) -> None:
    edit(ckpt, resize(1, 3))
    boxes = grid(SIZES, (4, 5))
    parts = [canaries(box.sizes) for box in boxes]
    with raises_one(CorruptionError) as raised:
        dcp.load({"w": chunked(boxes, parts, SIZES)}, storage_reader=DcpxReader(ckpt), no_dist=True)
    assert "element [7, 0]" in str(raised.error)
    assert "[6:9, 0:1] is wanted" in str(raised.error)
    assert all(
        torch.equal(part, canaries(box.sizes)) for box, part in zip(boxes, parts, strict=True)
    )


# ---- What is no damage --------------------------------------------------------------------------


def test_padding_of_a_target_behind_the_whole_tensor_is_nobodys_to_store(ckpt: Path) -> None:
    boxes = [Box((0, 0), (7, 5)), Box((7, 0), (7, 5))]
    parts = [canaries((7, 5)), canaries((7, 5))]
    for reader in READERS.values():
        target = {"w": chunked(boxes, parts, SIZES)}
        dcp.load(target, storage_reader=reader(ckpt), no_dist=True)
        assert_same(torch.cat([WHOLE, canaries((2, 5))]), torch.cat(parts))


def test_partial_load_of_a_state_with_more_names_is_allowed(ckpt: Path) -> None:
    target = {"w": canaries(), "new": canaries(), "step": 3}
    planner = DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(target, storage_reader=DcpxReader(ckpt), planner=planner, no_dist=True)
    assert_same({"w": WHOLE, "new": canaries(), "step": 3}, target)


def first_rows(items: list[ReadItem]) -> list[ReadItem]:
    return [item for item in items if item.storage_index.offset != torch.Size((4, 0))]


class PlansLess(DefaultLoadPlanner):
    def create_local_plan(self) -> LoadPlan:
        return LoadPlan(first_rows(super().create_local_plan().items))


class FinishesLess(DefaultLoadPlanner):
    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        return LoadPlan(first_rows(new_plan.items), new_plan.storage_data, new_plan.planner_data)


class FillsHoles(DefaultLoadPlanner):
    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return super().resolve_tensor(read_item)


class ReadsLess(DcpxReader):
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Any:
        return super().read_data(LoadPlan(first_rows(plan.items)), planner)


@pytest.mark.parametrize("planner", [PlansLess, FinishesLess, DefaultLoadPlanner])
def test_part_of_a_plan_on_purpose_is_read_as_by_stock(
    ckpt: Path, planner: type[DefaultLoadPlanner]
) -> None:
    reader = ReadsLess if planner is DefaultLoadPlanner else DcpxReader
    target = {"w": canaries()}
    dcp.load(target, storage_reader=reader(ckpt), planner=planner(), no_dist=True)
    expected = WHOLE.clone()
    expected[4:8] = -7
    assert_same(expected, target["w"])


class ReadsTwice(DefaultLoadPlanner):
    """Reads its one target from several places, one after the other: the last one stays."""

    def __init__(self, names: str) -> None:
        super().__init__()
        self.names = names

    def create_local_plan(self) -> LoadPlan:
        (item,) = super().create_local_plan().items
        places = [MetadataIndex(name, torch.Size([0]), 0) for name in self.names]
        return LoadPlan([dataclasses.replace(item, storage_index=place) for place in places])


@pytest.mark.parametrize("writer", WRITERS)
def test_target_that_a_plan_reads_twice_keeps_the_last_as_with_stock(
    tmp_path: Path, writer: str
) -> None:
    stored = {"x": torch.full((5000,), 1.0), "y": torch.full((5000,), 2.0), "w": torch.zeros(5000)}
    dcp.save(stored, storage_writer=WRITERS[writer](tmp_path), no_dist=True)
    dtypes, orders = (torch.float32, torch.float64), ("xy", "yx", "xyx", "yxy")
    for reader, dtype, names in itertools.product(READERS.values(), dtypes, orders):
        target = {"w": torch.zeros(5000, dtype=dtype)}
        dcp.load(target, storage_reader=reader(tmp_path), planner=ReadsTwice(names), no_dist=True)
        assert_same({"w": stored[names[-1]].to(dtype)}, target, names)


def test_planner_that_finds_targets_its_own_way_answers_for_holes_itself(ckpt: Path) -> None:
    edit(ckpt, DAMAGES["chunk left out"][0])
    target = {"w": canaries()}
    dcp.load(target, storage_reader=DcpxReader(ckpt), planner=FillsHoles(), no_dist=True)
    assert_same(WHOLE[8:], target["w"][8:])


# ---- Sizes and places that the file does not have -----------------------------------------------


def test_chunk_that_is_larger_than_what_the_file_holds_is_refused(ckpt: Path) -> None:
    def change(metadata: Metadata) -> None:
        w_of(metadata).size = torch.Size((13, 5))
        resize(2, 5)(metadata)

    edit(ckpt, change)
    target = {"w": canaries((13, 5))}
    with raises_one(CorruptionError) as raised:
        dcp.load(target, storage_reader=DcpxReader(ckpt), no_dist=True)
    assert (raised.error.fqn, raised.error.touched) == ("w", ())
    assert Path(raised.error.path).suffix == ".distcp"
    assert_same(canaries((13, 5)), target["w"])


def move_place(offset: int, length: int) -> Callable[[Metadata], None]:
    def change(metadata: Metadata) -> None:
        place = metadata.storage_data[MetadataIndex("w", torch.Size((4, 0)))]
        place.offset += offset
        place.length = length or place.length

    return change


@pytest.mark.usefixtures("no_leaks")
def test_place_that_the_file_does_not_have_is_refused(ckpt: Path) -> None:
    whole = (ckpt / ".metadata").read_bytes()
    numbers = (0, 1, 10**9, 10**18)
    for offset, length in itertools.product(numbers, numbers):
        (ckpt / ".metadata").write_bytes(whole)
        edit(ckpt, move_place(offset, length))
        target = {"a": torch.zeros_like(OTHER), "w": canaries()}
        reader = DcpxReader(ckpt)
        if offset == length == 0:
            dcp.load(target, storage_reader=reader, no_dist=True)
            continue
        with raises_one(CorruptionError, ShortReadError) as raised:
            dcp.load(target, storage_reader=reader, no_dist=True)
        assert raised.error.touched == ()
        assert Path(raised.error.path).suffix == ".distcp"
        assert_same({"a": torch.zeros_like(OTHER), "w": canaries()}, target)
