"""A body of columns: a JSON header, then arrays of int64 or bytes, each on an 8-byte border.

The header's "columns" lists name, kind and length of each array in the order of the file, so a
reader skips arrays that it does not know. It checks each length against the bytes that are there,
so a file cannot make it allocate more than the file's own size.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping
from itertools import accumulate, pairwise
from operator import le
from typing import Any

from torch_dcpx._json import parsed_json
from torch_dcpx._native import _C
from torch_dcpx.errors import CorruptionError

I64_MAX = (1 << 63) - 1

_ITEM_BYTES = {"i64": 8, "u8": 1}


def padded(nbytes: int) -> int:
    """Returns `nbytes` rounded up to a multiple of 8, where every part of a body begins."""
    return (nbytes + 7) & ~7


class StringPool:
    """Distinct strings in UTF-8, numbered in the order of their first use.

    A lone surrogate, which Python allows in a key, is kept as its three bytes.
    """

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}  # by text; to be added to in this order only

    def add(self, text: str) -> int:
        """Returns the number of `text`, the same for equal strings."""
        return self.numbers.setdefault(text, len(self.numbers))

    def columns(self) -> dict[str, array[int] | bytes]:
        """Returns the columns that `ColumnReader.strings` reads."""
        whole = "".join(self.numbers)
        if whole.isascii():  # characters are bytes: one encoding for all
            return {
                "strings": whole.encode(),
                "string_ends": array("q", accumulate(map(len, self.numbers))),
            }
        texts = [text.encode("utf-8", "surrogatepass") for text in self.numbers]
        return {"strings": b"".join(texts), "string_ends": array("q", accumulate(map(len, texts)))}


def encode_body(
    header: Mapping[str, Any], columns: Mapping[str, array[int] | bytes | bytearray]
) -> tuple[list[bytes | memoryview], int]:
    """Returns the body piece by piece, no column copied, and the bytes of its padded header.

    `columns` are int64 arrays (typecode "q") and bytes by name; "columns" is added to `header`.
    """
    table = [
        [name, "i64" if isinstance(column, array) else "u8", len(column)]
        for name, column in columns.items()
    ]
    head = json.dumps({**header, "columns": table}, separators=(",", ":")).encode()
    head = head.ljust(padded(len(head)))  # with spaces, which JSON allows
    pieces: list[bytes | memoryview] = [head]
    for column in columns.values():
        piece = memoryview(column).cast("B")
        pieces += [piece, bytes(padded(len(piece)) - len(piece))]
    return [piece for piece in pieces if len(piece)], len(head)


class ColumnReader:
    """Checked access to the columns of a body, which header and columns must fill exactly.

    Every method raises CorruptionError for a column that is missing or not as asked.

    Args:
        body: header, of `header_bytes`, and columns.
        path, offset: file and byte where the body begins, for errors.
    """

    def __init__(self, body: memoryview, header_bytes: int, path: str, offset: int) -> None:
        self._path = path
        self._offset = offset
        self._body = body
        self._ranges: dict[str, tuple[str, int, int]] = {}  # kind, begin, end in `body`
        try:
            header = parsed_json(str(body[:header_bytes], "utf-8"))
        except (ValueError, RecursionError) as error:
            raise self.error(f"the header is no JSON text ({error})") from error
        if type(header) is not dict or type(header.get("columns")) is not list:
            raise self.error("the header lists no columns")
        self.header: dict[str, Any] = header
        end = header_bytes  # checked with the end of the last column, also when it is too large
        for row in header["columns"]:
            end = self._add(row, end)
        nbytes = len(body)
        self.require(end == nbytes, f"header and columns take {end} B, the body has {nbytes} B")

    def _add(self, row: object, begin: int) -> int:
        """Checks one row of the header's table; returns where the next column begins."""
        if type(row) is not list or list(map(type, row)) != [str, str, int]:
            raise self.error("a column is not [name, kind, count]")
        name, kind, count = row
        if kind not in _ITEM_BYTES or name in self._ranges or count < 0:
            raise self.error(f"column {name!r} of kind {kind!r} and length {count}")
        end = begin + count * _ITEM_BYTES[kind]  # no count is negative: the last end bounds all
        self._ranges[name] = (kind, begin, end)
        return padded(end)

    def error(self, why: str, name: str | None = None) -> CorruptionError:
        """Returns the error for a body, or for its column `name`, that contradicts itself."""
        begin, end = self._ranges[name][1:] if name in self._ranges else (0, len(self._body))
        where = f"column {name!r}" if name else "the metadata columns"
        return CorruptionError(
            f"read {where} at offset {self._offset + begin} of {self._path!r}: {why}",
            path=self._path,
            offset=self._offset + begin,
            nbytes=end - begin,
        )

    def require(self, is_so: bool, why: str, name: str | None = None) -> None:
        """Raises `error` unless `is_so`."""
        if not is_so:
            raise self.error(why, name)

    def _column(self, name: str, kind: str, count: int | None) -> memoryview:
        found, begin, end = self._ranges.get(name, ("", 0, 0))
        if found != kind:
            raise self.error(f"there is no column {name!r} of kind {kind!r}")
        length = (end - begin) // _ITEM_BYTES[kind]
        if count is not None and length != count:
            raise self.error(f"{length} values where {count} belong", name)
        return self._body[begin:end]

    def has(self, name: str) -> bool:
        """Returns whether the body holds a column `name`."""
        return name in self._ranges

    def i64(self, name: str, count: int | None, low: int = 0, high: int = I64_MAX) -> list[int]:
        """Returns the `count` values (None: any number) of an int64 column, all in [low, high]."""
        return self.i64_view(name, count, low, high).cast("q").tolist()

    def i64_view(
        self, name: str, count: int | None, low: int = 0, high: int = I64_MAX
    ) -> memoryview:
        """As `i64`: the checked bytes, without a copy."""
        values = self._column(name, "i64", count)
        if not _C.are_within(values, low, high):
            raise self.error(f"a value is outside [{low}, {high}]", name)
        return values

    def u8(self, name: str, count: int | None, high: int = 255) -> bytes:
        """As `i64`, of a byte column."""
        return bytes(self.u8_view(name, count, high))

    def u8_view(self, name: str, count: int | None, high: int = 255) -> memoryview:
        """As `u8`, without a copy."""
        values = self._column(name, "u8", count)
        if high < 255 and _C.highest(values) > high:
            raise self.error(f"a value is greater than {high}", name)
        return values

    def strings(self) -> list[str]:
        """Returns the strings of a `StringPool`, in the order of their numbers."""
        text = self.u8("strings", None)
        borders = [0, *self.i64("string_ends", None, high=len(text))]
        do_ascend = all(map(le, borders, borders[1:])) and borders[-1] == len(text)
        why = "the ends of the strings do not ascend to the last byte"
        self.require(do_ascend, why, "string_ends")
        spans = pairwise(borders)
        if text.isascii():  # characters are bytes: one decoding for all
            whole = text.decode("ascii")
            return [whole[begin:end] for begin, end in spans]
        try:
            return [text[begin:end].decode("utf-8", "surrogatepass") for begin, end in spans]
        except UnicodeDecodeError as error:
            raise self.error(f"a string is no UTF-8 ({error})", "strings") from error
