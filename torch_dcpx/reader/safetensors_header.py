"""The header of a safetensors file: read without trust in it, and written.

A file is 8 bytes (the header's length, little endian), the header (JSON, padded with spaces), and
the tensors' bytes in C order, one after the other without a gap. Every number is checked against
the file's size before anything is allocated by it.

Source: safetensors/src/tensor.rs (Metadata::validate) of https://github.com/huggingface/safetensors
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch_dcpx._json import check_cost, cost_of_letters, parsed_json
from torch_dcpx.errors import CorruptionError, UnsupportedError

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit
# Ten times what the largest published models have in all their files. A tensor takes a kilobyte of
# memory while it is planned, and a header could name two million.
MAX_FILE_TENSORS = 250_000
_MAX_MARKS = 16 * MAX_FILE_TENSORS  # of JSON; each may become an object of a hundred bytes
# Of a tensor; what else there is are notes.
_MARKS = {b":": (4, "pairs"), b"[": (2, "lists"), b'"': (10, "quotation marks")}
_MAX_NOTES = 400_000
NOTES_NAME = "__metadata__"  # what no tensor can be called
_SAVED_NOTE = "DCP_SHARDING_INFO"  # of torch's HuggingFaceStorageWriter: JSON
_MAX_DIMS = 64  # torch's own

# Code of the format by torch's name of the dtype.
DTYPE_CODES: Mapping[str, str] = {
    "float64": "F64",
    "int64": "I64",
    "uint64": "U64",
    "complex64": "C64",
    "float32": "F32",
    "int32": "I32",
    "uint32": "U32",
    "bfloat16": "BF16",
    "float16": "F16",
    "int16": "I16",
    "uint16": "U16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2": "F8_E5M2",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
_NAMES = {code: name for name, code in DTYPE_CODES.items()}
_BYTES = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("BF16", "F16", "I16", "U16"), 2),
}  # others: 1


class HeaderEntry(NamedTuple):
    """One tensor of a file."""

    name: str
    dtype: str  # torch's name
    sizes: tuple[int, ...]
    begin: int  # byte of the data behind the header
    end: int
    saved_at: tuple[int, ...] | None = None  # offsets in the tensor that torch saved in pieces


def header_bytes(prefix: bytes, file_bytes: int, path: str) -> int:
    """Returns the length of the header that the file's first bytes promise.

    Raises: CorruptionError: they promise more than the limit, or than the file holds.
    """
    if len(prefix) < LENGTH_BYTES:
        raise _error(path, f"it holds {file_bytes} B, no header", 0, file_bytes)
    length = int.from_bytes(prefix[:LENGTH_BYTES], "little")
    claim = f"its header is {length} B long"
    if length > MAX_HEADER_BYTES:
        raise _error(path, f"{claim}, more than {MAX_HEADER_BYTES}", 0, LENGTH_BYTES)
    if length < 2 or LENGTH_BYTES + length > file_bytes:
        raise _error(path, f"{claim} in a file of {file_bytes} B", 0, LENGTH_BYTES)
    return length


def parse_header(header: bytes, file_bytes: int, path: str) -> list[HeaderEntry]:
    """Returns the tensors that a header, without its length, names, in the order of their bytes.

    Raises:
        CorruptionError: it is no JSON of this form; ranges leave a gap, overlap, or do not fit
            dtype and shape; the file is longer or shorter.
        UnsupportedError: it names more than `MAX_FILE_TENSORS` tensors, or has too much other JSON.
    """

    def fail(what: str) -> CorruptionError:
        return _error(path, what, LENGTH_BYTES, len(header))

    if header[:1] != b"{":
        raise fail("its header does not begin with '{'")
    marks = sum(map(header.count, (b"{", b"[", b",")))
    if marks > _MAX_MARKS:
        raise UnsupportedError(
            f"'{path}' has a header of {marks} values and lists, more than {_MAX_MARKS}: nothing "
            "that is loaded has so many"
        )
    _check_marks(header, path)
    objects = itertools.count(1)

    def unique(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
        if next(objects) > MAX_FILE_TENSORS + 2:  # notes, and all of them
            raise UnsupportedError(f"'{path}' names more than {MAX_FILE_TENSORS} tensors")
        return unique_keys(pairs)

    try:
        check_cost(header, cost_of_letters(header))
        rows = json.loads(header.decode(), object_pairs_hook=unique, parse_constant=_refused)
    except (ValueError, RecursionError) as error:
        raise fail(f"its header is no JSON that it may be: {str(error)[:200]}") from error
    notes = rows.pop(NOTES_NAME, None)
    is_text = isinstance(notes, dict) and all(isinstance(text, str) for text in notes.values())
    if notes is not None and not is_text:
        raise fail("its `__metadata__` is no dict of texts")
    entries = [_entry(name, row, fail) for name, row in rows.items()]
    if notes and notes.get(_SAVED_NOTE):
        entries = _with_places(entries, notes[_SAVED_NOTE], fail)
    entries.sort(key=lambda entry: (entry.begin, entry.end))
    at = 0
    for entry in entries:
        if entry.begin != at:
            what = "overlaps what lies before it" if entry.begin < at else "leaves a gap before it"
            raise fail(f"tensor {_short(entry.name)} at byte {entry.begin} {what}, up to {at}")
        at = entry.end
    held = file_bytes - LENGTH_BYTES - len(header)
    if at != held:
        raise fail(f"its tensors end at byte {at} of {held} B behind the header")
    return entries


def _check_marks(header: bytes, path: str) -> None:
    """Raises UnsupportedError where more pairs, lists or texts stand in a header than its tensors
    have: each takes a hundred bytes, and two of the file.
    """
    tensors = min(header.count(b"{"), MAX_FILE_TENSORS)
    for mark, (per_tensor, what) in _MARKS.items():
        count, most = header.count(mark), per_tensor * tensors + _MAX_NOTES
        if count > most:
            raise UnsupportedError(
                f"'{path}' has a header of {count} {what}, more than {most}: nothing that is "
                "loaded has so many"
            )


def encode_header(rows: Sequence[HeaderEntry], notes: Mapping[str, str]) -> bytes:
    """Returns length and header of a file, in a multiple of 8 bytes.

    Args:
        rows: in the order of the tensors' bytes.
        notes: the format's `__metadata__`.
    """
    fields: dict[str, Any] = {NOTES_NAME: dict(notes)} if notes else {}
    for row in rows:
        fields[row.name] = {
            "dtype": DTYPE_CODES[row.dtype],
            "shape": list(row.sizes),
            "data_offsets": [row.begin, row.end],
        }
    text = json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def _entry(name: str, row: Any, fail: Callable[[str], CorruptionError]) -> HeaderEntry:
    """Returns one tensor of the header. Raises CorruptionError: its numbers do not agree."""
    shown = _short(name)
    if not isinstance(row, dict) or row.keys() != {"dtype", "shape", "data_offsets"}:
        raise fail(f"tensor {shown} has not exactly dtype, shape and data_offsets")
    code, shape, offsets = row["dtype"], row["shape"], row["data_offsets"]
    if not isinstance(code, str) or code not in _NAMES:
        raise fail(f"tensor {shown} has dtype {str(code)[:40]!r}, which is not known here")
    if not _are_counts(shape) or len(shape) > _MAX_DIMS:
        raise fail(f"tensor {shown} has shape {str(shape)[:80]}")
    if not _are_counts(offsets) or len(offsets) != 2:
        raise fail(f"tensor {shown} has data_offsets {str(offsets)[:80]}")
    nbytes = math.prod(shape) * _BYTES.get(code, 1)
    if nbytes >= 1 << 63 or offsets[1] - offsets[0] != nbytes:
        raise fail(
            f"tensor {shown} of {code} {str(shape)[:80]} takes {nbytes} B, its range "
            f"{offsets} has {offsets[1] - offsets[0]}"
        )
    return HeaderEntry(name, _NAMES[code], tuple(shape), *offsets)


def _with_places(
    entries: Iterable[HeaderEntry], note: str, fail: Callable[[str], CorruptionError]
) -> list[HeaderEntry]:
    """Returns the entries with what the note of torch's writer says of them.

    Source: torch.distributed.checkpoint.hf_storage.HuggingFaceStorageReader.read_metadata.
    """
    try:
        places: Any = parsed_json(note, unique_keys, _refused)
    except (ValueError, RecursionError) as error:
        raise fail(f"its {_SAVED_NOTE} is no JSON: {str(error)[:200]}") from error
    if not isinstance(places, dict):
        raise fail(f"its {_SAVED_NOTE} is no dict")
    found = []
    for entry in entries:
        if entry.name not in places:  # another tool has added it
            found.append(entry)
            continue
        place = places[entry.name]
        at: Any = place.get("saved_offsets") if isinstance(place, dict) else None
        if (
            not _are_counts(at)
            or len(at) != len(entry.sizes)
            or any(begin + size >= 1 << 63 for begin, size in zip(at, entry.sizes, strict=True))
        ):
            raise fail(f"its {_SAVED_NOTE} puts {_short(entry.name)} at {str(at)[:80]}")
        found.append(entry._replace(saved_at=tuple(at)))
    return found


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(
        type(value) is int and 0 <= value < 1 << 63 for value in values
    )


def unique_keys(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Returns a JSON object as a dict. Raises ValueError: a key is there twice."""
    rows: dict[str, Any] = {}
    for name, value in pairs:
        if name in rows:
            raise ValueError(f"{_short(name)} is there twice")
        rows[name] = value
    return rows


def _refused(text: str) -> Any:
    raise ValueError(f"{text} is no number of JSON")


def _short(name: str) -> str:
    return repr(name if len(name) <= 160 else f"{name[:160]}...")


def _error(path: str, what: str, offset: int, nbytes: int) -> CorruptionError:
    return CorruptionError(
        f"'{path}' is no safetensors file that can be read: {what}",
        path=path,
        offset=offset,
        nbytes=nbytes,
        touched=(),
    )
