"""What `DcpxLoadPlanner` asked of its items the reader does not ask again; of others it does.

The error of what is stored twice, or not at all, says who read it, and what helps.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.saves import raises_one, save
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

import torch_dcpx
from torch_dcpx import CorruptionError, DcpxLoadPlanner, DcpxReader, DcpxWriter
from torch_dcpx.reader import coverage as read_coverage


def metadata_of(state: dict[str, Any]) -> Metadata:
    planner = DefaultSavePlanner()
    planner.set_up_planner(copy.copy(state), None, True)
    return planner.create_global_plan([planner.create_local_plan()])[1]


def items_by(planner: DcpxLoadPlanner, state: dict[str, Any], metadata: Metadata) -> list[ReadItem]:
    planner.set_up_planner(state, metadata, True)
    return planner.create_local_plan().items


def test_error_of_a_hole_names_what_loads_it(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(4, 4)}, storage_writer=DcpxWriter(tmp_path))

    def with_a_hole(reader: Any) -> Any:
        read = reader.read_metadata

        def change(**kwargs: Any) -> Metadata:
            metadata = read(**kwargs)
            chunk = ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([2, 4]))
            metadata.state_dict_metadata["w"].chunks[:] = [chunk]
            return metadata

        reader.read_metadata = change
        return reader

    target = {"w": torch.zeros(4, 4)}
    for planner in (DcpxLoadPlanner(), DefaultLoadPlanner()):
        with pytest.raises(CheckpointException) as caught:
            dcp.load(target, storage_reader=with_a_hole(DcpxReader(tmp_path)), planner=planner)
        error, _ = caught.value.failures[0]
        assert isinstance(error, CorruptionError)
        assert "DefaultLoadPlanner with FileSystemReader" in str(error)
    reader = with_a_hole(dcp.FileSystemReader(tmp_path))
    dcp.load(target, storage_reader=reader, planner=DefaultLoadPlanner())
    assert target["w"].tolist() == [[1.0] * 4] * 2 + [[0.0] * 4] * 2


def test_items_that_were_asked_are_not_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"w": torch.ones(4, 4), "v": torch.zeros(3), "n": 3}
    dcp.save(copy.copy(state), storage_writer=DcpxWriter(tmp_path))
    asked = []
    monkeypatch.setattr(read_coverage, "has_stock_hooks", lambda *_: True)
    monkeypatch.setattr(
        DcpxLoadPlanner,
        "_take_covered",
        lambda self, items, take=DcpxLoadPlanner._take_covered: asked.append(take(self, items)),
    )
    planner = DcpxLoadPlanner()
    dcp.load(copy.copy(state), storage_reader=DcpxReader(tmp_path), planner=planner)
    assert asked == [True]
    assert planner._covered is None


@pytest.mark.parametrize("change", ["less", "others", "state", "twice", "none"])
def test_items_that_are_not_those_that_were_asked_are_asked(change: str) -> None:
    state = {"a": torch.ones(3), "b": torch.ones(2)}
    planner = DcpxLoadPlanner()
    items = items_by(planner, state, metadata_of(state))
    if change == "less":
        items = items[:1]
    elif change == "others":
        items = [items[0], copy.copy(items[1])]
    elif change == "state":
        planner.state_dict = dict(planner.state_dict)
    elif change == "twice":
        assert planner._take_covered(items)
    assert planner._take_covered(items) == (change == "none")


def test_items_that_stocks_function_made_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DcpxLoadPlanner, "_fallback", lambda *_: [])
    planner = DcpxLoadPlanner()
    chunks = [ChunkStorageMetadata(torch.Size(n * [0]), torch.Size(n * [4])) for n in (2, 1)]
    entry = TensorStorageMetadata(TensorProperties(), torch.Size([4, 4]), chunks)
    items = items_by(planner, {"w": torch.ones(4, 4)}, Metadata({"w": entry}))
    assert items == []
    assert not planner._take_covered(items)


# ---- A directory with two saves' chunks of one tensor -------------------------------------------


class OwnReader(DcpxReader):
    """A subclass has a name of its own."""


class OwnPlanner(DcpxLoadPlanner):
    def create_local_plan(self) -> Any:
        return super().create_local_plan()


def twice(base: type) -> Any:
    """Returns a reader that finds each chunk once more, as in the files of a second save."""

    class Reader(base):  # type: ignore[misc]
        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            metadata = super().read_metadata(*args, **kwargs)
            entry = metadata.state_dict_metadata["w"]
            entry.chunks = [*entry.chunks, *entry.chunks]
            return metadata

    Reader.__name__ = f"Twice{base.__name__}"
    return Reader


@pytest.mark.parametrize("planner", [OwnPlanner, DefaultLoadPlanner])
@pytest.mark.parametrize("base", [OwnReader, dcp.FileSystemReader])
def test_error_of_what_is_stored_twice_names_the_reader(
    tmp_path: Path, base: type, planner: type
) -> None:
    save({"w": torch.arange(6)}, tmp_path)
    reader = twice(base)(tmp_path)
    target = {"w": torch.zeros(6, dtype=torch.int64)}
    if base is dcp.FileSystemReader and planner is DefaultLoadPlanner:
        dcp.load(target, storage_reader=reader, planner=planner(), no_dist=True)
        assert torch.equal(target["w"], torch.arange(6))
        return
    with raises_one(CorruptionError) as raised:
        dcp.load(target, storage_reader=reader, planner=planner(), no_dist=True)
    text = str(raised.error)
    assert f"read by Twice{base.__name__}: the directory may hold two saves; torch's" in text
    other = "this TwiceFileSystemReader" if base is dcp.FileSystemReader else "FileSystemReader"
    assert text.endswith(f"DefaultLoadPlanner with {other} loads what there is")
    assert not target["w"].any()


def test_error_of_our_own_load_names_the_reader(tmp_path: Path) -> None:
    save({"w": torch.arange(6)}, tmp_path)
    target = {"w": torch.zeros(6, dtype=torch.int64)}
    with pytest.raises(CorruptionError, match=r"same elements .*read by TwiceOwnReader: "):
        torch_dcpx.load(target, tmp_path, storage_reader=twice(OwnReader)(tmp_path), no_dist=True)
    assert not target["w"].any()


def test_planner_that_is_called_by_hand_names_no_reader(tmp_path: Path) -> None:
    save({"w": torch.arange(6)}, tmp_path)
    planner = DcpxLoadPlanner()
    planner.set_up_planner(
        {"w": torch.zeros(6, dtype=torch.int64)}, twice(DcpxReader)(tmp_path).read_metadata(), True
    )
    with pytest.raises(CorruptionError, match="read; the directory may hold two saves; torch's"):
        planner.create_local_plan()
