"""Lays out the archive that torch.save writes of a flat dict, before a rank writes its bytes.

The archive is a zip of stored records: the pickle, one a storage, and small ones that torch.load
needs. Their lengths are known; checksums come once all ranks have written.
"""

from __future__ import annotations

import collections
import importlib
import io
import pickle
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from torch_dcpx._compat import dtype_by_name, framing_of
from torch_dcpx._native import _C
from torch_dcpx.artifacts.layout import ExportTensor, Layout, OutputPlan, Payload, file_view
from torch_dcpx.errors import UnsupportedError

_ROOT = "archive"
_ALIGNMENT = 64  # of payloads, as torch.save's
_IN_64_BITS = 0xFFFFFFFF
_FIRST_DAY = (1 << 5) | 1  # 1980-01-01, the oldest date of a zip
_LOCAL = struct.Struct("<IHHHHHIIIHH")
_CENTRAL = struct.Struct("<IHHHHHHIIIHHHHHII")
_PLAIN = (type(None), bool, float, str, bytes)
_MAX_INT_BITS = 255 * 8  # longer ones have an opcode that torch.load does not know
_MAX_DEPTH = 50


class _Record(NamedTuple):
    """One record of the zip."""

    name: bytes
    offset: int  # of its local header
    payload_offset: int
    nbytes: int
    data: bytes | None  # None: a storage


class _Storage(NamedTuple):
    """Stands for a storage in the pickle."""

    key: str
    dtype: torch.dtype
    length: int  # elements; bytes where it is untyped


class _Tensor:
    """Pickles as torch.save pickles a contiguous tensor.

    Source: torch.Tensor._reduce_ex_internal.
    """

    def __init__(self, tensor: ExportTensor, key: int) -> None:
        dtype = dtype_by_name(tensor.dtype)
        if dtype is None:
            raise UnsupportedError(f"'{tensor.name}' is {tensor.dtype}, which this torch lacks")
        is_typed = not framing_of(dtype)[2]
        count = tensor.nbytes // tensor.itemsize if is_typed else tensor.nbytes
        storage = _Storage(str(key), dtype, count)
        hooks: Any = collections.OrderedDict()
        arguments = (storage, 0, tensor.sizes, file_view(tensor).stride(), False, hooks)
        self._reduced: tuple[Any, ...] = (torch._utils._rebuild_tensor_v2, arguments)
        if not is_typed:
            self._reduced = (torch._utils._rebuild_tensor_v3, (*arguments, dtype))

    def __reduce__(self) -> tuple[Any, ...]:
        return self._reduced


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, _Storage):
            return None
        module, name, _ = framing_of(obj.dtype)
        kind = getattr(importlib.import_module(module), name)
        return "storage", kind, obj.key, "cpu", obj.length


def check_objects(objects: Mapping[str, Any]) -> None:
    """Raises UnsupportedError for objects that torch.load(weights_only=True) refuses."""
    held: dict[int, Any] = {}
    refused = [name for name, value in objects.items() if not _is_plain(value, 0, held)]
    if refused:
        shown = ", ".join(repr(name) for name in refused[:10])
        raise UnsupportedError(
            f"{len(refused)} objects are more than numbers, texts and containers of them, which "
            f"torch.load(weights_only=True) takes: {shown}; choose others by keys"
        )


def torch_layout(
    tensors: Sequence[ExportTensor], objects: Mapping[str, Any], name: str
) -> tuple[Layout, list[_Record]]:
    """Returns the file `name`, with payloads in the order of `tensors`, and its records."""
    state: dict[str, Any] = {}
    for number, tensor in enumerate(tensors):
        state |= dict.fromkeys((tensor.name, *tensor.aliases), _Tensor(tensor, number))
    state |= objects
    stream = io.BytesIO()
    _Pickler(stream, protocol=2).dump(state)
    records: list[_Record] = []
    _add(records, "data.pkl", stream.getvalue())
    _add(records, ".format_version", b"1")
    _add(records, ".storage_alignment", b"64")
    _add(records, "byteorder", b"little")
    first = len(records)
    for number, tensor in enumerate(tensors):
        _add(records, f"data/{number}", None, tensor.nbytes)
    payloads = [Payload(0, one.payload_offset, one.nbytes) for one in records[first:]]
    _add(records, "version", b"3\n")
    _add(records, ".data/serialization_id", b"0" * 40)
    end = _end_of(records)
    nbytes = end + len(_directory(records, [0] * len(records), end))
    return Layout((OutputPlan(name, nbytes, b""),), tuple(payloads)), records


def torch_patches(records: Sequence[_Record], crcs: Sequence[int]) -> list[tuple[int, int, bytes]]:
    """Returns the bytes around the payloads, which have `crcs`: (file, offset, bytes)."""
    left = iter(crcs)
    all_crcs = [next(left) if one.data is None else _C.crc32(one.data) for one in records]
    patches = []
    for one, crc in zip(records, all_crcs, strict=True):
        patches.append((0, one.offset, _local_header(one, crc) + (one.data or b"")))
    end = _end_of(records)
    return [*patches, (0, end, _directory(records, all_crcs, end))]


def _add(records: list[_Record], name: str, data: bytes | None, nbytes: int = 0) -> None:
    offset = _end_of(records)
    raw = f"{_ROOT}/{name}".encode()
    nbytes = nbytes if data is None else len(data)
    begin = offset + _LOCAL.size + len(raw) + (20 if nbytes >= _IN_64_BITS else 0) + 4
    records.append(_Record(raw, offset, begin + -begin % _ALIGNMENT, nbytes, data))


def _end_of(records: Sequence[_Record]) -> int:
    return records[-1].payload_offset + records[-1].nbytes if records else 0


def _local_header(one: _Record, crc: int) -> bytes:
    """Returns the bytes before a payload, which begins where the padding ends."""
    is_large = one.nbytes >= _IN_64_BITS
    extra = struct.pack("<HHQQ", 1, 16, one.nbytes, one.nbytes) if is_large else b""
    padding = one.payload_offset - one.offset - _LOCAL.size - len(one.name) - len(extra) - 4
    extra += b"FB" + struct.pack("<H", padding) + b"Z" * padding
    return _LOCAL.pack(0x04034B50, *_fields(one, crc, extra, is_large)) + one.name + extra


def _fields(one: _Record, crc: int, extra: bytes, is_large: bool) -> tuple[int, ...]:
    """Returns the fields that a record's header and its entry in the directory share."""
    version = 45 if is_large else 20
    size = min(one.nbytes, _IN_64_BITS)
    return (version, 0, 0, 0, _FIRST_DAY, crc, size, size, len(one.name), len(extra))


def _directory(records: Sequence[_Record], crcs: Sequence[int], begin: int) -> bytes:
    """Returns the central directory, which begins at this byte, and the zip's end."""
    parts = []
    for one, crc in zip(records, crcs, strict=True):
        wide = b"".join(
            struct.pack("<Q", value)
            for value in (one.nbytes, one.nbytes, one.offset)
            if value >= _IN_64_BITS
        )
        extra = struct.pack("<HH", 1, len(wide)) + wide if wide else b""
        fields = _fields(one, crc, extra, bool(wide))
        places = (0, 0, 0, 0, min(one.offset, _IN_64_BITS))
        parts += [_CENTRAL.pack(0x02014B50, fields[0], *fields, *places), one.name, extra]
    directory = b"".join(parts)
    count, size = len(records), len(directory)
    end64 = struct.pack("<IQHHIIQQQQ", 0x06064B50, 44, 45, 45, 0, 0, count, count, size, begin)
    locator = struct.pack("<IIQI", 0x07064B50, 0, begin + size, 1)
    few, low, at = min(count, 0xFFFF), min(size, _IN_64_BITS), min(begin, _IN_64_BITS)
    end = struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, few, few, low, at, 0)
    return directory + end64 + locator + end


def _is_plain(value: Any, depth: int, held: dict[int, Any]) -> bool:
    """Returns whether torch.load would take it; `held`: the containers so far, by id."""
    if type(value) is int:
        return value.bit_length() < _MAX_INT_BITS
    if type(value) in _PLAIN or id(value) in held:
        return True
    if depth > _MAX_DEPTH:
        return False
    held[id(value)] = value
    if type(value) in (list, tuple, set):
        return all(_is_plain(one, depth + 1, held) for one in value)
    if type(value) in (dict, collections.OrderedDict):
        return all(_is_plain(one, depth + 1, held) for pair in value.items() for one in pair)
    return False
