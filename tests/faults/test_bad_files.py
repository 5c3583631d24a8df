"""Data files that are not what the metadata says, or change while they are read.

Each ends in a typed error that names the file, in bounded time and memory; a tensor holds what it
held before, or what is right.
"""

from __future__ import annotations

import io
import itertools
import os
import socket
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.foreign import Piece, write_foreign
from support.saves import load, raises_one, save
from support.states import assert_same, raw
from support.zip_samples import saved
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from torch_dcpx import (
    CorruptionError,
    DcpxError,
    DcpxReader,
    ReadOptions,
    ShortReadError,
    StorageError,
    WriteOptions,
)
from torch_dcpx.metadata.file import decode_metadata, encode_metadata
from torch_dcpx.reader import reader as reader_module

NUMEL = 100_000
MIB = 1 << 20
pytestmark = pytest.mark.usefixtures("no_leaks")


def state_of(seed: int = 0) -> dict[str, Any]:
    return {name: torch.arange(NUMEL) + NUMEL * (seed + i) for i, name in enumerate("abc")}


def canaries(dtype: torch.dtype = torch.int64) -> dict[str, torch.Tensor]:
    return {name: torch.full((NUMEL,), -7, dtype=dtype) for name in "abc"}


def assert_old_or_right(target: dict[str, torch.Tensor], touched: tuple[str, ...]) -> None:
    """Asserts that no byte is anything else, and that `touched` names what changed."""
    for name, right in state_of().items():
        found = raw(target[name])
        is_old = found == raw(torch.full_like(target[name], -7))
        assert bool((is_old | (found == raw(right.to(target[name].dtype)))).all()), name
        assert name in touched or bool(is_old.all()), name


# ---- Something else in place of a file ----------------------------------------------------------


def plant(path: Path, kind: str) -> None:
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "link":
        path.with_name("elsewhere").write_bytes(b"x" * 100_000)
        path.symlink_to("elsewhere")
    else:
        with socket.socket(socket.AF_UNIX) as server:
            here = Path.cwd()
            os.chdir(path.parent)  # a socket's name is short
            try:
                server.bind(path.name)
            finally:
                os.chdir(here)


@pytest.mark.parametrize("writer", ["ours", "stock"])
def test_what_is_no_file_is_refused_by_name_and_waited_for_by_nobody(
    tmp_path: Path, writer: str
) -> None:
    save(state_of(), tmp_path, writer)
    names, kinds = ("__0_0.distcp", ".metadata"), ("pipe", "directory", "link", "socket")
    for name, kind in itertools.product(names, kinds):
        path = tmp_path / name
        whole = path.read_bytes()
        plant(path, kind)
        assert_refused(tmp_path, path, StorageError if kind == "socket" else CorruptionError)
        path.rmdir() if kind == "directory" else path.unlink()
        path.write_bytes(whole)
    assert_same(state_of(), load(state_of(), tmp_path))


def assert_refused(directory: Path, path: Path, kind: type[DcpxError]) -> None:
    target = canaries()
    with raises_one(kind) as raised:
        dcp.load(target, storage_reader=DcpxReader(directory), no_dist=True)
    assert raised.error.path == str(path), repr(raised.error)
    assert not getattr(raised.error, "touched", None)
    assert_same(canaries(), target)


# ---- Files of another place in the same save ----------------------------------------------------


def test_swapped_files_of_one_checkpoint_are_noticed(tmp_path: Path) -> None:
    same = dict.fromkeys("abcd", torch.arange(NUMEL))  # files of equal length and content
    save(same, tmp_path, options=WriteOptions(files_per_rank=2))
    first, second = sorted(tmp_path.glob("*.distcp"))
    contents = first.read_bytes(), second.read_bytes()
    assert len(contents[0]) == len(contents[1])
    first.write_bytes(contents[1])
    second.write_bytes(contents[0])
    with raises_one(CorruptionError) as raised:
        load(same, tmp_path)
    assert raised.error.path in (str(first), str(second))


def test_size_in_the_file_table_that_is_not_the_files_is_refused(tmp_path: Path) -> None:
    save(state_of(), tmp_path)
    path = tmp_path / ".metadata"
    found = decode_metadata(path.read_bytes(), str(path))
    for nbytes in (0, 1, 10**9, 10**18):
        entries = [entry._replace(nbytes=nbytes) for entry in (found.files or {}).values()]
        path.write_bytes(encode_metadata(found.metadata, entries, found.save_id))
        kind = ShortReadError if nbytes > 1 else CorruptionError
        assert_refused(tmp_path, tmp_path / "__0_0.distcp", kind)


# ---- Files that shrink while they are read ------------------------------------------------------


@pytest.mark.parametrize("writer", ["ours", "stock"])
def test_file_that_shrinks_before_it_is_read_is_a_short_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writer: str
) -> None:
    """Between the look for the payloads and their read, at any place."""
    read = reader_module.read_items
    path = tmp_path / "__0_0.distcp"
    save(state_of(), tmp_path, writer)
    whole = path.read_bytes()
    for left in (0, 1, 4096, len(whole) // 3, len(whole) // 2):
        path.write_bytes(whole)

        def shrunk(*args: Any, nbytes: int = left, **kwargs: Any) -> int:
            os.truncate(path, nbytes)
            return read(*args, **kwargs)

        monkeypatch.setattr(reader_module, "read_items", shrunk)
        target = canaries()
        with raises_one(ShortReadError) as raised:
            dcp.load(target, storage_reader=DcpxReader(tmp_path), no_dist=True)
        assert raised.error.path == str(path)
        assert raised.error.offset >= left
        assert_old_or_right(target, raised.error.touched)


class Shrinks(DefaultLoadPlanner):
    """Cuts the file when the first tensor has been read."""

    path: Path

    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        if self.path.stat().st_size > 4096:
            os.truncate(self.path, 4096)


@pytest.mark.parametrize("writer", ["ours", "stock"])
def test_file_that_shrinks_between_two_reads_of_a_load_is_a_short_read(
    tmp_path: Path, writer: str
) -> None:
    save(state_of(), tmp_path, writer)
    planner = Shrinks()
    planner.path = tmp_path / "__0_0.distcp"
    # Of another dtype, so that every tensor is staged, in a window of its own.
    target = canaries(torch.float64)
    options = ReadOptions(workers=1, slot_bytes=256 << 10, host_memory_bytes=256 << 10)
    reader = DcpxReader(tmp_path, options=options)
    with raises_one(ShortReadError) as raised:
        dcp.load(target, storage_reader=reader, planner=planner, no_dist=True)
    assert raised.error.path == str(planner.path)
    assert_old_or_right(target, raised.error.touched)
    assert_same(state_of()["a"].double(), target["a"])


# ---- Zip items that claim more than they hold ---------------------------------------------------


@contextmanager
def bounded_memory() -> Iterator[None]:
    """Asserts that the block's peak is at most 64 MiB above what it began with."""

    def resident(field: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    yield
    assert resident("VmHWM") - before <= 64 * MIB


def claims(record: str, nbytes: int, method: int) -> bytes:
    """Returns an item whose directory says that one record has `nbytes`, packed by `method`."""
    source = zipfile.ZipFile(io.BytesIO(saved(torch.arange(1000))))
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name in source.namelist():
            archive.writestr(name, source.read(name))
        for info in archive.filelist:
            if info.filename.endswith(record):
                info.file_size = nbytes
                if method == zipfile.ZIP_STORED:
                    info.compress_size = nbytes
    return buffer.getvalue()


def assert_item_is_corrupt(directory: Path, item: bytes) -> None:
    write_foreign(directory, [Piece("t", item, torch.arange(1000))])
    target = {"t": torch.full((1000,), -7)}
    with bounded_memory(), raises_one(CorruptionError) as raised:
        dcp.load(target, storage_reader=DcpxReader(directory), no_dist=True)
    assert (raised.error.fqn, raised.error.path) == ("t", str(directory / "__0_0.distcp"))
    assert_same(torch.full((1000,), -7), target["t"])


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_record_that_claims_more_than_there_is_is_corruption_in_bounded_memory(
    tmp_path: Path, method: int
) -> None:
    records, claimed = ("data/0", "data.pkl", "version"), (8001, 1 << 32, 1 << 36, 10**18)
    for number, (record, nbytes) in enumerate(itertools.product(records, claimed)):
        assert_item_is_corrupt(tmp_path / str(number), claims(record, nbytes, method))


def test_deflated_item_that_is_cut_off_is_corruption(tmp_path: Path) -> None:
    item = claims("data/0", 8000, zipfile.ZIP_DEFLATED)
    for share in (0.1, 0.5, 0.9, 0.99):
        cut = item[: int(share * len(item))].ljust(len(item), b"\0")
        assert_item_is_corrupt(tmp_path / str(share), cut)
