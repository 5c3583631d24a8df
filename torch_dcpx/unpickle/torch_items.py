"""Tensor items that only torch's own loader understands: subclasses, quantized, sparse, compressed.

`torch.load(weights_only=True)` looks up no name that is not on torch's list, and still believes a
file: it makes `bytearray(10**12)`, `torch.Tensor(10**9)` of memory that nobody wrote, inflates a
record to any size, and takes sparse indices that lie outside. So, before and after it:
1. records must inflate to no more than the tensor's size asks for;
2. the pickle is scanned, and unpickled into stand-ins that call nothing (`unpickler`): they show
   calls that only take memory, and keys that take hours;
3. the result must be a tensor with values, with the indices of a sparse one inside.
"""

from __future__ import annotations

import io
import math
import pickle
import re
import zlib
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem

from torch_dcpx._native import _C
from torch_dcpx.errors import UnsafePickleError, UnsupportedError
from torch_dcpx.options import ReadOptions
from torch_dcpx.unpickle.hashed_keys import MAX_COMPOUND_KEYS
from torch_dcpx.unpickle.settle import refuse
from torch_dcpx.unpickle.stand_ins import StandIn, StandInType, stand_in
from torch_dcpx.unpickle.unpickler import (
    RestrictedUnpickler,
    imported,
    malformed_is_corruption,
    way_to_allow,
)

_INFLATED_BASE_BYTES = 64 << 20
_INFLATED_PER_BYTE = 16  # of the tensor; a sparse one keeps 8 B of each index beside a value
_PIECE_BYTES = 1 << 20
_STORED, _DEFLATED = 0, 8
_LEGACY_PICKLES = 5  # of torch.save before 1.6: magic, protocol, machine, object, keys
_CALLS_BASE_BYTES, _CALLS_PER_BYTE = 16 << 20, 4  # what calls may make of a pickle's texts
_MAX_CALLED = 64  # numbers; a tensor's own pickle calls OrderedDict() with none
_MAX_CLASSES = 1000  # each takes a kilobyte
_SIMPLE = (str, bytes, int, float, bool, type(None))
_MAX_PARTS = 8
_COMPRESSED = frozenset((torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc))


class _Looked(StandIn):
    """Stand-in whose `build` looks at each call as the pickle makes it; nothing is ever built.

    All of one pickle share a budget: the table that they are in, as `value`.
    """

    __slots__ = ()

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        self = super().__new__(cls, *args, **kwargs)
        cls.build(self, None)
        cls.value.left_bytes -= sum(len(arg) for arg in args if type(arg) in (str, bytes))
        if cls.value.left_bytes < 0:
            refuse("makes far more by its calls than it has bytes")
        return self

    def __hash__(self) -> int:
        # As a key. The real one is hashed by what it was called with, unlike this one.
        table = type(self).value
        table.left_keys -= 1
        if table.left_keys < 0:
            refuse(f"has more than {MAX_COMPOUND_KEYS} keys that are results of calls")
        return object.__hash__(self)


def _look_at_class(raw: StandIn, _settle: Any) -> None:
    """Refuses a call with a size: it would return memory without values."""
    for arg in raw.args:
        is_codec = isinstance(arg, StandIn) and arg.global_name == "_codecs.encode"
        is_encoded = is_codec and arg.is_called  # so protocol 2 writes bytes
        if not is_encoded and type(arg) not in (str, bytes):
            refuse(f"calls {raw.global_name}, which no pickle of a tensor does")


def _look_at_codec(raw: StandIn, _settle: Any) -> None:
    if raw.args[1:] not in (("latin1",), ("latin-1",)):
        refuse("encodes bytes by another codec than latin1")


def _look_at_inner_call(raw: StandIn, _settle: Any) -> None:
    """Makes the call that the function would make, to look at that as well."""
    args = raw.args
    if len(args) != 4 or type(args[0]) is not StandInType or type(args[2]) is not tuple:
        refuse(f"calls {raw.global_name} with other than a function, a class and arguments")
    args[0](*args[2])


def _look_at_keys(raw: StandIn, _settle: Any) -> None:
    """Refuses arguments that take long to hash, of a call that hashes them."""
    is_of_pairs = raw.global_name in ("collections.OrderedDict", "builtins.dict")
    for arg in raw.args:
        # A tensor that unfolds one number, for one, would be hashed element by element.
        if type(arg) not in (list, tuple, dict, str, bytes):
            refuse(f"calls {raw.global_name} with what is no plain container")
        if type(arg) not in (list, tuple):
            continue
        keys = [_key_of_pair(value) for value in arg] if is_of_pairs else arg
        numbers = sum(type(key) not in (str, bytes) for key in keys)
        if numbers > _MAX_CALLED or not all(map(_is_simple, keys)):
            refuse(f"calls {raw.global_name} with {len(arg)} keys or keys of many parts")


def _is_simple(key: Any) -> bool:
    """Returns whether it is fast to hash."""
    if type(key) is tuple and len(key) <= _MAX_PARTS:
        return all(type(part) in _SIMPLE for part in key)
    return type(key) in _SIMPLE


def _key_of_pair(value: Any) -> Any:
    return value[0] if type(value) in (list, tuple) and len(value) == 2 else value


# The first pattern that matches a whole name says how its calls are looked at.
_LOOKS: tuple[tuple[str, Callable[[StandIn, Any], None]], ...] = (
    (
        "|".join(re.escape(f"{one.__module__}.{one.__name__}") for one in torch._tensor_classes),
        _look_at_class,
    ),
    (r"torch\.(Tensor|\w*Storage|storage\.\w+)|builtins\.bytearray", _look_at_class),
    (r"collections\.\w+|builtins\.(set|frozenset|dict)", _look_at_keys),
    (r"torch\._tensor\._rebuild_from_type_v2", _look_at_inner_call),
    (r"_codecs\.encode", _look_at_codec),
    (r"(?s:.*)", lambda _raw, _settle: None),
)


class _AnyName(dict[tuple[str, str], StandInType]):
    """A table of all names (torch's own list says which are allowed), with one pickle's budget."""

    def __init__(self, pickle_bytes: int) -> None:
        super().__init__()
        self.left_bytes = _CALLS_BASE_BYTES + _CALLS_PER_BYTE * pickle_bytes  # made of texts
        self.left_keys = MAX_COMPOUND_KEYS  # that are results of calls: the file chose the hashes

    def get(self, key: tuple[str, str], _default: Any = None) -> StandInType:
        if key not in self:
            if len(self) >= _MAX_CLASSES:
                refuse(f"names more than {_MAX_CLASSES} classes and functions")
            # As torch reads it: pickles of protocol 2 have the names of Python 2.
            module, name = NAME_MAPPING.get(key, (IMPORT_MAPPING.get(key[0], key[0]), key[1]))
            name = f"{module}.{name}"
            look = next(look for pattern, look in _LOOKS if re.fullmatch(pattern, name))
            self[key] = stand_in(name, look, self, _Looked)
        return self[key]


def _check_calls(
    data: memoryview, path: str, fqn: str, add_pid: Callable[[Any], None] = lambda _pid: None
) -> Any:
    """Looks at the calls of a pickle; returns its stand-ins, with None for every storage."""
    table = _AnyName(len(data))
    return RestrictedUnpickler(data, table, path=path, fqn=fqn, load_storage=add_pid).load()


def _inflated(data: memoryview, room_bytes: int, piece_bytes: int) -> Iterator[bytes]:
    """Inflates a record of a zip, piece by piece; refuses one beyond its room."""
    inflater, packed = zlib.decompressobj(-15), bytes(data)
    left_bytes = room_bytes
    while packed and not inflater.eof:
        try:
            made = inflater.decompress(packed, piece_bytes)
        except zlib.error as error:
            refuse(f"has a record that does not inflate: {error}")
        left_bytes -= len(made)
        if left_bytes < 0:
            refuse(f"has records that inflate to more than {room_bytes} B, far beyond its tensor")
        yield made
        packed = inflater.unconsumed_tail


def _check_archive(data: memoryview, room_bytes: int, path: str, fqn: str) -> None:
    """Refuses an archive that takes far more memory or time than its tensor."""
    for name, method, offset, nbytes, _ in _C.zip_records(data):
        record = data[offset : offset + nbytes]
        if method not in (_STORED, _DEFLATED):
            refuse(f"has a record packed by method {method}")
        is_pickle = name.lower().endswith("data.pkl")  # torch's reader takes DATA.PKL for it
        if method == _DEFLATED and not is_pickle:
            room_bytes -= sum(map(len, _inflated(record, room_bytes, _PIECE_BYTES)))
        elif method == _DEFLATED:
            record = memoryview(b"".join(_inflated(record, room_bytes, room_bytes + 1)))
            room_bytes -= len(record)
        if is_pickle:
            _check_calls(record, path, fqn)


def _check_legacy(data: memoryview, path: str, fqn: str) -> None:
    """Refuses the same in an item that torch.save wrote before 1.6.

    That is one pickle behind the other, the last one a list of the storages that follow. A storage
    that is not listed has no values.
    """
    wanted: list[Any] = []
    for _ in range(_LEGACY_PICKLES):
        nbytes = _C.scan_pickle(data, allow_persid=True)
        found = _check_calls(data[:nbytes], path, fqn, wanted.append)
        data = data[nbytes:]
    listed = [key for key in found if type(key) is str] if type(found) is list else []
    for pid in wanted:
        if type(pid) is not tuple or len(pid) < 3 or type(pid[2]) is not str:
            refuse("has a persistent id that is no storage")
    lacking = {pid[2] for pid in wanted} - set(listed)
    if lacking:
        refuse(f"lacks the bytes of {len(lacking)} storages that it names")


def _tensor_bytes(planner: LoadPlanner, item: ReadItem) -> int:
    """Returns the size of the whole tensor by the metadata; without any, of the item's region."""
    metadata: Any = getattr(planner, "metadata", None)
    entry = None if metadata is None else metadata.state_dict_metadata.get(item.storage_index.fqn)
    size = getattr(entry, "size", None) or item.lengths
    dtype = getattr(getattr(entry, "properties", None), "dtype", None)
    return math.prod(size) * (dtype.itemsize if isinstance(dtype, torch.dtype) else 16)


def _check_item(data: io.IOBase, path: str, fqn: str, tensor_bytes: int) -> None:
    """Looks at an item before torch does. Leaves `data` at its start."""
    # Not getbuffer(): Python 3.12.1 crashes as it collects a cycle that has one, as an error's.
    view = memoryview(data.getvalue() if isinstance(data, io.BytesIO) else data.read())
    data.seek(0)
    if bytes(view[:4]) == b"PK\x03\x04":
        room_bytes = _INFLATED_BASE_BYTES + _INFLATED_PER_BYTE * tensor_bytes
        _check_archive(view, room_bytes, path, fqn)
    else:  # torch looks at no more than this to tell the two
        _check_legacy(view, path, fqn)


def _check_tensor(tensor: Any) -> None:
    """Refuses an object of torch's loader that is no tensor, or cannot be copied from."""
    if not isinstance(tensor, torch.Tensor):
        refuse(f"holds a {type(tensor).__name__} where a tensor belongs")
    if tensor.is_meta:
        refuse("holds a tensor without values")
    if tensor.layout == torch.sparse_coo:
        torch._validate_sparse_coo_tensor_args(tensor._indices(), tensor._values(), tensor.size())
    elif tensor.layout in _COMPRESSED:
        is_by_row = tensor.layout in (torch.sparse_csr, torch.sparse_bsr)
        ends = tensor.crow_indices() if is_by_row else tensor.ccol_indices()
        indices = tensor.col_indices() if is_by_row else tensor.row_indices()
        torch._validate_sparse_compressed_tensor_args(
            ends, indices, tensor.values(), tensor.size(), tensor.layout
        )


# In torch.load(weights_only=True)'s refusal of a global; its other errors are malformed data.
_REFUSED_GLOBAL = re.compile(r"[Uu]nsupported (?:global: )?GLOBAL (\S+)")


def _refused_global(error: pickle.UnpicklingError) -> str | None:
    """Returns the name that torch refused, if that is the error."""
    refused = _REFUSED_GLOBAL.search(str(error))
    return None if refused is None else refused[1][:200]


def _load(source: Any, added: list[Any], names: set[str], *, trusted: bool) -> Any:
    """Returns what torch loads with `added` allowed, and those of `names` that it meets."""
    try:
        with torch.serialization.safe_globals(added):  # takes them away at its end
            return torch.load(source, map_location="cpu", weights_only=not trusted)
    except pickle.UnpicklingError as error:
        name = _refused_global(error)
        if name not in names:
            raise
    source.seek(0)
    added = [*added, (imported(*name.rsplit(".", 1)), name)]
    return _load(source, added, names - {name}, trusted=trusted)


def load_by_torch(
    data: io.IOBase, path: str, item: ReadItem, planner: LoadPlanner, options: ReadOptions
) -> torch.Tensor:
    """Returns the tensor of an item that only torch's own loader understands, loaded as by stock.

    Raises:
        UnsafePickleError: it is of a class that is neither plain nor allowed by `options`.
        CorruptionError: torch cannot load it.
    """
    fqn, known = item.storage_index.fqn, torch.serialization.get_safe_globals()
    names: set[Any] = {one for one in options.safe_globals if isinstance(one, str)}
    added = [one for one in options.safe_globals if one not in names and one not in known]
    with malformed_is_corruption("load by torch", path=path, fqn=fqn):
        if not options.trusted:
            _check_item(data, path, fqn, _tensor_bytes(planner, item))
        try:
            tensor = _load(data, added, names, trusted=options.trusted)
        except pickle.UnpicklingError as error:
            name = _refused_global(error)
            if name is None:
                raise
            raise UnsafePickleError(
                f"refuse to load item '{fqn}' of '{path}': its tensor needs '{name}', which is on "
                f"no allow-list; {way_to_allow([name])}, or if you trust whoever wrote this "
                "checkpoint, pass trusted=True",
                global_name=name,
                path=path,
                fqn=fqn,
            ) from error
        _check_tensor(tensor)
    return tensor  # type: ignore[no-any-return]


def fill_target(tensor: torch.Tensor, item: ReadItem, planner: LoadPlanner) -> None:
    """Copies the region of `item` in a loaded tensor to its target, as stock does.

    A quantized target takes scale and zero point as well: stock leaves it its own, under which the
    stored integers are other values.

    Raises:
        AssertionError: a target of another size (stock's words).
        UnsupportedError: a target of another kind, which torch does not copy to.
    """
    tensor = narrow_tensor_by_index(tensor, item.storage_offsets, item.lengths)
    target = planner.resolve_tensor(item)
    # detach() makes a copy of a COO, and gives a quantized one a scale of its own.
    if target.layout != torch.sparse_coo and not target.is_quantized:
        target = target.detach()
    if target.size() != tensor.size():
        sizes = f"{target.size()} vs {tensor.size()}"
        raise AssertionError(f"req {item.storage_index} mismatch sizes {sizes}")
    fqn = item.dest_index.fqn
    if tensor.layout in _COMPRESSED or target.layout in _COMPRESSED:
        _check_compressed(tensor, target, fqn)
    if tensor.is_quantized and _takes_quantized(tensor, target, fqn):
        target.data = tensor.to(target.device)
    else:
        with torch.no_grad():
            target.copy_(tensor)
    planner.commit_tensor(item, target)


def _check_compressed(tensor: torch.Tensor, target: torch.Tensor, fqn: str) -> None:
    """Raises UnsupportedError: torch does not copy between these, of which one is compressed."""
    texts = [
        f"{one.layout}" + (f" of {one._nnz()} elements" if one.layout in _COMPRESSED else "")
        for one in (tensor, target)
    ]
    if texts[0] != texts[1]:
        raise UnsupportedError(
            f"'{fqn}' is stored as {texts[0]}, and the state has {texts[1]}: give it one of the "
            "stored layout and as many elements"
        )


def _takes_quantized(tensor: torch.Tensor, target: torch.Tensor, fqn: str) -> bool:
    """Returns whether a target for a quantized tensor has no scale yet, so that no copy goes to it.

    Raises UnsupportedError: it is of another kind, or would show its values under two scales.
    """
    own, stored = _quantizer(target), _quantizer(tensor)
    if own == stored:
        return False
    if own is None and target.is_quantized:
        return True
    if own is None or own[:2] != stored[:2]:
        here = target.dtype if own is None else f"{own[0]}, {own[1]}"
        raise UnsupportedError(
            f"'{fqn}' is stored as {stored[0]}, {stored[1]}, which torch does not copy to {here}: "
            "give a target of its kind"
        )
    # A copy gives its own scale to this tensor alone, not to those that share its memory.
    if target._is_view() or target.untyped_storage().nbytes() != target.nbytes:
        raise UnsupportedError(
            f"'{fqn}' is stored under another scale or zero point than its target has, which is a "
            "part or view of a tensor: give a whole one, or one quantized as the stored one"
        )
    return False


def _quantizer(tensor: torch.Tensor) -> Any:
    """Returns (dtype, scheme, numbers) that give integers of a quantized tensor their values; None
    of another tensor, and of one of torch.empty.
    """
    if not tensor.is_quantized:
        return None
    try:
        scheme = tensor.qscheme()
    except RuntimeError:  # an assertion within torch, which has no way to ask
        return None
    if scheme in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        numbers: Any = tensor.q_scale(), tensor.q_zero_point()
    else:
        scales, zeros = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
        numbers = scales.tolist(), zeros.tolist(), tensor.q_per_channel_axis()
    return tensor.dtype, scheme, numbers
