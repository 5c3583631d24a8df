"""Tensor items that only torch's own loader understands: subclasses, quantized, sparse, compressed.

`torch.load(weights_only=True)` looks up no name that is not on torch's list, and still believes a
file: it makes `bytearray(10**12)`, `torch.Tensor(10**9)` of memory that nobody wrote, inflates a
record to any size, and takes sparse indices that lie outside. So an item is looked at before and
after it:
1. its records inflate to no more than its tensor's size asks for;
2. its pickle is scanned, and unpickled into stand-ins that call nothing (`unpickle`), which shows
   calls that only take memory, and keys that take hours;
3. what comes back is a tensor with values, and a sparse one's indices lie inside.
"""

from __future__ import annotations

import io
import math
import pickle
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem

from torch_dcpx import _C
from torch_dcpx.errors import UnsafePickleError
from torch_dcpx.options import ReadOptions
from torch_dcpx.settle import refuse
from torch_dcpx.unpickle import (
    RestrictedUnpickler,
    StandIn,
    StandInType,
    malformed_is_corruption,
    stand_in,
)

__all__ = ["load_by_torch"]

INFLATED_BASE_BYTES = 64 << 20
INFLATED_PER_BYTE = 16  # of the tensor; a sparse one keeps 8 B of each index beside a value
_PIECE_BYTES = 1 << 20
_STORED, _DEFLATED = 0, 8
_LEGACY_PICKLES = 5  # of torch.save before 1.6: magic, protocol, machine, object, keys
# A number given to one of these is memory that nobody wrote.
_NEVER_CALLED = re.compile(r"torch\.(Tensor|\w*Storage|storage\.\w+)|builtins\.bytearray")

_HASHING = re.compile(r"collections\.\w+|(builtins|__builtin__)\.(set|frozenset|dict)")
_CODECS = (("latin1",), ("latin-1",))
_CALLS_BASE_BYTES, _CALLS_PER_BYTE = 16 << 20, 4  # what calls may make of a pickle's texts
_MAX_CALLED = 64  # keys; a tensor's own pickle calls OrderedDict() with none


class _Looked(StandIn):
    """Stand-in whose calls share a budget (`value`, one number): texts that they make bytes of."""

    __slots__ = ()

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        for arg in args:
            if type(arg) in (str, bytes):
                cls.value[0] -= len(arg)
        if cls.value[0] < 0:
            refuse("makes far more by its calls than it has bytes")
        if cls.global_name == "_codecs.encode" and args[1:] not in _CODECS:
            refuse("encodes bytes by another codec than latin1")
        return super().__new__(cls, *args, **kwargs)


class _NeverCalled(_Looked):
    """Stand-in of what a tensor's pickle may name, as a class, and may not call with a size."""

    __slots__ = ()

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        if any(type(arg) not in (str, bytes) for arg in args):
            refuse(f"calls {cls.global_name}, which no pickle of a tensor does")
        return super().__new__(cls, *args, **kwargs)


class _Hashing(_Looked):
    """Stand-in of what hashes what it is called with."""

    __slots__ = ()

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        for arg in args:
            if type(arg) in (list, tuple) and (
                len(arg) > _MAX_CALLED or not all(map(_is_simple_key, arg))
            ):
                refuse(f"calls {cls.global_name} with {len(arg)} keys or keys of many parts")
        return super().__new__(cls, *args, **kwargs)


def _is_simple_key(value: Any) -> bool:
    """Whether this is a member of a set, or a pair of a dict, that is hashed at once."""
    if type(value) in (list, tuple):
        return len(value) == 2 and type(value[0]) is str
    return type(value) in (str, bytes, int, float, bool)


def _built(_raw: StandIn, _settle: Any) -> NoReturn:
    """Build nothing: only the calls are looked at."""
    refuse("builds an object where none is wanted")


class _AnyName(dict[tuple[str, str], StandInType]):
    """A table of all names there are; which of them are allowed is torch's own list's business."""

    def __init__(self, pickle_bytes: int) -> None:
        super().__init__()
        self._left_bytes = [_CALLS_BASE_BYTES + _CALLS_PER_BYTE * pickle_bytes]

    def get(self, key: tuple[str, str], _default: Any = None) -> StandInType:
        name = ".".join(key)
        if key not in self:
            base: StandInType = _Looked
            if _NEVER_CALLED.fullmatch(name):
                base = _NeverCalled
            elif _HASHING.fullmatch(name):
                base = _Hashing
            self[key] = stand_in(name, _built, self._left_bytes, base)
        return self[key]


def _no_storage(_pid: Any) -> None:
    """What a storage is while only the calls are looked at."""


def _check_calls(data: memoryview, path: str, fqn: str) -> None:
    table = _AnyName(len(data))
    RestrictedUnpickler(data, table, path=path, fqn=fqn, load_storage=_no_storage).load()


def _inflated(data: memoryview, room_bytes: int) -> bytes:
    """Inflates a record of a zip, of at most `room_bytes`."""
    inflater = zlib.decompressobj(-15)
    try:
        made = inflater.decompress(data, room_bytes + 1)
    except zlib.error as error:
        refuse(f"has a record that does not inflate: {error}")
    if len(made) > room_bytes:
        refuse(f"has records that inflate to more than {room_bytes} B, far beyond its tensor")
    return made


def _inflated_bytes(data: memoryview, room_bytes: int) -> int:
    """The size of a record that is inflated, without holding it; refuses one beyond its room."""
    inflater, nbytes, piece = zlib.decompressobj(-15), 0, bytes(data)
    while piece and not inflater.eof:
        try:
            nbytes += len(inflater.decompress(piece, _PIECE_BYTES))
        except zlib.error as error:
            refuse(f"has a record that does not inflate: {error}")
        piece = inflater.unconsumed_tail
        if nbytes > room_bytes:
            refuse(f"has records that inflate to more than {room_bytes} B, far beyond its tensor")
    return nbytes


def _check_archive(data: memoryview, room_bytes: int, path: str, fqn: str) -> None:
    """Refuses an archive that takes far more memory or time than its tensor."""
    for name, method, offset, nbytes, _ in _C.zip_records(data):
        record = data[offset : offset + nbytes]
        if method not in (_STORED, _DEFLATED):
            refuse(f"has a record packed by method {method}")
        is_pickle = name.endswith("data.pkl")
        if method == _DEFLATED and not is_pickle:
            room_bytes -= _inflated_bytes(record, room_bytes)
        elif method == _DEFLATED:
            record = memoryview(_inflated(record, room_bytes))
            room_bytes -= len(record)
        if is_pickle:
            _check_calls(record, path, fqn)


def _check_legacy(data: memoryview, path: str, fqn: str) -> None:
    """The same for what torch.save wrote before 1.6: pickles one behind the other."""
    for _ in range(_LEGACY_PICKLES):
        nbytes = _C.scan_pickle(data, allow_persid=True)
        _check_calls(data[:nbytes], path, fqn)
        data = data[nbytes:]


def _tensor_bytes(planner: LoadPlanner, item: ReadItem) -> int:
    """The bytes of the whole tensor as the metadata has it; of its region where nobody knows."""
    metadata = getattr(planner, "metadata", None)
    entry = None
    if metadata is not None:
        entry = metadata.state_dict_metadata.get(item.storage_index.fqn)
    size = getattr(entry, "size", None) or item.lengths
    dtype = getattr(getattr(entry, "properties", None), "dtype", None)
    return math.prod(size) * (dtype.itemsize if isinstance(dtype, torch.dtype) else 16)


def _check_item(data: io.IOBase, path: str, fqn: str, tensor_bytes: int) -> None:
    """Looks at an item before torch does. Leaves `data` at its start."""
    view = data.getbuffer() if isinstance(data, io.BytesIO) else memoryview(data.read())
    data.seek(0)
    if bytes(view[:4]) == b"PK\x03\x04":
        room_bytes = INFLATED_BASE_BYTES + INFLATED_PER_BYTE * tensor_bytes
        _check_archive(view, room_bytes, path, fqn)
    elif bytes(view[:1]) == b"\x80":
        _check_legacy(view, path, fqn)


def _check_tensor(tensor: Any) -> None:
    """Refuses what torch has made, where it is no tensor that can be copied from."""
    if not isinstance(tensor, torch.Tensor):
        refuse(f"holds a {type(tensor).__name__} where a tensor belongs")
    if tensor.is_meta:
        refuse("holds a tensor without values")
    if tensor.layout == torch.sparse_coo:
        torch._validate_sparse_coo_tensor_args(tensor._indices(), tensor._values(), tensor.size())
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        rows, columns = tensor.crow_indices(), tensor.col_indices()
        torch._validate_sparse_compressed_tensor_args(
            rows, columns, tensor.values(), tensor.size(), tensor.layout
        )
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        columns, rows = tensor.ccol_indices(), tensor.row_indices()
        torch._validate_sparse_compressed_tensor_args(
            columns, rows, tensor.values(), tensor.size(), tensor.layout
        )


# How torch.load(weights_only=True) names what it refuses; its other errors are malformed data.
_REFUSED_GLOBAL = re.compile(r"[Uu]nsupported (?:global: )?GLOBAL (\S+)")


@contextmanager
def _refusals_by_name(path: str, fqn: str) -> Iterator[None]:
    """Turns torch's refusal of a global into UnsafePickleError; leaves all other errors alone."""
    try:
        yield
    except pickle.UnpicklingError as error:
        found = _REFUSED_GLOBAL.search(str(error))
        if found is None:
            raise
        name = found[1][:200]
        raise UnsafePickleError(
            f"refuse to load item '{fqn}' of '{path}': its tensor needs '{name}', which is on no "
            f"allow-list; allow it with ReadOptions(safe_globals=[{name}]) or "
            "torch.serialization.add_safe_globals, or if you trust whoever wrote this checkpoint, "
            "pass trusted=True",
            global_name=name,
            path=path,
            fqn=fqn,
        ) from error


def load_by_torch(
    data: io.IOBase, path: str, item: ReadItem, planner: LoadPlanner, options: ReadOptions
) -> None:
    """Loads an item that only torch's own loader understands, as stock does.

    Raises:
        AssertionError: the target's size is not the region's (stock's text).
        UnsafePickleError: it is of a class that is neither plain nor allowed by `options`.
        CorruptionError: torch cannot load it.
    """
    fqn = item.storage_index.fqn
    known = torch.serialization.get_safe_globals()
    added: list[Any] = [entry for entry in options.safe_globals if entry not in known]
    if not options.trusted:
        with malformed_is_corruption("load by torch", path=path, fqn=fqn):
            _check_item(data, path, fqn, _tensor_bytes(planner, item))
    with (
        malformed_is_corruption("load by torch", path=path, fqn=fqn),
        _refusals_by_name(path, fqn),
        torch.serialization.safe_globals(added),  # takes away at its end what it was given
    ):
        tensor = torch.load(
            data,  # type: ignore[arg-type]
            map_location="cpu",
            weights_only=not options.trusted,
        )
        _check_tensor(tensor)
    tensor = narrow_tensor_by_index(tensor, item.storage_offsets, item.lengths)
    target = planner.resolve_tensor(item)
    if target.layout != torch.sparse_coo:  # of which detach() makes a copy, which stock then fills
        target = target.detach()
    if target.size() != tensor.size():
        raise AssertionError(
            f"req {item.storage_index} mismatch sizes {target.size()} vs {tensor.size()}"
        )
    with torch.no_grad():
        target.copy_(tensor)
    planner.commit_tensor(item, target)
