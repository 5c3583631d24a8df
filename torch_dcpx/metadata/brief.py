"""The little of a `.metadata` file that a look at a root asks for, read without torch.

No object of a Metadata is made, and no pickle comes to life: of ours the columns are read, of
stock's those that C++ makes of a pickle that is exactly as torch writes it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from typing import Any, NamedTuple

from torch_dcpx._native import _C
from torch_dcpx.metadata.columns import ColumnReader
from torch_dcpx.metadata.parts import Content, check_tail, has_tail
from torch_dcpx.storage.names import FileEntry, id_bytes
from torch_dcpx.storage.place import SmallContent

RECORD_ITEM = "dcpx.manager"  # a manager's record, as manager/stored.py writes it


class Brief(NamedTuple):
    """Says what a `.metadata` file names."""

    save_id: str
    items: int  # tensors and objects
    sizes: dict[str, int]  # bytes of each data file, by its path
    is_exact: bool  # else a file may be longer: stock's says where items end, and no size
    record: tuple[str, int, int] | None = None  # of a manager: file, offset, bytes


def brief_of(data: bytes | SmallContent, path: str) -> Brief | None:
    """Reads the content of a `.metadata` file. None: of stock's, and not exactly as torch writes
    it: `decode_metadata` reads it, or says what is wrong.

    Raises: CorruptionError, UnsupportedError: as `decode_metadata`, of a file of ours.
    """
    content = Content.of(data)
    if not has_tail(content):
        return _of_stock(content.whole())
    columns = check_tail(content, path)[-1]
    strings = columns.strings()
    sizes = {name: entry.nbytes for name, entry in decode_files(columns, strings).items()}
    save_id = optional_str(columns, columns.header, "save_id")
    return Brief(
        save_id or digest_of(content.pieces(content.nbytes)),
        len(columns.u8_view("entry_kind", None, high=1)),
        sizes,
        True,
        _record_in(columns, strings),
    )


def _of_stock(data: bytes) -> Brief | None:
    found = _C.unpickle_metadata(data, os.urandom(16))
    if found is None:
        return None
    strings: list[str] = found["strings"]
    names = ("entry_fqn", "storage_path", "storage_offset", "storage_bytes")
    fqns, paths, offsets, lengths = (
        memoryview(found["columns"][name]).cast("q").tolist() for name in names
    )
    sizes: dict[str, int] = {}
    for number, offset, length in zip(paths, offsets, lengths, strict=True):
        path = strings[number]
        sizes[path] = max(offset + length, sizes.get(path, 0))
    return Brief(digest_of([data]), len(fqns), sizes, False)


def _record_in(columns: ColumnReader, strings: list[str]) -> tuple[str, int, int] | None:
    """Returns where a manager's record lies."""
    if RECORD_ITEM not in strings:
        return None
    fqns = columns.i64("storage_fqn", None, high=len(strings) - 1)
    if strings.index(RECORD_ITEM) not in fqns:
        return None
    at = fqns.index(strings.index(RECORD_ITEM))
    paths = columns.i64("storage_path", len(fqns), high=len(strings) - 1)
    offset, nbytes = (columns.i64(name, len(fqns)) for name in ("storage_offset", "storage_bytes"))
    return strings[paths[at]], offset[at], nbytes[at]


def decode_files(columns: ColumnReader, strings: list[str]) -> dict[str, FileEntry]:
    """Returns the file table by path."""
    paths = [strings[number] for number in columns.i64("file_path", None, high=len(strings) - 1)]
    ids = columns.u8("file_id", 16 * len(paths))
    sizes = columns.i64("file_bytes", len(paths))
    crcs = columns.i64("file_crc", len(paths), high=(1 << 32) - 1)
    save_id = id_bytes(columns.header.get("save_id"))
    files = {
        path: FileEntry(path, ids[16 * number : 16 * number + 16], nbytes, crc, save_id)
        for number, (path, nbytes, crc) in enumerate(zip(paths, sizes, crcs, strict=True))
    }
    columns.require(len(files) == len(paths), "a file is there twice", "file_path")
    return files


def optional_str(columns: ColumnReader, values: dict[str, Any], name: str) -> str | None:
    """Returns value `name` of the header or of a dict in it: a string or null, never missing."""
    value: str | None = values.get(name, 0)
    columns.require(value is None or type(value) is str, f"the header's {name!r} is no string")
    return value


def digest_of(pieces: Iterable[bytes | memoryview]) -> str:
    """Returns what stands for the id of a save whose file notes none."""
    digest = hashlib.blake2b(digest_size=16)
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()
