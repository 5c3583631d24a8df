"""Damaged checkpoints: the right bytes come back, or a typed error that says where."""

from __future__ import annotations

import itertools
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.saves import flipped, load, raises_one, read_footer, save
from support.states import assert_same, blank_like
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint.api import CheckpointException

from torch_dcpx import (
    CorruptionError,
    DcpxError,
    DcpxReader,
    ReadOptions,
    ShortReadError,
    StorageError,
    UnsafePickleError,
)
from torch_dcpx.reader import locate
from torch_dcpx.reader.locate import Found

BLOCK_BYTES = 64 << 10


def state_of(seed: int = 0) -> dict[str, Any]:
    g = torch.Generator().manual_seed(seed)
    return {
        "small": torch.randn(100, generator=g),
        "other": torch.randn(33, generator=g),
        "large": torch.randn(100_000, generator=g),
        "text": f"déjà vu {seed}",
    }


@pytest.fixture
def ckpt(tmp_path: Path) -> Path:
    save(state_of(), tmp_path / "ckpt")
    return tmp_path / "ckpt"


def regions(data_file: Path) -> dict[str, int]:
    """Returns region -> offset of one byte in it; each of them is checked by some checksum."""
    footer = read_footer(data_file)
    small, large, text = (footer.row(fqn) for fqn in ("small", "large", "text"))
    rows = sorted(footer.rows, key=lambda row: row.item_offset)
    pairs = itertools.pairwise(rows)
    ends = [(row.item_offset + row.item_bytes, following.item_offset) for row, following in pairs]
    gap = next(end for end, begin in ends if begin > end)
    return {
        "first byte of a small payload": small.payload_offset,
        "last byte of a small payload": small.payload_offset + small.payload_bytes - 1,
        "first byte of a large payload": large.payload_offset,
        "first whole block of a large payload": (large.payload_offset // BLOCK_BYTES + 1)
        * BLOCK_BYTES,
        "last byte of a large payload": large.payload_offset + large.payload_bytes - 1,
        "bytes item": text.payload_offset + text.payload_bytes // 2,
        "head of a zip": small.item_offset,
        "tail of a zip": small.item_offset + small.item_bytes - 1,
        "gap between items": gap,
        "first byte of the index": footer.index_offset,
        "last byte of the index": footer.index_offset + footer.index_bytes - 1,
        "block table": footer.table_offset + 4,
        "page checks": footer.page_checks_offset,
        "magic of the tail": footer.tail_offset,
        "version in the tail": footer.tail_offset + 8,
        "file id in the tail": footer.tail_offset + 16,
        "last byte of the file": footer.file_bytes - 1,
    }


def load_and_compare(state: dict[str, Any], directory: Path) -> DcpxError:
    """Loads what must fail; asserts that only tensors in `touched` changed; returns the error."""
    target = blank_like(state)
    with pytest.raises(CheckpointException) as caught:
        dcp.load(target, storage_reader=DcpxReader(directory), no_dist=True)
    error = caught.value.failures[0][0]
    assert isinstance(error, (CorruptionError, ShortReadError)), repr(error)
    assert error.touched is not None
    for fqn, blank in blank_like(state).items():
        if fqn not in error.touched:
            assert_same(blank, target[fqn])
    return error


def test_flipped_byte_of_a_data_file_is_a_corruption_error_that_says_where(ckpt: Path) -> None:
    data_file = ckpt / "__0_0.distcp"
    footer = read_footer(data_file)
    for region, offset in regions(data_file).items():
        with flipped(data_file, offset):
            error: Any = load_and_compare(state_of(), ckpt)
        assert error.path == str(data_file), region
        assert error.offset <= offset < error.offset + error.nbytes, region
        if offset < footer.data_bytes:
            names = footer.items_within(error.offset, error.offset + error.nbytes)
            assert error.fqn in names, region
            assert error.expected != error.found, region
        else:
            assert error.touched == (), region  # known before any tensor was touched
    assert_same(state_of(), load(state_of(), ckpt))


def test_items_of_a_damaged_range_are_those_with_bytes_in_it() -> None:
    places = [(0, 100, 50, 0), (0, 150, 50, 0), (0, 300, 9, 0), (0, 150, 50, 0)]
    plan: Any = [SimpleNamespace(storage_index=SimpleNamespace(fqn=name)) for name in "abde"]
    job: Any = None
    found = Found(job, "d", plan, [], [0, 0, 0, 1], ["f", "g"], [False] * 2, [], places)
    for begin, end, names in (
        (50, 100, ""), (50, 101, "a"), (149, 150, "a"), (149, 151, "ab"), (150, 200, "b"),
        (200, 300, ""), (199, 301, "bd"), (308, 400, "d"), (309, 400, ""),
    ):  # fmt: skip
        assert found.names_in("f", begin, end) == list(names), (begin, end)
    assert found.names_in("g", 0, 1000) == ["e"]


def test_item_at_which_a_file_fails_is_named() -> None:
    rows = [("a", "f", 0), ("b", "f", 10), ("c", "g", 0)]
    stored: Any = [
        (
            SimpleNamespace(storage_index=SimpleNamespace(fqn=name)),
            SimpleNamespace(relative_path=file, offset=at, length=10),
        )
        for name, file, at in rows
    ]
    for kind, offset, file, name in (
        (StorageError, None, "f", "a"), (StorageError, 10, "f", "b"), (StorageError, 9, "f", "a"),
        (StorageError, None, "g", "c"), (CorruptionError, 10, "f", "b"),
        (CorruptionError, 19, "f", "b"), (CorruptionError, 9, "f", "a"),
    ):  # fmt: skip
        error = kind("it fails", offset=offset)
        locate._name_item(error, file, stored)
        assert str(error).endswith(f"(item '{name}')"), (kind, offset, file)
    error = CorruptionError("it fails", offset=20)
    locate._name_item(error, "f", stored)
    assert "item" not in str(error)


def test_flipped_byte_in_padding_changes_nothing(ckpt: Path) -> None:
    data_file = ckpt / "__0_0.distcp"
    footer = read_footer(data_file)
    for offset in (footer.index_offset - 1, footer.table_offset - 1, footer.tail_offset - 1):
        assert data_file.read_bytes()[offset] == 0
        with flipped(data_file, offset):
            assert_same(state_of(), load(state_of(), ckpt))


def test_touched_names_tensors_of_earlier_windows_too(ckpt: Path) -> None:
    state = {name: torch.randn(100_000) for name in "abc"}
    save(state, ckpt)
    # Of another dtype, so that every tensor is staged, in a window of its own.
    target = {name: torch.zeros(100_000, dtype=torch.float64) for name in state}
    (data_file,) = ckpt.glob("*.distcp")
    last = read_footer(data_file).row("c")
    options = ReadOptions(workers=1, slot_bytes=256 << 10, host_memory_bytes=256 << 10)
    with (
        flipped(data_file, last.payload_offset + last.payload_bytes - 1),
        raises_one(CorruptionError) as raised,
    ):
        dcp.load(target, storage_reader=DcpxReader(ckpt, options=options), no_dist=True)
    assert [bool(value.any()) for value in target.values()] == [True, True, False]
    assert raised.error.touched == ("a", "b", "c")


def test_with_verify_none_a_flipped_footer_is_still_noticed(ckpt: Path) -> None:
    data_file = ckpt / "__0_0.distcp"
    for region in ("first byte of the index", "last byte of the file"):
        with flipped(data_file, regions(data_file)[region]), raises_one(CorruptionError):
            load(state_of(), ckpt, options=ReadOptions(verify="none"))


def test_data_file_of_another_length_is_noticed_before_a_tensor_is_touched(ckpt: Path) -> None:
    data_file = ckpt / "__0_0.distcp"
    whole, footer = data_file.read_bytes(), read_footer(data_file)
    for nbytes in (
        0, 1, 127, 128, 4096, footer.row("large").payload_offset, footer.data_bytes,
        footer.index_offset, footer.table_offset, footer.tail_offset, len(whole) - 4096,
        len(whole) - 1, len(whole) + 1, len(whole) + 4096,
    ):  # fmt: skip
        data_file.write_bytes(whole[:nbytes].ljust(nbytes, b"\0"))
        error: Any = load_and_compare(state_of(), ckpt)
        assert (error.path, error.touched) == (str(data_file), ()), nbytes
        if nbytes < len(whole):
            assert f"{nbytes} B of {len(whole)} B" in str(error)
            assert (error.offset, error.nbytes) == (nbytes, len(whole) - nbytes)
        else:
            assert (error.expected, error.found) == (f"{len(whole)} B", f"{nbytes} B")


def test_missing_data_file_is_a_storage_error(ckpt: Path) -> None:
    (ckpt / "__0_0.distcp").unlink()
    with raises_one(StorageError) as raised:
        load(state_of(), ckpt)
    assert (raised.error.errno, raised.error.path) == (2, str(ckpt / "__0_0.distcp"))


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
def test_file_of_another_checkpoint_of_equal_shapes_is_noticed(tmp_path: Path, name: str) -> None:
    ckpt, other, state = tmp_path / "ckpt", tmp_path / "other", state_of()
    save(state, ckpt)
    state["large"].neg_()  # in place: the same addresses, so the same layout of the file
    save(state, other)
    footers = [read_footer(path / "__0_0.distcp") for path in (ckpt, other)]
    assert footers[0].save_id != footers[1].save_id
    assert footers[0]._replace(save_id="") == footers[1]._replace(save_id="")
    shutil.copy(other / name, ckpt / name)
    error: Any = load_and_compare(state, ckpt)
    assert (error.path, error.touched) == (str(ckpt / "__0_0.distcp"), ())
    assert "another save" in str(error)


@pytest.mark.parametrize("fqn", ["tensor", "text"])
def test_damaged_compressed_item_of_stock_is_corruption(tmp_path: Path, fqn: str) -> None:
    """Stock's files hold no checksums: what finds the damage is the extension, if it does."""
    state = {"tensor": torch.arange(1000), "text": "text"}
    save(state, tmp_path, "stock", _extensions=[ZStandard()])
    infos = dcp.FileSystemReader(tmp_path).read_metadata().storage_data
    info = next(info for index, info in infos.items() if index.fqn == fqn)
    with (
        flipped(tmp_path / info.relative_path, info.offset),  # zstd's magic
        raises_one(CorruptionError) as raised,
    ):
        load(state, tmp_path)
    assert (raised.error.fqn, raised.error.path) == (fqn, str(tmp_path / info.relative_path))
    assert "stream.zstd" in str(raised.error)


def assert_heard(target: dict[str, Any], touched: tuple[str, ...]) -> None:
    """Asserts that autograd knows which tensors, made new for a load, were written."""
    tensors = {name: value for name, value in target.items() if isinstance(value, torch.Tensor)}
    heard = {name for name, tensor in tensors.items() if tensor._version}
    assert heard == set(touched) & set(tensors)


def test_autograd_hears_of_what_a_failed_load_touched(ckpt: Path) -> None:
    data_file = ckpt / "__0_0.distcp"
    target = {**blank_like(state_of()), "small": torch.zeros(100), "large": torch.zeros(100_000)}
    target["other"] = torch.zeros(66)[::2]
    with (
        flipped(data_file, regions(data_file)["last byte of a large payload"]),
        raises_one(CorruptionError) as raised,
    ):
        dcp.load(target, storage_reader=DcpxReader(ckpt), no_dist=True)
    assert "large" in raised.error.touched
    assert_heard(target, raised.error.touched)


def test_autograd_hears_of_tensors_behind_an_item_that_is_refused(tmp_path: Path) -> None:
    save({"a": os.getcwd, "whole": torch.ones(5), "strided": torch.ones(6, 7)}, tmp_path)
    target = {"a": 0, "whole": torch.zeros(5), "strided": torch.zeros(6, 14)[:, ::2]}
    with raises_one(UnsafePickleError) as raised:
        dcp.load(target, storage_reader=DcpxReader(tmp_path), no_dist=True)
    assert set(raised.error.touched) == {"a", "whole", "strided"}
    assert_heard(target, raised.error.touched)
