"""What `finish` makes of the results of all ranks, and which ones it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from torch_dcpx.errors import PlanError
from torch_dcpx.storage.names import FileEntry
from torch_dcpx.writer.commit import WriteResults, verify_results
from torch_dcpx.writer.rows import write_results

SIZES = torch.Size((4, 8))
HALVES = [torch.Size((0, 0)), torch.Size((2, 0))]


def file_of(rank: int) -> FileEntry:
    return FileEntry(f"__{rank}_0.distcp", bytes(16), 1000, 0)


def metadata() -> Metadata:
    """A tensor in two halves, and an object."""
    chunks = [ChunkStorageMetadata(offsets, torch.Size((2, 8))) for offsets in HALVES]
    entry = TensorStorageMetadata(TensorProperties(torch.float32), SIZES, chunks)
    return Metadata({"w": entry, "step": BytesStorageMetadata()})


def result(index: MetadataIndex, rank: int, offset: int = 0, length: int = 64) -> WriteResult:
    return WriteResult(index, length, _StorageInfo(file_of(rank).path, offset, length))


def results() -> list[WriteResults]:
    """Each rank writes a half, and rank 1 the object."""
    first = WriteResults([result(MetadataIndex("w", HALVES[0]), 0)], [file_of(0)])
    rows = [result(MetadataIndex("w", HALVES[1]), 1, 64), result(MetadataIndex("step"), 1, 128)]
    return [first, WriteResults(rows, [file_of(1)])]


def test_results_of_all_chunks_become_storage_data() -> None:
    storage_data, files = verify_results(metadata(), results())
    flat = [one for rank in results() for one in rank]
    assert storage_data == {one.index: one.storage_data for one in flat}
    assert list(storage_data) == [one.index for one in flat]
    assert files == [file_of(0), file_of(1)]


def replaced(rank: int, number: int, new: WriteResult) -> list[WriteResults]:
    made = results()
    made[rank][number] = new
    return made


def without(rank: int, number: int) -> list[WriteResults]:
    made = results()
    del made[rank][number]
    return made


def with_one_more(new: WriteResult) -> list[WriteResults]:
    made = results()
    made[1].append(new)
    return made


HALF = MetadataIndex("w", HALVES[1])
BAD: dict[str, tuple[Any, str]] = {
    "twice": (
        with_one_more(result(HALF, 1, 256)),
        r"'w' at offset .*2, 0.* from rank 1 was written twice",
    ),
    "missing": (without(0, 0), r"no rank wrote 'w' at offset \(0, 0\): nothing is published"),
    "missing object": (without(1, 1), "no rank wrote 'step' at offset None"),
    "unplanned": (
        with_one_more(result(MetadataIndex("x", (0,)), 1)),
        "'x' at offset .* was written but is not in the metadata",
    ),
    "elsewhere": (
        replaced(1, 0, result(MetadataIndex("w", (3, 0)), 1)),
        r"no rank wrote 'w' at offset \(2, 0\)",
    ),
    "unknown file": (
        replaced(1, 0, WriteResult(HALF, 64, _StorageInfo("__7_0.distcp", 0, 64))),
        "names unknown file '__7_0.distcp': no rank reports it",
    ),
    "behind the end": (
        replaced(1, 0, result(HALF, 1, 960)),
        r"lies at \[960, 1024\), outside of '__1_0.distcp' of 1000 B",
    ),
    "before the begin": (replaced(1, 0, result(HALF, 1, -64)), r"lies at \[-64, 0\), outside of"),
    "negative length": (replaced(1, 0, result(HALF, 1, 64, -1)), r"lies at \[64, 63\), outside of"),
    "no table": ([list(rank) for rank in results()], "names unknown file '__0_0.distcp'"),
}


def test_results_that_contradict_the_metadata_or_each_other_are_refused() -> None:
    for case, (made, text) in BAD.items():
        with pytest.raises(PlanError, match=text) as raised:
            verify_results(metadata(), made)
        assert raised.value.fqn in ("w", "x", "step"), case
    given = results()
    given[1].files = [file_of(0)]
    with pytest.raises(PlanError, match=r"rank 1 reports file '__0_0.distcp' of another rank"):
        verify_results(metadata(), given)


def test_made_results_equal_those_of_the_constructors() -> None:
    items: Any = [WriteResult(HALF, 0, None), WriteResult(MetadataIndex("step"), 0, None)]
    paths, descriptors = ["a.distcp", "b.distcp"], ["zlib"]
    made = write_results(items, paths, [0, 70], [64, 8], descriptors)
    assert made == [
        WriteResult(HALF, 64, _StorageInfo("a.distcp", 0, 64, descriptors)),
        WriteResult(MetadataIndex("step"), 8, _StorageInfo("b.distcp", 70, 8, descriptors)),
    ]
    assert vars(made[0]).keys() == vars(WriteResult(HALF, 64, None)).keys()
    assert write_results(items[:1], ["a"], [0], [1], None)[0].storage_data == _StorageInfo(
        "a", 0, 1
    )
    with pytest.raises(ValueError, match="differ in number"):
        write_results(items, paths, [0], [64], None)
