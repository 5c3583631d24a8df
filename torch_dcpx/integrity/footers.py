"""The footer of a data file: its rows, its end, and the faults that C++ finds in it.

C++ (`VerifyJob`) reads and checks; here its tables get names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from torch_dcpx._json import parsed_json

if TYPE_CHECKING:
    from torch_dcpx._native import _C

TENSOR, BYTES, TORCH_TENSOR = 0, 1, 2  # ItemKind of csrc/format/file_footer.h


class RawFinding(NamedTuple):
    """One finding as C++ gives it."""

    kind: str
    path: str  # directory and name
    offset: int  # bytes; -1: unknown
    nbytes: int
    expected: str
    found: str
    message: str


class FooterRow(NamedTuple):
    """One item of a footer's index. Sizes and offsets in elements, the rest in bytes."""

    kind: int
    flags: int  # 1 requires_grad + 2 pin_memory
    memory_format: int
    item_offset: int
    item_bytes: int
    payload_offset: int
    payload_bytes: int
    global_sizes: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: str
    prop_dtype: str
    layout: str
    fqn: str
    path: str  # JSON, or empty
    payload_crc: int  # CRC-32
    strides: tuple[int, ...]  # of the payload as it is stored


class Tail(NamedTuple):
    """The end of a whole footer."""

    rank: int
    file_id: bytes
    footer_crc: int
    data_bytes: int
    save_id: bytes  # 16; b"": it names none


class FileFacts(NamedTuple):
    """One data file, as its footer describes it."""

    name: str
    nbytes: int
    tail: Tail | None  # None: no footer, or a damaged one
    rows: list[FooterRow] | None  # None: the index is damaged
    findings: list[RawFinding]


def add_file(job: _C.VerifyJob, name: str) -> FileFacts:
    """Adds a file to the sums of `job`, and returns the facts of its footer.

    Raises CorruptionError for a name that is no regular file beneath the directory, StorageError,
    and UnsupportedError for a newer version of the footer.
    """
    nbytes, tail, rows, findings = job.add_file(name)
    return FileFacts(
        name,
        nbytes,
        None if tail is None else Tail(*tail),
        None if rows is None else list(map(FooterRow._make, rows)),
        list(map(RawFinding._make, findings)),
    )


def key_path(row: FooterRow) -> tuple[str | int, ...] | None:
    """Returns the path of the item in the state, or None; ValueError: it is no such list."""
    if not row.path:
        return None
    keys: Any = parsed_json(row.path)
    if type(keys) is not list or not {*map(type, keys)} <= {str, int}:
        raise ValueError(f"{row.path!r:.200} is no list of names and integers")
    return tuple(keys)
