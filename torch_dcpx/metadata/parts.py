"""The parts of a `.metadata` file and their checks: pickle, columns, tail.

    [pickle][body of columns][tail, 64 B]

Each part has a checksum in the tail, so that one may be whole where another is damaged.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import NamedTuple

from torch_dcpx._native import _C
from torch_dcpx._version import __version__
from torch_dcpx.errors import CorruptionError, UnsupportedError
from torch_dcpx.metadata.columns import ColumnReader
from torch_dcpx.storage.directory import SmallFile
from torch_dcpx.storage.object_claim import SmallObject
from torch_dcpx.storage.place import SmallContent

MAGIC = b"DCPXMETA"
VERSION = 1
# magic, version, pickle CRC, pickle, body and header bytes, body CRC, zeros, CRC of the 60 B before
TAIL = struct.Struct("<8sIIQQQI16sI")


class Content(NamedTuple):
    """The bytes of a `.metadata` file: in memory, or read on demand."""

    nbytes: int
    part: Callable[[int, int], bytes | memoryview]  # offset, bytes

    @classmethod
    def of(cls, data: bytes | SmallContent) -> Content:
        if isinstance(data, SmallFile | SmallObject):
            return cls(data.nbytes, data.part)
        view = memoryview(data)

        def part(offset: int, nbytes: int) -> bytes | memoryview:
            return data if nbytes == len(data) else view[offset : offset + nbytes]

        return cls(len(data), part)

    def whole(self) -> bytes:
        found = self.part(0, self.nbytes)
        return found if type(found) is bytes else bytes(found)

    def pieces(self, end: int) -> Iterator[bytes | memoryview]:
        """Yields the bytes before `end` in pieces that stay in the cache."""
        for offset in range(0, end, _PIECE_BYTES):
            yield self.part(offset, min(_PIECE_BYTES, end - offset))


_PIECE_BYTES = 1 << 20


def has_tail(content: Content) -> bool:
    at = content.nbytes - TAIL.size
    return at >= 0 and bytes(content.part(at, len(MAGIC))) == MAGIC


def scan_stock(data: bytes, path: str, *, trusted: bool = False) -> int:
    """Scans a file of stock's, which one pickle must fill; returns its number of compound keys."""
    from torch_dcpx.unpickle.unpickler import is_heavy, scanned  # which imports torch

    try:
        end, compound_keys = scanned(data, path=path, fqn=None, trusted=trusted)
    except CorruptionError as error:
        if is_heavy(error):
            raise
        # Where the scan has stopped says nothing of where the damage is.
        what = f"its {len(data)} B are not what a save writes" if data else "it is empty"
        fields = {"path": path, "offset": error.offset, "nbytes": error.nbytes}
        message = f"{path!r} is no metadata of a checkpoint, or damaged: {what}"
        raise CorruptionError(message, **fields) from error
    behind = len(data) - end
    if behind:
        message = f"read {path!r}: {behind} bytes behind the pickle are no valid trailer"
        raise CorruptionError(message, path=path, offset=end, nbytes=behind)
    return compound_keys


def check_tail(content: Content, path: str) -> tuple[int, int, ColumnReader]:
    """Checks sizes and checksums of the whole file; returns the pickle's size and CRC, and columns.

    Raises CorruptionError, and UnsupportedError for a newer version of the format.
    """
    pickle_bytes, body_bytes, header_bytes, pickle_crc, body_crc = _check_layout(content, path)
    crc = 0
    for piece in content.pieces(pickle_bytes):
        crc = _C.crc32(piece, crc)
    check_crc(crc, pickle_crc, 0, pickle_bytes, "pickle", path)
    body = content.part(pickle_bytes, body_bytes)
    check_crc(_C.crc32(body), body_crc, pickle_bytes, body_bytes, "columns", path)
    if type(body) is not bytes and pickle_bytes % 8:  # numbers begin at multiples of 8
        body = bytes(body)
    columns = ColumnReader(memoryview(body), header_bytes, path, pickle_bytes)
    return pickle_bytes, pickle_crc, columns


def _check_layout(content: Content, path: str) -> tuple[int, int, int, int, int]:
    """Checks the tail; returns sizes of pickle, body and header, and CRCs of pickle and body."""
    tail_at = content.nbytes - TAIL.size
    tail = content.part(tail_at, TAIL.size)
    _, version, pickle_crc, pickle_bytes, body_bytes, header_bytes, body_crc, _, tail_crc = (
        TAIL.unpack(tail)
    )
    check_crc(_C.crc32(memoryview(tail)[:-4]), tail_crc, tail_at, TAIL.size, "tail", path)
    if version != VERSION:
        raise UnsupportedError(
            f"read {path!r}: its format is version {version}, torch-dcpx {__version__} "
            f"reads version {VERSION}"
        )
    if pickle_bytes + body_bytes != tail_at:
        why = f"{pickle_bytes} B of pickle, {body_bytes} B of columns and the tail make no file of "
        why += f"{content.nbytes} B"
    elif header_bytes % 8 or header_bytes > body_bytes:
        why = f"a header of {header_bytes} B in {body_bytes} B of columns is no multiple of 8, or "
        why += "too long"
    else:
        return pickle_bytes, body_bytes, header_bytes, pickle_crc, body_crc
    raise CorruptionError(f"read {path!r}: {why}", path=path, offset=tail_at, nbytes=TAIL.size)


def check_crc(found: int, expected: int, offset: int, nbytes: int, what: str, path: str) -> None:
    if found != expected:
        raise CorruptionError(
            f"checksum {nbytes} B of {what} at offset {offset} of {path!r}: "
            f"CRC-32 {found:08x} where {expected:08x} was written",
            path=path,
            offset=offset,
            nbytes=nbytes,
            expected=f"{expected:08x}",
            found=f"{found:08x}",
        )


class MetadataParts(NamedTuple):
    """The parts of a `.metadata` file that are as they were written, by their own checksums."""

    errors: tuple[CorruptionError, ...]  # empty: all of it
    pickle: bytes | None  # without the columns; None: damaged, or its end is unknown
    columns: ColumnReader | None


def decode_parts(data: bytes, path: str) -> MetadataParts:
    """Checks each part of a file by itself. Raises UnsupportedError, as `check_tail` does."""
    content, errors = Content.of(data), []
    try:
        if not has_tail(content):
            scan_stock(data, path)
            return MetadataParts((), data, None)
        pickle_bytes, body_bytes, header_bytes, pickle_crc, body_crc = _check_layout(content, path)
    except CorruptionError as error:
        return MetadataParts((error,), None, None)
    stock: bytes | None = data[:pickle_bytes]
    columns: ColumnReader | None = None
    try:
        check_crc(_C.crc32(stock), pickle_crc, 0, pickle_bytes, "pickle", path)
    except CorruptionError as error:
        errors.append(error)
        stock = None
    try:
        body = data[pickle_bytes : pickle_bytes + body_bytes]
        check_crc(_C.crc32(body), body_crc, pickle_bytes, body_bytes, "columns", path)
        columns = ColumnReader(memoryview(body), header_bytes, path, pickle_bytes)
    except CorruptionError as error:
        errors.append(error)
    return MetadataParts(tuple(errors), stock, columns)
