"""A damaged or hostile `.metadata` is a CorruptionError that says where, and nothing else."""

from __future__ import annotations

import pathlib
import struct
import zlib
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given
from support.metadata_samples import I64, PATH, TAIL, canonical, encode_small, forge, seal, small
from support.rows import check_rows
from torch.distributed.checkpoint.metadata import Metadata

from torch_dcpx.errors import CorruptionError, UnsupportedError
from torch_dcpx.metadata.file import CheckpointMetadata, decode_metadata
from torch_dcpx.storage.directory import Directory, SmallFile

# ---- Damage -------------------------------------------------------------------------------------


def test_flipped_bit_anywhere_is_corruption(seed: int) -> None:
    data = encode_small()
    for at in range(len(data)):
        flipped = bytearray(data)
        flipped[at] ^= 1 << (at + seed) % 8
        with pytest.raises(CorruptionError) as caught:
            decode_metadata(bytes(flipped), PATH)
        error = caught.value
        assert error.path == PATH
        if at < len(data) - 56:  # with the tail's magic gone, the error is about what follows
            assert error.offset is not None
            assert error.nbytes is not None
            assert error.offset <= at < error.offset + error.nbytes


def test_cut_file_is_corruption_or_exactly_the_stock_file() -> None:
    data = encode_small()
    pickle_bytes = TAIL.unpack(data[-64:])[3]
    for nbytes in range(len(data)):
        if nbytes == pickle_bytes:
            cut = decode_metadata(data[:nbytes], PATH)
            assert canonical(cut) == canonical(CheckpointMetadata(small(), cut.save_id, None))
            continue
        with pytest.raises(CorruptionError) as caught:
            decode_metadata(data[:nbytes], PATH)
        assert caught.value.path == PATH


def test_longer_file_is_corruption() -> None:
    data = encode_small()
    for longer in (data + b"\0", b"\0" + data, data + data, data + bytes(64)):
        with pytest.raises(CorruptionError):
            decode_metadata(longer, PATH)


def test_unknown_version_is_named() -> None:
    tail = struct.pack("<8sI", b"DCPXMETA", 2) + encode_small()[-52:-4]
    data = encode_small()[:-64] + tail + struct.pack("<I", zlib.crc32(tail))
    with pytest.raises(UnsupportedError, match=r"version 2\b.*version 1\b"):
        decode_metadata(data, PATH)


# ---- Hostile files: the checksums are right ------------------------------------------------------


def put(name: str, at: int, value: int) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    return lambda _, columns: columns[name].__setitem__(at, value)


def head(name: str, value: Any) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    return lambda header, _: header.__setitem__(name, value)


def one_beyond(name: str, at: int = 0) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    """Names the string behind the last."""
    return lambda _, columns: columns[name].__setitem__(at, len(columns["string_ends"]))


def second_name_of_the_first(_: dict[str, Any], columns: dict[str, Any]) -> None:
    """Gives the second item the name and offset of the first, by another string."""
    columns["strings"] += b"model.weight"
    columns["string_ends"].append(len(columns["strings"]))
    columns["storage_fqn"][1] = len(columns["string_ends"]) - 1
    columns["storage_offsets"][2:4] = columns["storage_offsets"][0:2]


STRING_COLUMNS = ("entry_fqn", "tensor_dtype", "tensor_layout", "storage_fqn", "storage_path",
                  "planner_fqn", "planner_value", "file_path")  # fmt: skip
META: dict[str, Any] = {"checkpoint_id": "", "save_id": "", "modules": []}
HOSTILE: dict[str, Callable[[dict[str, Any], dict[str, Any]], None]] = {
    **{f"{name}: -1": put(name, 0, -1) for name in STRING_COLUMNS},
    **{f"{name}: one beyond": one_beyond(name) for name in STRING_COLUMNS},
    "dtype unknown": put("tensor_dtype", 0, 0),
    "layout is a dtype": lambda _, c: c["tensor_layout"].__setitem__(0, c["tensor_dtype"][0]),
    "kind unknown": put("entry_kind", 0, 2),
    "one tensor fewer": put("entry_kind", 0, 1),
    "flags unknown": put("tensor_flags", 0, 4),
    "memory format unknown": put("tensor_memory_format", 0, 3),
    "ndim negative": put("tensor_ndim", 0, -2),
    "ndim huge": put("tensor_ndim", 0, 1 << 62),
    "chunks of a scalar": put("tensor_chunk_count", 1, 1 << 62),
    "chunks negative": put("tensor_chunk_count", 0, -2),
    "chunk flag unknown": put("chunk_flags", 0, 1),
    "size negative": put("tensor_sizes", 0, -1),
    "chunk ends beyond int64": lambda _, c: [
        c[name].__setitem__(0, 1 << 62) for name in ("chunk_offsets", "chunk_sizes")
    ],
    "item ends beyond int64": put("storage_offset", 0, I64),
    "item length negative": put("storage_bytes", 0, -1),
    "index ndim below None": put("storage_ndim", 0, -2),
    "index ndim huge": put("storage_ndim", 0, 1 << 62),
    "hint below None": put("storage_hint", 0, -2),
    "descriptors unknown": put("storage_descriptors", 0, 1),
    "path length huge": put("planner_len", 0, 1 << 62),
    "tag unknown": put("planner_tag", 0, 2),
    "file crc too large": put("file_crc", 0, 1 << 32),
    "file id short": lambda _, c: c["file_id"].pop(),
    "strings descend": put("string_ends", 1, 0),
    "unused string descends": lambda _, c: c["string_ends"].extend(
        [c["string_ends"][-1] - 1, c["string_ends"][-1]]
    ),
    "strings end late": lambda _, c: c["strings"].extend(b"more"),
    "strings end early": lambda _, c: c["string_ends"].pop(),
    "no strings": lambda _, c: (c["strings"].clear(), c["string_ends"].clear()),
    "string no UTF-8": put("strings", 0, 0xFF),
    "name twice": lambda _, c: c["entry_fqn"].__setitem__(0, c["entry_fqn"][1]),
    "item twice": lambda _, c: c["storage_offsets"].__setitem__(2, 0),
    "planner name twice": lambda _, c: c["planner_fqn"].__setitem__(0, c["planner_fqn"][1]),
    "file twice": lambda _, c: c["file_path"].__setitem__(0, c["file_path"][1]),
    "column longer": lambda _, c: c["storage_path"].append(0),
    "ndim column longer": lambda _, c: c["storage_ndim"].append(0),
    "string again": second_name_of_the_first,
    "path beyond the strings": one_beyond("planner_value", -1),
    "column missing": lambda _, c: c.pop("storage_hint"),
    "column of bytes": lambda _, c: c.__setitem__("storage_hint", bytearray(32)),
    "column of numbers": lambda _, c: c.__setitem__("entry_kind", [0, 0, 1]),
    "columns no list": head("columns", 1),
    "column no row": head("columns", [["strings", "u8"]]),
    "column of unknown kind": head("columns", [["strings", "f64", 1]]),
    "column huge": head("columns", [["strings", "i64", 1 << 80]]),
    "column count a bool": head("columns", [["strings", "u8", True]]),
    "columns too few": head("columns", []),
    "planner_data elsewhere": head("planner_data", "there"),
    "planner_data no str": head("planner_data", []),
    "storage_meta no object": head("storage_meta", []),
    "storage_meta empty": head("storage_meta", {}),
    "modules no strings": head("storage_meta", {**META, "modules": [1]}),
    "checkpoint_id a number": head("storage_meta", {**META, "checkpoint_id": 1}),
    "descriptors no lists": head("descriptors", ["a"]),
    "version a number": head("version", 1),
    "save id a number": head("save_id", 1),
}


def test_columns_that_contradict_themselves_are_corruption() -> None:
    def check(change: Callable[[dict[str, Any], dict[str, Any]], None]) -> None:
        data = forge(change)
        with pytest.raises(CorruptionError) as caught:
            decode_metadata(data, PATH)
        error = caught.value
        assert error.path == PATH
        assert error.offset is not None and error.nbytes is not None
        assert 0 <= error.offset <= error.offset + error.nbytes <= len(data)

    check_rows(HOSTILE, check)


def test_unknown_column_is_skipped_and_missing_key_is_not() -> None:
    data = forge(lambda _, columns: columns.update({"of a later version": [1, 2]}))
    assert canonical(decode_metadata(data, PATH)) == canonical(
        decode_metadata(encode_small(), PATH)
    )
    for key in ("save_id", "version", "storage_meta", "planner_data", "descriptors"):
        with pytest.raises(CorruptionError):
            decode_metadata(forge(lambda header, _, key=key: header.pop(key)), PATH)  # type: ignore[misc]


def extra(_header: dict[str, Any], columns: dict[str, Any]) -> None:
    columns["extra"] = [1]


def same_again(_header: dict[str, Any], columns: dict[str, Any]) -> None:
    columns["extra"] = columns["entry_kind"]


TABLES: dict[str, tuple[Callable[..., object], Callable[[list[list[Any]]], object]]] = {
    "bytes left": (extra, lambda table: table.pop()),
    "name twice": (same_again, lambda table: table[-1].__setitem__(0, "entry_kind")),
    "bytes missing": (extra, lambda table: table[-1].__setitem__(2, 2)),
    "negative u8": (lambda *_: None, lambda table: table.insert(3, ["extra", "u8", -1])),
    "negative i64": (lambda *_: None, lambda table: table.append(["extra", "i64", -1])),
}
HEADERS = [b"[" * 100_000, b"no JSON!", b"\xff" * 8, b"1       ", b"null    ", b"{}      ", b""]


def test_header_that_is_none_or_does_not_describe_the_body_is_corruption() -> None:
    def check(data: bytes) -> None:
        with pytest.raises(CorruptionError):
            decode_metadata(data, PATH)

    data = encode_small()
    pickle_bytes = TAIL.unpack(data[-64:])[3]
    check_rows({name: forge(*changes) for name, changes in TABLES.items()}, check)
    check_rows({repr(one[:8]): seal(data, one, len(one)) for one in HEADERS}, check)
    lengths = (4, 1 << 40, (1 << 64) - 8)
    check_rows({str(n): seal(data, data[pickle_bytes:-64], n) for n in lengths}, check)
    check_rows({"bytes before the tail": data[:-64] + bytes(8) + data[-64:]}, check)


@given(st.data())
def test_changed_body_under_right_checksums_is_corruption_or_metadata(draw: st.DataObject) -> None:
    data = encode_small()
    _, _, _, pickle_bytes, _, header_bytes, *_ = TAIL.unpack(data[-64:])
    body = bytearray(data[pickle_bytes:-64])
    for _ in range(draw.draw(st.integers(1, 3))):
        at = draw.draw(st.integers(0, len(body) - 1))
        new = draw.draw(st.binary(min_size=1, max_size=8))
        body[at : at + len(new)] = new[: len(body) - at]
    try:
        found = decode_metadata(seal(data, bytes(body), header_bytes), PATH)
    except CorruptionError as error:
        assert error.path == PATH  # noqa: PT017  either outcome is right
    else:
        assert isinstance(found.metadata, Metadata)


def test_header_that_ends_off_the_8_byte_border_is_corruption() -> None:
    def change(_: dict[str, Any], columns: dict[str, Any]) -> None:
        """Puts a column of numbers first: all others begin on a border, wherever it begins."""
        rest = dict(columns)
        columns.clear()
        columns["tensor_ndim"] = rest.pop("tensor_ndim")
        columns.update(rest)

    data = forge(change)
    _, _, _, pickle_bytes, body_bytes, header_bytes, *_ = TAIL.unpack(data[-64:])
    whole = data[pickle_bytes : pickle_bytes + body_bytes]
    end = header_bytes + 2 * 8  # of the numbers of two tensors
    for shift in (1, 4, 7):
        body = whole[:header_bytes] + b" " * shift + whole[header_bytes:end]
        body += b"\0" * (8 - shift) + whole[end:]
        with pytest.raises(CorruptionError, match="multiple of 8") as caught:
            decode_metadata(seal(data, body, header_bytes + shift), PATH)
        assert caught.value.path == PATH


def test_header_beyond_its_body_is_corruption() -> None:
    data = encode_small()
    _, _, _, pickle_bytes, body_bytes, *_ = TAIL.unpack(data[-64:])
    for header_bytes in (1 << 20, (1 << 64) - 8):
        forged = seal(data, data[pickle_bytes : pickle_bytes + body_bytes], header_bytes)
        with pytest.raises(CorruptionError, match="too long") as caught:
            decode_metadata(forged, PATH)
        assert caught.value.path == PATH


def test_file_that_becomes_shorter_while_it_is_read_is_corruption(tmp_path: pathlib.Path) -> None:
    path = tmp_path / ".metadata"
    path.write_bytes(encode_small())
    with Directory(tmp_path) as opened, opened.open_small(".metadata") as file:
        path.write_bytes(encode_small()[:-100])
        with pytest.raises(CorruptionError, match="ends at"):
            decode_metadata(file, PATH)


def test_pickle_that_changes_between_its_check_and_its_decoding_is_corruption(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = encode_small(planner_data=[{"not": "flatten's"}])
    (tmp_path / ".metadata").write_bytes(data)
    end = TAIL.unpack(data[-64:])[3]
    at = data.index(b"flatten's")
    part = SmallFile.part
    reads = []

    def changing(self: SmallFile, offset: int, nbytes: int) -> bytes:
        """The bytes of the file; from the second time on that the pickle is read, of another."""
        found = part(self, offset, nbytes)
        if offset == 0:
            reads.append(nbytes)
        if offset != 0 or len(reads) < 2:
            return found
        return found[:at] + b"FLATTEN'S" + found[at + 9 :]

    monkeypatch.setattr(SmallFile, "part", changing)
    with (
        Directory(tmp_path) as opened,
        opened.open_small(".metadata") as file,
        pytest.raises(CorruptionError, match="of pickle at offset 0"),
    ):
        decode_metadata(file, PATH)
    assert reads == [end, end]
