"""Saving, loading and damaging checkpoints: what the tests of faults have in common."""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch.distributed.checkpoint as dcp
from support.states import assert_same, blank_like
from torch.distributed.checkpoint.api import CheckpointException

from torch_dcpx import DcpxReader, DcpxWriter
from torch_dcpx.metadata.file import decode_save_id
from torch_dcpx.storage.names import is_metadata_name

WRITERS: dict[str, Callable[..., Any]] = {"ours": DcpxWriter, "stock": dcp.FileSystemWriter}
READERS: dict[str, Callable[..., Any]] = {"ours": DcpxReader, "stock": dcp.FileSystemReader}

_TAIL = struct.Struct("<8sII16s7Q3I16s8sI")  # docs/reference/format.md, "Data files"


def save(state: dict[str, Any], directory: Path, writer: str = "ours", **kwargs: Any) -> None:
    dcp.save(state, storage_writer=WRITERS[writer](directory, **kwargs), no_dist=True)


def save_rank_local(state: dict[str, Any], directory: Path, rank: int) -> None:
    """Saves as `rank` of a job without collectives does."""

    class RankWriter(DcpxWriter):
        def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
            super().set_up_storage_writer(is_coordinator, rank=rank, use_collectives=False)

    dcp.save(state, storage_writer=RankWriter(directory), no_dist=True, use_collectives=False)


def load(
    state: dict[str, Any], directory: Path, reader: str = "ours", **kwargs: Any
) -> dict[str, Any]:
    """Returns what a blank copy of `state` holds after the load."""
    target = blank_like(state)
    dcp.load(target, storage_reader=READERS[reader](directory, **kwargs), no_dist=True)
    return target


def assert_loads(state: dict[str, Any], directory: Path) -> None:
    """Asserts that stock and we both load `state` from `directory`, bit for bit."""
    for reader in READERS:
        assert_same(state, load(state, directory, reader))


class Raised:
    """What `raises_one` saw; filled in when its block has ended."""

    error: Any = None


@contextmanager
def raises_one(*kinds: type[BaseException]) -> Iterator[Raised]:
    """Asserts that the block raises CheckpointException around one error, of these types."""
    raised = Raised()
    with pytest.raises(CheckpointException) as caught:
        yield raised
    assert list(caught.value.failures) == [0]
    raised.error = caught.value.failures[0][0]
    assert type(raised.error) in kinds, repr(raised.error)


def files_in(directory: Path) -> dict[str, bytes]:
    """Returns name -> content of every regular file, the lock left out."""
    return {
        path.name: path.read_bytes()
        for path in directory.iterdir()
        if path.is_file() and path.name != ".dcpx.lock"
    }


def data_files(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.glob("*.distcp"))


def referenced(directory: Path) -> list[str]:
    """Returns the data files that the directory's metadata names, as stock reads it."""
    infos = dcp.FileSystemReader(directory).read_metadata().storage_data.values()
    return sorted({info.relative_path for info in infos})


def assert_whole(state: dict[str, Any], directory: Path) -> None:
    """Asserts that the directory holds `state`, its own files, and nothing else of a save."""
    assert_loads(state, directory)
    assert data_files(directory) == referenced(directory)
    hidden = {path.name for path in directory.glob(".*")}
    assert hidden in ({".metadata"}, {".metadata", ".dcpx.lock"})


def change(path: Path, offset: int, data: bytes) -> bytes:
    """Overwrites bytes in place; returns what was there."""
    fd = os.open(path, os.O_RDWR)
    try:
        before = os.pread(fd, len(data), offset)
        assert len(before) == len(data)
        os.pwrite(fd, data, offset)
    finally:
        os.close(fd)
    return before


@contextmanager
def flipped(path: Path, offset: int, mask: int = 0xFF) -> Iterator[None]:
    """Flips bits of one byte of a file while the block runs."""
    before = path.read_bytes()[offset]
    change(path, offset, bytes([before ^ mask]))
    try:
        yield
    finally:
        change(path, offset, bytes([before]))


class Row(NamedTuple):
    """One item of a data file, byte ranges from the start of the file."""

    fqn: str
    item_offset: int
    item_bytes: int
    payload_offset: int
    payload_bytes: int
    path: str  # JSON, or empty


class Footer(NamedTuple):
    """Where the parts of a data file lie, in bytes, and its items in the order of the index."""

    file_bytes: int
    data_bytes: int
    index_offset: int
    index_bytes: int
    table_offset: int
    block_count: int
    rows: list[Row]
    save_id: str  # hex; "": none

    @property
    def page_checks_offset(self) -> int:
        return self.table_offset + 4 * self.block_count

    @property
    def tail_offset(self) -> int:
        return self.file_bytes - _TAIL.size

    def row(self, fqn: str) -> Row:
        return next(row for row in self.rows if row.fqn == fqn)

    def items_within(self, begin: int, end: int) -> set[str]:
        """Returns the names of items with a payload byte in [begin, end)."""
        return {
            row.fqn
            for row in self.rows
            if row.payload_offset < end and begin < row.payload_offset + row.payload_bytes
        }


def read_footer(path: Path) -> Footer:
    data = path.read_bytes()
    tail = _TAIL.unpack(data[-_TAIL.size :])
    file_bytes, data_bytes, index_offset, index_bytes, _, table_offset, block_count = tail[4:11]
    rows = []
    at = index_offset
    while at < index_offset + index_bytes:
        row_bytes, _, _, _, ndim, *places = struct.unpack_from("<I4B4Q", data, at)
        *texts, _, fqn_bytes, path_bytes, _ = struct.unpack_from("<4H3I", data, at + 44)
        begin = at + 64 + 32 * ndim + sum(texts)
        end = begin + fqn_bytes
        keys = data[end : end + path_bytes].decode("utf-8", "surrogatepass")
        rows.append(Row(data[begin:end].decode("utf-8", "surrogatepass"), *places, keys))
        at += row_bytes
    save_id = "" if tail[14] == bytes(16) else tail[14].hex()
    return Footer(
        file_bytes, data_bytes, index_offset, index_bytes, table_offset, block_count, rows, save_id
    )


def save_ids(directory: Path) -> dict[str, str]:
    """Returns which save each data file says that it is of."""
    return {name: read_footer(directory / name).save_id for name in data_files(directory)}


def committed_ids(directory: Path) -> set[str | None]:
    """Returns the saves that the directory's files of metadata are of."""
    paths = [path for path in directory.iterdir() if is_metadata_name(path.name)]
    return {decode_save_id(path.read_bytes(), str(path)) for path in paths}


def note_save(path: Path, save_id: bytes = bytes(16)) -> None:
    """Makes a data file say another save; by default none, as those of older versions."""
    data = bytearray(path.read_bytes())
    data[-28:-12] = save_id
    data[-4:] = struct.pack("<I", zlib.crc32(data[-_TAIL.size : -4]))
    path.write_bytes(data)
