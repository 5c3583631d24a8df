"""A directory with two saves' chunks of one tensor: the error says who read it, and what helps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.saves import raises_one, save
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

import torch_dcpx
from torch_dcpx import CorruptionError, DcpxLoadPlanner, DcpxReader


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


@pytest.mark.parametrize("planner", [DcpxLoadPlanner, OwnPlanner, DefaultLoadPlanner])
@pytest.mark.parametrize("base", [DcpxReader, OwnReader, dcp.FileSystemReader])
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
